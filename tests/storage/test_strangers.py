"""Checkpoints that strangers made: whatever lies there, no reader hangs or takes more memory than is declared."""

import json
import math
import os
import resource
import shutil
import socket
import struct
import threading
from contextlib import contextmanager

import numcodecs
import numpy as np
import pytest
import tensorstore as ts
import torch

import dtckpt
from dtckpt import Region, SaveOptions
from dtckpt._proto import checkpoint_pb2
from dtckpt.cli.main import main
from dtckpt.errors import CheckpointCorruptError, StoragePermissionError
from dtckpt.format.codecs import zstd_bound
from dtckpt.format.digest import Blocks, bytes_digest, digest_chunk
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.ocdbt_database import OcdbtDatabase
from dtckpt.storage.tensorstore_setup import open_context

PATIENCE_S = 20
"""Nothing here takes a second; what hangs is found by this."""
ELEMENTS = torch.arange(2000, dtype=torch.float32)
TB = 1 << 40


@pytest.fixture(params=["ocdbt", "zarr"])
def kvstore(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kvstore):
    """A checkpoint with chunks of several blocks, small chunks, and values."""
    tree = {"w": torch.arange(300_000, dtype=torch.float32), "small": ELEMENTS, "tiny": torch.ones(3), "step": 7}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore, fsync=False))
    return tmp_path / "s"


def reads(path):
    """Every way to read a checkpoint, by name."""

    def opened(work):
        with dtckpt.open_checkpoint(path) as checkpoint:
            return work(checkpoint)

    def verified():
        report = opened(lambda checkpoint: checkpoint.verify())
        if not report.is_sound:
            raise CheckpointCorruptError(report.damages[0].reason)

    return {
        "restore": lambda: dtckpt.restore(path),
        "into a target": lambda: dtckpt.restore(
            path, {"w": torch.zeros(300_000), "small": torch.zeros(2000), "tiny": torch.zeros(3), "step": 0}
        ),
        "read": lambda: opened(lambda checkpoint: [checkpoint.read(name) for name in checkpoint.tensors]),
        "rows": lambda: opened(lambda checkpoint: checkpoint.read("w", Region((100_000,), (10,)))),
        "verify": verified,
        "reshard": lambda: dtckpt.reshard(
            path, path.with_name("other"), mesh=dtckpt.abstract_mesh({"x": 2}), options=SaveOptions(overwrite=True)
        ),
    }


def outcome(work):
    """Return the error that some work ends with; fails if it does not end."""
    found = []

    def run():
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    return found[0] if found else None


def assert_damaged(work):
    error = outcome(work)
    assert type(error) is CheckpointCorruptError, repr(error)


@contextmanager
def address_space(nbytes):
    """Have this process get no more memory than so much, beside that which it has."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- files of other kinds -------------------------------------------------------------------------------------------


def fifo(path):
    os.mkfifo(path)


def linked_fifo(path):
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder(path):
    path.mkdir()


def device(path):
    path.symlink_to("/dev/zero")


def terminal(path):
    path.symlink_to("/dev/ptmx")


def loop(path):
    path.symlink_to(path.name)


def bound_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


KINDS = [fifo, linked_fifo, folder, device, terminal, loop, bound_socket]


def data_files(path):
    """Files that hold chunks, and those that lead to them."""
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and file.name not in (MANIFEST_NAME, "zarr.json", "dtckpt.blocks", "metrics.json")
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_file_of_another_kind_is_damage(saved, kind):
    for file in data_files(saved):
        if file.stat().st_size < 100 and "c" in file.parts:
            continue
        kept = file.read_bytes()
        file.unlink()
        kind(file)
        tensor = file.relative_to(saved).parts[0] if "c" in file.parts else "w"
        for name, work in reads(saved).items():
            if name != "rows" or tensor == "w":
                assert_damaged(work)
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
        file.with_name("elsewhere").unlink(missing_ok=True)
        file.write_bytes(kept)
    assert all(outcome(work) is None for work in reads(saved).values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not loop], ids=lambda kind: kind.__name__)
def test_a_manifest_of_another_kind_is_damage(saved, kind):
    (saved / MANIFEST_NAME).unlink()
    kind(saved / MANIFEST_NAME)
    for work in reads(saved).values():
        assert_damaged(work)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_digests_of_blocks_of_another_kind_are_damage(saved, kind):
    blocks = saved / "client_0" / "dtckpt.blocks"
    blocks.unlink()
    kind(blocks)
    work = reads(saved)
    assert_damaged(work["rows"])
    assert_damaged(work["verify"])
    assert outcome(work["restore"]) is None


def test_a_client_s_folder_may_be_a_fifo(saved):
    shutil.rmtree(saved / "client_0")
    os.mkfifo(saved / "client_0")
    work = reads(saved)
    assert_damaged(work["rows"])
    assert_damaged(work["verify"])


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_document_of_another_kind_is_damage(saved, kind):
    (saved / "w" / "zarr.json").unlink()
    kind(saved / "w" / "zarr.json")
    assert_damaged(reads(saved)["verify"])
    assert outcome(reads(saved)["restore"]) is None


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
def test_fsspec_s_folders_are_read_with_the_same_care(tmp_path, kvstore):
    dtckpt.save(f"local://{tmp_path}/run/s", {"w": ELEMENTS}, options=SaveOptions(kvstore="zarr"))
    (chunk,) = (tmp_path / "run").rglob("c/0")
    chunk.unlink()
    os.mkfifo(chunk)
    assert_damaged(lambda: dtckpt.restore(f"local://{tmp_path}/run/s"))
    (manifest,) = (tmp_path / "run").rglob(MANIFEST_NAME)
    os.truncate(manifest, 10 * TB)
    with address_space(1 << 30):
        assert_damaged(lambda: dtckpt.restore(f"local://{tmp_path}/run/s"))


def test_what_may_not_be_read_is_no_damage(saved, monkeypatch):
    def denied(path, *rest, **more):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)
    assert type(outcome(lambda: dtckpt.restore(saved))) is StoragePermissionError


def test_the_command_line_tells_damage_by_its_exit_code(saved, capsys):
    (saved / MANIFEST_NAME).unlink()
    os.mkfifo(saved / MANIFEST_NAME)
    for command in (["verify"], ["inspect"], ["reshard", "--mesh", "x=1"]):
        target = [str(saved.with_name("other"))] * (command[0] == "reshard")
        assert main([command[0], str(saved), *target, *command[1:]]) == 1
        assert "is a fifo" in capsys.readouterr().err


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_long_files_are_not_read(saved, kvstore):
    for file in [saved / MANIFEST_NAME, *([saved / "manifest.ocdbt"] if kvstore == "ocdbt" else [])]:
        kept = file.stat().st_size
        os.truncate(file, 10 * TB)
        with address_space(1 << 30):
            for work in reads(saved).values():
                assert_damaged(work)
        os.truncate(file, kept)
    assert outcome(reads(saved)["restore"]) is None


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
def test_more_than_a_chunk_is_not_read(saved):
    os.truncate(saved / "small" / "c" / "0", 10 * TB)
    os.truncate(saved / "w" / "zarr.json", 10 * TB)
    with address_space(1 << 30):
        assert dtckpt.restore(saved)["small"].equal(ELEMENTS)
        assert_damaged(reads(saved)["verify"])


def changed(path, change):
    """Change the manifest, with its digest, as a stranger would."""
    file = path / MANIFEST_NAME
    envelope = checkpoint_pb2.ManifestFile.FromString(file.read_bytes())
    message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
    change(message)
    envelope.manifest = message.SerializeToString()
    envelope.digest = bytes_digest(envelope.manifest)
    file.write_bytes(envelope.SerializeToString())


def entry_of(message, name):
    return next(tensor for tensor in message.tensors if tensor.name == name)


def resized(name, shape, chunk_shape):
    """Return the change that gives a tensor another shape, and as many chunks as that has, if they are few."""

    def change(message):
        tensor = entry_of(message, name)
        count = math.prod(-(-size // max(1, chunk)) for size, chunk in zip(shape, chunk_shape, strict=True))
        tensor.shape[:], tensor.chunk_shape[:] = shape, chunk_shape
        tensor.ClearField("layout")
        if 0 <= count <= 1 << 20:
            tensor.digests[:] = [1] * count
            del tensor.writers[:]
            tensor.writers.add(client=0, count=count)

    return change


@pytest.mark.parametrize(
    ("shape", "chunk_shape"),
    [
        ((10 * TB,), (10 * TB,)),  # 40 TB in one chunk
        ((1 << 38,), (1 << 30,)),  # and 1 TB in many
        ((1 << 6, 1 << 31), (1, 1 << 31)),
        ((1 << 12,) * 4, (1, 1, 1 << 12, 1 << 12)),
        ((1 << 60,), (1,)),  # more chunks than have digests
        ((1 << 62, 1 << 62), (1 << 62, 1 << 62)),  # more bytes than numbers have bits
        ((1 << 62, 0, 1 << 62), (1 << 62, 1, 1 << 62)),
        ((-4,), (1,)),
        ((2000,), (0,)),
        ((2000,), (-1,)),
        ((2000,) + (1,) * 40, (2000,) + (1,) * 40),
    ],
    ids=str,
)
def test_a_manifest_that_claims_too_much_is_damaged(saved, shape, chunk_shape):
    changed(saved, resized("small", shape, chunk_shape))
    with address_space(2 << 30):
        work = reads(saved)
        for name in ("restore", "read", "verify"):
            assert_damaged(work[name])


def test_rows_of_a_huge_chunk_are_not_believed(saved):
    changed(saved, resized("w", (4, 10 * TB), (4, 10 * TB)))
    with address_space(1 << 30), dtckpt.open_checkpoint(saved) as checkpoint:
        assert_damaged(lambda: checkpoint.read("w", Region((0, 0), (1, 1))))


def test_what_was_never_saved_takes_no_memory(saved):
    def change(message):
        resized("small", (1 << 40,), (1 << 30,))(message)
        entry_of(message, "small").missing[:] = range(1 << 10)

    changed(saved, change)
    with address_space(1 << 30):
        assert type(outcome(lambda: dtckpt.restore(saved))) is dtckpt.errors.RegionNotFoundError


def test_chunks_of_a_database_have_bytes_of_their_own(tmp_path):
    """Else many keys of one value would make up a tensor of any size, every byte of it verified."""
    chunk = np.zeros(1 << 20, np.float32)
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(1 << 20)}, options=SaveOptions(chunk_nbytes=4 << 20, fsync=False))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/s/"}, context=open_context()).result()
    transaction = ts.Transaction(atomic=True)
    count = 200
    target = store.with_transaction(transaction)
    for number in range(1, count):
        source = store / "w/c/0"
        source.experimental_copy_range_to(target / f"w/c/{number}").result()
    transaction.commit_async().result()
    change = resized("w", (count << 20,), (1 << 20,))
    changed(tmp_path / "s", change)

    blocks = Blocks.of(ChunkGrid((count << 20,), (1 << 20,)), 4)

    def signed(message):
        digests = [digest_chunk("w", (number,), chunk, blocks)[0] for number in range(count)]
        entry_of(message, "w").digests[:] = digests

    changed(tmp_path / "s", signed)
    with address_space(1 << 30):
        assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


def test_tiny_chunks_take_little_more_than_their_digests(tmp_path):
    count = 50_000
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(1, dtype=torch.int8)}, options=SaveOptions(fsync=False))
    changed(tmp_path / "s", resized("w", (count,), (1,)))
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint, address_space(48 << 20):
        assert_damaged(lambda: checkpoint.read("w"))
        assert checkpoint.info("w").read_nbytes(Region((0,), (count,))) == count


# --- what decompresses to more --------------------------------------------------------------------------------------

BOMB_NBYTES = (2 << 30) - (1 << 20)


@pytest.fixture(scope="module")
def bombs():
    """Little that decompresses to 2 GB, by codec."""
    blosc = numcodecs.blosc.compress(bytes(1 << 20), b"zstd", 9, 2)
    # A header that states more makes Blosc take that memory, and then fail.
    stated = blosc[:4] + struct.pack("<I", BOMB_NBYTES) + blosc[8:]
    zeros = np.zeros(BOMB_NBYTES, np.uint8)
    return {
        "zstd": numcodecs.zstd.compress(zeros.data, 3),
        "blosc": numcodecs.blosc.compress(zeros.data, b"lz4", 1, 0),
        "stated": stated,
    }


@pytest.mark.parametrize("kvstore", ["zarr", "ocdbt"], indirect=True)
@pytest.mark.parametrize("bomb", ["blosc", "zstd", "stated"])
def test_a_chunk_decompresses_to_its_size_only(tmp_path, kvstore, bomb, bombs):
    codec = "zstd" if bomb == "zstd" else "blosc"
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(kvstore=kvstore, codec=codec, fsync=False))
    put(tmp_path / "s", kvstore, "w/c/0", bombs[bomb])
    for name, work in reads(tmp_path / "s").items():
        if name in ("restore", "read", "verify"):
            with address_space(1 << 30):
                assert_damaged(work)


def put(path, kvstore, key, value):
    """Write a value as a stranger would."""
    driver = {"driver": "ocdbt", "base": f"file://{path}/"} if kvstore == "ocdbt" else f"file://{path}/"
    ts.KvStore.open(driver, context=open_context()).result()[key] = value


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_what_compresses_best_is_no_bomb(tmp_path, kvstore, codec):
    """Elements that are all alike come to less than a thousandth; their readers believe them."""
    tree = {"zeros": torch.zeros(64 << 20), "ones": torch.ones(1 << 20, dtype=torch.int8), "one": torch.ones(())}
    options = SaveOptions(kvstore=kvstore, codec=codec, chunk_nbytes=256 << 20, content_digest=False, fsync=False)
    dtckpt.save(tmp_path / "s", tree, options=options)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1 << 20
    restored = dtckpt.restore(tmp_path / "s")
    assert all(restored[name].equal(tensor) for name, tensor in tree.items())


def test_what_does_not_compress_is_read_too(tmp_path):
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    for codec in ("zstd", "blosc"):
        dtckpt.save(tmp_path / codec, {"w": noise}, options=SaveOptions(codec=codec, fsync=False))
        assert dtckpt.restore(tmp_path / codec)["w"].equal(noise)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 131_072, 131_073, 3_000_000])
@pytest.mark.parametrize("kind", ["zeros", "noise", "text"])
def test_the_bound_of_compressed_data_holds(nbytes, kind):
    data = {"zeros": bytes(nbytes), "noise": os.urandom(nbytes), "text": (b"some text %d" * nbytes)[:nbytes]}[kind]
    for level in (-5, 1, 3, 19):
        encoded = bytes(numcodecs.zstd.compress(data, level)) if nbytes else bytes(numcodecs.zstd.compress(b"", level))
        assert nbytes <= zstd_bound(encoded) <= 4 * nbytes + (256 << 10)
        assert zstd_bound(encoded + encoded) == 2 * zstd_bound(encoded)
        for cut in {1, len(encoded) // 2, len(encoded) - 1} - {0, len(encoded)}:
            with pytest.raises(ValueError, match="corrupt"):
                zstd_bound(encoded[:cut])


def test_a_node_that_decompresses_to_more_is_damage(tmp_path, bombs):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    body = b"\x0c\xdb\x3a\x2a" + struct.pack("<Q", 14 + len(bombs["zstd"]) + 4) + b"\0\1" + bombs["zstd"]
    (tmp_path / "s" / "manifest.ocdbt").write_bytes(body + bytes(4))
    with address_space(1 << 30):
        assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


# --- object stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bomb", ["blosc", "zstd"])
def test_objects_are_measured_before_they_are_read(bucket, monkeypatch, bomb, bombs, kvstore):
    """An object may be of any size: of what is too long, a byte is asked for; of a chunk, its elements."""
    path = f"{bucket}/run/s"
    dtckpt.save(path, {"w": ELEMENTS}, options=SaveOptions(kvstore=kvstore, codec=bomb))
    dtckpt.save(f"{path}2", {"small": ELEMENTS}, options=SaveOptions(kvstore=kvstore))
    with dtckpt.open_checkpoint(path) as checkpoint:
        root = checkpoint._root
    key = {"zarr": "w/c/0", "ocdbt": "manifest.ocdbt"}[kvstore]
    root.write(key, bombs[bomb])
    with address_space(1 << 30):
        assert_damaged(lambda: dtckpt.restore(path))
    assert dtckpt.restore(f"{path}2")["small"].equal(ELEMENTS)

    with dtckpt.open_checkpoint(f"{path}2") as checkpoint:
        root = checkpoint._root
    envelope = checkpoint_pb2.ManifestFile.FromString(root.read(MANIFEST_NAME))
    message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
    resized("small", (1 << 38,), (1 << 30,))(message)
    envelope.manifest = message.SerializeToString()
    envelope.digest = bytes_digest(envelope.manifest)
    root.write(MANIFEST_NAME, envelope.SerializeToString())
    with address_space(1 << 30):
        assert_damaged(lambda: dtckpt.restore(f"{path}2"))
    monkeypatch.setattr("dtckpt.checkpoint.reading.checkpoint.MAX_MANIFEST_NBYTES", 100)
    assert_damaged(lambda: dtckpt.open_checkpoint(f"{path}2"))


# --- databases ------------------------------------------------------------------------------------------------------


def odd_database(monkeypatch, location, height=0):
    """Have the newest version of databases begin somewhere."""
    monkeypatch.setattr(OcdbtDatabase, "_root_node", (location, height))


@pytest.mark.parametrize(
    "location",
    [
        "btreenode::../../secret:0:100",
        "btreenode:../:d/x:0:100",
        "btreenode::/etc/passwd:0:100",
        "btreenode::d/./x:0:100",
        "btreenode::d//x:0:100",
        "btreenode:d/\0:x:0:100",
        "btreenode::d/x:0:-100",
        "btreenode::d/x:none:100",
        "btreenode",
    ],
)
def test_a_database_refers_to_its_own_files_only(tmp_path, monkeypatch, location):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    (tmp_path / "secret").write_bytes(bytes(100))
    odd_database(monkeypatch, location)
    assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


def test_a_node_may_be_its_own_child(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    top = OcdbtDatabase(LocalFolder(tmp_path / "s"), open_context())._root_node
    odd_database(monkeypatch, top[0], top[1] + 1)
    assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


# --- what the manifest says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        b"[" * 100_000,
        b'{"list":[' * 5000 + b'{"value":0}' + b"]}" * 5000,
        b'{"list":[' * 100 + b'{"tensor":"w"}' + b"]}" * 100,
        b'{"value":' + b"9" * 10_000 + b"}",
        b'{"dict":[["a",{"value":0}],["a",{"value":0}]]}',
        b'{"float":"' + b"9" * 100 + b'x"}',
        b"\xff",
        b"",
    ],
    ids=lambda tree: repr(tree[:12]),
)
def test_trees_of_strangers(saved, tree):
    changed(saved, lambda message: setattr(message, "tree", tree))
    error = outcome(lambda: dtckpt.restore(saved))
    assert type(error) is CheckpointCorruptError or not tree


def test_counts_of_strangers(saved):
    def huge_run(message):
        entry_of(message, "w").writers[0].count = (1 << 64) - 1

    def huge_client(message):
        entry_of(message, "w").writers[0].client = (1 << 32) - 1

    def no_mesh(message):
        entry_of(message, "w").layout.mesh = (1 << 32) - 1

    def odd_mesh(message):
        message.meshes.add().mesh_dimensions.add(name="x", size=1 << 62)

    def lost(message):
        entry_of(message, "w").missing.append((1 << 64) - 1)

    def long_token(message):
        message.attempt = "x" * (1 << 20)

    def twice(message):
        message.tensors.append(entry_of(message, "w"))

    def elsewhere(message):
        entry_of(message, "w").path = "../../w"

    def costs(message):
        message.phases.add(phase="write", microseconds=[1] * 100_000)

    kept = (saved / MANIFEST_NAME).read_bytes()
    for change in (huge_run, huge_client, no_mesh, odd_mesh, lost, long_token, twice, elsewhere, costs):
        changed(saved, change)
        with address_space(1 << 30):
            assert_damaged(lambda: dtckpt.restore(saved))
        (saved / MANIFEST_NAME).write_bytes(kept)


def test_documents_that_state_something_else_change_nothing(tmp_path):
    """What counts is the manifest: another shape, type or codec in a zarr.json is damage to other readers only."""
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(kvstore="zarr", codec="blosc", fsync=False))
    document = tmp_path / "s" / "w" / "zarr.json"
    stated = json.loads(document.read_bytes())
    stated |= {"shape": [10 * TB], "data_type": "float64", "codecs": [{"name": "gzip", "configuration": {"level": 1}}]}
    document.write_bytes(json.dumps(stated).encode())
    assert dtckpt.restore(tmp_path / "s")["w"].equal(ELEMENTS)
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        (damage,) = checkpoint.verify().damages
        assert "zarr.json" in damage.reason


def test_metrics_of_strangers_count_as_none(tmp_path):
    with dtckpt.CheckpointManager(tmp_path / "run", is_async=False) as manager:
        manager.save(1, {"w": ELEMENTS}, metrics={"loss": 1.0}, force=True)
        file = tmp_path / "run" / "step_00000001" / "metrics.json"
        for odd in (b"[" * 100_000, b'{"loss": 1' + b"0" * 400 + b"}", b"\xff"):
            file.write_bytes(odd)
            assert manager.metrics(1) == {}
        os.truncate(file, 10 * TB)
        with address_space(1 << 30):
            assert manager.metrics(1) == {}
        file.unlink()
        os.mkfifo(file)
        assert outcome(lambda: manager.metrics(1)) is None


def test_no_manifest_is_written_that_nobody_would_read(monkeypatch):
    monkeypatch.setattr("dtckpt.format.manifest.MAX_MANIFEST_NBYTES", 100)
    with pytest.raises(dtckpt.errors.ConfigError, match="chunk_nbytes"):
        Manifest("zarr", {}, tree=b"x" * 100).to_bytes()
    assert MAX_MANIFEST_NBYTES >= 1 << 28
