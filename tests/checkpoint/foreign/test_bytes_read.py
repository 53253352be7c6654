"""A read from an object store asks for little more than the bytes of the tensor, or of the rows, that are wanted."""

import json
import shutil

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

import dtckpt
from dtckpt import Region

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

ROWS, COLUMNS = 1024, 1024
TENSOR_NBYTES = 4 * ROWS * COLUMNS
SLACK_NBYTES = 512 << 10
"""For headers, the index, and the samples that tell one checkpoint from another."""
NAMES = "abce"
"""A `d` in an Orbax folder is a database."""


def write_megatron_zarr(path, tensors):
    for name, tensor in tensors.items():
        (path / name).mkdir(parents=True)
        document = {"zarr_format": 2, "shape": [ROWS, COLUMNS], "chunks": [ROWS // 4, COLUMNS], "dtype": "<f4"}
        document |= {"order": "C", "compressor": None, "filters": None, "fill_value": None}
        (path / name / ".zarray").write_text(json.dumps(document))
        for number, part in enumerate(tensor.chunk(4)):
            (path / name / f"{number}.0").write_bytes(part.numpy().tobytes())
    torch.save({"iteration": 7}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')


def write_shards(path, tensors):
    path.mkdir()
    weight_map = {name: f"model-{number:05}-of-00004.safetensors" for number, name in enumerate(tensors, start=1)}
    for name, file in weight_map.items():
        safetensors.torch.save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_by_converting(target):
    def write(path, tensors):
        dtckpt.save(path.with_name("ours"), tensors)
        dtckpt.convert(path.with_name("ours"), path, to=target)
        shutil.rmtree(path.with_name("ours"))

    return write


FORMATS = {
    "model.safetensors": lambda path, tensors: safetensors.torch.save_file(tensors, path),
    "shards": write_shards,
    "model.pt": lambda path, tensors: torch.save(tensors, path),
    "dcp": lambda path, tensors: dcp.save(tensors, checkpoint_id=path),
    "megatron_zarr": write_megatron_zarr,
    "orbax": write_by_converting("orbax"),
    "tensorflow": write_by_converting("tensorflow"),
}
PREFIXES = {"tensorflow": "tensorflow/ckpt"}
"""Paths of checkpoints that are no directories."""
WHOLE_CHUNKS = {"orbax"}
"""Formats whose chunks are read whole, and here each tensor is a chunk."""


@pytest.fixture
def asked(monkeypatch):
    """The numbers of bytes that the store returned."""
    returned = []
    cat_file = MemoryFileSystem.cat_file

    def counted(self, *arguments, **options):
        data = cat_file(self, *arguments, **options)
        returned.append(len(data))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return returned


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_read(tmp_path, asked, name):
    tensors = {key: torch.rand(ROWS, COLUMNS) for key in NAMES}
    FORMATS[name](tmp_path / name, tensors)
    remote = fsspec.filesystem("memory")
    root = f"/bytes_{name}"
    for file in tmp_path.rglob("*"):
        if file.is_file():
            remote.pipe(f"{root}/{file.relative_to(tmp_path)}", file.read_bytes())
    shutil.rmtree(tmp_path)
    with dtckpt.open_checkpoint(f"memory:/{root}/{PREFIXES.get(name, name)}") as checkpoint:
        assert sum(asked) < SLACK_NBYTES
        asked.clear()
        assert torch.equal(checkpoint.read("c"), tensors["c"])
        assert TENSOR_NBYTES <= sum(asked) < TENSOR_NBYTES + SLACK_NBYTES
        asked.clear()
        rows = Region((ROWS // 4, 0), (ROWS // 4, COLUMNS))
        assert torch.equal(checkpoint.read("b", rows), tensors["b"][ROWS // 4 : ROWS // 2])
        nbytes = TENSOR_NBYTES if name in WHOLE_CHUNKS else TENSOR_NBYTES // 4
        assert nbytes <= sum(asked) < nbytes + SLACK_NBYTES
    remote.rm(root, recursive=True)
