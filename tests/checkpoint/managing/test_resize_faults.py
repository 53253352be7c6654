"""Resizes in which clients are killed, disagree, or have states of all kinds."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from support.coordinators import server_in_thread

from dtckpt import CheckpointManager

from . import resize_faults as cases
from .test_resize import told

HEARTBEAT_S = 3.0


@pytest.mark.share(5)
@pytest.mark.parametrize("point", cases.POINTS)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_copied", [False, True], ids=["sharded", "copied"])
@pytest.mark.parametrize("with_tier", [False, True], ids=["root", "tier"])
@pytest.mark.parametrize("with_coordinator", [False, True], ids=["store", "coordinator"])
def test_a_client_is_killed(pool, tmp_path, point, victim, is_copied, with_tier, with_coordinator):
    """The others get an error that names it; the next resize is right, and loses no more than it must."""
    tier = tmp_path / "tier" if with_tier else None
    with server_in_thread(HEARTBEAT_S) if with_coordinator else nullcontext() as port:
        answers = pool.run(
            cases.kill,
            tmp_path / "run",
            tier,
            point,
            victim,
            is_copied=is_copied,
            clients=4,
            coordinator=f"127.0.0.1:{port}" if port else "",
            heartbeat_timeout_s=HEARTBEAT_S,
        )
    assert [answer.has_died for answer in answers] == [number == victim for number in range(4)]
    is_whole = is_copied and point not in cases.TORN
    resized = (3, 0, True) if is_whole else (2, 1, True)
    failures = set()
    for number, found in zip([number for number in range(4) if number != victim], told(answers), strict=True):
        *failed, again, restored = found
        assert (again, restored) == (resized, (2, True)), answers
        assert len(failed) == (number != 3), answers
        failures.update(failed)
    ((kind, text),) = failures
    allowed = ("BarrierTimeoutError",) if point == "connecting" else ("ClientLostError", "SourceLostError")
    assert kind in allowed, text
    assert f"client {1 - victim}" in text  # its number in the new world
    assert CheckpointManager(tmp_path / "run").latest_step() == 4


@pytest.mark.parametrize("absent", [0, 1])
def test_a_client_that_does_not_call(pool, tmp_path, absent):
    """The others wait no longer than they were told to, and name it."""
    first, second, third = told(pool.run(cases.once_only, tmp_path, absent, clients=3))
    assert [first, second, third][absent] == [(2, 0, True)]
    (kind, missing, text), right = third
    assert (kind, missing, right) == ("BarrierTimeoutError", [absent], (2, 0, True))
    assert "must call CheckpointManager.resize" in text


def test_called_again_on_the_same_mesh(pool, tmp_path):
    assert told(pool.run(cases.again, tmp_path, clients=2)) == [[(2, 0, True)] * 4] * 2


def test_clients_that_ask_for_different_meshes(pool, tmp_path):
    """All get one error before anything moves, and may call again."""
    first, second = told(pool.run(cases.other_meshes, tmp_path, clients=2))
    assert first == second
    other, local, layouts, right = first
    assert "got a mesh of 2 clients from 0, and other meshes from 1" in other
    assert "got a mesh of 2 clients from 0, and other meshes from 1" in local
    assert "got different layouts on one mesh from clients 0, 1" in layouts
    assert right == (2, 0, True)


def test_a_state_of_all_kinds(pool, tmp_path):
    found = told(pool.run(cases.move_all_kinds, tmp_path, clients=4))
    moved = (0, "", [])
    assert found == [[moved, moved, []]] * 4


def test_kinds_that_no_save_takes(pool, tmp_path):
    """One client has such a leaf: all get one error, and nothing has moved."""
    found = told(pool.run(cases.refuse_kinds, tmp_path, clients=3))
    assert found == [found[0]] * 3
    *refused, right = found[0]
    assert all("odd" in text and "client 1" in text for text in refused), refused
    assert right == (2, 0, True)


def test_a_coordinator_without_a_process_group(pool, tmp_path):
    with server_in_thread(10.0) as port:
        answers = pool.run(cases.without_process_group, tmp_path, clients=5, coordinator=f"127.0.0.1:{port}")
    assert told(answers) == [[(3, 0, True)] * 2, [], [(3, 0, True)] * 2, [(3, 0, True)] * 2, [(3, 0, True)]]
