"""Many small tensors: read many at a time, straight into their memory, each verified; and few files stay open."""

import itertools
import os
import resource
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import bits_of, tensor_of, zeros_of

import dtckpt
from dtckpt import Region, RestoreOptions, SaveOptions
from dtckpt.checkpoint.reading import verified_reads
from dtckpt.checkpoint.reading.read_chunks import COPIED_NBYTES, is_slow
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.dtypes import DTYPES
from dtckpt.storage import local_values

SHAPES = ((64, 32), (), (1,), (0, 4), (3, 5, 7), (100, 100))
STRANGE_OFFSETS = (0, 1, 16, 33, 63, 64, 100)


@pytest.fixture
def calls(monkeypatch):
    """How many buffers each read from a file has filled."""
    found = []
    preadv = os.preadv

    def counted(number, buffers, *rest):
        found.append(len(buffers))
        return preadv(number, buffers, *rest)

    monkeypatch.setattr(os, "preadv", counted)
    return found


def small_tree(count=300):
    kinds = itertools.cycle(itertools.product(sorted(DTYPES), SHAPES))
    return {
        f"t{number}": tensor_of(f"t{number}", shape, dtype)
        for number, (dtype, shape) in zip(range(count), kinds, strict=False)
    }


def emptied(tree):
    return {name: zeros_of(tensor) for name, tensor in tree.items()}


def assert_same(tree, other):
    for name, tensor in tree.items():
        assert bits_of(other[name]) == bits_of(tensor), name


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_every_dtype_and_shape(kvstore, tmp_path):
    tree = small_tree()
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore))
    target = emptied(tree)
    dtckpt.restore(tmp_path / "s", target)
    assert_same(tree, target)


def test_a_few_calls_read_many(tmp_path, calls):
    tree = {f"t{number}": torch.randn(64, 32) for number in range(1000)}
    dtckpt.save(tmp_path / "s", tree)
    target = emptied(tree)
    calls.clear()
    dtckpt.restore(tmp_path / "s", target)
    assert_same(tree, target)
    assert sum(calls) == 1000
    assert len(calls) <= 1000 // local_values.MAX_RUN_VALUES + 8


def test_a_few_calls_read_many_that_several_want_in_parts_and_converted(tmp_path, calls):
    tree = {f"t{number}": torch.randn(64, 32) for number in range(1000)}
    dtckpt.save(tmp_path / "s", tree)
    halves = [Region((0, 0), (64, 20)), Region((10, 15), (54, 17))]
    buffers = {name: [np.zeros(half.shape, np.float64) for half in halves] for name in tree}
    calls.clear()
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        checkpoint.read_all((name, list(zip(halves, arrays, strict=True))) for name, arrays in buffers.items())
    for name, tensor in tree.items():
        for half, array in zip(halves, buffers[name], strict=True):
            np.testing.assert_array_equal(array, tensor.numpy()[half.slices()])
    assert sum(calls) == 1000
    assert len(calls) <= 1000 // local_values.MAX_RUN_VALUES + 8


def test_what_a_call_leaves_out_is_read_once_more(tmp_path, monkeypatch):
    """The system may fill less than was asked for."""
    tree = {f"t{number}": torch.randn(64, 32) for number in range(100)}
    dtckpt.save(tmp_path / "s", tree)
    preadv = os.preadv

    def short(number, buffers, *rest):
        return preadv(number, [memoryview(buffers[0]).cast("B")[:100]], *rest)

    monkeypatch.setattr(os, "preadv", short)
    target = emptied(tree)
    dtckpt.restore(tmp_path / "s", target)
    assert_same(tree, target)


def test_damage_names_the_tensor(tmp_path):
    tree = {f"t{number:03}": torch.full((64, 32), float(number)) for number in range(200)}
    dtckpt.save(tmp_path / "s", tree)
    (file,) = (path for path in (tmp_path / "s").rglob("d/*") if tree["t123"].numpy().tobytes() in path.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(tree["t123"].numpy().tobytes()) + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="'t123'"):
        dtckpt.restore(tmp_path / "s", emptied(tree))
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointCorruptError):
        dtckpt.restore(tmp_path / "s", emptied(tree))


def test_few_descriptors_are_enough(tmp_path):
    """Each chunk is a file here."""
    tree = {f"t{number}": torch.randn(4, 4) for number in range(600)}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore="zarr"))
    target = emptied(tree)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 300, hard))
    try:
        dtckpt.restore(tmp_path / "s", target)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same(tree, target)


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_runs_cover_each_value_once(data):
    files = [_Numbered(number) for number in range(2)]
    values, sizes, ends = [], [], [0, 0]
    for _ in range(data.draw(st.integers(0, 300))):
        number, gap = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([0, 0, 0, 5]))
        nbytes = data.draw(st.sampled_from([1, 8]))
        values.append(local_values.StoredValue(files[number], ends[number] + gap, nbytes))
        sizes.append(min(nbytes, data.draw(st.sampled_from([8, 8, 8, 1]))))
        ends[number] += gap + nbytes
    order = data.draw(st.permutations(range(len(values))))
    values, sizes = [values[each] for each in order], [sizes[each] for each in order]
    runs = list(local_values.contiguous_runs(values, sizes))
    assert sorted(position for run in runs for position in run) == list(range(len(values)))
    for run in runs:
        assert 1 <= len(run) <= local_values.MAX_RUN_VALUES
        for first, second in itertools.pairwise(run):
            assert values[first].file is values[second].file
            assert values[first].start + sizes[first] == values[second].start


class _Numbered:
    def __init__(self, number):
        self.descriptor = number


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("shape", [(64, 1024), (512, 1024)])
def test_wherever_the_memory_lies(kvstore, shape, tmp_path):
    """Also where it lies badly for the place in the file, so that what is read goes over other memory."""
    source = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
    dtckpt.save(tmp_path / "s", {"w": source}, options=SaveOptions(kvstore=kvstore))
    memory = np.zeros(source.nbytes + 8192, np.uint8)
    base = -memory.ctypes.data % 4096
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        for offset in STRANGE_OFFSETS:
            memory[...] = 0xAA
            part = memory[base + offset : base + offset + source.nbytes]
            into = part.view(np.int32).reshape(shape)
            checkpoint.read_into("w", Region.full(shape), into)
            assert np.array_equal(into, source.numpy())
            assert (memory[: base + offset] == 0xAA).all()
            assert (memory[base + offset + source.nbytes :] == 0xAA).all()
    assert source.nbytes >= COPIED_NBYTES


def test_slow_places():
    """Within a line of the processor's cache behind the place in the page that is read."""
    assert [distance for distance in range(4096) if is_slow(4096 * 5 + distance, 4096 * 9)] == list(range(1, 64))
    assert is_slow(4096 + 4, 4095)
    assert not is_slow(4096, 4096 * 3)


def test_parts_of_small_tensors_and_other_dtypes(tmp_path):
    """What is not wanted as it is stored is read chunk by chunk."""
    tree = {f"t{number}": torch.randn(16, 16) for number in range(50)}
    dtckpt.save(tmp_path / "s", tree)
    halves = {name: torch.zeros(16, 16, dtype=torch.float64) for name in tree}
    dtckpt.restore(tmp_path / "s", halves, options=RestoreOptions(cast="any"))
    columns = {name: torch.zeros(32, 16).t()[:, ::2] for name in tree}
    dtckpt.restore(tmp_path / "s", columns)
    for name, tensor in tree.items():
        assert halves[name].equal(tensor.double())
        assert columns[name].equal(tensor)
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.read("t7", Region((3, 2), (5, 6))).equal(tree["t7"][3:8, 2:8])


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """Threads that read large chunks, whatever this machine has."""
    monkeypatch.setattr(verified_reads, "spare_threads", lambda: request.param)
    monkeypatch.setattr(verified_reads, "LARGE_NBYTES", 1 << 10)
    return request.param


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_large_and_small_chunks_beside_each_other(threads, kvstore, tmp_path):
    tree = {f"t{number}": torch.randn(number * 7 % 300 + 1, 257) for number in range(100)}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore, chunk_nbytes=64 << 10))
    target = emptied(tree)
    dtckpt.restore(tmp_path / "s", target)
    assert_same(tree, target)
    columns = {name: torch.zeros(257, tensor.shape[0]).t() for name, tensor in tree.items()}
    reports = []
    dtckpt.restore(tmp_path / "s", columns, options=RestoreOptions(report=reports.append))
    assert_same(tree, columns)
    assert reports[0].phases["read"].nbytes == sum(tensor.nbytes for tensor in tree.values())


def test_damage_ends_all_reads(threads, tmp_path, monkeypatch):
    """When the error is raised, nothing writes into the target any more, and no thread is left."""
    tree = {f"t{number:02}": torch.full((256, 257), float(number)) for number in range(40)}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore="zarr"))
    file = tmp_path / "s" / "t07" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    under_way = []
    read_into = local_values.StoredValue.read_into

    def noted(self, memory, start):
        under_way.append(1)
        try:
            read_into(self, memory, start)
        finally:
            under_way.pop()

    monkeypatch.setattr(local_values.StoredValue, "read_into", noted)
    before = set(threading.enumerate())
    for _ in range(10):
        with pytest.raises(CheckpointCorruptError, match="'t07'"):
            dtckpt.restore(tmp_path / "s", emptied(tree))
        assert not under_way
        assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile
