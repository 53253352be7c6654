"""Whatever happens to the bytes of a checkpoint, what is read is what was saved, or an error."""

import itertools
import os
import random
import shutil

import pytest
import torch
from states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.errors import CheckpointError
from dtckpt.format.manifest import MANIFEST_NAME

MESH = abstract_mesh({"x": 2, "y": 2})
# Sizes that fill their chunks: padding may change unseen, it is never read.
WHOLES = {
    "w": tensor_of("w", (32, 20), "float32"),
    "a/b": tensor_of("a/b", (64,), "int64"),
    "small": tensor_of("small", (5,), "bfloat16"),
    "zeros": torch.zeros(36, 8),
}
DETECTED = ("CheckpointCorruptError", "CheckpointVersionError", "StorageError")
FLIPS_PER_FILE = 40


@pytest.fixture(scope="module", params=["ocdbt", "zarr"])
def original(request, tmp_path_factory):
    tree = {**WHOLES, "w": packed(WHOLES["w"], Layout([("y", "x"), "unsharded"], MESH)), "step": 7}
    path = tmp_path_factory.mktemp("original") / "s"
    dtckpt.save(path, tree, options=SaveOptions(kvstore=request.param, chunk_nbytes=700))
    return path


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "s")


def files_of(path):
    return sorted(entry for entry in path.rglob("*") if entry.is_file())


def outcome(path):
    """Return 'exact' or the error's class; anything else is a wrong value that nobody noticed."""
    try:
        restored = dtckpt.restore(path)
    except CheckpointError as error:
        return type(error).__name__
    for name, whole in WHOLES.items():
        assert bits_of(restored[name]) == bits_of(whole), f"{name} was read wrong without an error"
    assert restored["step"] == 7
    return "exact"


def is_needed(file, path):
    """Whether a reader cannot do without a file: chunks and the manifest, not what other readers need."""
    parts = file.relative_to(path).parts
    return parts[0] == MANIFEST_NAME or "c" in parts


def test_the_copy_is_fine(copy):
    assert outcome(copy) == "exact"


def test_flipped_bits(copy):
    for file in files_of(copy):
        data = file.read_bytes()
        draw = random.Random(file.name)
        positions = draw.sample(range(len(data)), min(FLIPS_PER_FILE, len(data)))
        for position in sorted({0, len(data) - 1, *positions}):
            damaged = bytearray(data)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            result = outcome(copy)
            if is_needed(file, copy):
                assert result in DETECTED, f"a flipped bit at byte {position} of {file} goes unseen"
        file.write_bytes(data)
    assert outcome(copy) == "exact"


def test_every_bit_of_a_chunk_counts(copy):
    with dtckpt.open_checkpoint(copy) as checkpoint:
        chunk = checkpoint.tensors["small"].chunks[0]
    expected = bits_of(WHOLES["small"])[-10:]
    hits = 0
    for file in files_of(copy):
        data = file.read_bytes()
        start = data.find(expected)
        while start >= 0:
            for bit in range(8 * len(expected)):
                damaged = bytearray(data)
                damaged[start + bit // 8] ^= 1 << bit % 8
                file.write_bytes(damaged)
                # What is found may be a copy that is no longer referred to.
                hits += outcome(copy) != "exact"
            start = data.find(expected, start + 1)
        file.write_bytes(data)
    assert hits >= 8 * len(expected), chunk


def test_verify_names_the_damage(copy):
    with dtckpt.open_checkpoint(copy) as checkpoint:
        assert checkpoint.verify().damages == ()
    needle = WHOLES["w"][:2].numpy().tobytes()[:40]
    touched = 0
    for file in files_of(copy):
        data = file.read_bytes()
        if needle in data:
            file.write_bytes(data.replace(needle, needle[::-1]))
            touched += 1
    assert touched
    with dtckpt.open_checkpoint(copy) as checkpoint:
        (damage,) = checkpoint.verify().damages
        assert damage.tensor == "w"
        assert damage.region.offset == (0, 0)
        assert "damaged" in damage.reason
        assert checkpoint.read("a/b").equal(WHOLES["a/b"])


def test_cut_and_emptied_files(copy):
    for file in files_of(copy):
        data = file.read_bytes()
        for length in {0, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:length])
            result = outcome(copy)
            if is_needed(file, copy):
                assert result in DETECTED, f"{file} was cut to {length} bytes"
        file.write_bytes(data + b"\0")
        outcome(copy)
        file.write_bytes(data)


def test_deleted_files(copy):
    for file in files_of(copy):
        data = file.read_bytes()
        file.unlink()
        if file.name == MANIFEST_NAME:
            with pytest.raises(dtckpt.errors.CheckpointIncompleteError):
                dtckpt.restore(copy)
        else:
            result = outcome(copy)
            assert result != "exact" or not is_needed(file, copy)
        file.write_bytes(data)
    assert outcome(copy) == "exact"


def test_chunks_that_changed_places(copy):
    """Checksums of values do not notice this; digests are bound to tensor and place."""
    with dtckpt.open_checkpoint(copy) as checkpoint:
        regions = [chunk.region for chunk in checkpoint.tensors["w"].chunks]
    contents = [WHOLES["w"][region.slices()].numpy().tobytes() for region in regions]
    assert len({len(content) for content in contents}) == 1
    files = {file: file.read_bytes() for file in files_of(copy)}
    for one, other in itertools.pairwise(contents):
        for file, data in files.items():
            swapped = data.replace(one, b"\0" * len(one)).replace(other, one).replace(b"\0" * len(one), other)
            file.write_bytes(swapped if one in data or other in data else data)
        assert outcome(copy) == "CheckpointCorruptError"
        for file, data in files.items():
            file.write_bytes(data)


def test_chunks_of_zeros_that_are_gone_are_not_read_as_zeros(copy):
    chunks = [file for file in files_of(copy) if "zeros" in file.parts and "c" in file.parts]
    for file in chunks:
        file.unlink()
    assert outcome(copy) == ("CheckpointCorruptError" if chunks else "exact")


def test_files_of_other_checkpoints(copy, tmp_path):
    """The manifest of one checkpoint over the data of another."""
    other = tmp_path / "other"
    tree = {name: whole + 1 for name, whole in WHOLES.items()} | {"step": 7}
    with dtckpt.open_checkpoint(copy) as checkpoint:
        kvstore = checkpoint.manifest.kvstore
    dtckpt.save(other, tree, options=SaveOptions(kvstore=kvstore, chunk_nbytes=700))
    os.replace(copy / MANIFEST_NAME, other / MANIFEST_NAME)
    assert outcome(other) != "exact"
