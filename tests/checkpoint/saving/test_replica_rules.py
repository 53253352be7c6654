"""Copies that may differ: buffers that each client keeps for itself, and names that the options list."""

import pytest
import torch

import dtckpt
from dtckpt import SaveOptions
from dtckpt.errors import ConfigError

from . import buffer_cases as cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "inner ddp", "inner fsdp2"])
def test_buffers_of_data_parallel_modules_are_those_of_the_lowest_client(pool, tmp_path, kind, is_async):
    path = f"{tmp_path}/s"
    # Small chunks, so that several clients would write parts of one buffer.
    (error, lines, buffers), (_, others, _) = pool.values(
        cases.save, path, kind, is_async=is_async, chunk_nbytes=32, clients=2, group=True
    )
    assert error == "none"
    assert (len(lines), others) == (2, [])  # one line for each save, on the leader
    assert all(word in lines[1] for word in ("norm.running_mean", "norm.running_var", "seen", "3 buffers"))
    for step in range(2):
        back = dtckpt.restore(f"{path}_{step}")["model"]
        assert all(back[name].equal(tensor) for name, tensor in buffers.items())


def test_statistics_of_a_batch_norm_may_differ_in_any_module(pool, tmp_path):
    (error, lines, buffers), _ = pool.values(
        cases.save, f"{tmp_path}/s", "module", seen_equal=True, clients=2, group=True
    )
    assert (error, len(lines)) == ("none", 2)
    assert dtckpt.restore(f"{tmp_path}/s_1")["model"]["norm.running_mean"].equal(buffers["norm.running_mean"])


@pytest.mark.parametrize("kind", ["ddp", "module"])
def test_parameters_are_still_compared(pool, tmp_path, kind):
    for error, _, _ in pool.values(
        cases.save, f"{tmp_path}/s", kind, flip="linear.weight", seen_equal=True, clients=2, group=True
    ):
        assert error.startswith("ReplicaMismatchError: client 0: copies of ")
        assert "linear.weight' must be equal" in error
        assert error.index("dtckpt.Shards.mark(") < error.index("nothing was committed")
    assert not list(tmp_path.glob("s_*"))


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_other_tensors_are_still_compared(pool, tmp_path, kind):
    for error, _, _ in pool.values(cases.save, f"{tmp_path}/s", kind, clients=2, group=True):
        name = "norm.running_mean" if kind == "dict" else "seen"
        assert error.startswith("ReplicaMismatchError: client 0: copies of ")
        assert f"model/{name}' must be equal" in error
        assert error.index("dtckpt.PerClient") < error.index("check_replicas=")


@pytest.mark.parametrize("is_async", [False, True])
def test_patterns_say_which_copies_may_differ(pool, tmp_path, is_async):
    answers = pool.values(
        cases.save, f"{tmp_path}/s", "dict", is_async=is_async, check_replicas={"*running_*": False, "*/seen": False},
        chunk_nbytes=32, clients=2, group=True,
    )  # fmt: skip
    assert [answer[:2] for answer in answers] == [("none", []), ("none", [])]
    back = dtckpt.restore(f"{tmp_path}/s_1")["model"]
    assert all(back[name].equal(tensor) for name, tensor in answers[0][2].items())


def test_patterns_say_which_copies_must_be_equal(pool, tmp_path):
    rules = {"*/module.seen": True}
    for error, _, _ in pool.values(cases.save, f"{tmp_path}/s", "ddp", check_replicas=rules, clients=2, group=True):
        assert error.startswith("ReplicaMismatchError: client 0: copies of ")
        assert "module.seen' must be equal" in error


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"check_replicas: no tensor matches '\*runing_\*'"):
        dtckpt.save(tmp_path / "s", {"w": torch.ones(2)}, options=SaveOptions(check_replicas={"*runing_*": False}))
