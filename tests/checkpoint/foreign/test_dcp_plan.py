"""Plans of distributed checkpoints: PyTorch flattens alike, and loads the planned files."""

from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from checkpoint.foreign.torch_files import write_segments
from dtckpt.checkpoint.foreign import dcp_plan
from dtckpt.checkpoint.foreign.dcp_plan import ShapeAndDtype, flat_leaves, plan_checkpoint
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

STATE = {
    "model": OrderedDict(
        [("layers.0.w", torch.arange(35.0).reshape(5, 7)), ("b", torch.ones(3, dtype=torch.bfloat16))]
    ),
    "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}]},
    "empty": torch.empty(0, 4),
    "numbers": [1, 2, [3]],
    "mixed": [1, torch.ones(2), [torch.ones(1), 5], {"x": None}],
    "deep": [[[{"a": 1}]]],
    "tuple": (torch.ones(2), {"a": torch.zeros(1)}),
    "queue": deque([1, 2], 5),
    "count": Counter("abb"),
    "random": ("MT19937", np.arange(5, dtype=np.uint32), 7),
    "array": np.arange(4).reshape(2, 2),
    "scalar": np.float32(1.5),
    "": {"a.b": 1},
}


def blank(value):
    """Return a state dict of the same structure, with other values."""
    if torch.is_tensor(value):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return type(value)({key: blank(child) for key, child in value.items()})
    return [blank(child) for child in value] if isinstance(value, list) else None


def planned(state, file_nbytes=dcp_plan.FILE_NBYTES):
    """Return the files of a plan of a state dict, and its tensors."""
    leaves, structure = trees.flatten(state, torch.is_tensor)
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    tensors = {name: leaf for name, leaf in leaves.items() if name not in arrays}
    facts = {
        name: ShapeAndDtype(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    return plan_checkpoint(structure, facts, arrays.__getitem__, file_nbytes), tensors


def test_leaves_are_those_of_pytorch():
    _, structure = trees.flatten(STATE, torch.is_tensor)
    flat, paths = flatten_state_dict(STATE)
    assert [path for path, _ in flat_leaves(structure)] == list(paths.values())
    assert {path for path, node in flat_leaves(structure) if "tensor" in node} == {
        path for name, path in paths.items() if torch.is_tensor(flat[name])
    }


@pytest.mark.parametrize(("chunk_nbytes", "file_nbytes"), [(1 << 20, 1 << 30), (40, 3000)])
def test_pytorch_loads_it(tmp_path, monkeypatch, chunk_nbytes, file_nbytes):
    monkeypatch.setattr(dcp_plan, "CHUNK_NBYTES", chunk_nbytes)
    files, tensors = planned(STATE, file_nbytes)
    assert len(files) == 2 or chunk_nbytes == 40
    for name, segments in files.items():
        (tmp_path / name).write_bytes(write_segments(segments, tensors))
    flat, _ = flatten_state_dict(STATE)
    target = blank(STATE)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert repr(target) == repr(STATE)
    loaded, _ = flatten_state_dict(target)
    assert all(torch.equal(loaded[name], value) for name, value in flat.items() if torch.is_tensor(value))
    chunks = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["model.layers.0.w"].chunks
    assert len(chunks) == (5 if chunk_nbytes == 40 else 1)


def test_what_cannot_be_in_it_is_refused():
    for state, text in [
        ([torch.ones(1)], "saves dicts"),
        ({"a": {"b": 1}, "a.b": 2}, "both be named 'a.b'"),
    ]:
        with pytest.raises(TreeError, match=text):
            planned(state)
    with pytest.raises(TreeError, match="cannot write the enum at 'x/0'"):
        plan_checkpoint({"dict": [["x", {"list": [{"enum": ["Color", "RED"]}]}]]}, {}, None)
