"""The interval between saves: the formula, the estimate of failures, and managers with ``every="auto"``."""

import contextlib
import itertools
import json
import logging
import math
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import forkserver

from dtckpt import AutoInterval, CheckpointManager, errors, optimal_interval
from dtckpt.checkpoint.managing.interval import HOST_MTBF_S, PastRun, estimate_mtbf
from dtckpt.checkpoint.managing.run_history import MAX_RUNS, RUNS_FOLDER, RunHistory, RunRecord
from dtckpt.cli.main import main
from dtckpt.storage.local_folder import LocalFolder

HOUR = 3600.0


# --- the formula ---


def lost(interval, cost, mtbf):
    """The time that a second of work takes if failures come at random: what the formula makes least."""
    return math.expm1((interval + cost) / mtbf) / interval


@given(st.floats(1e-6, 0.05), st.floats(60, 1e7))
def test_no_other_interval_loses_less(share, mtbf):
    cost = share * mtbf
    interval = optimal_interval(cost, mtbf)
    least = min(lost(interval * factor, cost, mtbf) for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2.0))
    assert lost(interval, cost, mtbf) <= least * (1 + 1e-3)


@pytest.mark.parametrize(
    ("cost", "hours", "seconds"),
    [(0.5, 7.9, 168), (300, 7.9, 3933), (0.05, 3.09, 33), (1.5, 3.09, 182), (300, 3.09, 2389), (60, 0.52, 433)],
)
def test_published_cases(cost, hours, seconds):
    assert optimal_interval(cost, hours * HOUR) == pytest.approx(seconds, abs=2 if hours > 1 else 5)


def test_one_save_at_a_time_is_in_flight():
    assert optimal_interval(0.5, 3.09 * HOUR, lag_s=600) == 600
    assert optimal_interval(0, HOUR) == 0
    assert optimal_interval(100, 10) == 10, "a save takes longer than the job lives"


@pytest.mark.parametrize(("cost", "mtbf", "lag"), [(-1, 1, 0), (1, 0, 0), (1, -1, 0), (1, 1, -1), (math.nan, 1, 0)])
def test_numbers_that_make_no_sense(cost, mtbf, lag):
    with pytest.raises(errors.ConfigError):
        optimal_interval(cost, mtbf, lag_s=lag)


def test_failures_are_counted_with_the_general_rate_as_one():
    assert estimate_mtbf([], 0, 2048) == pytest.approx(3.09 * HOUR, rel=0.01)
    many = [PastRun(HOUR, has_failed=True)] * 30
    assert estimate_mtbf(many, 0, 2048) == pytest.approx(HOUR, rel=0.1)
    assert estimate_mtbf([PastRun(HOUR, has_failed=False)] * 30, HOUR, 1) == HOST_MTBF_S + 31 * HOUR


# --- the history ---


def test_a_run_is_remembered(tmp_path):
    first = RunHistory(LocalFolder(tmp_path / RUNS_FOLDER))
    assert first.begin(1000.0) == ([], None)
    first.note(1600.0, None, has_ended=False)
    second = RunHistory(LocalFolder(tmp_path / RUNS_FOLDER))
    assert second.begin(10.0)[0] == [PastRun(600.0, has_failed=True)], "also if the clock went back"
    second.note(20.0, None, has_ended=True)
    third = RunHistory(LocalFolder(tmp_path / RUNS_FOLDER))
    assert third.begin(3000.0)[0] == [PastRun(600.0, has_failed=True), PastRun(10.0, has_failed=False)]


def test_few_runs_are_kept_and_damage_is_passed_over(tmp_path):
    folder = tmp_path / RUNS_FOLDER
    for number in range(MAX_RUNS + 5):
        RunHistory(LocalFolder(folder)).begin(float(number))
    files = sorted(folder.iterdir())
    assert len(files) == MAX_RUNS
    files[0].write_bytes(b"")
    files[1].write_bytes(b"[]")
    files[2].write_bytes(b'{"began_s": 1')
    (folder / "notes").write_text("not ours")
    assert len(RunHistory(LocalFolder(folder)).begin(100.0)[0]) == MAX_RUNS - 3
    assert (folder / "notes").exists()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_damaged(data):
    with contextlib.suppress(ValueError):
        RunRecord.from_bytes(data)


# --- the manager ---


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def saved_steps(manager, clock, steps, step_s=1.0, cost_s=0.5):
    """Train; each save moves the clock by its cost."""
    saved = []
    for step in steps:
        clock.now += step_s
        if manager.should_save(step):
            manager.save(step, Slow(clock, cost_s), force=True)
            saved.append(step)
    return saved


class Slow:
    """A state whose collection takes its time, by the clock of the test."""

    def __init__(self, clock, cost_s):
        self.clock, self.cost_s = clock, cost_s

    def state_dict(self):
        self.clock.now += self.cost_s
        return {"w": torch.ones(2)}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_manager_saves_as_often_as_pays(tmp_path, clock, caplog):
    caplog.set_level(logging.INFO, "dtckpt.checkpoint")
    auto = AutoInterval(mtbf_s=400.0)
    with CheckpointManager(tmp_path, every=auto, is_async=False, clock=clock) as manager:
        saved = saved_steps(manager, clock, range(100))
    interval = optimal_interval(0.5, 400.0)  # 19.7 s
    assert saved[0] == 0, "the first save measures the cost"
    gaps = {after - before for before, after in itertools.pairwise(saved)}
    assert gaps <= {math.ceil(interval - 0.5), math.ceil(interval)}
    (line,) = [record.message for record in caplog.records if record.message.startswith("saves every")]
    assert "19.7 s: a save stops training for 0.500 s" in line
    assert "a failure is expected every 0.11 h (given by mtbf_s)" in line


def test_the_next_run_knows_costs_and_failures(tmp_path, clock, caplog):
    caplog.set_level(logging.INFO, "dtckpt.checkpoint")

    def fail():
        with CheckpointManager(tmp_path, every="auto", is_async=False, clock=clock) as manager:
            assert saved_steps(manager, clock, range(3)) == [0]
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fail()
    with CheckpointManager(tmp_path, every="auto", is_async=False, clock=clock) as manager:
        assert saved_steps(manager, clock, range(3, 5)) == [3]
        assert saved_steps(manager, clock, range(5, 8)) == []
    assert "earlier runs: 1, failed: 1; hosts: 1" in caplog.text
    with CheckpointManager(tmp_path, every="auto", is_async=False, clock=clock) as manager:
        assert manager.all_steps() == [0, 3]


def test_bounds_of_the_user_hold(tmp_path, clock):
    auto = AutoInterval(mtbf_s=1e9, max_s=5.0)
    with CheckpointManager(tmp_path / "a", every=auto, is_async=False, clock=clock) as manager:
        assert saved_steps(manager, clock, range(12), cost_s=0.0) == list(range(12))
    auto = AutoInterval(mtbf_s=1.0, min_s=4.0)
    with CheckpointManager(tmp_path / "b", every=auto, is_async=False, clock=clock) as manager:
        assert saved_steps(manager, clock, range(12), cost_s=0.0) == [3, 7, 11]


@pytest.mark.parametrize("every", ["automatic", 10, True])
def test_what_every_can_be(tmp_path, every):
    with pytest.raises(errors.ConfigError, match="'auto' or an AutoInterval"):
        CheckpointManager(tmp_path, every=every)


@pytest.mark.parametrize("arguments", [{"mtbf_s": 0}, {"mtbf_s": math.inf}, {"min_s": 2, "max_s": 1}, {"min_s": -1}])
def test_bounds_that_make_no_sense(arguments):
    with pytest.raises(errors.ConfigError):
        AutoInterval(**arguments)


def save_until_killed(root):
    manager = CheckpointManager(root, every="auto", is_async=False)
    for step in range(2):
        manager.save(step, {"w": torch.ones(2)}, force=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_a_run_that_was_killed_has_failed(tmp_path):
    process = forkserver.start(save_until_killed, tmp_path)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    ((run,), costs) = RunHistory(LocalFolder(tmp_path / RUNS_FOLDER)).begin(0.0)
    assert run.has_failed
    assert costs.blocking_s > 0


def test_a_history_that_cannot_be_written_stops_no_save(tmp_path, clock, caplog):
    (tmp_path / RUNS_FOLDER).write_text("a file")
    with CheckpointManager(tmp_path, every="auto", is_async=False, clock=clock) as manager:
        assert saved_steps(manager, clock, range(2)) == [0]
    assert "the history of runs" in caplog.text


def decide(root):
    manager = CheckpointManager(root, every=AutoInterval(mtbf_s=1e6))
    decisions = []
    for step in range(6):
        decisions.append(manager.should_save(step))
        if decisions[-1]:
            manager.save(step, {"w": torch.ones(2)})
            manager.wait()
    manager.close()
    return decisions


def test_clients_decide_alike(pool, tmp_path):
    first, *others = pool.values(decide, tmp_path, clients=3, group=True)
    assert others == [first] * 2
    assert first == [True, *[False] * 5], "the second save would come after minutes"
    assert len(list((tmp_path / RUNS_FOLDER).iterdir())) == 1, "client 0 writes the history"


def test_the_history_is_no_checkpoint(tmp_path, capsys):
    with CheckpointManager(tmp_path, every="auto", is_async=False) as manager:
        manager.save(0, {"w": torch.ones(2)})
    assert main(["ls", str(tmp_path), "--json"]) == 0
    *events, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [event["name"] for event in events] == ["step_00000000"]
    assert main(["gc", str(tmp_path), "--keep", "1", "--min-age", "0", "--yes"]) == 0
    assert (tmp_path / RUNS_FOLDER).is_dir()


def test_an_object_store_that_refuses_the_history_stops_no_save(tmp_path, clock, caplog, monkeypatch):
    def refuse(self, now_s):
        raise ValueError("PERMISSION_DENIED: as TensorStore says it")

    monkeypatch.setattr(RunHistory, "begin", refuse)
    with CheckpointManager(tmp_path, every="auto", is_async=False, clock=clock) as manager:
        assert saved_steps(manager, clock, range(2)) == [0]
    assert "PERMISSION_DENIED" in caplog.text
