"""What a relay and its sources tell each other, over real servers in this process."""

from dataclasses import replace

import numpy as np
import pytest

from dtckpt.checkpoint.live import pulls
from dtckpt.checkpoint.live.fan_out import MAX_COPIES, MAX_PULLERS
from dtckpt.checkpoint.live.pulls import HeldPart, PullPeer, PullRequest, PullService
from dtckpt.checkpoint.live.sources import RelayPeer
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.open_part import elements_of, piece_digest
from dtckpt.checkpoint.parts.records import PartIndex, PartPiece, PartTensor, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.errors import CheckpointCorruptError, StorageError
from dtckpt.layout.region import Region

SAVE = SaveId(7, 3, 1, is_durable=False, token="0" * 8)
SHAPE = (6, 4)
NUM_ROWS = 3


def index_of(data):
    """Describe columns with gaps, then rows without, then a number."""
    tensors = tuple(
        PartTensor(name, shape, "float32", None) for name, shape in [("c", (6, 2)), ("r", SHAPE), ("n", ())]
    )
    boxes = [(0, Region((0, 0), (6, 2)), 0, (4, 1))]
    boxes += [(1, Region((2 * row, 0), (2, 4)), 96 + 32 * row, (4, 1)) for row in range(NUM_ROWS)]
    boxes += [(2, Region((), ()), 96 * 2, ())]
    pieces = [PartPiece(*box, 0) for box in boxes]
    found = [elements_of(memoryview(data), piece, np.dtype("float32")) for piece in pieces]
    digests = [piece_digest(tensors[p.tensor].name, p.region, each) for p, each in zip(pieces, found, strict=True)]
    described = tuple(replace(piece, digest=digest) for piece, digest in zip(pieces, digests, strict=True))
    return PartIndex(SAVE, 0, len(data), b"{}", tensors, described, {})


@pytest.fixture
def source(tmp_path):
    """A folder with the part, its service, and a peer that reaches its server."""
    data = np.random.default_rng(0).standard_normal(49).astype("float32").tobytes()
    index = index_of(data)
    folder = HostFolder(tmp_path, "source", host="here")
    folder.make()
    file = folder.take(len(data))
    file.view[:] = data
    folder.put(file, index, index.to_bytes(), is_voted=True)
    damaged = []
    service = PullService(folder, max_copies=MAX_COPIES, on_damage=lambda *told: damaged.append(told))
    server = PartServer(folder, "127.0.0.1", 10.0, answer_pull=service)
    server.open("secret")
    yield index, data, file, service, PullPeer(server.url, "there", "secret", 10.0), damaged
    server.close()
    folder.close()


def empty(index):
    return HeldPart(index, index.to_bytes(), memoryview(bytearray(index.nbytes)), set())


def test_a_part_is_pulled_in_several_answers(source, monkeypatch):
    index, data, _, _, peer, _ = source
    monkeypatch.setattr(pulls, "ANSWER_NBYTES", 70)
    told = peer.pull(SAVE, 0, PullRequest.of_index("a"))
    assert PartIndex.from_bytes(told.index_file) == index
    part, admissions, left = empty(index), [], []
    while lacking := part.lacking():
        request = PullRequest.of_lacking("a", lacking, insists=False)
        assert not peer.pull(SAVE, 0, request, part, lambda: admissions.append(1)).is_full
        left.append(len(lacking))
    assert left == [5, 4, 2]
    assert len(admissions) == 3
    assert part.nbytes == (12 + 24 + 1) * 4
    part.verify()
    for number in range(5):
        assert part.elements(number) == HeldPart(index, b"", memoryview(data)).elements(number)


def test_a_relay_serves_what_it_has_so_far(source, tmp_path, monkeypatch):
    index, _, _, _, peer, _ = source
    monkeypatch.setattr(pulls, "ANSWER_NBYTES", 70)
    relay = HostFolder(tmp_path, "relay", host="relay")
    relay.make()
    service, part = PullService(relay, max_copies=None), empty(index)
    server = PartServer(relay, "127.0.0.1", 10.0, answer_pull=service, is_relay=True)
    server.open("other secret")
    try:
        child, second = PullPeer(server.url, "relay", "other secret", 10.0), empty(index)
        request = PullRequest.of_lacking("b", second.lacking(), insists=False)
        assert child.pull(SAVE, 0, request, second).is_full, "it does not have the part"
        service.begin(SAVE, 0, part)
        assert not child.pull(SAVE, 0, request, second).is_full, "it has nothing yet"
        assert not second.nbytes
        peer.pull(SAVE, 0, PullRequest.of_lacking("a", part.lacking(), insists=False), part)
        child.pull(SAVE, 0, request, second)
        assert second.lacking() == part.lacking() == [1, 2, 3, 4]
        service.end(SAVE, 0)
        assert child.pull(SAVE, 0, request, second).is_full
    finally:
        server.close()
        relay.close()


def test_a_source_serves_few_relays(source):
    index, _, _, _, peer, _ = source
    some = PullRequest("", [0])
    answers = [peer.pull(SAVE, 0, replace(some, puller=name), empty(index)) for name in "abc"]
    assert [answer.is_full for answer in answers] == [False] * MAX_PULLERS + [True]
    whole = PullRequest.of_lacking("a", range(5), insists=False)
    assert not peer.pull(SAVE, 0, whole, empty(index)).is_full
    insisting = [replace(some, puller="c", insists=insists) for insists in (False, True)]
    assert [peer.pull(SAVE, 0, each, empty(index)).is_full for each in insisting] == [True, False]


def test_a_damaged_piece_is_refused_and_its_source_told(source):
    index, _, file, _, peer, damaged = source
    file.view[96 + 33] ^= 1
    part = empty(index)
    with pytest.raises(
        CheckpointCorruptError, match=r"host there: the part of client 0 is damaged at 'r' \[2:4, 0:4\]"
    ):
        peer.pull(SAVE, 0, PullRequest.of_lacking("a", part.lacking(), insists=False), part)
    assert part.lacking() == [2, 3, 4], "the pieces before it are kept"
    ((save, error),) = damaged
    assert save == SAVE
    assert "is damaged at 'r'" in str(error)


def test_a_reader_that_is_told_nonsense_takes_it_for_a_failure(source, monkeypatch):
    index, _, _, _, peer, _ = source
    malformed = PullRequest("a", ["x"])
    with pytest.raises(StorageError):
        peer.pull(SAVE, 0, replace(malformed, pieces=7), empty(index))
    monkeypatch.setattr(pulls, "_head", lambda **_: b"\0" * 7 + b"\5[1,2]")
    with pytest.raises(StorageError, match="its answer to a pull is malformed"):
        peer.pull(SAVE, 0, PullRequest.of_lacking("a", [0], insists=False), empty(index))


def test_a_relay_that_is_lost_is_asked_once():
    relay = RelayPeer("127.0.0.1:1", "gone", "", 10.0)
    errors = []
    for _ in range(2):
        with pytest.raises(StorageError, match="host gone") as caught:
            relay.read(SAVE, 0, [])
        errors.append(caught.value)
    assert errors[0] is errors[1]
    with pytest.raises(StorageError, match="the address of a relay is malformed"):
        RelayPeer("127.0.0.1:x", "gone", "", 10.0).read(SAVE, 0, [])


def with_tied(index, data, *, digest=None):
    """Return the index with a tensor that is tied to the rows: other names for the same elements."""
    tied = [replace(piece, tensor=len(index.tensors)) for piece in index.pieces if piece.tensor == 1]
    digests = [
        piece_digest("t", piece.region, elements_of(memoryview(data), piece, np.dtype("float32"))) for piece in tied
    ]
    pieces = tuple(replace(piece, digest=digest or own) for piece, own in zip(tied, digests, strict=True))
    tensors = (*index.tensors, PartTensor("t", SHAPE, "float32", None))
    return replace(index, tensors=tensors, pieces=index.pieces + pieces)


def test_elements_of_tied_tensors_are_pulled_once(source):
    index, data, _, _, peer, _ = source
    part = empty(with_tied(index, data))
    assert part.lacking() == list(range(5))
    peer.pull(SAVE, 0, PullRequest.of_lacking("a", part.lacking(), insists=False), part)
    assert part.lacking() == []
    assert part.some_of(range(8)) == list(range(8))
    assert part.nbytes == (12 + 24 + 1) * 4
    part.verify()


def test_tied_tensors_with_different_digests_are_refused(source):
    """An index of another host may claim anything."""
    index, data, _, _, peer, _ = source
    part = empty(with_tied(index, data, digest=1))
    with pytest.raises(CheckpointCorruptError, match="damaged at 't'"):
        peer.pull(SAVE, 0, PullRequest.of_lacking("a", part.lacking(), insists=False), part)
    assert part.lacking() == [1, 2, 3, 4]


def test_no_answer_overwrites_a_piece_that_is_here(source):
    index, _, file, _, peer, _ = source
    part = empty(index)
    peer.pull(SAVE, 0, PullRequest.of_lacking("a", part.lacking(), insists=False), part)
    file.view[100] ^= 1
    with pytest.raises(StorageError, match="here already"):
        peer.pull(SAVE, 0, PullRequest.of_lacking("a", [1], insists=False), part)
    part.verify()
