"""Plans of ``torch.save`` files: PyTorch, Python and this library read the planned files."""

import io
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch

from checkpoint.foreign.torch_files import zip_of
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_zip import read_zip
from dtckpt.checkpoint.foreign.torch_zip_plan import ALIGNMENT, Checksum, Elements, plan_zip, segment_nbytes
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region


def whole_tensor(name, dtype, shape):
    """Return all elements of a tensor."""
    return Elements(name, dtype, Region.full(shape))


def written(segments, contents, first=0):
    """Return the file of a plan, and the contents of its tensors."""
    result, crcs = io.BytesIO(), {}
    for segment in segments:
        before = result.tell()
        if isinstance(segment, Elements):
            data = contents[segment.name]
            crcs[first + len(crcs)] = zlib.crc32(data)
            result.write(data)
        elif isinstance(segment, Checksum):
            result.write(crcs[segment.number].to_bytes(4, "little"))
        else:
            result.write(segment)
        assert result.tell() - before == segment_nbytes(segment)
    return result.getvalue()


def random_contents(*tensors):
    rng = np.random.default_rng(1)
    return {tensor.name: rng.integers(0, 2, tensor.nbytes, np.uint8).tobytes() for tensor in tensors}


@pytest.mark.parametrize("count", [0, 1, 40])
def test_readers_of_a_plan(count):
    tensors = [whole_tensor(f"t{n}", list(DTYPES)[n % len(DTYPES)], (n % 5, 3)) for n in range(count)]
    value = {"list": tensors, "step": 3, "more": OrderedDict(a=(1, "ä"), b=torch.float32), "again": tensors[:1]}
    contents = random_contents(*tensors)
    data = written(plan_zip(value), contents)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert {key: loaded[key] for key in ("step", "more")} == {key: value[key] for key in ("step", "more")}
    for tensor, expected in zip(loaded["list"], tensors, strict=True):
        assert (str(tensor.dtype), tensor.shape) == (f"torch.{expected.dtype}", expected.region.shape)
        raw = tensor.untyped_storage().tolist() if tensor.numel() else []
        assert bytes(raw) == contents[expected.name]
    if tensors:
        assert loaded["again"][0] is loaded["list"][0]
    file = zip_of(data)
    for name, view in read_tree(file.value).leaves.items():
        if name.startswith("list/"):
            start = file.element_start(view)
            assert start % ALIGNMENT == 0
            assert data[start : start + view.stop] == contents[tensors[int(name[5:])].name]


def test_a_part_of_a_tensor_is_a_tensor():
    part = Elements("w", "float32", Region((4, 0), (2, 3)))
    data = written(plan_zip(part), random_contents(part))
    assert torch.load(io.BytesIO(data), weights_only=True).shape == (2, 3)


def test_a_plan_may_be_a_part_of_a_file():
    tensor = whole_tensor("w", "int64", (7,))
    contents = random_contents(tensor)
    assert written(plan_zip(tensor, 5), contents, 5) == written(plan_zip(tensor), contents)


@pytest.mark.parametrize("sizes", [(5 << 30, 3), (3, 5 << 30, 2), ((1 << 32) - 1,), (1 << 32, 0)])
def test_files_of_more_than_four_gigabytes(tmp_path, sizes):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        for segment in plan_zip([whole_tensor(str(n), "uint8", (size,)) for n, size in enumerate(sizes)]):
            if isinstance(segment, Elements):
                file.seek(segment.nbytes, 1)  # a sparse file
            else:
                file.write(bytes(4) if isinstance(segment, Checksum) else segment)

    def read(start, stop):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    ours = read_zip(read, path.stat().st_size, "large")
    reader = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive:
        for name, view in read_tree(ours.value).leaves.items():
            size = sizes[int(name)]
            assert ours.element_start(view) == reader.get_record_offset(f"data/{name}")
            assert archive.getinfo(f"archive/data/{name}").file_size == size
    assert [tuple(each.shape) for each in torch.load(path, weights_only=True, mmap=True)] == [(size,) for size in sizes]
