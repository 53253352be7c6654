"""`CheckpointManager.resize`: the state moves to other clients, in processes that go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.client_processes import Answer
from support.coordinators import server_in_thread

from dtckpt import CheckpointManager

from . import resize_cases as cases


def told(answers: list[Answer]) -> list[Any]:
    """Return what the processes told that were left."""
    for client, answer in enumerate(answers):
        assert not answer.error, f"{client}: {answer.error}: {answer.text}\n{answer.trace}"
    return [answer.value for answer in answers if not answer.has_died]


@pytest.mark.parametrize(
    "worlds",
    [
        [[0, 1], [0, 1, 2]],
        [[0, 1], [1, 0]],
        [[0], [2, 0, 1]],
        [[0, 1, 2], [2, 3, 0, 1], [0, 1, 2, 3]],
    ],
)
def test_nothing_is_lost_where_all_live(pool, tmp_path, worlds):
    """Clients come, and get other numbers: every value is there, bit for bit."""
    num = 1 + max(number for world in worlds for number in world)
    found = told(pool.run(cases.move, tmp_path, worlds, clients=num))
    assert all(each == (3, 0, "", True) for of_process in found for each in of_process)
    assert len(found) == num


def test_a_coordinator(pool, tmp_path):
    """Four clients, three, four: the second one is killed, and a new one comes."""
    with server_in_thread(10.0) as port:
        worlds, address = [[0, 1, 2, 3], [3, 0, 2], [2, 4, 0, 3]], f"127.0.0.1:{port}"
        found = told(pool.run(cases.move, tmp_path, worlds, clients=5, coordinator=address))
    back = (1, 2, "[3:6, 0:10] of tensor 'model/w' was on client 1 alone, which is lost", True)
    assert found == [[back, (1, 0, "", True)]] * 3 + [[(1, 0, "", True)]]


def test_a_lost_client_had_a_part(pool, tmp_path):
    """All go back to the newest checkpoint, together."""
    found = told(pool.run(cases.move, tmp_path, [[0, 1, 2], [2, 0]], clients=3))
    reason = "[4:8, 0:10] of tensor 'model/w' was on client 1 alone, which is lost"
    assert found == [[(1, 2, reason, True)]] * 2


def test_a_lost_client_had_copies_only(pool, tmp_path):
    found = told(pool.run(cases.replicated_pairs, tmp_path, clients=4))
    assert [each[:4] for each in found] == [(3, 0, 3, True)] * 3
    assert any(each[4] for each in found)


def test_a_module_goes_on_in_place(pool, tmp_path):
    """The target is the state, with optimizer and schedule; a new client goes on as a process that never stopped."""
    reference, *found = told(pool.run(cases.into_itself, tmp_path, clients=3))
    assert found == [reference] * 2
    assert CheckpointManager(tmp_path).all_steps() == [3, 5]


def test_a_target_in_the_memory_of_the_old_state(pool, tmp_path):
    """Nothing is overwritten before all have read it."""
    total = torch.arange(600_000.0).sum().item()
    assert told(pool.run(cases.into_each_other, tmp_path, clients=2)) == [[total, -total]] * 2


def test_tensors_of_torch_whose_process_group_is_gone(pool, tmp_path):
    found = told(pool.run(cases.sharded_by_torch, tmp_path, clients=4))
    assert found == [found[0]] * 4


def test_values_that_differ_by_client(pool, tmp_path):
    """What a client keeps goes with its process, whatever its number; the rest goes by numbers, as in a restore."""
    found = told(pool.run(cases.values_of_clients, tmp_path, clients=4))
    assert found == [(0, 0, {"at": 2}), (0, 2, {"at": 0}), (0, 30, {"at": [0, 2]})]


@pytest.mark.parametrize("with_tier", [False, True], ids=["root", "tier"])
def test_saves_go_on_in_one_lineage(pool, tmp_path, with_tier):
    """The right to the root moves; a run that had gone back before is known to have."""
    tier = tmp_path / "tier" if with_tier else None
    found = told(pool.run(cases.leader_moves, tmp_path / "run", tier, clients=4))
    two, one = [(0, True, True)] * 2, [(0, True, True)]
    assert found == [two, two, two, one]
    manager = CheckpointManager(tmp_path / "run")
    assert (manager.all_steps(), manager.abandoned_steps()) == ([1, 2, 5, 6], [3])
    assert CheckpointManager(tmp_path / "mirror").all_steps() == [1, 2, 5, 6]


def test_a_failure_in_the_middle_leaves_the_old_state(pool, tmp_path):
    found = told(pool.run(cases.failures, tmp_path, clients=3))
    assert found == [[True, True, (3, 0, True), True, (1, 2, True), True, (1, 3, True)]] * 3


def test_what_is_refused(pool, tmp_path):
    first, second = told(pool.run(cases.wrong, tmp_path, clients=2))
    assert first == second
    for text, expected in zip(
        first,
        [
            "a state needs the step that it is at, a whole number from 0 on; got step=None",
            "a state needs the step that it is at, a whole number from 0 on; got step=-1",
            "both were client 0 of job",
            "come from different jobs; got job",
            "this manager has neither saved nor restored",
            "SaveDisagreementError",
            "True",
        ],
        strict=True,
    ):
        assert expected in text
