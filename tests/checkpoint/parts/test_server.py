"""The server of parts refuses bad requests, and lives on: hostile peers, and writers of earlier attempts."""

import json
import socket
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection, HTTPException

import numpy as np
import pytest
import torch

from dtckpt.checkpoint.parts import peers
from dtckpt.checkpoint.parts import server as server_module
from dtckpt.checkpoint.parts.announced_boxes import MAX_ANNOUNCEMENT_NBYTES, AnnouncedBoxes, announcement
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.open_part import OpenPart, piece_digest, piece_seed
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import HeldRange, PartBox, PartIndex, PartPiece, PartTensor, SaveId, gaps
from dtckpt.checkpoint.parts.server import LENGTH_NBYTES, PartServer
from dtckpt.checkpoint.parts.transports import BoxRequest
from dtckpt.checkpoint.reading.pieces import c_strides
from dtckpt.errors import CheckpointCorruptError, ConfigError, StorageError, StorageFullError
from dtckpt.layout.region import Region

TOKEN = "token of this attempt"
WAIT_S = 20.0
"""Longest wait of a peer for an answer."""
SAVE = SaveId(7, 10, 2, False, "0a1b2c3d")
ELEMENTS = torch.arange(60.0).reshape(12, 5)
DATA = memoryview(ELEMENTS.numpy()).cast("B")
NBYTES = len(DATA)
WHOLE = Region((0, 0), (12, 5))


def index_of(*, save=SAVE, client=1, nbytes=NBYTES, digest=None, offset=0, region=None, dtype="float32"):
    region = region or WHOLE
    digest = piece_digest("w", region, ELEMENTS.numpy()) if digest is None else digest
    piece = PartPiece(0, region, offset, c_strides(region.shape), digest)
    return PartIndex(save, client, nbytes, b"{}", (PartTensor("w", (12, 5), dtype, None),), (piece,), {})


@pytest.fixture
def folder(tmp_path):
    made = HostFolder(tmp_path / "tier", "root", host="here", max_nbytes=1 << 20)
    made.make()
    return made


@pytest.fixture
def server(folder):
    started = PartServer(folder, "127.0.0.1", 2.0)
    started.open(TOKEN)
    yield started
    started.close()


@pytest.fixture
def peer(server):
    return Peer(server.url, "here", TOKEN, WAIT_S)


def request(server, method, path, body=b"", token=TOKEN, headers=()):
    """Send a request as any process could; return the status, 0 if the server hangs up without one."""
    connection = HTTPConnection(server.url, timeout=5)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {
            "Authorization": f"Bearer {token}",
            "Content-Length": str(len(body)),
            **dict(headers),
        }.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse().status
    except (HTTPException, ConnectionError):
        return 0
    finally:
        connection.close()


def body_of(index, data=DATA):
    file = index if isinstance(index, bytes) else index.to_bytes()
    return len(file).to_bytes(LENGTH_NBYTES, "big") + file + bytes(data)


def read(peer, number, offset, shape):
    """Return the elements of a box, as a client reads them: a piece of which it has the digest, or a box of one."""
    target = np.zeros(shape, np.float32)
    is_whole = tuple(shape) == (12, 5)
    facts = (piece_seed("w", WHOLE), index_of().pieces[0].digest) if is_whole else ()
    peer.read(SAVE, 1, [BoxRequest(number, Region(tuple(offset), tuple(shape)), target, target.dtype, *facts)])
    return target.tobytes()


def files_in(folder):
    return sorted(str(file.relative_to(folder.path)) for file in folder.path.rglob("*") if file.parent.name != "spare")


def test_a_copy_and_its_elements(peer, folder):
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert folder.parts().voted == {SAVE: frozenset({1})}
    (file,) = peer.indexes(SAVE)
    assert PartIndex.from_bytes(file) == index_of()
    assert read(peer, 0, (1, 2), (3, 2)) == ELEMENTS[1:4, 2:4].contiguous().numpy().tobytes()


def test_a_copy_again(peer, folder):
    """The same copy may come twice; there is one part then."""
    for _ in range(3):
        peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert folder.parts().voted == {SAVE: frozenset({1})}
    assert bytes(folder.open_data(SAVE, 1)[: len(DATA)]) == bytes(DATA)


# A part with a large piece that stays and a small piece that changes; in the second save the other way round.
LARGE, LARGE_NBYTES = torch.arange(1 << 15, dtype=torch.float32).numpy(), 128 << 10
NEWER = replace(SAVE, number=8, token="1a1b2c3d")


def two_pieces(save, small, *, is_large_first=True):
    """Return the index and the elements of a part."""
    small = np.full(64, small, np.float32)
    tensors = PartTensor("large", (1 << 15,), "float32", None), PartTensor("small", (64,), "float32", None)
    pieces, data = [], b""
    for number, elements in [(0, LARGE), (1, small)][:: 1 if is_large_first else -1]:
        region = Region((0,), elements.shape)
        digest = piece_digest(tensors[number].name, region, elements)
        pieces.append(PartPiece(number, region, len(data), (1,), digest))
        data += elements.tobytes()
    pieces.sort(key=lambda piece: piece.tensor)
    return PartIndex(save, 1, len(data), b"{}", tensors, tuple(pieces), {}), memoryview(data)


def test_a_copy_takes_what_the_host_holds_from_there(peer, folder):
    first, data = two_pieces(SAVE, 1)
    assert peer.put(SAVE, 1, first.to_bytes(), data, None) == len(data)
    for number in range(3):
        newer = replace(NEWER, number=8 + number)
        index, data = two_pieces(newer, 2 + number, is_large_first=number % 2 == 1)
        held = index.ranges_in(first)
        assert [stop - start for start, stop, _ in held] == [LARGE_NBYTES]
        assert peer.put(newer, 1, index.to_bytes(), data, None, base=SAVE, held=held) == 256
        assert bytes(folder.open_data(newer, 1)[: len(data)]) == bytes(data)
        assert folder.parts().voted[newer] == {1}


def test_a_copy_from_a_part_that_is_gone_or_damaged(peer, folder):
    first, data = two_pieces(SAVE, 1)
    index, newer = two_pieces(NEWER, 2)
    held = index.ranges_in(first)
    with pytest.raises(StorageError, match="not on this host"):
        peer.put(NEWER, 1, index.to_bytes(), newer, None, base=SAVE, held=held)
    peer.put(SAVE, 1, first.to_bytes(), data, None)
    with folder.data_path(SAVE, 1).open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    with pytest.raises(CheckpointCorruptError, match="damaged at 'large'"):
        peer.put(NEWER, 1, index.to_bytes(), newer, None, base=SAVE, held=held)
    assert NEWER not in folder.parts().voted
    # All of it is right whatever the base holds.
    assert peer.put(NEWER, 1, index.to_bytes(), newer, None) == len(newer)
    assert bytes(folder.open_data(NEWER, 1)[: len(newer)]) == bytes(newer)


def test_copies_of_another_length_than_what_the_host_lacks(server, peer, folder):
    first, data = two_pieces(SAVE, 1)
    peer.put(SAVE, 1, first.to_bytes(), data, None)
    index, newer = two_pieces(NEWER, 2)
    path = f"/v1/parts/{NEWER.name}/1/{SAVE.name}"
    assert request(server, "PUT", path, body_of(index, newer)) == 400
    assert request(server, "PUT", path, body_of(index, newer[LARGE_NBYTES + 1 :])) == 400
    assert NEWER not in folder.parts().voted
    assert request(server, "PUT", path, body_of(index, newer[LARGE_NBYTES:])) == 204


def test_ranges_that_a_part_has_of_another():
    index, _ = two_pieces(NEWER, 2)
    large, small = index.pieces
    assert index.ranges_in(index) == [(0, LARGE_NBYTES, 0)]
    tensors = tuple(replace(each, dtype="int32") for each in index.tensors)
    for other in (
        replace(index, tensors=tensors),
        replace(index, pieces=(replace(large, digest=large.digest + 1), small)),
        replace(index, pieces=(replace(large, strides=(2,)), small)),
        replace(index, pieces=(small,)),
        replace(index, nbytes=LARGE_NBYTES - 1),
    ):
        assert index.ranges_in(other) == []
        assert other.ranges_in(index) == []
    # An index that claims that pieces lie in each other.
    twice = replace(index, pieces=(large, replace(large, offset=4), small))
    assert twice.ranges_in(index) == [(0, LARGE_NBYTES, 0)]
    assert list(gaps([HeldRange(2, 4, 0), HeldRange(4, 6, 9)], 8)) == [(0, 2), (6, 8)]
    assert list(gaps([], 0)) == []


def test_a_writer_of_an_earlier_attempt(server, folder):
    """Situation 11: its token is refused, whatever it asks for."""
    late = Peer(server.url, "here", "token of an earlier attempt", 5.0)
    for call in (
        lambda: late.put(SAVE, 1, index_of().to_bytes(), DATA, None),
        lambda: read(late, 0, (0, 0), (1, 1)),
        lambda: late.indexes(SAVE),
        lambda: late.text(1),
    ):
        with pytest.raises(StorageError, match="token belongs to another attempt"):
            call()
    assert folder.parts().voted == {}


@pytest.mark.parametrize("token", ["", TOKEN])
def test_nobody_is_served_before_the_clients_have_met(folder, token):
    """Not even by the empty token that the server has then; and the wait is bounded."""
    server = PartServer(folder, "127.0.0.1", 0.1)
    try:
        assert request(server, "PUT", f"/v1/parts/{SAVE.name}/1", body_of(index_of()), token=token) in (0, 503)
        assert folder.parts().voted == {}
    finally:
        server.close()


def test_who_comes_early_waits(folder):
    server = PartServer(folder, "127.0.0.1", 5.0)
    try:
        answers = []
        early = threading.Thread(target=lambda: answers.append(Peer(server.url, "here", TOKEN, 5.0).indexes(SAVE)))
        early.start()
        server.open(TOKEN)
        early.join(10)
        assert answers == [[]]
    finally:
        server.close()


NAME = SAVE.name
PATHS = [
    "/v1/parts/../../../../etc/1",
    "/v1/parts/..%2f..%2fetc/1",
    f"/v1/parts/{NAME}/../1",
    f"/v1/parts/{NAME}%00/1",
    f"/v1/parts/{NAME}/-1",
    f"/v1/parts/{NAME}/2",
    f"/v1/parts/{NAME}/x",
    f"/v1/parts/{NAME}/99999999999999999999",
    "/v1/parts/spare/1",
    f"/v1/parts/{NAME}",
    "/v1/parts//1",
    "/",
    "*",
    f"/v1/parts/{SaveId(8, 10, 2, False, '0a1b2c3d').name}/1",
    f"/v1/parts/{NAME}/0",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_copy_for_another_place(server, folder, peer, path):
    """Situation 30: a name that leads out of the directory, or names another part."""
    assert request(server, "PUT", path, body_of(index_of())) in (0, 400, 404, 409)
    assert files_in(folder) == ["job.json", "spare"]
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)


LATE = index_of().to_bytes()
BODIES = {
    "nothing": b"",
    "half a length": b"\0\0\0",
    "a length over all": b"\xff" * 8 + LATE,
    "a length of 0": bytes(8) + LATE,
    "garbage": body_of(b"garbage, and no index of anything"),
    "a digest that differs": body_of(bytes([LATE[0] ^ 1]) + LATE[1:]),
    "a pickle": body_of(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "too few elements": body_of(index_of(), DATA[:-4]),
    "too many elements": body_of(index_of(), bytes(DATA) + b"1234"),
    "a flipped bit": body_of(index_of(), bytes([DATA[0] ^ 1]) + bytes(DATA[1:])),
    "another digest": body_of(index_of(digest=1)),
    "a piece behind the file": body_of(index_of(offset=8)),
    "a negative offset": body_of(index_of(offset=-4)),
    "a piece outside the tensor": body_of(index_of(region=Region((5, 0), (12, 5)), digest=1)),
    "another client": body_of(index_of(client=0)),
    "a client that there is not": body_of(index_of(client=2)),
    "another save": body_of(index_of(save=SaveId(7, 11, 2, False, "0a1b2c3d"))),
    "a dtype that there is not": body_of(index_of(dtype="object")),
    "more bytes than there are": body_of(index_of(nbytes=1 << 60)),
    "a negative number of bytes": body_of(index_of(nbytes=-1)),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_copy(server, folder, peer, kind):
    """Situations 14 and 30: nothing of it counts, nothing is left, and the server takes the next one."""
    before = folder.used_nbytes()
    assert request(server, "PUT", f"/v1/parts/{NAME}/1", BODIES[kind]) in (0, 400, 409, 507)
    assert folder.parts().voted == {}
    assert folder.used_nbytes() <= before + 8192, "one file at most waits to be used again"
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert folder.parts().voted == {SAVE: frozenset({1})}


@pytest.mark.parametrize("length", ["", "-1", "x", "99999999999999999999999", "1e9", "\u00b2"])
def test_a_hostile_length(server, folder, peer, length):
    answer = request(server, "PUT", f"/v1/parts/{NAME}/1", body_of(index_of()), headers={"Content-Length": length})
    assert answer in (0, 400, 409)
    assert folder.parts().voted == {}
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)


QUESTIONS = [b"", b"garbage", b"[1]", b"[[0]]", b"[[9, [0, 0], [1, 1]]]", b"[[-9, [0, 0], [1, 1]]]"]
QUESTIONS += [b'[["0", [0, 0], [1, 1]]]', b"[" * 100_000, b"[[0, null, null]]", b"null", b"\xff"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_hostile_question(server, peer, question):
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert request(server, "POST", f"/v1/read/{NAME}/1", question) in (400, 404, 409, 500)
    assert read(peer, 0, (0, 0), (12, 5)) == bytes(DATA)


@pytest.mark.parametrize("box", [(0, (0, 0), (13, 5)), (0, (11, 4), (2, 2)), (1, (0, 0), (1, 1)), (0, (0,), (61,))])
def test_a_box_outside_its_piece(peer, box):
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    with pytest.raises((CheckpointCorruptError, StorageError)):
        read(peer, *box)


def test_what_is_not_here(peer):
    for call in (lambda: read(peer, 0, (0, 0), (1, 1)), lambda: peer.text(5)):
        with pytest.raises(StorageError, match="not on this host"):
            call()
    assert peer.indexes(SAVE) == []


def test_a_damaged_part_is_not_given_away(peer, folder):
    """Situation 15: the holder looks at each piece before it answers."""
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    (file,) = folder.path.rglob("1.data")
    with file.open("r+b") as opened:
        opened.seek(200)
        opened.write(b"\xff")
    with pytest.raises(CheckpointCorruptError, match=r"host here.*damaged at 'w'"):
        read(peer, 0, (0, 0), (1, 1))


def test_a_request_that_ends_amid_its_body(server, folder, peer):
    """Situation 10: the sender dies; what came is no part, and its memory is used again."""
    for _ in range(5):
        connection = HTTPConnection(server.url, timeout=5)
        connection.putrequest("PUT", f"/v1/parts/{NAME}/1")
        connection.putheader("Authorization", f"Bearer {TOKEN}")
        body = body_of(index_of())
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:-40])
        connection.close()
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert folder.parts().voted == {SAVE: frozenset({1})}
    assert len(list(folder.path.rglob("*.data"))) <= 6


def test_no_space_is_said_with_numbers(peer, folder):
    big = index_of(nbytes=2 << 20)
    with pytest.raises(StorageFullError, match=r"host here.*1\.0 MiB.*2\.0 MiB more are needed"):
        peer.put(SAVE, 1, big.to_bytes(), memoryview(bytes(2 << 20)), None)


def test_a_text_that_is_another_one(server, peer):
    server.keep_texts({5: b"not of digest 5"})
    with pytest.raises(CheckpointCorruptError, match="differs from its client's announcement"):
        peer.text(5)


def test_an_answer_that_is_cut_short(folder):
    """An answer is as long as the question asks, and has its digest, or it is refused."""

    def serve(answer):
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))

    for answer in (b"", b"1234", b"12345678", b"1234" + b"12345678"):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=serve, args=(answer,))
            thread.start()
            with pytest.raises(CheckpointCorruptError, match=r"damaged on its way|ended before its length"):
                read(Peer(f"127.0.0.1:{listening.getsockname()[1]}", "there", "", 5.0), 0, (0,), (1,))
            thread.join(10)


def test_indexes_that_lie_about_their_lengths():
    def serve():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            body = (1 << 62).to_bytes(8, "big") + json.dumps({}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        (file,) = Peer(f"127.0.0.1:{listening.getsockname()[1]}", "there", "", 5.0).indexes(SAVE)
        thread.join(10)
    with pytest.raises(CheckpointCorruptError):
        PartIndex.from_bytes(file)


@pytest.mark.parametrize("left", [0, 100, 239])
def test_a_file_that_was_cut_short(peer, folder, left):
    """Situation 16: the asking client hears of it at once, and does not wait for the missing bytes."""
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    (file,) = folder.path.rglob("1.data")
    with file.open("r+b") as opened:
        opened.truncate(left)
    for box in [((0, 0), (12, 5)), ((11, 0), (1, 5))]:
        start = time.monotonic()
        with pytest.raises((CheckpointCorruptError, StorageError)):
            read(peer, 0, *box)
        assert time.monotonic() - start < WAIT_S / 2


def test_a_file_that_is_gone(peer, folder):
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    (file,) = folder.path.rglob("1.data")
    file.unlink()
    start = time.monotonic()
    with pytest.raises((CheckpointCorruptError, StorageError)):
        read(peer, 0, (0, 0), (12, 5))
    assert time.monotonic() - start < WAIT_S / 2


# --- boxes that have digests, and changes --------------------------------------------------------------------------

COLUMN = Region((0, 1), (12, 2))
LATER = SaveId(8, 11, 2, False, "0a1b2c3d")


def put(folder, save, elements):
    """Put a part with a digest of a box, as its writer does; return the index."""
    data, region = memoryview(elements.numpy()).cast("B"), COLUMN
    index = index_of(save=save, digest=piece_digest("w", WHOLE, elements.numpy()))
    box = PartBox(0, region, piece_digest("w", region, elements.numpy()[region.slices()].copy()))
    index = replace(index, boxes=(box,))
    file = folder.take(NBYTES)
    file.view[:NBYTES] = data
    folder.put(file, index, index.to_bytes(), is_voted=True)
    return index


def box_request(index, buffer, base=None):
    box = index.boxes[0]
    target = np.frombuffer(buffer, np.float32).reshape(COLUMN.shape)
    return BoxRequest(0, COLUMN, target, target.dtype, piece_seed("w", COLUMN), box.digest, base)


def test_a_box_with_a_digest_is_verified_by_its_reader(server, peer, folder, monkeypatch):
    """The server does not even look at it; damage in the server's memory is found where the bytes arrive."""
    index = put(folder, SAVE, ELEMENTS)
    monkeypatch.setattr(OpenPart, "elements", None)
    buffer = bytearray(12 * 2 * 4)
    assert peer.read(SAVE, 1, [box_request(index, buffer)]) == len(buffer)
    assert buffer == ELEMENTS[:, 1:3].contiguous().numpy().tobytes()
    folder._filled[SAVE, 1].view[4] ^= 1
    with pytest.raises(CheckpointCorruptError, match="host here: a piece of the part of client 1 is damaged"):
        peer.read(SAVE, 1, [box_request(index, buffer)])


@pytest.mark.parametrize("fault", ["", "no base", "other memory", "base removed", "base damaged"])
def test_changes_from_another_save(server, peer, folder, fault):
    old, new = put(folder, SAVE, ELEMENTS), ELEMENTS.clone()
    new[7, 2] = -1
    index = put(folder, LATER, new)
    buffer = bytearray(12 * 2 * 4)
    peer.read(SAVE, 1, [box_request(old, buffer)])
    base = old.boxes[0].digest
    match fault:
        case "no base":
            base += 1
        case "other memory":
            buffer[9] ^= 1
        case "base removed":
            folder.remove(SAVE, 1)
            server.forget_part(SAVE, 1)
        case "base damaged":  # in the element that changed: as if it had not
            folder._filled[SAVE, 1].view[(7 * 5 + 2) * 4 :][:4] = new.numpy()[7, 2].tobytes()
    sent = peer.read(LATER, 1, [box_request(index, buffer, base)])
    assert buffer == new[:, 1:3].contiguous().numpy().tobytes()
    # Head, gap and value; then the whole box where the digest of the result was another.
    changes = 9 + 1 + 4 if fault in ("", "other memory") else 9 if fault == "base damaged" else 0
    assert sent == changes + (len(buffer) if fault else 0)


def test_changes_that_are_longer_than_the_box(server, peer, folder, monkeypatch):
    index = put(folder, SAVE, ELEMENTS)
    monkeypatch.setattr(server_module, "_changes", lambda *_: bytes(12 * 2 * 4))
    with pytest.raises(CheckpointCorruptError, match="longer than the box"):
        peer.read(SAVE, 1, [box_request(index, bytearray(12 * 2 * 4), base=1)])


def test_boxes_are_announced_to_the_client_that_makes_the_parts(folder):
    boxes = AnnouncedBoxes(1)
    boxes.digested(index_of(), DATA)
    server = PartServer(folder, "127.0.0.1", 2.0, boxes=boxes)
    try:
        server.open(TOKEN)
        peer = Peer(server.url, "here", TOKEN, 5.0)
        peer.announce(SAVE, 1, announcement([("w", COLUMN)]))
        assert len(boxes.digested(index_of(), DATA).boxes) == 1
        for client, text, reason in [(0, b"[]", "are not made here"), (1, b"{", "cannot be read")]:
            with pytest.raises((StorageError, CheckpointCorruptError), match=reason):
                peer.announce(SAVE, client, text)
        path = f"/v1/boxes/{SAVE.name}/1"
        assert request(server, "POST", path, b"[]", token="none") in (0, 403)
        assert request(server, "POST", path, headers={"Content-Length": str(MAX_ANNOUNCEMENT_NBYTES + 1)}) in (0, 400)
    finally:
        server.close()


def test_a_server_that_makes_no_parts_takes_no_boxes(peer):
    with pytest.raises(StorageError, match="are not made here"):
        peer.announce(SAVE, 1, announcement([("w", COLUMN)]))


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_that_stands_for_all_is_refused(tmp_path, address):
    """Other hosts would be told of it, and would ask themselves."""
    with pytest.raises(ConfigError, match="is no address that other hosts could reach"):
        PartServer(HostFolder(tmp_path, "root", host="here"), address, 10.0)


@pytest.mark.parametrize(
    ("master", "towards", "expected"),
    [
        ("train-0", "coordinator:5", "10.0.0.1"),
        ("localhost", "coordinator:5", "10.0.0.2"),
        ("", "[fd00::1]:5", "fd00::2"),
        ("localhost", "localhost:5", "127.0.0.1"),
        ("localhost", "", "127.0.0.1"),
    ],
)
def test_own_address(monkeypatch, master, towards, expected):
    """A job on one host may be read from others, which reach the coordinator."""
    ways = {"train-0": "10.0.0.1", "coordinator": "10.0.0.2", "fd00::1": "fd00::2", "localhost": "127.0.0.1"}
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(peers, "_address_towards", lambda host, _: ways[host])
    assert peers.own_address(towards) == expected
