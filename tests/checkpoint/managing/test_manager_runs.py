"""Managers that go back: a run that restores an older step and goes on from there, beside the run that it left."""

import itertools
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import dtckpt
from dtckpt import CheckpointManager, Retention
from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME
from dtckpt.checkpoint.managing.removal import StepRemoval
from dtckpt.checkpoint.saving import construction
from dtckpt.storage import commit_by_rename
from dtckpt.storage.fsspec_folder import FsspecFolder
from dtckpt.storage.local_folder import LocalFolder

from .test_manager import WAIT_S, flip_a_byte, state

ON_OBJECTS = dtckpt.SaveOptions(kvstore="zarr")


@pytest.fixture(params=["directory", "objects"])
def root(request, tmp_path):
    if request.param == "directory":
        yield tmp_path / "run"
    else:
        MemoryFileSystem.store.clear()
        yield "memory://some/run"
        MemoryFileSystem.store.clear()


def run_at(root, *, back_to=None, saves=(), **options):
    """A process's life: it restores a step, or the newest, or nothing, and saves some; return the manager."""
    manager = CheckpointManager(root, options=ON_OBJECTS, **options)
    if back_to is not None:
        manager.restore(None if back_to == "newest" else back_to)
    for step in saves:
        manager.save(step, state(step))
    manager.close()
    return manager


def view(root):
    """Another process sees the steps of the run and the abandoned steps, and restores the newest step."""
    manager = CheckpointManager(root)
    steps = manager.all_steps()
    found = manager.restore()
    assert (found.step, found.tree["step"], found.skipped) == (steps[-1], steps[-1], {})
    assert manager.latest_step() == steps[-1]
    return steps, manager.abandoned_steps()


def test_the_newest_step_is_that_of_the_run_that_went_back(root):
    run_at(root, saves=[10, 20, 30])
    run_at(root, back_to=10, saves=[15])
    assert view(root) == ([10, 15], [20, 30])
    run_at(root, back_to="newest", saves=[25, 35])
    assert view(root) == ([10, 15, 25, 35], [20, 30])
    assert CheckpointManager(root).restore(30).tree["step"] == 30


def test_what_a_run_that_went_back_saves_is_kept(root):
    """Abandoned steps go when the run has passed them, whatever the rules keep; the run's own go by the rules."""
    keep = Retention(last=2, every_steps=20)
    run_at(root, saves=[10, 20, 30], keep=keep)
    seen = []
    manager = CheckpointManager(root, options=ON_OBJECTS, keep=keep)
    manager.restore(20)
    for step in (25, 28, 29, 35, 40):
        manager.save(step, state(step))
        manager.wait()
        seen.append((manager.all_steps(), manager.abandoned_steps()))
    manager.close()
    assert seen == [
        ([20, 25], [30]),
        ([20, 25, 28], [30]),
        ([20, 28, 29], [30]),
        ([20, 29, 35], []),
        ([20, 35, 40], []),
    ]
    run_at(root, back_to=20, saves=[24], keep=1)
    assert view(root) == ([24], [35, 40])


def test_looking_at_an_old_step_changes_nothing(root):
    """Neither another process nor a run that restores it and ends before it saves goes back."""
    run_at(root, saves=[10, 20, 30], keep=3)
    run_at(root, back_to=10)
    assert view(root) == ([10, 20, 30], [])
    run_at(root, back_to="newest", saves=[40], keep=3)
    assert view(root) == ([20, 30, 40], [])


def test_a_run_that_goes_back_in_one_life(root):
    """The steps that it comes by again are due again, also the last saved step."""
    manager = CheckpointManager(root, options=ON_OBJECTS, save_interval_steps=10)
    for step in (10, 20, 30):
        assert manager.save(step, state(step)) is not None
    manager.restore(20)
    assert manager.save(29, state(29)) is None
    assert manager.save(30, state(30) | {"step": "again"}) is not None
    manager.close()
    assert manager.restore().tree["step"] == "again"
    assert (manager.all_steps(), manager.abandoned_steps()) == ([10, 20, 30], [])


def test_the_same_step_again_replaces_that_of_the_abandoned_run(root):
    run_at(root, saves=[10, 20, 30])
    manager = run_at(root, back_to=10)
    manager.save(20, state(20) | {"step": "of the new run"})
    manager.close()
    assert (manager.all_steps(), manager.abandoned_steps()) == ([10, 20], [30])
    assert CheckpointManager(root).restore().tree["step"] == "of the new run"


def test_a_second_time_back_and_to_what_was_abandoned(root):
    run_at(root, saves=[10, 20, 30])
    run_at(root, back_to=10, saves=[15, 25])
    run_at(root, back_to=15, saves=[18])
    assert view(root) == ([10, 15, 18], [20, 25, 30])
    run_at(root, back_to=30, saves=[40])
    assert view(root) == ([10, 20, 30, 40], [15, 18, 25])


def test_a_smaller_step_without_a_restore(root):
    """A new run in the root of an old one; the steps of the old run are removed when the new run has passed them."""
    run_at(root, saves=[10, 20, 30])
    run_at(root, saves=[1, 2, 3], keep=2)
    assert view(root) == ([2, 3], [10, 20, 30])
    run_at(root, back_to="newest", saves=[25], keep=2)
    assert view(root) == ([3, 25], [30])


def test_a_save_that_fails_after_going_back(root, monkeypatch):
    run_at(root, saves=[10, 20, 30])
    manager = run_at(root, back_to=10)
    with monkeypatch.context() as patch:
        patch.setattr(construction, "merge_clients", lambda *args, **kwargs: 1 / 0)
        manager.save(20, state(20)).wait(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        manager.wait()
    assert view(root) == ([10, 20, 30], [])
    manager.save(25, state(25))
    manager.close()
    assert view(root) == ([10, 25], [20, 30])


def test_going_on_after_a_damaged_newest_step(tmp_path):
    """It stays, to be looked at, and is not the newest any more."""
    run_at(tmp_path, saves=[10, 20, 30])
    flip_a_byte(tmp_path / "step_00000030")
    manager = CheckpointManager(tmp_path, keep=2)
    assert manager.restore().step == 20
    manager.save(25, state(25))
    manager.wait()
    assert view(tmp_path) == ([20, 25], [30])
    manager.save(35, state(35))
    manager.close()
    assert view(tmp_path) == ([25, 35], [30])


@pytest.mark.parametrize("loss", [Path.unlink, lambda file: file.write_bytes(b"[]\n1\n")])
def test_a_lineage_that_was_lost(tmp_path, loss, caplog):
    """The newest commit says which steps were set aside, whatever becomes of theirs."""
    run_at(tmp_path, saves=[10, 20, 30])
    run_at(tmp_path, back_to=10, saves=[15])
    for step in (10, 20, 30):
        loss(tmp_path / f"step_{step:08d}" / LINEAGE_NAME)
    assert view(tmp_path) == ([10, 15], [20, 30])
    assert ("the lineage of step 20 cannot be read" in caplog.text) == (loss is not Path.unlink)
    run_at(tmp_path, back_to="newest", saves=[25])
    assert view(tmp_path) == ([10, 15, 25], [20, 30])


def test_a_root_of_before_there_were_lineages(root):
    for step in (10, 20, 30):
        dtckpt.save(f"{root}/step_{step:08d}", state(step), options=ON_OBJECTS)
    assert view(root) == ([10, 20, 30], [])
    run_at(root, back_to=10)
    assert view(root) == ([10, 20, 30], [])
    run_at(root, back_to="newest", saves=[40])
    assert view(root) == ([10, 20, 30, 40], [])
    run_at(root, back_to=10, saves=[15])
    assert view(root) == ([10, 15], [20, 30, 40])


def test_metrics_of_an_abandoned_run_do_not_count(root):
    manager = CheckpointManager(root, options=ON_OBJECTS, keep=Retention(last=3, best=1))
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        manager.save(step, state(step), metrics={"loss": loss})
    manager.close()
    assert manager.best_step() == 20
    run_at(root, back_to=10, saves=[15])
    assert manager.best_step() == 10


def test_a_crash_anywhere_after_going_back(root, monkeypatch):
    """Before the commit there is the old run, after it the new one; the next life goes on either way."""
    views = []
    for number in itertools.count():
        where = f"{root}-{number}"
        run_at(where, saves=[10, 20, 30], keep=3)
        manager = CheckpointManager(where, options=ON_OBJECTS, keep=3)
        manager.restore(10)
        with monkeypatch.context() as patch:
            is_over = crash_at_change(patch, number)
            with suppress(Crash):
                manager.save(25, state(25)).result(WAIT_S)
            manager._handle is None or manager._handle.wait(WAIT_S)
        manager._root.right.release()
        views.append(view(where))
        run_at(where, back_to="newest", saves=[40], keep=3)
        went_back = views[-1][0] == [10, 25]
        assert view(where) == ([10, 25, 40], []) if went_back else ([20, 30, 40], [])
        if is_over():
            break
    changes = [this for this, _ in itertools.groupby(views)]
    assert changes == [([10, 20, 30], []), ([10, 25], [20, 30]), ([10, 25], [30])]


class Crash(BaseException):
    pass


def crash_at_change(patch, number):
    """End whatever changes storage, from its n-th change on; gives a call that says whether there were fewer."""
    count = itertools.count(1)
    numbers = []

    def dying(change):
        def die_or_change(*args, **kwargs):
            numbers.append(next(count))
            if numbers[-1] > number:
                raise Crash
            return change(*args, **kwargs)

        return die_or_change

    def tidy_up(*args):
        with suppress(Crash):
            tidy_up_whole(*args)

    for owner, name in ((FsspecFolder, "_write"), (FsspecFolder, "remove"), (FsspecFolder, "clear")):
        patch.setattr(owner, name, dying(getattr(owner, name)))
    for owner, name in ((LocalFolder, "write"), (commit_by_rename, "rename"), (Path, "rename"), (shutil, "rmtree")):
        patch.setattr(owner, name, dying(getattr(owner, name)))
    tidy_up_whole = StepRemoval.remove_old
    patch.setattr(StepRemoval, "remove_old", tidy_up)
    return lambda: max(numbers) <= number
