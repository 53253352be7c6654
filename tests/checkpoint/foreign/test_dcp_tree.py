"""State trees of paths, as PyTorch's own functions flatten and unflatten state dicts."""

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from dtckpt.checkpoint.foreign import dcp_metadata
from dtckpt.checkpoint.foreign.dcp_metadata import structure_of
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import tree as trees


def test_trees_are_those_of_pytorch():
    tensor = torch.ones(1)
    state = {
        "model": {"layers.0.w": tensor, "empty": {}},
        "optim": {"state": {0: {"step": tensor, "beta": 0.9}}, "groups": [{"lr": 1.0}, {}, {"lr": 2.0, "x": [tensor]}]},
        "epoch": 3,
        "list": [1, 2],
    }
    flat, paths = flatten_state_dict(state)
    built = trees.build(structure_of({paths[name]: {"value": name} for name in flat}), None)
    assert built == unflatten_state_dict({name: name for name in flat}, paths)
    assert list(built) == list(state)


def test_nothing():
    assert structure_of({}) == {"dict": []}


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([("a",), ("a", "b")], "leads through"),
        ([("a", "b"), ("a",)], "already"),
        ([("a", "b"), ("a", 0)], "a dict and a list"),
        ([("a", 0), ("a", dcp_metadata.MAX_GAP + 4)], "has an item 65540"),
        ([("a", -1)], "has an item -1"),
        ([("a",) * 65], "more than 64 keys"),
    ],
)
def test_malformed_paths_are_refused(paths, text):
    with pytest.raises(CheckpointCorruptError, match=text):
        structure_of({path: {"value": 1} for path in paths})
