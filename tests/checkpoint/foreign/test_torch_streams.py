"""Indexes of distributed checkpoints of PyTorch and of ``torch.save`` files: all elements are where they say."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtckpt
from dtckpt.checkpoint.foreign import dcp_files, dcp_processes, torch_files
from dtckpt.checkpoint.foreign.torch_files import PieceLocator
from dtckpt.checkpoint.reading.pieces import Piece
from dtckpt.errors import CheckpointCorruptError, TreeError, UnexpectedTensorError
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region
from dtckpt.storage.local_folder import LocalFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


def training_state():
    """Return a state dict with all that one of a training job has, and odd strides."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    generator = np.random.RandomState(3)
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "images": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "large": torch.rand(100, 100).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "random": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": generator.get_state()},
        "tuple": (torch.ones(3), 1),
        "args": Fraction(1, 2),
        "step": 7,
        "odd": {"": torch.ones(1), "/a//b": 2, "..": [torch.ones(1)]},
    }


def stored(folder, index):
    """Return the tree of an index, with the elements read."""

    def read(name):
        tensor = index.tensors[name]
        result = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        if tensor.elements is not None:
            return tensor.elements
        assert tensor.is_whole
        for piece in tensor.pieces:
            place = PieceLocator(folder).locate(tensor, piece)
            data = bytearray(folder.read(place.file, place.offset, place.stop(tensor.itemsize)))
            box = torch.frombuffer(data, dtype=result.dtype).as_strided(place.region.shape, place.element_strides)
            result[place.region.slices()] = box
        return result

    return trees.build(index.structure, read)


def assert_same(found, expected):
    """Compare trees; dicts by their items."""
    if isinstance(expected, dict):
        assert found.keys() == {key if key in found else str(key) for key in expected}  # DCP has no other keys
        for key, value in expected.items():
            assert_same(found[key if key in found else str(key)], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@pytest.fixture
def state():
    torch.manual_seed(1)
    return training_state()


@pytest.mark.parametrize("run_nbytes", [0, 3000, 1 << 20])
def test_a_distributed_checkpoint(tmp_path, monkeypatch, state, run_nbytes):
    monkeypatch.setattr(dcp_processes, "RUN_NBYTES", run_nbytes)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    folder = LocalFolder(tmp_path)
    index = dcp_files.read_index(folder, folder.names())
    assert index.refused.keys() == {"args"}
    del state["args"]
    assert_same(stored(folder, index), state)


def test_a_distributed_checkpoint_that_was_not_flattened(tmp_path):
    state = {"a.b": torch.ones(2), "c": 3}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    folder = LocalFolder(tmp_path)
    assert_same(stored(folder, dcp_files.read_index(folder, folder.names())), state)


@pytest.mark.parametrize("whole_nbytes", [0, 16 << 10])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_file_of_torch_save(tmp_path, monkeypatch, state, whole_nbytes, protocol):
    monkeypatch.setattr(torch_files, "WHOLE_NBYTES", whole_nbytes)
    torch.save(state, tmp_path / "it.pt", pickle_protocol=protocol)
    folder = LocalFolder(tmp_path)
    assert torch_files.is_file("it.pt", folder.read("it.pt", 0, 64))
    index = torch_files.read_index(folder, ["it.pt"])
    assert index.refused.keys() == {"args"}
    del state["args"]
    assert_same(stored(folder, index), state)
    assert all(type(key) is int for key in trees.build(index.structure, str)["optim"]["state"])


def test_a_file_of_one_tensor(tmp_path):
    torch.save(torch.arange(3), tmp_path / "it.pt")
    folder = LocalFolder(tmp_path)
    assert_same(stored(folder, torch_files.read_index(folder, ["it.pt"])), torch.arange(3))


def test_chunks_that_are_not_what_the_metadata_says(tmp_path):
    dcp.save({"w": torch.rand(50, 100)}, checkpoint_id=tmp_path, no_dist=True)
    folder = LocalFolder(tmp_path)
    tensor = dcp_files.read_index(folder, folder.names()).tensors["w"]
    (piece,) = tensor.pieces
    wrong = Piece(Region((0, 0), (50, 99)), piece.file, piece.offset, stream_nbytes=piece.stream_nbytes)
    with pytest.raises(CheckpointCorruptError, match=r"float32 of shape \(50, 100\), expected .*\(50, 99\)"):
        PieceLocator(folder).locate(tensor, wrong)
    data = (tmp_path / piece.file).read_bytes()
    (tmp_path / piece.file).write_bytes(data[:-1])
    with pytest.raises(CheckpointCorruptError, match="its end is missing"):
        PieceLocator(folder).locate(tensor, piece)


def test_values_that_are_damaged_are_refused_alone(tmp_path):
    dcp.save({"w": torch.ones(2), "a": {"x": 1, "y": 2}}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(b"K\1.") + 1] = 3  # the first value
    path.write_bytes(data)
    folder = LocalFolder(tmp_path)
    index = dcp_files.read_index(folder, folder.names())
    assert list(index.refused) == ["a/x"]
    assert trees.build(index.structure, str) == {"w": "w", "a": {"y": 2}}
    path.unlink()
    index = dcp_files.read_index(folder, folder.names())
    assert all("__0_0.distcp is missing" in error.message for error in index.refused.values())


def test_names_that_collide_are_refused(tmp_path):
    dcp.save({"a": {"b": torch.ones(1)}, "a/b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    folder = LocalFolder(tmp_path)
    index = dcp_files.read_index(folder, folder.names())
    assert "both be named 'a/b'" in index.refused["a/b"].message
    assert index.tensors["a/b"].shape == (1,)


def saved_both_ways(tmp_path):
    """Return the paths of a distributed checkpoint and of a file with the same tensors, and the files with elements."""
    state = {"w": torch.rand(64, 100), "v": torch.rand(1000).bfloat16(), "part": torch.rand(10, 10)[2:5]}
    state["view"] = state["w"][3:]
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "it.pt")
    return {
        "dcp": (tmp_path / "dcp", tmp_path / "dcp" / "__0_0.distcp"),
        "torch": (tmp_path / "it.pt", tmp_path / "it.pt"),
    }


def test_verify_compares_the_checksums_of_pytorch(tmp_path):
    for form, (path, file) in saved_both_ways(tmp_path).items():
        with dtckpt.open_checkpoint(path) as checkpoint:
            assert checkpoint.format == form
            report = checkpoint.verify()
            assert (report.is_sound, report.num_unverified, report.num_tensors) == (True, 0, 4)
            tensor = checkpoint.files._index.tensors["w"]
        (piece,) = tensor.pieces
        place = PieceLocator(LocalFolder(file.parent)).locate(tensor, piece)
        data = bytearray(file.read_bytes())
        data[place.offset + 4000] ^= 1
        file.write_bytes(data)
        with dtckpt.open_checkpoint(path) as checkpoint:
            report = checkpoint.verify()
        # In the file both tensors are views of one storage.
        assert [damage.tensor for damage in report.damages] == (["w"] if form == "dcp" else ["w", "view"])
        assert "CRC" in report.damages[0].reason


def test_files_without_checksums_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        paths = saved_both_ways(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    for path, _ in paths.values():
        with dtckpt.open_checkpoint(path) as checkpoint:
            report = checkpoint.verify()
        assert (report.is_sound, report.num_unverified) == (True, 4)


def test_files_that_are_cut_short_are_refused_when_they_are_opened(tmp_path):
    for path, file in saved_both_ways(tmp_path).values():
        data = file.read_bytes()
        file.write_bytes(data[:-30])
        with pytest.raises(CheckpointCorruptError):
            dtckpt.open_checkpoint(path)


def test_a_tensor_that_cannot_be_read_is_an_error_for_those_who_want_it(tmp_path):
    state = {"w": torch.ones(2), "args": Fraction(1, 2), "sparse": torch.ones(2, 2).to_sparse()}
    torch.save(state, tmp_path / "it.pt")
    target = {"w": torch.zeros(2)}
    with pytest.raises(TreeError, match=r"cannot read fractions\.Fraction at 'args'"):
        dtckpt.restore(tmp_path / "it.pt")
    with pytest.raises(UnexpectedTensorError, match="'args', 'sparse'"):
        dtckpt.restore(tmp_path / "it.pt", target)
    options = dtckpt.RestoreOptions(allow_unexpected=True)
    assert torch.equal(dtckpt.restore(tmp_path / "it.pt", target, options=options)["w"], torch.ones(2))
    with pytest.raises(TreeError, match="sparse"):
        dtckpt.restore(tmp_path / "it.pt", {**target, "sparse": torch.ones(2, 2)}, options=options)
    with dtckpt.open_checkpoint(tmp_path / "it.pt") as checkpoint, pytest.raises(TreeError, match="sparse"):
        checkpoint.read("sparse")


def test_keys_of_optimizers_are_numbers_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    fresh = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    dtckpt.restore(tmp_path, {"optim": fresh})
    assert [state["exp_avg"].tolist() for state in fresh.state.values()] == [
        state["exp_avg"].tolist() for state in optimizer.state.values()
    ]


def test_dtensors_in_a_file_are_read_if_they_are_whole(tmp_path):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh, whole = init_device_mesh("cpu", (4,)), torch.arange(12.0).reshape(4, 3)
        tensors = {
            "whole": TorchDTensor.from_local(whole, mesh, [Replicate()]),
            "parameter": torch.nn.Parameter(TorchDTensor.from_local(whole, mesh, [Replicate()])),
            "part": TorchDTensor.from_local(whole[:1], mesh, [Shard(0)]),
            "pending": TorchDTensor.from_local(whole, mesh, [Partial()]),
        }
        torch.save(tensors, tmp_path / "it.pt")
    finally:
        dist.destroy_process_group()
    with dtckpt.open_checkpoint(tmp_path / "it.pt") as checkpoint:
        assert torch.equal(checkpoint.read("whole"), whole)
        assert torch.equal(checkpoint.read("parameter"), whole)
        assert checkpoint.refused.keys() == {"part", "pending"}
        for error in checkpoint.refused.values():
            assert "one process's part of a DTensor of shape (4, 3)" in error.message
            assert "torch.distributed.checkpoint" in error.message
