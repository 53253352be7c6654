"""What a reshard reads from the source, counted where it is read: each byte once, or as often as the plan says."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import bits_of, layouts, meshes, packed, tensor_of

import dtckpt
from dtckpt import UNSHARDED, Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.resharding.reshard import reshard
from dtckpt.checkpoint.resharding.workers import Worker


@contextmanager
def counted_reads(folder):
    """Note the ranges of bytes that are read from the files in a folder: lists of (file, first, behind the last)."""
    ranges = []
    preadv = os.preadv

    def noted(descriptor, buffers, position, flags=0):
        nbytes = preadv(descriptor, buffers, position, flags)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        # Reads with flags only ask what the page cache has.
        if name.startswith(f"{folder}/") and not flags:
            ranges.append((name, position, position + nbytes))
        return nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", noted)
        yield ranges


def overlaps(ranges):
    """The ranges that begin before an earlier one ends."""
    found, behind = [], {}
    for name, first, stop in sorted(ranges):
        if first < behind.get(name, 0):
            found.append((name, first, stop))
        behind[name] = max(stop, behind.get(name, 0))
    return found


@st.composite
def changes(draw):
    """Tensors by name, each with its layout in the source and in the target."""
    old, new = draw(meshes("ab")), draw(meshes("xy"))
    shapes = draw(st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=3))
    return [
        (f"t{i}", shape, draw(layouts(old, len(shape))), draw(layouts(new, len(shape))))
        for i, shape in enumerate(shapes)
    ]


@settings(max_examples=examples(5))
@given(tensors=changes(), chunk_nbytes=st.sampled_from([64, 512, 16 << 20]), num_workers=st.sampled_from([1, 1, 2]))
def test_every_byte_is_read_once_and_every_element_is_kept(tensors, chunk_nbytes, num_workers):
    """In files of chunks: a database keeps small ones in its nodes, which TensorStore reads."""
    whole = {name: tensor_of(name, shape, "float32") for name, shape, _, _ in tensors}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "old"), Path(folder, "new")
        tree = {name: packed(whole[name], old) for name, _, old, _ in tensors}
        dtckpt.save(source, tree, options=SaveOptions(kvstore="zarr", chunk_nbytes=chunk_nbytes, fsync=False))
        wanted = {name: new for name, _, _, new in tensors}
        mesh = tensors[0][3].mesh
        options = SaveOptions(kvstore="zarr", chunk_nbytes=chunk_nbytes, fsync=False)
        with counted_reads(source) as ranges:
            for index in range(num_workers):
                worker = Worker(index, num_workers) if num_workers > 1 else None
                report = reshard(source, target, mesh=mesh, layouts=wanted, options=options, worker=worker)
        assert overlaps(ranges) == []
        nbytes = sum(tensor.nbytes for tensor in whole.values())
        assert report.read_nbytes == nbytes
        assert sum(stop - first for _, first, stop in ranges) >= nbytes
        with dtckpt.open_checkpoint(source) as old, dtckpt.open_checkpoint(target) as new:
            assert {name: bits_of(new.read(name)) for name in new.tensors} == {k: bits_of(v) for k, v in whole.items()}
            contents = [{name: info.content_digest for name, info in each.tensors.items()} for each in (old, new)]
            assert contents[0] == contents[1]
            assert {name: info.layout for name, info in new.tensors.items()} == wanted


ROWS, COLUMNS = ["x", UNSHARDED], [UNSHARDED, "x"]


@pytest.mark.parametrize(("old", "new"), [(ROWS, COLUMNS), (COLUMNS, ROWS), (["x", "y"], ["y", "x"])])
@pytest.mark.parametrize("mib", [3, 6, 64])
def test_with_little_memory_it_reads_as_often_as_planned(tmp_path, old, new, mib):
    """The source has 8 MiB, in 48 chunks or fewer."""
    before, after = abstract_mesh({"x": 4, "y": 3}), abstract_mesh({"x": 5, "y": 2})
    source, target = tmp_path / "old", tmp_path / "new"
    whole = torch.arange(2.0**21).reshape(2048, 1024)
    dtckpt.save(source, {"w": packed(whole, Layout(old, before))}, options=SaveOptions(chunk_nbytes=1 << 19))
    call = {"mesh": after, "layouts": {"w": Layout(new, after)}, "max_memory": mib << 20}
    options = SaveOptions(chunk_nbytes=1 << 19)
    planned = reshard(source, target, dry_run=True, options=options, **call).read_nbytes
    with counted_reads(source) as ranges:
        assert reshard(source, target, options=options, **call).read_nbytes == planned
    assert sum(stop - first for _, first, stop in ranges) == pytest.approx(planned, rel=0.2)
    assert planned >= whole.nbytes
    if mib == 64:
        assert planned == whole.nbytes
        assert overlaps(ranges) == []
    with dtckpt.open_checkpoint(target) as checkpoint:
        assert torch.equal(checkpoint.read("w"), whole)
