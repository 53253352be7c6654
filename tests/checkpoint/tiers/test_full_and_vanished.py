"""A tier that cannot be written costs no training step: saves are skipped, with one warning, until it can be."""

import logging
import os
import shutil
import socket

import pytest
import torch
from support import forkserver, mounts

from dtckpt import CheckpointManager, LocalTier

from . import tier_cases, tier_faults

STEP_NBYTES = 4 << 20


def state(step):
    return {"weight": torch.full((STEP_NBYTES // 4,), float(step)), "step": step}


def manager(tmp_path, *, durable=1000, path="tier", root="root", **options):
    local = LocalTier(path=tmp_path / path, every_steps=1, copies=1, **options)
    return CheckpointManager(tmp_path / root, local=local, save_interval_steps=durable)


def saved_steps(tmp_path, path="tier"):
    return sorted({int(file.parent.name.split("-")[1]) for file in (tmp_path / path).rglob("*.voted")})


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_more_than_max_nbytes(tmp_path, caplog):
    """Situation 17: training goes on with one warning with numbers; steps due in the root are written there."""
    with manager(tmp_path, durable=2, max_nbytes=STEP_NBYTES // 2) as manager_:
        for step in range(1, 6):
            handle = manager_.save(step, state(step))
            assert (handle is not None) == (step % 2 == 0)
            if handle is not None:
                handle.result()
        assert manager_.all_steps() == [2, 4]
        restored = manager_.restore()
    assert (restored.step, restored.local, restored.tree["step"]) == (4, None, 4)
    (told,) = warnings_of(caplog)
    assert "max_nbytes" in told
    assert "4.0 MiB more are needed" in told
    assert f"on host {socket.gethostname()} is full" in told


def test_room_for_the_first_saves_only(tmp_path, caplog):
    """Files are used again, so a tier with space for one step more than it keeps is never full."""
    with manager(tmp_path, max_nbytes=3 * STEP_NBYTES + (1 << 20)) as manager_:
        for step in range(1, 8):
            assert manager_.save(step, state(step)) is not None
            manager_.wait()
    assert warnings_of(caplog) == []
    assert saved_steps(tmp_path) == [6, 7]


def test_a_file_that_was_cut_short(tmp_path):
    """It is not filled again: to write behind its end would end the process."""
    with manager(tmp_path) as manager_:
        for step in range(1, 4):
            manager_.save(step, state(step))
            manager_.wait()
        for file in tmp_path.rglob("*.data"):
            os.truncate(file, 0)
        for step in range(4, 9):
            assert manager_.save(step, state(step)) is not None
            manager_.wait()
        assert manager_.restore().tree["step"] == 8


def test_the_tier_comes_back(tmp_path, caplog):
    """Situation 17: when there is room again, saves go on, and it is said."""
    with manager(tmp_path, keep=1) as manager_:
        manager_.save(1, state(1))
        manager_.wait()
        shutil.rmtree(tmp_path / "tier")
        for step in (2, 3, 4):
            manager_.save(step, state(step))
            manager_.wait()
        assert manager_.restore().step == 4
    told = warnings_of(caplog)
    assert len(told) <= 2, told


def test_the_path_is_a_file(tmp_path, caplog):
    (tmp_path / "tier").write_text("")
    with manager(tmp_path, durable=2) as manager_:
        for step in (1, 2, 3):
            manager_.save(step, state(step))
            manager_.wait()
        restored = manager_.restore()
    assert (restored.step, restored.local) == (2, None)
    assert any("tier" in text for text in warnings_of(caplog))


@pytest.mark.processes
def test_a_full_file_system(tmp_path):
    """Situation 17: steps due in the root are written there directly; the tier comes back when there is space."""
    folder = tmp_path / "tier"
    folder.mkdir()
    if reason := mounts.reason_unsupported(str(folder)):
        pytest.skip(f"mounts: {reason}")
    ours, theirs = forkserver.Pipe()
    process = forkserver.start(tier_faults.save_on_small_disk, str(tmp_path / "root"), str(folder), 8 << 20, 7, theirs)
    theirs.close()
    assert ours.poll(60)
    refused, told, saved, step, values = ours.recv()
    process.join(10)
    assert refused == [4, 5]
    assert saved == [1, 3, 6]
    assert (step, values) == (7, [7.0])
    assert len(told) == 2, told
    assert "full" in told[0]
    assert "1.0 MiB are needed" in told[0]
    assert "from step 6 on" in told[1]


HOSTS = ["host0", "host1"]


def test_one_host_of_two_is_full(pool, tmp_path):
    """Situation 17: all clients go on alike; the host is named."""
    by_client = {0: ({},), 1: ({"max_nbytes": 1000},)}
    answers = pool.values(
        tier_faults.save_beside, tmp_path / "root", tmp_path / "tier", HOSTS, [1, 2, 3, 4], 2,
        clients=2, group=True, by_client=by_client,
    )  # fmt: skip
    assert [answer["saved"] for answer in answers] == [[2, 4]] * 2
    assert [answer["refused"] for answer in answers] == [[1, 3]] * 2
    (told,) = answers[0]["told"]
    assert "host1" in told
    assert answers[1]["told"] == []


def test_one_host_of_two_has_no_tier(pool, tmp_path):
    """A host whose path cannot be written keeps no other host from restoring the parts elsewhere."""
    folders = tmp_path / "root", tmp_path / "tier"
    pool.values(tier_cases.save_steps, *folders, HOSTS, [1, 2], clients=2, group=True)
    tier_cases.remove_host(folders[1], "host1")
    (folders[1] / "host1").write_text("not a directory")
    restored = pool.values(tier_cases.restore, *folders, HOSTS, clients=2, group=True)
    assert [(each["step"], each["is_equal"]) for each in restored] == [(2, True)] * 2
    assert all(each["local"] is not None for each in restored)
