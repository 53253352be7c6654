"""Managers with a mirror: copies after each commit, their rules, their errors, and restores from the nearest place."""

import logging
import os
import shutil

import pytest
import torch
from support.states import bits_of

import dtckpt
from dtckpt import CheckpointManager, Mirror, Retention, errors
from dtckpt.checkpoint.managing import mirror as mirrors
from dtckpt.checkpoint.managing.lineage import Lineage
from dtckpt.checkpoint.managing.mirror import steps_to_copy


def state(step):
    return {"w": torch.full((300,), float(step)), "step": step}


def save_steps(root, steps, mirror, **options):
    with CheckpointManager(root, mirror=mirror, **options) as manager:
        for step in steps:
            manager.save(step, state(step), force=True)
    return manager


def steps_of(root):
    return CheckpointManager(root).all_steps()


def damage(folder):
    file = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def copies(tmp_path):
    return tmp_path / "copies"


@pytest.mark.parametrize("is_async", [True, False])
def test_steps_are_copied_by_rules_of_their_own(root, copies, is_async):
    save_steps(root, [1, 2, 3, 4], Mirror(path=copies, keep=Retention(every_steps=2)), keep=1, is_async=is_async)
    assert set(steps_of(root)) <= {3, 4}  # a step stays while it is copied
    assert set(steps_of(copies)) <= {2, 4}
    assert 4 in steps_of(copies)


def test_all_steps_stay_by_default(root, copies):
    with CheckpointManager(root, mirror=copies, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            manager.wait()
    assert steps_of(root) == [3]
    assert steps_of(copies) == [1, 2, 3]
    with CheckpointManager(root, mirror=copies) as manager:
        old = manager.restore(1)
        assert (old.step, old.is_mirrored, old.tree["step"]) == (1, True, 1)
        assert manager.restore().is_mirrored is False


@pytest.mark.parametrize("loss", [shutil.rmtree, damage])
def test_a_step_is_restored_from_the_nearest_place(root, copies, loss):
    save_steps(root, [1, 2], copies)
    loss(root / "step_00000002")
    with CheckpointManager(root, mirror=copies) as manager:
        restored = manager.restore()
        assert (restored.step, restored.is_mirrored, restored.tree["w"].tolist()) == (2, True, [2.0] * 300)
        assert restored.skipped == {}
        assert manager.restore(2).is_mirrored
        manager.save(3, state(3))
        manager.wait()
    assert steps_of(copies) == [1, 2, 3]


def test_the_root_is_lost(root, copies):
    save_steps(root, [1, 2], copies)
    shutil.rmtree(root)
    with CheckpointManager(root, mirror=copies) as manager:
        assert manager.restore().step == 2
        manager.save(3, state(3))
    assert steps_of(root) == [3]
    assert steps_of(copies) == [1, 2, 3]


def test_a_run_that_begins_anew_beside_the_copies_of_a_former_one_is_told(root, copies):
    """Its saves would replace the copies of the lost root, and remove the newer ones."""
    save_steps(root, [1, 2, 3], copies)
    shutil.rmtree(root)
    assert CheckpointManager(root, mirror=copies).latest_step() == 3  # so that a job restores
    with pytest.raises(errors.CheckpointConflictError, match="holds step 3 of a run that the root does not know"):
        save_steps(root, [1], copies)
    assert steps_of(copies) == [1, 2, 3]
    with dtckpt.open_checkpoint(copies / "step_00000001") as kept:
        assert kept.values["step"] == 1


def test_a_copy_of_another_save_of_the_step_is_not_restored(root, copies):
    save_steps(root, [1, 2], copies)
    with CheckpointManager(root) as manager:  # without the mirror, which keeps the old step 2
        manager.restore(1)
        manager.save(2, state(20))
    damage(root / "step_00000002")
    with CheckpointManager(root, mirror=copies) as manager:
        assert manager.restore().step == 1


def test_abandoned_steps_do_not_come_back(root, copies):
    save_steps(root, [10, 20, 30], copies, keep=5)
    with CheckpointManager(root, mirror=copies, keep=1) as manager:
        manager.restore(10)
        for step in (15, 40):
            manager.save(step, state(step))
            manager.wait()
    assert steps_of(root) == [40]
    damage(root / "step_00000040")
    damage(copies / "step_00000040")
    with CheckpointManager(root, mirror=copies) as manager:
        assert manager.restore().step == 15


def refuse_once(monkeypatch, error):
    real, calls = mirrors.copy_checkpoint, []

    def copy(*args):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return real(*args)

    monkeypatch.setattr(mirrors, "copy_checkpoint", copy)


def test_the_next_save_raises_the_error_of_a_copy_once_and_tries_again(root, copies, monkeypatch):
    refuse_once(monkeypatch, errors.StorageError("the store is gone"))
    with CheckpointManager(root, mirror=copies) as manager:
        manager.save(1, state(1))
        manager.wait()
        assert steps_of(root) == [1]
        assert manager.num_failed_copies == 1
        with pytest.raises(errors.StorageError, match="the store is gone"):
            manager.save(2, state(2))
        manager.save(3, state(3))
        manager.wait()
    assert steps_of(copies) == [1, 3]


def test_close_raises_the_error_of_the_last_copy(root, copies, monkeypatch):
    refuse_once(monkeypatch, errors.StorageError("the store is gone"))
    manager = CheckpointManager(root, mirror=copies)
    manager.save(1, state(1))
    with pytest.raises(errors.StorageError, match="the store is gone"):
        manager.close()
    save_steps(root, [2], copies)
    assert steps_of(copies) == [1, 2]


def test_failures_of_storage_are_logged_if_the_user_says_so(root, copies, monkeypatch, caplog):
    refuse_once(monkeypatch, errors.StorageError("the store is gone"))
    with caplog.at_level(logging.WARNING):
        save_steps(root, [1, 2], copies, on_failure="warn", is_async=False)
    assert "step 1 is not copied" in caplog.text
    assert steps_of(root) == steps_of(copies) == [1, 2]


def test_mirrors_that_cannot_be_used(root, tmp_path):
    for mirror in (root, root / "in", tmp_path):
        with pytest.raises(errors.ConfigError, match="overlap; choose another"):
            CheckpointManager(root, mirror=mirror)
    with pytest.raises(errors.ConfigError, match="max_rate"):
        Mirror(path=root, max_rate=0)


def test_a_mirror_of_two_managers_is_refused(root, copies, tmp_path):
    with CheckpointManager(root, mirror=copies) as first:
        first.save(1, state(1))
        first.wait()
        second = CheckpointManager(tmp_path / "other", mirror=copies)
        second.save(2, state(2))
        with pytest.raises(errors.CheckpointConflictError):
            second.close()
    assert steps_of(copies) == [1]
    assert bits_of(dtckpt.restore(copies / "step_00000001")["w"]) == bits_of(state(1)["w"])
    assert not [name for name in os.listdir(copies) if "dtckpt-new" in name]


def test_steps_are_copied_in_the_order_of_their_commits():
    saved = {1: Lineage(5), 2: Lineage(3), 3: Lineage(9)}
    # Step 2 of number 3 is older than step 1 of number 5, which belongs to the run all the same.
    assert steps_to_copy(saved, {}, set(), Retention()) == [2, 1, 3]
    assert steps_to_copy(saved, {1: Lineage(5)}, set(), Retention()) == [3]
    assert steps_to_copy(saved, {1: Lineage(5)}, {2}, Retention()) == [2, 3]
    assert steps_to_copy(saved, {}, set(), Retention(last=1)) == [3]
