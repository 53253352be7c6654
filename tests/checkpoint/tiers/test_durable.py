"""Steps are written to the root from the tier: storage stops no training, and no step that is due is forgotten."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from support import forkserver

import dtckpt
from dtckpt import CheckpointManager, LocalTier
from dtckpt.checkpoint.managing import tier_saves
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.saving import write as writing
from dtckpt.checkpoint.tiers import local_save
from dtckpt.errors import StorageError

from . import tier_faults


class Storage:
    """Storage that is slow, or refuses, as a test says; counts the writes that are under way at one time."""

    def __init__(self):
        self.may_write, self.is_asked, self.refuses = threading.Event(), threading.Event(), False
        self.may_write.set()
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()

    @contextmanager
    def write(self):
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.under_way, self.most_under_way)
        self.is_asked.set()
        try:
            assert self.may_write.wait(30)
            if self.refuses:
                raise StorageError("the bucket does not answer")
            yield
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.fixture
def storage(monkeypatch):
    made, real = Storage(), writing.ClientWriter.write

    def write(self, *args, **kwargs):
        with made.write():
            return real(self, *args, **kwargs)

    monkeypatch.setattr(writing.ClientWriter, "write", write)
    yield made
    made.may_write.set()
    assert made.most_under_way <= 1, "two writes at once"


def manager(tmp_path, **options):
    tier = {"every_steps": 1, "copies": 1, **options.pop("tier", {})}
    options.setdefault("save_interval_steps", 4)
    return CheckpointManager(tmp_path / "root", local=LocalTier(path=tmp_path / "tier", **tier), **options)


def state(step):
    return {"weight": torch.full((1000,), float(step)), "step": step}


def restored(tmp_path, step):
    return dtckpt.restore(tmp_path / "root" / f"step_{step:08}")["weight"].unique().tolist()


def save(manager_, steps):
    """Save steps, and return how long the longest call took."""
    longest = 0.0
    for step in steps:
        start = time.monotonic()
        manager_.save(step, state(step)).wait()  # with what follows it: then the write has begun
        longest = max(longest, time.monotonic() - start)
    return longest


def begin_to_write(manager_, storage):
    """Save step 1 in the root, and begin to write step 4 there."""
    save(manager_, [1])
    manager_.wait()
    storage.may_write.clear()
    storage.is_asked.clear()
    save(manager_, [4])
    assert storage.is_asked.wait(10)


def test_slow_storage(tmp_path, storage):
    """Situation 24: local saves go on meanwhile, and the step that is due then has its place taken."""
    with manager(tmp_path) as manager_:
        storage.may_write.clear()
        assert save(manager_, range(1, 11)) < 1
        assert storage.is_asked.wait(10)
        assert manager_.all_steps() == []
        storage.may_write.set()
        manager_._tier.writer.wait()
        assert manager_.all_steps() == [1]
        save(manager_, [11])
        manager_.wait()
        assert manager_.all_steps() == [1, 11], "in place of 4 and 8"
        save(manager_, [12])
        manager_.wait()
    assert manager_.all_steps() == [1, 11, 12]
    assert restored(tmp_path, 11) == [11.0], "what the tier held, not what training made of it"


def test_the_last_step_is_owed(tmp_path, storage):
    """The manager writes it when it is closed; a job that has ended has no tier."""
    with manager(tmp_path) as manager_:
        storage.may_write.clear()
        save(manager_, range(1, 10))
        storage.may_write.set()
    assert manager_.all_steps() == [1, 9]
    assert restored(tmp_path, 9) == [9.0]
    manager_.close()


def test_nothing_is_owed_after_an_error(tmp_path, storage):
    manager_ = manager(tmp_path)
    save(manager_, [1])
    manager_.wait()
    storage.may_write.clear()
    save(manager_, range(4, 9))
    storage.may_write.set()
    manager_.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert manager_.all_steps() == [1, 4]


@pytest.mark.parametrize("step", [9, 8])
def test_a_step_that_is_forced(tmp_path, storage, step):
    """It waits for the write under way, and is written itself."""
    with manager(tmp_path, tier={"every_steps": 2}) as manager_:
        storage.may_write.clear()
        save(manager_, [2, 4, 6])
        timer = threading.Timer(0.2, storage.may_write.set)
        timer.start()
        manager_.save(step, state(step), force=True)
        timer.join()
        manager_.wait()
        assert manager_.all_steps() == [2, step]


def test_saves_that_are_not_in_the_background(tmp_path, storage):
    with manager(tmp_path, is_async=False, save_interval_steps=2) as manager_:
        for step in range(1, 6):
            manager_.save(step, state(step), metrics={"loss": step / 2})
            assert manager_.all_steps() == [1, *range(2, step + 1, 2)]
        assert manager_.metrics(4) == {"loss": 2.0}


def test_storage_that_refuses(tmp_path, storage, caplog):
    """Situation 24: training hears of it by a warning; the next local save is written in its place."""
    with manager(tmp_path) as manager_:
        save(manager_, [1])
        manager_.wait()
        storage.refuses = True
        save(manager_, [4])
        manager_._tier.writer.wait()
        assert manager_.latest_step() == 1
        storage.refuses = False
        save(manager_, [5, 6])
        manager_.wait()
        assert manager_.all_steps() == [1, 5]
    (told,) = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert "step 4" in told
    assert "the bucket does not answer" in told


def test_storage_that_refuses_to_the_end(tmp_path, storage):
    """The job does not end as if all were well."""
    storage.refuses = True
    with pytest.raises(StorageError, match="the bucket does not answer"), manager(tmp_path) as manager_:
        save(manager_, range(1, 6))
    assert manager_.all_steps() == []
    storage.refuses = False
    with manager(tmp_path) as manager_:
        assert manager_.restore().step == 5, "from the tier"
        save(manager_, [6])
        manager_.wait()
        assert manager_.all_steps() == [5], "and so it comes to the root"


def test_a_write_that_was_cut_off(tmp_path, storage):
    """Situation 24: after a restart the first save has the restored step written, though it was not due itself."""
    with manager(tmp_path) as manager_:
        save(manager_, [1])
        manager_.wait()
        storage.refuses = True
        save(manager_, [4])
        manager_._tier.writer.wait()
        manager_._tier.writer.handle.forgive()
        manager_._tier._debt = 0  # as if the process had died
        save(manager_, [5])
        manager_._tier.writer.wait()
        manager_._tier._debt = 0
        storage.refuses = False
    assert manager_.all_steps() == [1]
    with manager(tmp_path) as manager_:
        assert manager_.restore().step == 5
        manager_.wait()
    assert manager_.all_steps() == [1], "a restore alone changes nothing"
    with manager(tmp_path) as manager_:
        assert manager_.restore().step == 5
        save(manager_, [6, 7])
        manager_.wait()
        assert manager_.all_steps() == [1, 5]
    assert restored(tmp_path, 5) == [5.0]


def test_nothing_is_written_for_a_run_that_went_back_and_saved_no_more(tmp_path, storage):
    """The step that the manager owed to the root belongs to the run that the restore has abandoned."""
    with manager(tmp_path, tier={"keep": 10}) as manager_:
        save(manager_, [1])
        manager_.wait()
        storage.refuses = True
        save(manager_, [4])
        manager_._tier.writer.wait()
        manager_._tier.writer.handle.forgive()
        storage.refuses = False
        manager_._tier.writer.is_busy = True  # so that step 5 is owed, too
        save(manager_, [5])
        manager_._tier.writer.is_busy = False
        assert manager_.restore(1).step == 1
    assert manager_.all_steps() == [1]


def test_a_restore_beside_a_job_that_saves(tmp_path, storage):
    """A process that only restores writes nothing, and does not ask for the right to."""
    with manager(tmp_path) as job:
        begin_to_write(job, storage)
        with manager(tmp_path) as reader:
            assert reader.restore().step == 4
            reader.wait()
            assert reader.all_steps() == [1]
        storage.may_write.set()
        save(job, [5])
        job.wait()
        assert job.all_steps() == [1, 4]


def test_a_restore_while_a_write_is_under_way(tmp_path, storage):
    """A run that goes back in the same process does not write the same step twice."""
    with manager(tmp_path) as manager_:
        begin_to_write(manager_, storage)
        timer = threading.Timer(0.2, storage.may_write.set)
        timer.start()
        assert manager_.restore().step == 4
        timer.join()
        manager_.wait()
        assert manager_.all_steps() == [1, 4]


def test_a_full_tier_while_a_write_is_under_way(tmp_path, storage):
    """A step that is written to the root directly comes after it."""
    with manager(tmp_path, save_interval_steps=2) as manager_:
        storage.may_write.clear()
        save(manager_, [2, 3])
        manager_._tier.session.folder._max_nbytes = 1
        manager_._tier.session.folder._spare.clear()
        timer = threading.Timer(0.2, storage.may_write.set)
        timer.start()
        save(manager_, [4])
        timer.join()
        manager_.wait()
        assert manager_.all_steps() == [2, 4]


def test_a_status_that_is_slow(tmp_path, monkeypatch):
    """The file is for people; no save waits for it, and only the newest waiting status is written."""
    may_write, asked, real = threading.Event(), [], tier_saves.write_status

    def write_status(folder, session, begun):
        asked.append(begun.save.step)
        assert may_write.wait(30)
        real(folder, session, begun)

    monkeypatch.setattr(tier_saves, "write_status", write_status)
    with manager(tmp_path) as manager_:
        assert save(manager_, range(1, 8)) < 1
        may_write.set()
    assert asked == [1, 7]


def test_a_status_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    def write_status(*_):
        raise StorageError("no status today")

    monkeypatch.setattr(tier_saves, "write_status", write_status)
    with manager(tmp_path) as manager_:
        save(manager_, [1, 2])
        manager_.wait()
    assert any("no status today" in record.getMessage() for record in caplog.records)


def test_going_back(tmp_path):
    """The newest step belongs to the run that saved last, whatever the numbers of the steps."""
    with manager(tmp_path, tier={"keep": 10}) as manager_:
        for step in range(1, 10):
            manager_.save(step, state(step))
            manager_.wait()
        assert manager_.all_steps() == [1, 4, 8]
        assert manager_.restore(5).local is not None
        manager_.save(6, {"weight": torch.full((1000,), 60.0), "step": 60})
        manager_.wait()
        assert manager_.restore().tree["step"] == 60
    with manager(tmp_path, tier={"keep": 10}) as manager_:
        restored_ = manager_.restore()
        assert (restored_.step, restored_.tree["step"]) == (6, 60)
        assert restored_.tree["weight"].unique().tolist() == [60.0]
        assert manager_.restore(9).tree["step"] == 9, "an abandoned step, by its number"


def test_the_newest_of_a_run_that_went_back_is_lost(tmp_path):
    """Then the run is found before it went back, not the steps that it has abandoned."""
    with manager(tmp_path, tier={"keep": 10}) as manager_:
        for step in range(1, 8):
            manager_.save(step, state(step))
            manager_.wait()
        manager_.restore(3)
        manager_.save(5, {"weight": torch.full((1000,), 50.0), "step": 50})
        manager_.wait()
        folder = manager_._tier.session.folder
        newest = max(folder.parts().voted)
        (folder.path / newest.name / "0.data").write_bytes(b"")
    with manager(tmp_path, tier={"keep": 10}) as manager_:
        restored_ = manager_.restore()
        assert (restored_.step, restored_.tree["step"]) == (4, 4)
        assert 5 in restored_.skipped


def test_as_often_as_it_pays(tmp_path):
    """``every="auto"`` decides which steps are written to the root; the tier saves as it is told."""
    auto = dtckpt.AutoInterval(min_s=0.0001, max_s=0.0001, mtbf_s=1000.0)
    with manager(tmp_path, every=auto, save_interval_steps=None) as manager_:
        for step in range(1, 6):
            manager_.save(step, state(step))
            manager_.wait()
            time.sleep(0.001)
        assert manager_.all_steps() == [1, 2, 3, 4, 5]
        assert manager_._pace.costs is not None
    with manager(tmp_path, every="auto", save_interval_steps=None) as manager_:
        assert manager_.restore().step == 5
        assert manager_.save(6, state(6)) is not None
        manager_.wait()
        assert manager_.restore().step == 6


def test_a_failure_that_is_no_refusal_is_raised_by_the_next_save(tmp_path, monkeypatch):
    """A local save that failed in the background, by anything but its storage, is no secret."""

    def described_pieces(*_):
        raise ValueError("an error of the program")

    monkeypatch.setattr(local_save, "described_pieces", described_pieces)
    with manager(tmp_path) as manager_:
        manager_.save(1, state(1))
        manager_._tier.wait_for_local()
        with pytest.raises(ValueError, match="an error of the program"):
            manager_.save(2, state(2))


def test_storage_that_does_not_answer_at_a_restart(tmp_path, monkeypatch, caplog):
    """The job goes on from its tier, and says so; the root is written when storage is back."""
    with manager(tmp_path) as manager_:
        save(manager_, [1, 2, 3])
    real, is_down = StepFolders.saved, [True]

    def saved(self):
        if is_down[0]:
            raise StorageError("the bucket does not answer")
        return real(self)

    monkeypatch.setattr(StepFolders, "saved", saved)
    with manager(tmp_path) as manager_:
        restored_ = manager_.restore()
        assert (restored_.step, restored_.tree["step"]) == (3, 3)
        assert restored_.local is not None
        save(manager_, [4])
        manager_._tier.writer.wait()
        is_down[0] = False
        assert manager_.all_steps() == [1]
        save(manager_, [5])
        manager_.wait()
        assert manager_.all_steps() == [1, 5]
        assert manager_.abandoned_steps() == []
    assert any("cannot be listed, so none of them is restored" in record.getMessage() for record in caplog.records)


def test_storage_that_does_not_answer_and_an_empty_tier(tmp_path, monkeypatch):
    def saved(_):
        raise StorageError("the bucket does not answer")

    monkeypatch.setattr(StepFolders, "saved", saved)
    with manager(tmp_path) as manager_, pytest.raises(StorageError, match="the bucket does not answer"):
        manager_.restore()


@pytest.mark.processes
def test_a_process_that_ends_without_closing(tmp_path):
    """Both the save of the tier and the write to the root that follows it end before the process does."""
    process = forkserver.start(tier_faults.save_and_leave, str(tmp_path))
    process.join(60)
    assert process.exitcode == 0
    assert restored(tmp_path, 1) == [1.0]
