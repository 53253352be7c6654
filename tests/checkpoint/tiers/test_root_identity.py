"""Roots that are copied, moved, deleted, damaged, or used by two jobs: no state of another run passes for one's own."""

import shutil
import time

import pytest
import torch

from dtckpt import CheckpointManager, LocalTier
from dtckpt.errors import CheckpointConflictError, CheckpointNotFoundError

IDENTITY = ".dtckpt-root"


def manager(folder, root, **options):
    local = LocalTier(path=folder / "tier", every_steps=1, copies=1, **options.pop("tier", {}))
    return CheckpointManager(folder / root, local=local, **{"save_interval_steps": 100, **options})


def save(folder, root, name, steps):
    with manager(folder, root) as manager_:
        if manager_.latest_step() is not None:
            manager_.restore()
        for step in steps:
            manager_.save(step, {"who": name, "step": step})
            manager_.wait()
        manager_.__exit__(RuntimeError, RuntimeError("the job dies"), None)  # so that nothing owed is written


def restored(folder, root):
    with manager(folder, root) as manager_:
        answer = manager_.restore()
        return answer.tree["who"], answer.tree["step"], answer.local is not None


def test_a_copy_that_takes_the_place_of_the_original(tmp_path):
    """The memory of the hosts has newer steps of the original root, which the copy of the root lacks."""
    save(tmp_path, "run", "original", range(3))
    shutil.copytree(tmp_path / "run", tmp_path / "fork")
    save(tmp_path, "fork", "fork", range(100, 103))
    save(tmp_path, "run", "original", range(3, 6))
    assert restored(tmp_path, "run") == ("original", 5, True)
    assert restored(tmp_path, "fork") == ("fork", 102, True)
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "fork").rename(tmp_path / "run")
    for _ in range(2):
        assert restored(tmp_path, "run") == ("fork", 100, False)
    save(tmp_path, "run", "fork", range(101, 104))
    assert restored(tmp_path, "run") == ("fork", 103, True)


def test_a_root_below_a_folder_that_is_new(tmp_path):
    save(tmp_path, "runs/a/checkpoints", "a", range(3))
    save(tmp_path, "runs/b/checkpoints", "b", range(2))
    shutil.rmtree(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "b").rename(tmp_path / "runs" / "a")
    assert restored(tmp_path, "runs/a/checkpoints") == ("b", 0, False)


def test_a_restore_makes_no_root(tmp_path):
    with manager(tmp_path, "typo") as manager_, pytest.raises(CheckpointNotFoundError):
        manager_.restore()
    assert not (tmp_path / "typo").exists()


def test_two_jobs_at_a_new_root(tmp_path):
    """The refused job has no effect on the other, though it asked first."""
    refused, first = manager(tmp_path, "root"), manager(tmp_path, "root")
    with first, refused:
        for each in (refused, first):
            with pytest.raises(CheckpointNotFoundError):
                each.restore()
        first.save(1, {"who": "first", "step": 1})
        identity = (tmp_path / "root" / IDENTITY).read_bytes()
        with pytest.raises(CheckpointConflictError):
            refused.save(1, {"who": "second", "step": 1})
        first.save(2, {"who": "first", "step": 2})
        first.wait()
        assert (tmp_path / "root" / IDENTITY).read_bytes() == identity
    assert restored(tmp_path, "root") == ("first", 2, True)


def test_a_job_that_joined_before_another_named_the_root(tmp_path):
    """It learns the identity when it saves."""
    late = manager(tmp_path, "root")
    with pytest.raises(CheckpointNotFoundError):
        late.restore()
    save(tmp_path, "root", "first", range(2))
    with late:
        late.save(2, {"who": "late", "step": 2})
        late.wait()
    assert restored(tmp_path, "root") == ("late", 2, True)


DAMAGE = {
    "empty": b"",
    "long": b"7" * 1000,
    "no text": b"\xff" * 8,
    "the number that stands for none": b"00000000",
}


@pytest.mark.parametrize("damage", [*DAMAGE, "a directory"])
def test_a_damaged_identity(tmp_path, damage, caplog):
    """The tier is taken for the root's own, and the next save mends the file: a later root is another one again."""
    save(tmp_path, "root", "first", range(3))
    file = tmp_path / "root" / IDENTITY
    file.unlink()
    if damage in DAMAGE:
        file.write_bytes(DAMAGE[damage])
    else:
        file.mkdir()
    assert restored(tmp_path, "root") == ("first", 2, True)
    assert "is damaged" in caplog.text
    save(tmp_path, "root", "first", range(3, 5))
    assert restored(tmp_path, "root") == ("first", 4, True)
    if damage in DAMAGE:
        caplog.clear()
        assert restored(tmp_path, "root") == ("first", 4, True)
        assert caplog.text == ""
        shutil.rmtree(tmp_path / "root")
        save(tmp_path, "root", "second", range(1))
        assert restored(tmp_path, "root") == ("second", 0, True)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_clock_that_was_ahead(tmp_path, monkeypatch, is_lost):
    """The steps of the next run are newer than the steps that it went on from, whatever its clock says."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
    save(tmp_path, "root", "first", range(100, 102))
    monkeypatch.undo()
    if is_lost:
        shutil.rmtree(tmp_path / "tier")
    save(tmp_path, "root", "second", range(102, 105))
    assert restored(tmp_path, "root") == ("second", 104, True)


def test_a_clock_that_was_ahead_and_a_full_tier(tmp_path, monkeypatch):
    """Steps that are written to the root past the tier are newer than the tier's steps."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
    save(tmp_path, "root", "first", range(3))
    monkeypatch.undo()
    with manager(tmp_path, "root", tier={"max_nbytes": 1}, save_interval_steps=1) as manager_:
        assert manager_.restore().step == 2
        manager_.save(3, {"who": "second", "step": 3, "weight": torch.zeros(1000)}).result()
    assert restored(tmp_path, "root") == ("second", 3, False)
