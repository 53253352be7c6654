"""Reads of a part of a tensor take only the needed blocks from storage, and verify them."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, Region, RestoreOptions, SaveOptions, abstract_mesh
from dtckpt.checkpoint.reading import block_digests
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import BLOCKS_NAME, ArrayEntry, ArrayKind, Manifest
from dtckpt.storage.chunk_reader import ChunkReader
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.local_values import StoredValue

KVSTORES = ("ocdbt", "zarr")
WHOLE = torch.arange(4 << 20, dtype=torch.int64).reshape(4096, 1024)


@pytest.fixture(scope="module", params=KVSTORES)
def large(request, tmp_path_factory):
    """32 MiB in 4 shards, the second dim uneven."""
    path = tmp_path_factory.mktemp("large") / "s"
    mesh = abstract_mesh({"x": 2, "y": 2})
    tree = {"w": packed(WHOLE, Layout([("x", "y"), "unsharded"], mesh)), "odd": WHOLE[:1000, :1001].clone()}
    dtckpt.save(path, tree, options=SaveOptions(kvstore=request.param))
    return path


@pytest.fixture
def taken(monkeypatch):
    """Bytes that reads took from storage, as the reader of arrays and of files saw them."""
    found = []
    start, finish_span, read_into = ChunkReader.start, ChunkReader.finish_span, StoredValue.read_into

    def counted(self, array, region, into):
        found.append(into.nbytes)
        return start(self, array, region, into)

    def counted_span(self, *args):
        data = finish_span(self, *args)
        found.append(len(data))
        return data

    def counted_value(self, memory, start):
        read_into(self, memory, start)
        found.append(memory.nbytes)

    monkeypatch.setattr(StoredValue, "read_into", counted_value)
    monkeypatch.setattr(ChunkReader, "start", counted)
    monkeypatch.setattr(ChunkReader, "finish_span", counted_span)
    return found


def test_a_slab_of_the_leading_dim_takes_no_more_than_it_needs(large, taken):
    """1/256 of a tensor, whose chunks are 32 times as large."""
    with dtckpt.open_checkpoint(large) as checkpoint:
        info = checkpoint.info("w")
        assert info.max_chunk_nbytes == 8 << 20
        assert info.block_shape == (32, 1024)
        for number in (0, 1, 100, 255):
            region = Region((16 * number, 0), (16, 1024))
            assert checkpoint.read("w", region).equal(WHOLE[region.slices()])
        # A block is the smallest part that can be verified: here two slabs.
        assert taken == [256 << 10] * 4
        taken.clear()
        slab = Region((1000, 0), (1024, 1024))
        assert checkpoint.read("w", slab).equal(WHOLE[1000:2024])
        assert sum(taken) == checkpoint.tensors["w"].read_nbytes(slab)
        assert sum(taken) <= 1.1 * (8 << 20)


def test_a_slab_of_another_dim_takes_whole_chunks_and_inspect_says_so(large, taken):
    with dtckpt.open_checkpoint(large) as checkpoint:
        slab = Region((0, 512), (4096, 4))
        assert checkpoint.read("w", slab).equal(WHOLE[:, 512:516])
        assert sum(taken) == checkpoint.tensors["w"].read_nbytes(slab) == WHOLE.nbytes


def test_a_restore_reports_the_bytes_it_read(large):
    reports = []
    mesh = abstract_mesh({"x": 2, "y": 2})
    layouts = {"w": Layout(["unsharded", "x"], mesh), "odd": Layout(["x", "y"], mesh)}
    restored = dtckpt.restore(large, mesh=mesh, layouts=layouts, options=RestoreOptions(report=reports.append))
    assert restored["w"].full_tensor().equal(WHOLE)
    assert reports[0].nbytes_read == WHOLE.nbytes + 1000 * 1001 * 8


@given(st.data())
@settings(max_examples=examples(30), deadline=None)
def test_any_region(large, data):
    name, whole = data.draw(st.sampled_from([("w", WHOLE), ("odd", WHOLE[:1000, :1001])]))
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in whole.shape]
    region = Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
    with dtckpt.open_checkpoint(large) as checkpoint:
        assert checkpoint.read(name, region).equal(whole[region.slices()])


@pytest.mark.parametrize("kvstore", KVSTORES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 700, 513), "float32"), ((1, 1, 600001), "int16"), ((5, 300000), "bfloat16"), ((2, 1 << 20), "uint8")],
)
def test_edge_chunks_and_leading_dims_of_one(tmp_path, kvstore, shape, dtype):
    """Chunks at an edge are stored with padding, which block digests leave out."""
    whole = tensor_of("w", shape, dtype)
    options = SaveOptions(kvstore=kvstore, chunk_nbytes=1 << 20)
    dtckpt.save(tmp_path / "s", {"w": whole}, options=options)
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.verify().is_sound
        draw = np.random.default_rng(0)
        for _ in range(20):
            bounds = [sorted(draw.integers(0, size + 1, 2).tolist()) for size in shape]
            region = Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
            assert bits_of(checkpoint.read("w", region)) == bits_of(whole[region.slices()])
            assert checkpoint.info("w").read_nbytes(region) <= whole.nbytes


def test_damage_shows_where_it_is_read(tmp_path):
    dtckpt.save(tmp_path / "s", {"w": WHOLE}, options=SaveOptions(kvstore="zarr"))
    file = tmp_path / "s" / "w" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[5 << 20] ^= 1
    file.write_bytes(data)
    row = (5 << 20) // (8 * 1024)
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        for start, is_sound in ((0, True), (row, False), (row // 32 * 32, False), (row // 32 * 32 + 32, True)):
            region = Region((start, 0), (1, 1024))
            if is_sound:
                assert checkpoint.read("w", region).equal(WHOLE[region.slices()])
            else:
                with pytest.raises(CheckpointCorruptError, match="'w'"):
                    checkpoint.read("w", region)
        (damage,) = checkpoint.verify().damages
        assert damage.region.contains(Region((row, 0), (1, 1024)))


def test_damaged_digests_of_blocks(large, tmp_path):
    copy = shutil.copytree(large, tmp_path / "s")
    (file,) = copy.rglob(BLOCKS_NAME)
    data = file.read_bytes()
    for damaged in (b"", data[:-8], data[:3], bytes(len(data)), data[8:16] + data[:8] + data[16:], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with dtckpt.open_checkpoint(copy) as checkpoint:
            # What is read whole needs them not.
            assert checkpoint.read("w").equal(WHOLE)
            assert {damage.tensor for damage in checkpoint.verify().damages} <= {"w", "odd"}
            assert not checkpoint.verify().is_sound
            failed = 0
            for name, row in (("odd", 0), ("odd", 950), ("w", 0), ("w", 4095)):
                try:
                    checkpoint.read(name, Region((row, 0), (1, 1000)))
                except CheckpointCorruptError as error:
                    failed += "block digests" in str(error)
            assert failed
        file.write_bytes(data)


@st.composite
def manifests(draw):
    """Tensors of several chunks, some of one block only, by several writers, some not saved."""
    arrays = {}
    for number in range(draw(st.integers(0, 4))):
        columns, cut = draw(st.sampled_from([(16, 16), (1 << 15, 1 << 14), (1 << 15, 1 << 15)]))
        grid = ChunkGrid((draw(st.integers(0, 40)), columns), (draw(st.integers(1, 20)), cut))
        writers = np.random.default_rng(draw(st.integers(0, 99))).integers(-1, 3, grid.num_chunks).astype(np.int32)
        kind = ArrayKind("float32", "float32", grid, writers)
        arrays[f"t{number}"] = ArrayEntry(f"t{number}", f"t{number}", kind, np.zeros(grid.num_chunks, np.uint64))
    return Manifest(kvstore="ocdbt", arrays=arrays)


@given(manifests())
def test_where_block_digests_stand(manifest):
    starts, ends = block_digests._positions(manifest)
    found = {}
    for name, entry in manifest.arrays.items():
        for number, writer in enumerate(entry.writers.tolist()):
            count = entry.blocks.count(entry.grid.region(entry.grid.index(number)).shape)
            if count > 1:
                assert starts[name][number] == found.get(writer, 0)
                found[writer] = found.get(writer, 0) + count
    assert {writer: end for writer, end in ends.items() if end} == found


def test_block_digests_are_read_by_the_page(large, monkeypatch):
    reads = []
    read = LocalFolder.read
    monkeypatch.setattr(LocalFolder, "read", lambda *args: reads.append(args[1]) or read(*args))
    with dtckpt.open_checkpoint(large) as checkpoint:
        for row in range(0, 4096, 64):
            assert checkpoint.read("w", Region((row, 0), (1, 1024))).equal(WHOLE[row : row + 1])
    assert reads.count(BLOCKS_NAME) <= 2


def test_block_digests_that_cross_a_page(large, monkeypatch):
    monkeypatch.setattr(block_digests, "PAGE_NBYTES", 40)
    with dtckpt.open_checkpoint(large) as checkpoint:
        for name in ("w", "odd"):
            for row in range(0, 1000, 50):
                assert checkpoint.read(name, Region((row, 0), (3, 7))).equal(WHOLE[row : row + 3, :7])
