"""Managers of checkpoints: when they save, the steps that they keep and restore, and the state after a crash."""

import math
import shutil
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import forkserver

import dtckpt
from checkpoint.saving import save_async_cases
from dtckpt import CheckpointManager, Retention, errors
from dtckpt.checkpoint.managing.leftovers import collect_leftovers
from dtckpt.checkpoint.managing.root import RootLock
from dtckpt.storage.commit_by_rename import DirectoryTarget
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

WAIT_S = 30


def state(step):
    return {"model": {"w": torch.full((300,), float(step))}, "optimizer": [torch.ones(3)], "step": step}


def save_steps(root, steps, **options):
    manager = CheckpointManager(root, **options)
    for step in steps:
        manager.save(step, state(step), force=True)
    manager.close()
    return manager


def flip_a_byte(folder):
    file = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# --- retention ------

steps_of = st.sets(st.integers(0, 300), max_size=20)
retentions = st.builds(
    Retention,
    last=st.none() | st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 50),
    best=st.none() | st.integers(1, 3),
    mode=st.sampled_from(["min", "max"]),
)


@given(retentions, steps_of, steps_of, steps_of, st.dictionaries(st.integers(0, 300), st.floats()))
def test_what_is_doomed(retention, steps, protected, damaged, losses):
    metrics = {step: {"loss": value} for step, value in losses.items()}
    doomed = set(retention.doomed(steps, metrics, protected=protected, damaged=damaged))
    good = sorted(steps - damaged)
    assert doomed <= set(good)
    assert not doomed & protected
    assert not good or good[-1] not in doomed
    assert not doomed & set(good[len(good) - (retention.last or 0) :])
    assert not any(retention.every_steps and step % retention.every_steps == 0 for step in doomed)
    assert not doomed & set(retention.ranked(good, metrics)[: retention.best or 0])


def test_the_best_are_kept():
    losses = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.1, 5: 0.9}
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    assert Retention(best=2).doomed(losses, metrics) == [1, 3]
    assert Retention(best=1, mode="max").doomed([1, 2, 3, 4, 5, 6], metrics) == [1, 2, 3, 4]
    assert Retention(best=1, metric="accuracy").doomed(losses, metrics) == [1, 2, 3, 4]


def test_what_is_kept_by_age():
    times = {1: 0.0, 2: 50.0, 3: 100.0, 4: 199.0, 5: 200.0, 7: 260.0}
    steps = [1, 2, 3, 4, 5, 6, 7]  # nothing tells when step 6 was saved
    doomed = {
        "young": Retention(newer_than_s=100).doomed(steps, times=times, now=290.0),
        "first of 100 s": Retention(every_s=100).doomed(steps, times=times, now=290.0),
        "either": Retention(newer_than_s=100, every_s=100).doomed(steps, times=times, now=290.0),
        "old run": Retention(newer_than_s=100).doomed(steps, times=times, now=9e9),
    }
    assert doomed == {"young": [1, 2, 3], "first of 100 s": [2, 4], "either": [2], "old run": [1, 2, 3, 4, 5]}


def test_a_run_that_keeps_by_age(tmp_path, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0] * 1e9))
    keep = Retention(newer_than_s=25, every_s=100)
    with CheckpointManager(tmp_path, keep=keep, is_async=False) as manager:
        for step in range(30):
            manager.save(step, state(step))
            now[0] += 10
    assert manager.all_steps() == [0, 10, 20, 27, 28, 29]


@pytest.mark.parametrize(
    "bad",
    [{"last": 0}, {"every_steps": -1}, {"best": True}, {"mode": "least"}, {"newer_than_s": 0}, {"every_s": math.inf}],
)
def test_bad_retentions(bad):
    with pytest.raises(errors.ConfigError):
        Retention(**bad)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_run(tmp_path, is_async):
    keep = Retention(last=2, every_steps=10, best=1, metric="loss")
    with CheckpointManager(tmp_path / "run", keep=keep, save_interval_steps=5, is_async=is_async) as manager:
        assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([], None, None)
        for step in range(31):
            handle = manager.save(step, state(step), metrics={"loss": (step - 15) ** 2})
            assert (handle is not None) == (step % 5 == 0)
            assert is_async or handle is None or handle.done()
        manager.wait()
        assert manager.all_steps() == [0, 10, 15, 20, 25, 30]
        assert (manager.latest_step(), manager.best_step(), manager.metrics(25)) == (30, 15, {"loss": 100.0})
        found = manager.restore()
        assert (found.step, found.tree["step"], found.skipped) == (30, 30, {})
        assert manager.restore(10).tree["model"]["w"][0] == 10
    names = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    assert names == [".dtckpt-manager.lock", *(f"step_{step:08d}" for step in (0, 10, 15, 20, 25, 30))]


def test_foreign_and_unfinished_things_are_ignored(tmp_path):
    save_steps(tmp_path, [1, 2])
    for name in ("step_3", "step_00000004", "step_00000005.bak", "notes", ".step_00000006.dtckpt-new-0-0-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step_00000007").write_text("a file")
    manager = CheckpointManager(tmp_path, keep=1)
    assert (manager.all_steps(), manager.restore().step) == ([1, 2], 2)
    manager.save(8, state(8))
    manager.close()
    assert manager.all_steps() == [8]
    assert {"step_3", "step_00000004", "step_00000005.bak", "notes", "step_00000007"} <= {
        entry.name for entry in tmp_path.iterdir()
    }


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    manager = save_steps(tmp_path, [1, 1])
    assert not manager.should_save(1)
    assert manager.save(1, state(5), force=True) is not None
    assert manager.restore(1).tree["step"] == 5
    manager.close()


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 10**18])
def test_what_is_no_step(tmp_path, step):
    with pytest.raises(errors.ConfigError, match="a step must be a whole number"):
        CheckpointManager(tmp_path).save(step, {})


@pytest.mark.parametrize("bad", [{"save_interval_steps": 0}, {"save_interval_s": -1.0}, {"leftover_age_s": 0}])
def test_bad_options(tmp_path, bad):
    with pytest.raises(errors.ConfigError, match="must be positive"):
        CheckpointManager(tmp_path, **bad)


def test_a_checkpoint_that_is_being_restored_stays(tmp_path):
    manager = save_steps(tmp_path, [1], keep=1)
    with manager._removal.pin(1):
        manager.save(2, state(2))
        manager.wait()
        assert manager.all_steps() == [1, 2]
    with directory_lock(manager.path(1)):
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [1, 3]
    manager.save(4, state(4))
    manager.close()
    assert manager.all_steps() == [4]


def test_a_replacement_that_stopped_half_way_does_not_stop_the_removals(tmp_path, caplog):
    manager = save_steps(tmp_path, [1, 2])
    step = manager.path(1)
    shutil.copytree(step, tmp_path / f".{step.name}.dtckpt-new-0-0-0")
    step.rename(tmp_path / f".{step.name}.dtckpt-old-0-0-0")
    assert manager.all_steps() == [1, 2]
    assert save_steps(tmp_path, [3], keep=1, leftover_age_s=1e-6).all_steps() == [3]
    assert {entry.name for entry in tmp_path.iterdir()} == {".dtckpt-manager.lock", "step_00000003"}
    assert not caplog.records


def test_a_step_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch, caplog):
    manager, remove = save_steps(tmp_path, [1, 2, 3]), DirectoryTarget.remove

    def refuse(place):
        if place.where == manager.path(1):
            raise PermissionError("not this one")
        remove(place)

    monkeypatch.setattr(DirectoryTarget, "remove", refuse)
    assert save_steps(tmp_path, [4], keep=1).all_steps() == [1, 4]
    assert [record.message for record in caplog.records] == [
        f"old checkpoints in {tmp_path} could not all be removed: not this one"
    ]


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("x")
    with pytest.raises(errors.StorageError, match="cannot list the checkpoints at"):
        CheckpointManager(tmp_path / "root").all_steps()


def directory_lock(folder):
    """As a reader in another process holds it."""
    from dtckpt.storage.directory_lock import lock_directory

    return lock_directory(folder, is_shared=True)


# --- when to save ---


def test_time_and_custom_rules(tmp_path):
    now = [0.0]
    manager = CheckpointManager(tmp_path, save_interval_s=10, save_when=lambda step: step == 3, clock=lambda: now[0])
    saved = []
    for step in range(8):
        now[0] += 4
        if manager.save(step, state(step)):
            saved.append(step)
    manager.close()
    assert saved == [2, 3, 6] == manager.all_steps()


def test_a_busy_manager_may_skip(tmp_path):
    with save_async_cases.Gate() as gate:
        manager = CheckpointManager(tmp_path, skip_when_busy=True)
        assert manager.save(0, state(0)) is not None
        assert gate.reached.wait(WAIT_S)
        assert manager.save(1, state(1)) is None
    manager.wait()
    assert manager.save(2, state(2)) is not None
    manager.close()
    assert manager.all_steps() == [0, 2]


def test_saves_back_to_back(tmp_path):
    with save_async_cases.Gate() as gate:
        manager = CheckpointManager(tmp_path, save_interval="continuous")
        assert manager.save(0, state(0)) is not None
        assert gate.reached.wait(WAIT_S)
        assert [manager.save(step, state(step)) for step in (1, 2)] == [None, None]
    manager.wait()
    assert not manager.should_save(2), "the decision for a step stays"
    assert manager.save(3, state(3)) is not None
    manager.close()
    assert manager.all_steps() == [0, 3]


def test_an_unknown_name_of_an_interval(tmp_path):
    with pytest.raises(errors.ConfigError, match="save_interval must be 'continuous', got 10"):
        CheckpointManager(tmp_path, save_interval=10)


# --- failures ---


def full_disk(*_):
    raise errors.StorageFullError("no space is left")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("at", ["begin", "commit"])
def test_training_goes_on_after_a_save_that_storage_refused(tmp_path, monkeypatch, caplog, is_async, at):
    with CheckpointManager(tmp_path, on_failure="warn", is_async=is_async, save_interval_steps=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryTarget if at == "begin" else TensorStoreWriter, at, full_disk)
            for step in (2, 3):
                handle = manager.save(step, state(step))
                assert (handle is None) == (at == "begin")
                manager.wait()
            if handle is not None:
                with pytest.raises(errors.StorageFullError):
                    handle.result()
        assert manager.num_failed_saves == 2
        manager.save(4, state(4))
    assert manager.all_steps() == [1, 4]
    assert [record.message for record in caplog.records] == [
        f"step {step} is not saved in {tmp_path}, and training goes on; failed saves so far: {count}; "
        "the reason: no space is left"
        for step, count in ((2, 1), (3, 2))
    ]


def test_what_is_raised_in_any_case(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, on_failure="warn")
    for error in (errors.ClientLostError, errors.ReplicaMismatchError, errors.CheckpointConflictError, MemoryError):
        with monkeypatch.context() as patch:
            patch.setattr(TensorStoreWriter, "commit", lambda self, error=error: (_ for _ in ()).throw(error("no")))
            manager.save(1, state(1), force=True)
            with pytest.raises(error):
                manager.wait()
    assert manager.num_failed_saves == 0
    with pytest.raises(errors.CheckpointNotFoundError):
        manager.restore()
    manager.close()


def test_an_unknown_answer_to_failures(tmp_path):
    with pytest.raises(errors.ConfigError, match="on_failure must be 'raise' or 'warn'"):
        CheckpointManager(tmp_path, on_failure="ignore")


def test_a_failed_save_is_raised_by_the_next_call(tmp_path, monkeypatch):
    manager = save_steps(tmp_path, [1], keep=1)
    for ask in (lambda: manager.save(3, state(3)), manager.wait, manager.close):
        with monkeypatch.context() as patch:
            patch.setattr(TensorStoreWriter, "commit", lambda self: 1 / 0)
            manager.save(2, state(2), force=True).wait(WAIT_S)
        with pytest.raises(ZeroDivisionError):
            ask()
        manager.wait()
        assert manager.all_steps() == [1]
    assert manager.restore().step == 1


def test_leaving_with_an_error_does_not_hide_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TensorStoreWriter, "commit", lambda self: (_ for _ in ()).throw(errors.StorageError("no disk")))

    def train():
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, state(1)).wait(WAIT_S)
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert "while another error was on its way: no disk" in caplog.text


@pytest.mark.parametrize("value", [None, "low", "1.5", [1.0], torch.ones(2), 1j, 10**400], ids=range(7))
@pytest.mark.parametrize("local", [False, True])
def test_bad_metrics_are_refused(tmp_path, value, local):
    tier = dtckpt.LocalTier(path=tmp_path / "local") if local else None
    with CheckpointManager(tmp_path / "run", local=tier) as manager:
        with pytest.raises(errors.ConfigError, match="metrics of step 1 must be numbers by name"):
            manager.save(1, state(1), metrics={"loss": value})
        with pytest.raises(errors.ConfigError, match="metrics of step 1 must be numbers by name"):
            manager.save(1, state(1), metrics={7: 1.0})
        with pytest.raises(errors.ConfigError, match="metrics of step 1 must be numbers by name"):
            manager.save(1, state(1), metrics=[("loss", 1.0)])
        manager.save(1, state(1), metrics={"loss": 1.0})
    assert CheckpointManager(tmp_path / "run").metrics(1) == {"loss": 1.0}


def test_metrics_that_lack_the_one_that_ranks_are_refused(tmp_path):
    with CheckpointManager(tmp_path, keep=Retention(best=1, metric="val/loss")) as manager:
        with pytest.raises(errors.ConfigError, match=r"without metric 'val/loss', .* did you mean 'val_loss'"):
            manager.save(1, state(1), metrics={"val_loss": 1.0, "epoch": 2})
        manager.save(1, state(1), metrics={"val/loss": 1.0})
        manager.save(2, state(2))  # as at the end of a run
    with pytest.raises(errors.ConfigError, match="retention metric must be the name"):
        Retention(best=1, metric=None)


def test_numbers_of_numpy_and_torch_are_metrics(tmp_path):
    passed = {"a": torch.tensor(1.5), "b": np.float32(2.5), "c": np.array(3), "d": True, "e": torch.tensor([4.0])}
    with CheckpointManager(tmp_path, is_async=False) as manager:
        manager.save(1, state(1), metrics=passed)
        assert manager.metrics(1) == {"a": 1.5, "b": 2.5, "c": 3.0, "d": 1.0, "e": 4.0}


def test_damaged_metrics_count_as_none(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, keep=Retention(best=1))
    for step in (1, 2):
        manager.save(step, state(step), metrics={"loss": step})
        manager.wait()
    (manager.path(1) / "metrics.json").write_text("[")
    assert manager.best_step() == 2
    assert "count as none" in caplog.text
    manager.close()


# --- restoring ---


@pytest.mark.parametrize("damage", ["a data file", "the manifest", "no data", "no manifest"])
def test_a_damaged_newest_step_is_passed_over(tmp_path, caplog, damage):
    manager = save_steps(tmp_path, [1, 2, 3])
    for step in (2, 3):
        folder = manager.path(step)
        manifest = folder / "dtckpt.manifest"
        if damage == "a data file":
            flip_a_byte(folder)
        elif damage == "the manifest":
            manifest.write_bytes(manifest.read_bytes()[:-3])
        elif damage == "no data":
            for file in folder.rglob("*"):
                if file.is_file() and file != manifest:
                    file.unlink()
        else:
            manifest.unlink()
    target = state(0)
    found = manager.restore(target=target)
    assert (found.step, target["model"]["w"][0], target["step"]) == (1, 1.0, 1)
    listed = [] if damage == "no manifest" else [3, 2]
    assert list(found.skipped) == listed
    assert all(text.startswith("client 0: ") for text in found.skipped.values())
    assert all(f"step {step} cannot be restored, trying the step before it" in caplog.text for step in listed)
    with pytest.raises(errors.CheckpointError):
        manager.restore(3)


def test_damaged_steps_do_not_cost_the_good_one(tmp_path):
    save_steps(tmp_path, [1, 2])
    manager = CheckpointManager(tmp_path, keep=1)
    flip_a_byte(manager.path(2))
    assert manager.restore().step == 1
    manager.save(2, state(2), force=True)  # the run comes by again
    manager.wait()
    assert (manager.all_steps(), manager.restore().step) == ([2], 2)
    manager.close()


def test_nothing_valid_is_left(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="there is no valid checkpoint in"):
        CheckpointManager(tmp_path / "nowhere").restore()
    manager = save_steps(tmp_path, [1, 2])
    for step in (1, 2):
        flip_a_byte(manager.path(step))
    with pytest.raises(errors.CheckpointNotFoundError, match=r"step 2: client 0: .*; step 1: client 0: "):
        manager.restore()


def test_what_the_caller_asks_for_wrongly_is_no_damage(tmp_path):
    manager = save_steps(tmp_path, [1, 2])
    with pytest.raises(errors.ShapeMismatchError):
        manager.restore(target=state(0) | {"model": {"w": torch.ones(2)}})
    with pytest.raises(errors.UnexpectedTensorError):
        manager.restore(target={"model": state(0)["model"]})


def test_some_items_of_many(tmp_path):
    manager = save_steps(tmp_path, [1, 2])
    target = {"model": state(0)["model"]}
    assert manager.restore(target=target, partial=True).step == 2
    assert target["model"]["w"][0] == 2


def test_a_restore_sees_the_save_in_flight(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1))
    assert manager.restore().step == 1
    manager.close()


# --- leftovers ---


@contextmanager
def running(case, path):
    """Run a case in another process until it is killed; yields the process when it says that it is ready."""
    ours, theirs = forkserver.Pipe()
    process = forkserver.start(case, str(path), theirs)
    theirs.close()
    try:
        assert ours.poll(WAIT_S)
        assert ours.recv() == "ready"
        yield process
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()


@pytest.mark.processes
def test_attempts_that_live_are_left_alone(tmp_path):
    with running(save_async_cases.build_forever, tmp_path / "step_00000005"):
        (building,) = tmp_path.iterdir()
        later = building.stat().st_mtime + 1000
        assert collect_leftovers(tmp_path, min_age_s=10, now=later) == []
        save_steps(tmp_path, [6], leftover_age_s=1e-9)
        assert building.is_dir()
    # Dead now, but only as old as its last change says.
    assert collect_leftovers(tmp_path, min_age_s=1e9, now=later) == []
    assert collect_leftovers(tmp_path, min_age_s=10, now=later) == [building]
    assert CheckpointManager(tmp_path).all_steps() == [6]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".dtckpt-manager.lock", "step_00000006"]


def test_trash_goes_and_half_done_replacements_stay(tmp_path):
    save_steps(tmp_path, [1, 2, 3])
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.dtckpt-trash-abc")
    (tmp_path / "step_00000002").rename(tmp_path / ".step_00000002.dtckpt-old-t")
    (tmp_path / "step_00000003").rename(tmp_path / ".step_00000002.dtckpt-new-t")
    manager = CheckpointManager(tmp_path, leftover_age_s=1e-9)
    assert manager.all_steps() == [2]
    assert manager.restore().tree["step"] == 2
    manager.save(4, state(4))
    manager.close()
    assert manager.all_steps() == [2, 4]
    assert manager.restore(2).tree["step"] == 2
    assert not list(tmp_path.glob(".*trash*"))


def test_leftovers_beside_what_is_no_checkpoint(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "photo").write_bytes(b"x")
    dead = tmp_path / ".s.dtckpt-new-0-0-0"
    dead.mkdir()
    assert collect_leftovers(tmp_path, min_age_s=10, now=dead.stat().st_mtime + 11) == [dead]
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "photo"]


# --- others at the same root ---


def test_one_manager_at_a_time_saves(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.save(1, state(1)).result(WAIT_S)
    with pytest.raises(errors.CheckpointConflictError, match="another manager of this process saves"):
        second.save(2, state(2))
    assert second.restore().step == 1
    first.close()
    second.save(2, state(2))
    second.close()
    assert first.all_steps() == [1, 2]


@pytest.mark.processes
def test_one_process_at_a_time_saves(tmp_path):
    with running(save_async_cases.hold, tmp_path) as process:
        manager = CheckpointManager(tmp_path)
        with pytest.raises(errors.CheckpointConflictError, match=f"process {process.pid} on .* saves checkpoints"):
            manager.save(1, state(1))
        assert manager.restore().step == 0
        assert RootLock(tmp_path).holder().startswith(f"process {process.pid} on ")
    manager.save(1, state(1))
    manager.close()
    assert manager.all_steps() == [0, 1]


def test_a_look_takes_no_lock(tmp_path, monkeypatch):
    """A manager that starts while another process looks would be refused."""
    save_steps(tmp_path, [1])
    monkeypatch.setattr("fcntl.lockf", lambda *_: pytest.fail("a lock was taken"))
    assert RootLock(tmp_path).holder() == ""


# --- several clients ---


def test_a_run_over_clients(pool, tmp_path, meeting):
    keep = Retention(last=1, best=1)
    found = pool.values(save_async_cases.manage, f"{tmp_path}", 6, keep=keep, clients=3, **meeting)
    assert found[0] == [[3, 5], 5, 3]
    assert pool.values(save_async_cases.resume, f"{tmp_path}", clients=2, **meeting) == [(5, [], [])] * 2
    flip_a_byte(tmp_path / "step_00000005")
    assert pool.values(save_async_cases.resume, f"{tmp_path}", clients=2, **meeting) == [(3, [5], [])] * 2


def test_all_pass_over_what_one_cannot_read(pool, tmp_path):
    pool.values(save_async_cases.manage, f"{tmp_path}", 3, clients=2)
    assert pool.values(save_async_cases.resume, f"{tmp_path}", 1, clients=2) == [(1, [2], [])] * 2


@pytest.mark.parametrize("case", ["restore_different_steps", "ask_for_different_steps"])
def test_clients_at_different_steps(pool, tmp_path, case):
    answers = pool.run(getattr(save_async_cases, case), f"{tmp_path}", clients=2)
    assert {answer.error for answer in answers} == {"BarrierConflictError"}, answers
    assert len({answer.text for answer in answers}) == 1


def test_a_rule_that_fails_on_client_0_fails_on_all(pool, tmp_path):
    answers = pool.run(save_async_cases.ask_a_rule_that_fails, f"{tmp_path}", clients=2)
    assert {answer.error for answer in answers} == {"ClientFailedError"}, answers
    assert {answer.text for answer in answers} == {"client 0: ZeroDivisionError: no rule today"}
    assert max(answer.seconds for answer in answers) < 5


def test_a_rule_that_fails_alone(tmp_path):
    manager = CheckpointManager(tmp_path, save_when=lambda step: 1 / (step - 1) > 0)
    with pytest.raises(ZeroDivisionError):
        manager.should_save(1)
    assert manager.should_save(2)


def test_one_clock_decides(pool, tmp_path):
    assert pool.values(save_async_cases.manage_by_time, f"{tmp_path}", clients=2) == [[1, 3, 5]] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_all_clients_go_on_after_a_save_that_storage_refused_to_one(pool, tmp_path, victim):
    found = pool.values(save_async_cases.go_on_after_failures, f"{tmp_path}", victim, "StorageFullError", clients=2)
    assert found == [([True] * 3, 1, [0, 2])] * 2


def test_all_clients_raise_what_the_next_save_would_not_mend(pool, tmp_path):
    answers = pool.run(save_async_cases.go_on_after_failures, f"{tmp_path}", 1, "ReplicaMismatchError", clients=2)
    assert [answer.error for answer in answers] == ["ReplicaMismatchError"] * 2


@pytest.mark.parametrize("blocked", [0, 1])
def test_clients_begin_saves_back_to_back_at_the_same_steps(pool, tmp_path, blocked):
    (saved, kept), other = pool.values(save_async_cases.save_back_to_back, f"{tmp_path}", blocked, clients=2)
    assert (saved, kept) == other
    assert saved == kept
    assert saved[0] == 0
    assert len(saved) == 40 if blocked == 0 else 1 < len(saved) <= 40


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_client_makes_all_save(pool, tmp_path, meeting, victim):
    found = pool.values(save_async_cases.train_until_preempted, f"{tmp_path}", victim, clients=2, **meeting)
    assert found == [(4, [4], "True")] * 2
    assert pool.values(save_async_cases.resume, f"{tmp_path}", clients=2, **meeting) == [(4, [], [])] * 2


@pytest.mark.parametrize("where", ["before the rename", "before the deletion", "amid the deletion"])
def test_a_kill_amid_removal_leaves_whole_checkpoints(pool, tmp_path, where):
    answers = pool.run(save_async_cases.die_while_removing, f"{tmp_path}", where, clients=2, heartbeat_timeout_s=2.0)
    assert answers[0].has_died
    assert not answers[1].error or answers[1].error == "ClientLostError"
    steps = CheckpointManager(tmp_path).all_steps()
    assert steps == ([0, 1] if where == "before the rename" else [1])
    for step in steps:
        with dtckpt.open_checkpoint(tmp_path / f"step_{step:08d}") as checkpoint:
            assert checkpoint.tensors.keys() == {"w", "c"}
    assert pool.values(save_async_cases.resume, f"{tmp_path}", clients=2) == [(1, [], [])] * 2
    pool.values(save_async_cases.manage, f"{tmp_path}", 3, keep=1, clients=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".dtckpt-manager.lock", "step_00000002"]
