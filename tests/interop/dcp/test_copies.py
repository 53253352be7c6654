"""Copies of one name on several ranks, of which DCP's planner lets one rank write: compared as `dtckpt.save` does."""

import pytest
import torch

from . import plugin_cases as cases

pytestmark = pytest.mark.processes

KINDS = ["elements", "one element of many", "replicated", "shape", "dtype", "value", "tuple", "array in a tuple"]
CLASSES = {"shape": "ComponentError", "dtype": "ComponentError", "value": "SaveDisagreementError"}


@pytest.mark.parametrize("to_lowest_rank", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_different_copies_are_refused_as_by_save(pool, tmp_path, kind, to_lowest_rank):
    path = tmp_path / "step"
    answers = pool.values(cases.errors_of_copies, str(path), kind, to_lowest_rank, clients=2, group=True)
    assert [len(found) for found in answers] == [2, 2]
    # `dtckpt.save` says which client found it; DCP does that itself. The two tell different cures for tensors.
    texts = {text.replace("client 0: ", "") for found in answers for text in found}
    assert len({text.partition("; " if "must be equal" in text else "\0")[0] for text in texts}) == 1
    assert CLASSES.get(kind, "") in answers[0][0]
    assert not path.exists()


def test_copies_are_not_compared_where_the_options_say_so(pool, tmp_path):
    assert pool.values(cases.save_unchecked, str(tmp_path / "step"), clients=2, group=True) == [True, True]


def test_copies_are_compared_where_plans_are_cached(pool, tmp_path):
    answers = pool.values(cases.errors_of_cached_copies, str(tmp_path / "step"), clients=2, group=True)
    assert answers == [["ReplicaMismatchError", "[2.0]"]] * 2


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        (torch.int32, torch.int64, 2**40 + 5),
        (torch.bfloat16, torch.float32, 1.001),
        (torch.float32, torch.float64, 1.0 + 2.0**-40),
        (torch.float64, torch.float16, 0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("clients", [1, 2])
def test_cached_plans_do_not_decide_the_dtype(pool, tmp_path, before, after, value, clients):
    answers = pool.values(
        cases.save_cached_dtypes, str(tmp_path / "step"), before, after, value, clients=clients, group=True
    )
    assert answers == [[True, (True, True), (True, True), (True, True)]] * clients
