"""The manifest: a written manifest is read, the same state gives the same bytes, and contradictions are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import dtype_names, layouts, meshes, shapes

from dtckpt._proto import checkpoint_pb2
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError
from dtckpt.format.codecs import CODECS
from dtckpt.format.digest import bytes_digest
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import FORMAT_VERSION, ArrayEntry, ArrayKind, Manifest, PhaseCost
from dtckpt.format.names import array_paths
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import Layout

ORIGINS = ("step_1", "é/2")


@st.composite
def entries(draw, name):
    shape = draw(shapes)
    grid = ChunkGrid(shape, tuple(draw(st.integers(1, max(1, size))) for size in shape))
    count = grid.num_chunks
    missing = frozenset(draw(st.lists(st.integers(0, count - 1), max_size=3))) if count else frozenset()
    random = np.random.default_rng(draw(st.integers(0, 99)))
    writers = np.sort(random.integers(0, 3, count)).astype(np.int32)
    writers[sorted(missing)] = -1
    kind = ArrayKind(
        dtype=draw(dtype_names),
        stored_dtype=draw(dtype_names),
        grid=grid,
        writers=writers,
        layout=draw(st.none() | meshes().flatmap(lambda mesh: layouts(mesh, len(shape)))),
        missing=missing,
        codec=draw(st.sampled_from(CODECS)),
    )
    digests = random.integers(0, 2**64, count, np.uint64)
    content = draw(st.none() | st.integers(0, 2**64 - 1))
    identities = random.integers(0, 2**64, count, np.uint64) if count and draw(st.booleans()) else None
    origins = random.integers(0, 1 + len(ORIGINS), count).astype(np.int32) if count and draw(st.booleans()) else None
    shares = random.integers(0, 2**64, count, np.uint64) if count and draw(st.booleans()) else None
    return ArrayEntry(name, array_paths([name])[name], kind, digests, content, identities, origins, shares)


@st.composite
def costs(draw):
    """What phases took, by client; in microseconds, as they are written down."""
    taken = st.builds(
        lambda microseconds, nbytes: PhaseCost(microseconds / 1e6, nbytes), st.integers(1, 10**9), st.integers(0, 2**50)
    )
    clients = sorted(draw(st.sets(st.integers(0, 9), max_size=3)))
    return {client: draw(st.dictionaries(st.sampled_from(["plan", "write", "x"]), taken)) for client in clients}


@st.composite
def manifests(draw):
    names = draw(st.lists(st.sampled_from(["w", "a/b", "é", "zarr.json", "x y"]), max_size=3, unique=True))
    return Manifest(
        kvstore=draw(st.sampled_from(["ocdbt", "zarr"])),
        arrays={name: draw(entries(name)) for name in sorted(names)},
        tree=draw(st.binary(max_size=20)),
        job=draw(st.text(max_size=5)),
        num_clients=draw(st.integers(1, 9)),
        attempt=draw(st.text(max_size=5)),
        documents=draw(st.integers(0, 2**64 - 1)),
        costs=draw(costs()),
        raw_bits=draw(st.booleans()),
        origins=ORIGINS,
    )


def facts(entry):
    arrays = entry.digests.tolist(), entry.writers.tolist(), entry.digests.dtype, entry.writers.dtype
    return (
        entry.name,
        entry.path,
        entry.dtype,
        entry.stored_dtype,
        entry.grid,
        entry.layout,
        entry.missing,
        entry.content,
        entry.codec,
        arrays,
        *(
            None if each is None else (each.tolist(), each.dtype)
            for each in (entry.identities, entry.origins, entry.shares)
        ),
    )


@given(manifests())
def test_bytes_and_back(manifest):
    data = manifest.to_bytes()
    back = Manifest.from_bytes(data, "here")
    assert back.to_bytes() == data
    assert back.origins == ORIGINS
    fields = "kvstore", "tree", "job", "num_clients", "attempt", "documents", "costs", "format_version", "raw_bits"
    for field in fields:
        assert getattr(back, field) == getattr(manifest, field)
    assert list(back.arrays) == list(manifest.arrays)
    for name, entry in manifest.arrays.items():
        assert facts(back.arrays[name]) == facts(entry)


def sample():
    grid = ChunkGrid((4, 6), (2, 3))
    layout = Layout(["x", ("y",)], abstract_mesh({"x": 2, "y": 2}))
    kind = ArrayKind("float32", "bfloat16", grid, np.array([0, 0, 1, 1], np.int32), layout)
    entry = ArrayEntry("w", "w", kind, np.arange(1, 5, dtype=np.uint64) << np.uint64(40))
    return Manifest(kvstore="zarr", arrays={"w": entry}, tree=b'{"dict":[]}', job="j", num_clients=2, attempt="0-1-a")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identities": np.arange(3, dtype=np.uint64)}, "3 identities for 4 chunks"),
        ({"shares": np.arange(5, dtype=np.uint64)}, "5 shares for 4 chunks"),
        ({"origins": np.zeros(5, np.int32)}, "origins for 5 of its chunks"),
        ({"origins": np.array([0, 0, 1, 0], np.int32)}, "a checkpoint that is not named"),
    ],
)
def test_facts_about_chunks_that_fit_no_chunks(changes, reason):
    manifest = sample()
    entry = replace(manifest.arrays["w"], **changes)
    with pytest.raises(CheckpointCorruptError, match=reason):
        Manifest.from_bytes(replace(manifest, arrays={"w": entry}).to_bytes(), "here")


def test_equal_manifests_give_equal_bytes():
    assert sample().to_bytes() == sample().to_bytes()


def test_no_flipped_byte_goes_unseen():
    data = sample().to_bytes()
    for position in range(len(data)):
        for mask in (0x01, 0x02, 0x10, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            with pytest.raises((CheckpointCorruptError, CheckpointVersionError), match="manifest here"):
                Manifest.from_bytes(bytes(damaged), "here")


def test_no_missing_or_added_end_goes_unseen():
    data = sample().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointCorruptError, match="manifest here"):
            Manifest.from_bytes(data[:length], "here")
    for tail in (b"\0", b"\xff", b"\x1a\0", data):
        try:
            again = Manifest.from_bytes(data + tail, "here")
        except CheckpointCorruptError:
            continue
        assert again.to_bytes() == data


@given(st.binary(max_size=60))
@settings(max_examples=examples(150))
def test_any_bytes_are_refused(data):
    with pytest.raises((CheckpointCorruptError, CheckpointVersionError)):
        Manifest.from_bytes(data, "here")


def test_a_newer_version_says_what_to_do():
    message = checkpoint_pb2.ManifestFile(format_version=FORMAT_VERSION + 1, manifest=b"\xff not of this version")
    with pytest.raises(CheckpointVersionError, match="got version 2, expected at most 1; upgrade dtckpt"):
        Manifest.from_bytes(message.SerializeToString(), "here")


def crafted(change):
    """Return the bytes of a manifest that was changed on purpose, digest included."""
    envelope = checkpoint_pb2.ManifestFile.FromString(sample().to_bytes())
    message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
    change(message)
    envelope.manifest = message.SerializeToString(deterministic=True)
    envelope.digest = bytes_digest(envelope.manifest)
    return envelope.SerializeToString(deterministic=True)


CONTRADICTIONS = {
    "path out of the checkpoint": lambda m: setattr(m.tensors[0], "path", "../w"),
    "absolute path": lambda m: setattr(m.tensors[0], "path", "/etc"),
    "path of another tensor": lambda m: setattr(m.tensors[0], "path", "v"),
    "empty path": lambda m: setattr(m.tensors[0], "path", ""),
    "hostile name": lambda m: setattr(m.tensors[0], "name", "../w"),
    "no store": lambda m: setattr(m, "kvstore", 0),
    "unknown store": lambda m: setattr(m, "kvstore", 7),
    "unknown dtype": lambda m: setattr(m.tensors[0], "dtype", "float4"),
    "unknown stored dtype": lambda m: setattr(m.tensors[0], "stored_dtype", "object"),
    "too few digests": lambda m: m.tensors[0].digests.pop(),
    "too many writers": lambda m: setattr(m.tensors[0].writers[0], "count", 9),
    "rank of the chunks": lambda m: m.tensors[0].chunk_shape.append(1),
    "chunks of nothing": lambda m: m.tensors[0].chunk_shape.__setitem__(0, 0),
    "negative shape": lambda m: m.tensors[0].shape.__setitem__(0, -4),
    "two negative sizes": lambda m: m.tensors[0].shape.__setitem__(slice(0, 2), [-4, -4]),
    "huge shape": lambda m: m.tensors[0].shape.__setitem__(0, 1 << 62),
    "huge chunks": lambda m: m.tensors[0].chunk_shape.__setitem__(0, 1 << 40),
    "huge run of writers": lambda m: setattr(m.tensors[0].writers[0], "count", 2**64 - 1),
    "client beyond 31 bits": lambda m: setattr(m.tensors[0].writers[0], "client", 2**32 - 1),
    "rank 100": lambda m: (m.tensors[0].shape.extend([1] * 100), m.tensors[0].chunk_shape.extend([1] * 100)),
    "unknown mesh": lambda m: setattr(m.tensors[0].layout, "mesh", 5),
    "rank of the layout": lambda m: m.tensors[0].layout.sharding_specs.add(sharding_spec="unsharded"),
    "unknown axis": lambda m: setattr(m.tensors[0].layout.sharding_specs[0], "sharding_spec", "q"),
    "missing chunk beyond the grid": lambda m: m.tensors[0].missing.append(99),
    "a tensor twice": lambda m: m.tensors.add().CopyFrom(m.tensors[0]),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself(change):
    with pytest.raises(CheckpointCorruptError, match="manifest here"):
        Manifest.from_bytes(crafted(change), "here")
