"""Damage to the bytes of a checkpoint: a read gives exactly the saved values, or an error."""

import itertools
import os
import random
import shutil

import pytest
import torch
from support.shares import SEED, amount
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.errors import CheckpointError
from dtckpt.format.manifest import BLOCKS_NAME, MANIFEST_NAME

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
    """Return 'exact' or the error's class; anything else is a wrong value without an error."""
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


# --- any damage -----------------------------------------------------------------------------------------------------

DAMAGES = amount(60, 600)
"""Random damages per key-value store, each day others."""
LARGE = {"large": tensor_of("large", (640, 512), "float32"), **WHOLES}
VALUES = {"step": 7, "note": "x" * 50}


def flip(draw, data, others):
    position = draw.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << draw.randrange(8)]) + data[position + 1 :]


def truncate(draw, data, others):
    return data[: draw.randrange(len(data))]


def delete(draw, data, others):
    return None


def zero(draw, data, others):
    start = draw.randrange(len(data))
    return data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :]


def swap(draw, data, others):
    """Exchange two pieces of one file."""
    length = draw.randint(1, max(1, len(data) // 3))
    one = draw.randint(0, len(data) - 2 * length) if len(data) >= 2 * length else 0
    other = draw.randint(one + length, max(one + length, len(data) - length))
    parts = data[:one], data[one : one + length], data[one + length : other], data[other : other + length]
    return b"".join((parts[0], parts[3], parts[2], parts[1], data[other + length :]))


def stale(draw, data, others):
    """Put the file of another checkpoint of the same structure in place."""
    return others[0]


def foreign(draw, data, others):
    """Put another file of the same checkpoint in place."""
    return draw.choice(others[1:])


@pytest.fixture(scope="module", params=["ocdbt", "zarr"])
def pair(request, tmp_path_factory):
    """Two checkpoints of one structure, with chunks of several blocks."""
    folder = tmp_path_factory.mktemp("pair")
    options = SaveOptions(kvstore=request.param, chunk_nbytes=700 << 10)
    dtckpt.save(folder / "s", {**LARGE, **VALUES}, options=options)
    dtckpt.save(
        folder / "older", {**{name: whole.roll(1) for name, whole in LARGE.items()}, "step": 6}, options=options
    )
    return folder


def found_by(path):
    """Return what notices that a checkpoint is damaged; fails if anything wrong is read without an error."""
    try:
        restored = dtckpt.restore(path)
        with dtckpt.open_checkpoint(path) as checkpoint:
            rows = dtckpt.Region((300, 0), (10, 512))
            part = checkpoint.read("large", rows)
            is_sound = checkpoint.verify().is_sound
    except CheckpointError as error:
        return type(error).__name__
    for name, whole in LARGE.items():
        assert bits_of(restored[name]) == bits_of(whole), f"{name} was read wrong without an error"
    assert bits_of(part) == bits_of(LARGE["large"][rows.slices()])
    assert {name: restored[name] for name in VALUES} == VALUES
    return None if is_sound else "verify"


def matching(files, file, older):
    """Return the file of the older checkpoint that plays the part of one; OCDBT's have random names."""
    relative = file.relative_to(files)
    same = older / relative
    if not same.is_file():
        candidates = sorted(older.joinpath(relative.parent).iterdir(), key=lambda entry: entry.stat().st_size)
        same = candidates[-1]
    return same


def test_random_damages(pair, tmp_path):
    """Every damage is noticed, or nothing of the checkpoint was in those bytes and all is read as it was saved."""
    path = shutil.copytree(pair / "s", tmp_path / "s")
    assert found_by(path) is None
    with dtckpt.open_checkpoint(path) as checkpoint:
        is_plain = checkpoint.manifest.kvstore == "zarr"
    draw = random.Random(f"{is_plain} {SEED}")
    counts = {}
    for number in range(DAMAGES):
        # Large files have most of the bytes, but small ones count as much.
        files = [file for file in files_of(path) if file.stat().st_size]
        file = draw.choice(files)
        data = file.read_bytes()
        others = [matching(path, file, pair / "older").read_bytes()]
        others += [each.read_bytes() for each in files if each != file]
        kind = draw.choice([flip, truncate, delete, zero, swap, stale, foreign])
        damaged = kind(draw, data, others)
        if damaged == data:
            continue
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        found = found_by(path)
        is_needed_by_all = is_plain or file.name in (MANIFEST_NAME, BLOCKS_NAME)
        assert found or not is_needed_by_all, f"damage {number}: {kind.__name__} of {file} goes unseen"
        key = kind.__name__, "found" if found else "in no part of the checkpoint"
        counts[key] = counts.get(key, 0) + 1
        file.write_bytes(data)
    assert found_by(path) is None
    print(sum(counts.values()), "damages:", dict(sorted(counts.items())))


def test_files_that_do_not_belong(copy):
    for name in ("extra", "w/extra", "client_7/extra", ".hidden", "client_0/d/00"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"anything")
    assert outcome(copy) == "exact"
