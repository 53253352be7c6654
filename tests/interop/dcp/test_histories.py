"""Saves of several ranks through DCP: after failures, by cached plans, in the background, in groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtckpt

from . import plugin_cases as cases

pytestmark = pytest.mark.processes


def test_after_a_failure_on_any_rank_the_next_save_is_well(pool, tmp_path):
    path = tmp_path / "saves" / "step"
    for seen in pool.values(cases.save_after_failures, str(path), clients=2, group=True):
        assert seen == [([0], [1.0]), ([1], [1.0]), [3.0], ["step"]]


def test_plans_are_cached(pool, tmp_path):
    answers = pool.values(cases.save_by_cached_plans, str(tmp_path / "step"), clients=3, group=True)
    assert answers == [[([float(step)], step >= 3) for step in range(5)]] * 3


def test_saves_in_the_background(pool, tmp_path):
    for *found, layout in pool.values(
        cases.save_in_background, str(tmp_path / "step"), "thread", clients=2, group=True
    ):
        assert found == [[0.0], [1.0], [2.0]]
        assert "sharding_specs:dim_0,unsharded" in layout


@pytest.mark.share(1, of="jobs of torchrun")
def test_saves_in_another_process(tmp_path):
    """A new process starts, since DCP's process must not be a child of the pool's processes."""
    program = (
        "import os, torch.distributed as dist; from interop.dcp import plugin_cases;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "found = plugin_cases.save_in_background(os.environ['SAVED'], 'process');"
        "assert found[:3] == [[0.0], [1.0], [2.0]], found;"
        "error = plugin_cases.error_of_memory('process'); assert 'in the memory of this process' in error, error;"
        "dist.destroy_process_group()"
    )
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "SAVED": str(tmp_path / "step"), "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.parametrize("to_lowest_rank", [False, True])
def test_copies_are_written_by_the_ranks_that_the_planner_chooses(pool, tmp_path, to_lowest_rank):
    path = str(tmp_path / "step")
    writers = pool.values(cases.save_copies, path, to_lowest_rank, clients=2, group=True)
    assert writers == [[0] if to_lowest_rank else [0, 1]] * 2


def test_a_rank_saves_without_the_others(pool, tmp_path):
    answers = pool.values(cases.save_alone, str(tmp_path / "step"), clients=2, group=True)
    assert answers == [[0.0] * 5, [1.0] * 5]


def test_sharded_tensors(pool, tmp_path):
    assert pool.values(cases.load_sharded_tensors, str(tmp_path / "step"), clients=2, group=True) == [[], []]


def test_groups_save_at_one_time(pool, tmp_path):
    answers = pool.values(cases.save_in_groups, str(tmp_path / "step"), clients=4, group=True)
    assert answers == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_without_collectives_each_rank_has_a_checkpoint(pool, tmp_path):
    path = tmp_path / "step"
    assert pool.values(cases.save_without_collectives, str(path), clients=2, group=True) == [[5.0]] * 2
    parts = [dtckpt.open_checkpoint(path / f"rank_{rank}").tensors["sharded"] for rank in range(2)]
    assert [part.is_whole for part in parts] == [False, False]


def test_what_differs_by_rank_is_refused_on_all(pool, tmp_path):
    told = pool.values(cases.errors_of_disagreements, str(tmp_path / "step"), clients=2, group=True)
    assert told == [[["BarrierConflictError"], ["SaveDisagreementError"], ["CheckpointExistsError"]]] * 2


def test_a_rank_that_dies_leaves_the_old_checkpoint(pool, tmp_path):
    path = tmp_path / "saves" / "step"
    answers = pool.run(cases.save_and_die, str(path), clients=2, group=True)
    assert answers[1].has_died
    assert answers[0].error  # of the process group, or DCP's
    assert dtckpt.restore(path)["value"] == 1.0
    assert pool.values(cases.save_again, str(path), clients=2, group=True) == [[3.0]] * 2
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]
