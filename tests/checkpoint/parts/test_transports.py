"""The contract of transports, over each of them."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from support.certificates import Authority

from dtckpt.checkpoint.parts import nixl_offer
from dtckpt.checkpoint.parts.data_tls import DataTls
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.nixl_reads import NixlReads
from dtckpt.checkpoint.parts.open_part import piece_digest, piece_seed
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import PartBox, PartIndex, PartPiece, PartTensor, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.checkpoint.parts.transports import BoxRequest, PartTransport
from dtckpt.checkpoint.reading.pieces import c_strides
from dtckpt.errors import CheckpointCorruptError, ConfigError, DependencyError, StorageError
from dtckpt.layout.region import Region

TOKEN = "token"
SAVE, OLDER = SaveId(8, 10, 2, False, "0a1b2c3d"), SaveId(7, 9, 2, False, "0a1b2c3d")
SHAPE = (300, 40)
WHOLE, ROWS, COLUMN = Region((0, 0), SHAPE), Region((7, 0), (200, 40)), Region((10, 3), (50, 2))
MANY = Region((0, 3), (300, 2))
"""A box of more runs than NIXL takes."""
DIGESTED = (WHOLE, ROWS, COLUMN, MANY)
F32 = np.dtype(np.float32)
has_nixl = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not has_nixl, reason="the package nixl is not installed: pip install 'dtckpt[nixl]'")
KINDS = ["mapped", "http", "https", pytest.param("nixl", marks=needs_nixl)]


def elements_of(save):
    return np.random.default_rng(save.number).standard_normal(SHAPE).astype(np.float32)


class Source:
    """A source of two saves, and a transport to it."""

    def __init__(self, kind, path):
        self.kind = kind
        self.folder = HostFolder(path / "tier", "root", host="there")
        self.folder.make()
        self.files = {save: self._put(save) for save in (OLDER, SAVE)}
        tls = Authority(path / "tls") if kind == "https" else None
        served = DataTls() if tls is None else DataTls(tls.cert, tls.key)
        self.server = PartServer(self.folder, "127.0.0.1", 5.0, tls=served)
        self.server.open(TOKEN)
        trusted = DataTls() if tls is None else DataTls(ca=tls.ca, ca_variable="DTCKPT_DATA_CA", is_required=True)
        peer = Peer(self.server.url, "there", TOKEN, 5.0, tls=trusted)
        self.transport = (
            MappedFolder(self.folder, "there") if kind == "mapped" else NixlReads(peer, 5.0) if kind == "nixl" else peer
        )

    def _put(self, save):
        elements = elements_of(save)
        pieces = (PartPiece(0, WHOLE, 0, c_strides(SHAPE), piece_digest("w", WHOLE, elements)),)
        boxes = tuple(PartBox(0, each, piece_digest("w", each, elements[each.slices()])) for each in DIGESTED[1:])
        index = PartIndex(save, 1, elements.nbytes, b"{}", (PartTensor("w", SHAPE, "float32", None),), pieces, {})
        index = replace(index, boxes=boxes)
        file = self.folder.take(elements.nbytes)
        file.view[: elements.nbytes] = memoryview(elements).cast("B")
        self.folder.put(file, index, index.to_bytes(), is_voted=True)
        return index, file

    def box(self, region, target, *, save=SAVE, base=None):
        index, _ = self.files[save]
        digest = index.digests().get(("w", region))
        if digest is None:
            return BoxRequest(0, region, target, F32)
        return BoxRequest(0, region, target, F32, piece_seed("w", region), digest, base)

    def close(self):
        self.transport.close()
        self.server.close()


@pytest.fixture(params=KINDS)
def source(request, tmp_path, monkeypatch):
    for name in ("CA", "CERT", "KEY", "NIXL"):
        monkeypatch.delenv(f"DTCKPT_DATA_{name}", raising=False)
    if request.param == "nixl":
        monkeypatch.setenv("DTCKPT_DATA_NIXL", "1")
    made = Source(request.param, tmp_path)
    yield made
    made.close()


def test_it_is_a_transport(source):
    transport: PartTransport = source.transport
    assert (transport.kind, transport.host) == (source.kind.removesuffix("s"), "there")
    assert transport.index_file(SAVE, 1) == source.files[SAVE][0].to_bytes()


@pytest.mark.parametrize("region", [WHOLE, ROWS, COLUMN, MANY, Region((4, 5), (6, 7))], ids=str)
@pytest.mark.parametrize("target", ["dense", "strided", "converted"])
def test_boxes(source, region, target):
    """With and without digests, into any memory; beside it, nothing changes."""
    expected = elements_of(SAVE)[region.slices()]
    if target == "strided":
        memory = np.full((region.shape[0], region.shape[1] + 3), 7, np.float32)
        into = memory[:, 1:-2]
    else:
        memory = into = np.full(region.shape, 7, np.float32 if target == "dense" else np.float64)
    nbytes = source.transport.read(SAVE, 1, [source.box(region, into)])
    assert nbytes == expected.nbytes
    assert (into == expected).all()
    assert target != "strided" or (memory[:, [0, -2, -1]] == 7).all()


def test_several_boxes_of_two_saves(source):
    targets = [np.zeros(each.shape, np.float32) for each in (ROWS, COLUMN, Region((4, 5), (6, 7)), MANY)]
    for save in (SAVE, OLDER, SAVE):
        regions = (ROWS, COLUMN, Region((4, 5), (6, 7)), MANY)
        boxes = [source.box(each, into, save=save) for each, into in zip(regions, targets, strict=True)]
        source.transport.read(save, 1, boxes)
        for each, into in zip(regions, targets, strict=True):
            assert (into == elements_of(save)[each.slices()]).all()


@pytest.mark.parametrize("is_right", [True, False])
def test_memory_that_holds_an_older_save(source, is_right):
    into = np.ascontiguousarray(elements_of(OLDER)[COLUMN.slices()])
    base = source.files[OLDER][0].digests()["w", COLUMN]
    if not is_right:
        into[0, 0] += 1
    source.transport.read(SAVE, 1, [source.box(COLUMN, into, base=base)])
    assert (into == elements_of(SAVE)[COLUMN.slices()]).all()


@pytest.mark.parametrize("region", [WHOLE, COLUMN, MANY, Region((0, 2), (6, 7))], ids=str)
def test_damaged_memory_is_named(source, region):
    source.files[SAVE][1].view[(12 * 40 + 3) * 4] ^= 1
    with pytest.raises(CheckpointCorruptError, match="part of client 1 is damaged"):
        source.transport.read(SAVE, 1, [source.box(region, np.zeros(region.shape, np.float32))])
    into = np.zeros(ROWS.shape, np.float32)
    source.transport.read(OLDER, 1, [source.box(ROWS, into, save=OLDER)])
    assert (into == elements_of(OLDER)[ROWS.slices()]).all()


def test_parts_that_are_not_there(source):
    for save, client in ((SaveId(9, 9, 2, False, "0a1b2c3d"), 1), (SAVE, 0)):
        start = time.monotonic()
        with pytest.raises((StorageError, CheckpointCorruptError), match="host there"):
            source.transport.index_file(save, client)
        with pytest.raises((StorageError, CheckpointCorruptError), match="host there"):
            source.transport.read(save, client, [source.box(COLUMN, np.zeros(COLUMN.shape, np.float32))])
        assert time.monotonic() - start < 5.0


def test_a_source_that_is_closed_may_be_read_again(source):
    for _ in range(3):
        into = np.zeros(COLUMN.shape, np.float32)
        source.transport.read(SAVE, 1, [source.box(COLUMN, into)])
        assert (into == elements_of(SAVE)[COLUMN.slices()]).all()
        source.transport.close()


def test_threads(source):
    failures = []

    def work(seed):
        try:
            for _ in range(5):
                into = np.zeros(DIGESTED[seed % 4].shape, np.float32)
                source.transport.read(SAVE, 1, [source.box(DIGESTED[seed % 4], into)])
                assert (into == elements_of(SAVE)[DIGESTED[seed % 4].slices()]).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_a_source_that_has_gone(source):
    """Nothing is written afterwards, and no client hangs. Parts that are mapped on this host stay."""
    into = np.zeros(COLUMN.shape, np.float32)
    source.transport.read(SAVE, 1, [source.box(COLUMN, into)])
    source.server.close()
    into[:] = 0
    start = time.monotonic()
    if source.kind == "mapped":
        source.transport.read(SAVE, 1, [source.box(COLUMN, into)])
        assert (into == elements_of(SAVE)[COLUMN.slices()]).all()
    elif source.kind != "nixl":  # whose agents live as long as their process: see the next test
        with pytest.raises(StorageError, match="host there"):
            source.transport.read(SAVE, 1, [source.box(COLUMN, into)])
        assert time.monotonic() - start < 15.0
        time.sleep(0.2)
        assert not into.any()


@needs_nixl
@pytest.mark.processes
def test_a_nixl_source_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("DTCKPT_DATA_NIXL", "1")
    script = "import sys; from checkpoint.parts.test_transports import Source; from pathlib import Path\n"
    script += "print(Source('nixl', Path(sys.argv[1])).server.url, flush=True); sys.stdin.read()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "there")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as process:
        lines = iter(process.stdout.readline, "")
        url = next(line.strip() for line in lines if "NIXL" not in line)  # it writes to standard output
        local = Source("nixl", tmp_path / "here")
        try:
            transport, into = NixlReads(Peer(url, "there", TOKEN, 5.0), 5.0), np.zeros(ROWS.shape, np.float32)
            assert transport.read(SAVE, 1, [local.box(ROWS, into)]) == into.nbytes
            assert (into == elements_of(SAVE)[ROWS.slices()]).all()
            process.kill()
            process.wait()
            into[:] = 0
            start = time.monotonic()
            with pytest.raises(StorageError, match="host there: read a part by NIXL"):
                transport.read(SAVE, 1, [local.box(ROWS, into)])
            assert time.monotonic() - start < 15.0
            time.sleep(0.2)
            assert not into.any()
            with pytest.raises(StorageError, match="host there"):  # nor later, when it asks anew
                transport.read(SAVE, 1, [local.box(ROWS, into)])
            local.transport.read(SAVE, 1, [local.box(ROWS, into)])  # others can be read
            assert (into == elements_of(SAVE)[ROWS.slices()]).all()
        finally:
            process.kill()
            local.close()


@needs_nixl
def test_nixl_takes_what_it_can(tmp_path, monkeypatch):
    monkeypatch.setenv("DTCKPT_DATA_NIXL", "1")
    source = Source("nixl", tmp_path)
    try:
        sent = []
        monkeypatch.setattr(Peer, "read", lambda _, save, client, boxes: sent.extend(boxes) or 0)
        for region, by_server in ((WHOLE, 0), (ROWS, 0), (COLUMN, 0), (MANY, 1), (Region((0, 0), (1, 1)), 1)):
            sent.clear()
            source.transport.read(SAVE, 1, [source.box(region, np.zeros(region.shape, np.float32))])
            assert len(sent) == by_server, region
    finally:
        source.close()


def test_a_source_without_nixl(tmp_path, monkeypatch):
    """Its server sends all."""
    monkeypatch.delenv("DTCKPT_DATA_NIXL", raising=False)
    source = Source("nixl", tmp_path)
    try:
        into = np.zeros(ROWS.shape, np.float32)
        assert source.transport.read(SAVE, 1, [source.box(ROWS, into)]) == into.nbytes
        assert (into == elements_of(SAVE)[ROWS.slices()]).all()
    finally:
        source.close()


def test_settings_of_nixl(monkeypatch):
    monkeypatch.setenv("DTCKPT_DATA_NIXL", "1")
    monkeypatch.setattr(nixl_offer.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DependencyError, match=r"the package nixl is missing; pip install dtckpt\[nixl\]"):
        nixl_offer.is_wanted()
    monkeypatch.setattr(nixl_offer.importlib.util, "find_spec", lambda _: True)
    assert nixl_offer.is_wanted()
    monkeypatch.setenv("DTCKPT_DATA_CA", "x")
    with pytest.raises(ConfigError, match="asks for TLS, which NIXL has not"):
        nixl_offer.is_wanted()
    monkeypatch.setenv("DTCKPT_DATA_NIXL", "0")
    assert not nixl_offer.is_wanted()
