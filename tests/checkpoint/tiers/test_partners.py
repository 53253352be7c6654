"""Hosts that take no copies: saves go on with fewer copies, no step waits, and one warning names the host."""

import functools
import socket
import threading
import time

import pytest

from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import PartIndex, PartPiece, PartTensor, SaveId
from dtckpt.checkpoint.tiers import replicator as replicators
from dtckpt.checkpoint.tiers.replicator import OutgoingPart, Replicator
from dtckpt.errors import StorageError
from dtckpt.layout.region import Region

from . import tier_faults

HOSTS = ["host0", "host1"]


@pytest.mark.share(1)
@pytest.mark.parametrize("fault", sorted(tier_faults.PARTNERS))
def test_a_partner_that_takes_no_copies(pool, tmp_path, fault):
    """Situation 19, and its end."""
    by_client = {0: ("",), 1: ("host1",)}
    answers = pool.values(
        tier_faults.save_with_partner, tmp_path / "root", tmp_path / "tier", HOSTS, fault, [2, 3, 4],
        clients=2, group=True, by_client=by_client,
    )  # fmt: skip
    # Each of the three saves would wait for the tier's timeout of 1 s; a slow machine alone may hold up one of them.
    assert max(min(answer["blocked"][1:4]) for answer in answers) < 1, "a save waits for no copy"
    assert max(answer["seconds"] for answer in answers) < 10
    trouble, end = answers[0]["told"]
    assert "host1 takes no copies" in trouble
    assert "step 2" in trouble
    assert "host1 takes copies again" in end
    assert answers[1]["told"] == []
    assert answers[1]["held"][6] == [0, 1]


def test_nobody_waits_at_the_end_for_copies_that_do_not_come(pool, tmp_path):
    by_client = {0: ("",), 1: ("host1",)}
    answers = pool.values(
        tier_faults.save_with_partner, tmp_path / "root", tmp_path / "tier", HOSTS, "full", [4, 5, 6],
        clients=2, group=True, by_client=by_client,
    )  # fmt: skip
    assert max(answer["seconds"] for answer in answers) < 5
    assert answers[1]["held"][6] == [1]
    # The newest step with all copies is kept beside the steps that lack some.
    assert answers[1]["held"][3] == [0, 1]
    assert sorted(answers[0]["held"]) == [3, 5, 6]


class SlowPeer(Peer):
    """A host that takes a copy when it is told to."""

    def __init__(self, host):
        super().__init__("127.0.0.1:1", host, "", 1.0)
        self.is_asked, self.may_take = threading.Event(), threading.Semaphore(0)
        self.taken, self.fails = [], False

    def put(self, save, client, index, data, max_rate):
        self.is_asked.set()
        assert self.may_take.acquire(timeout=10)
        if self.fails:
            raise StorageError(f"host {self.host}: it does not answer")
        self.taken.append(save.step)
        return len(data)


def save_of(step):
    return SaveId(step, step, 1, False, "00000000")


def submit(replicator, step, *peers, is_agreed=True):
    ended, save = threading.Event(), save_of(step)
    protect = functools.partial(replicator.protect, save)
    index = PartIndex(save, 0, 2, b"{}", (), (), {})
    replicator.submit(OutgoingPart(save, 0, index, memoryview(b"12"), peers, ended.set, protect, is_agreed))
    return ended


def test_a_late_copy_is_left_out():
    """Situation 19: of the saves that wait, only the newest is sent; every one of them lets go of its memory."""
    peer, replicator = SlowPeer("slow"), Replicator(None)
    assert replicator.is_free
    ended = [submit(replicator, 1, peer)]
    assert peer.is_asked.wait(10)
    ended += [submit(replicator, step, peer, is_agreed=False) for step in (2, 3, 4)]
    assert not replicator.is_free
    assert ended[1].wait(10)
    assert ended[2].wait(10)
    assert not ended[0].is_set()
    peer.may_take.release()
    peer.may_take.release()
    assert replicator.wait(10)
    assert peer.taken == [1, 4]
    assert [save.step for save in replicator.protected] == [1, 4]
    assert all(each.wait(10) for each in ended)
    assert replicator.nbytes_sent == 4


@pytest.mark.parametrize(("max_rate", "seconds", "is_told"), [(None, 1, False), (None, 100, True), (1e6, 100, False)])
def test_a_slow_link(monkeypatch, caplog, max_rate, seconds, is_told):
    """Situation 29: it is said once, and not if a rate was asked for."""
    now = 0.0

    class Link(SlowPeer):
        def put(self, save, client, index, data, max_rate):
            nonlocal now
            now += seconds
            return len(data)

    monkeypatch.setattr(replicators.time, "monotonic", lambda: now)
    caplog.set_level("INFO", "dtckpt.tiers")
    replicator = Replicator(max_rate, link_rate=1e8)
    data = memoryview(bytes(64 << 20))
    for step in (1, 2):
        index = PartIndex(save_of(step), 0, len(data), b"{}", (), (), {})
        replicator._send(OutgoingPart(save_of(step), 0, index, data, [Link("far")], int, int))
    told = [record.message for record in caplog.records]
    assert len(told) == 1 + is_told
    assert "host far takes copies at" in told[0]
    assert not is_told or "LocalTier(address=...)" in told[1]


def test_what_all_send_is_sent():
    """A newer save takes the place of an older one, but not of one on which the clients agreed."""
    peer, replicator = SlowPeer("slow"), Replicator(None)
    submit(replicator, 1, peer, is_agreed=False)
    assert peer.is_asked.wait(10)
    assert replicator.is_free, "what is sent is nothing that the others wait for"
    submit(replicator, 2, peer)
    assert not replicator.is_free
    for step in (3, 4, 5):
        submit(replicator, step, peer, is_agreed=False)
    for _ in range(3):
        peer.may_take.release()
    assert replicator.wait(10)
    assert peer.taken == [1, 2, 5]
    assert replicator.is_free


def test_memory_while_a_host_takes_none():
    """Then agreed copies are left out, too: each keeps its memory for as long as a host does not answer."""
    peer, replicator = SlowPeer("slow"), Replicator(None)
    peer.fails = True
    peer.may_take.release()
    submit(replicator, 1, peer)
    assert replicator.wait(10)
    peer.is_asked.clear()
    first = submit(replicator, 2, peer)
    assert peer.is_asked.wait(10)
    ended = [submit(replicator, step, peer) for step in range(3, 20)]
    assert all(each.is_set() for each in ended[:-1])
    assert not first.is_set()
    peer.fails = False
    peer.may_take.release()
    peer.may_take.release()
    assert replicator.wait(10)
    assert peer.taken == [2, 19]


def test_one_host_of_two_in_trouble(caplog):
    """The other one gets its copies; a step is protected when both have them."""
    good, bad, replicator = SlowPeer("good"), SlowPeer("bad"), Replicator(None)
    bad.fails = True
    for step in range(1, 6):
        bad.fails = step < 4
        good.may_take.release()
        bad.may_take.release()
        submit(replicator, step, good, bad)
        assert replicator.wait(10)
        assert replicator.is_free, "a host that waits for a host in trouble holds up no other host"
    assert good.taken == [1, 2, 3, 4, 5]
    assert bad.taken == [4, 5]
    assert [save.step for save in replicator.protected] == [4, 5]
    assert ["bad takes no copies" in record.getMessage() for record in caplog.records] == [True, False]


def test_a_host_that_never_answers():
    """A server that accepts and says nothing costs the time that the options allow, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(f"127.0.0.1:{silent.getsockname()[1]}", "silent", "token", 0.2)
        save = SaveId(1, 1, 1, False, "00000000")
        for call in (
            lambda: peer.put(save, 0, b"", memoryview(bytes(64 << 20)), None),
            lambda: peer.read(save, 0, []),
            lambda: peer.indexes(save),
        ):
            start = time.monotonic()
            with pytest.raises(StorageError, match="host silent"):
                call()
            assert time.monotonic() - start < 5


def test_a_host_that_is_gone():
    peer = Peer("127.0.0.1:1", "gone", "token", 5.0)
    with pytest.raises(StorageError, match=r"host gone.*refused"):
        peer.indexes(SaveId(1, 1, 1, False, "00000000"))


def test_a_copy_that_comes_after_its_run_was_abandoned_protects_nothing():
    peer, replicator = SlowPeer("slow"), Replicator(None)
    saves = [SaveId(step, step, 1, False, "00000000") for step in range(5)]
    for save in saves[1:3]:
        replicator.protect(save)
    ended = submit(replicator, 3, peer)
    replicator.go_back(saves[1], newest=3)
    peer.may_take.release()
    assert ended.wait(10)
    assert replicator.wait(10)
    assert peer.taken == [3]
    replicator.protect(saves[4])
    assert replicator.protected == (saves[1], saves[4])


class SparingPeer(Peer):
    """A host that notes the copies it gets; it may have lost the part before."""

    def __init__(self, host):
        super().__init__("127.0.0.1:1", host, "", 1.0)
        self.got, self.has_lost = [], False

    def put(self, save, client, index, data, max_rate, *, base=None, held=()):
        if base is not None and self.has_lost:
            raise StorageError(f"host {self.host}: not on this host")
        nbytes = len(data) - sum(each.stop - each.start for each in held)
        self.got.append((save.step, base and base.step, nbytes))
        return nbytes


def test_pieces_that_a_host_holds_are_not_sent_again():
    near, far, replicator = SparingPeer("near"), SparingPeer("far"), Replicator(None)
    tensors = PartTensor("frozen", (1 << 18,), "int8", None), PartTensor("adapter", (1 << 16,), "int8", None)

    def send(step, *peers):
        pieces = (
            PartPiece(0, Region((0,), (1 << 18,)), 0, (1,), 1),
            PartPiece(1, Region((0,), (1 << 16,)), 1 << 18, (1,), 100 + step),
        )
        index = PartIndex(save_of(step), 0, 5 << 16, b"{}", tensors, pieces, {})
        replicator.submit(OutgoingPart(save_of(step), 0, index, memoryview(bytes(5 << 16)), peers, int, int))
        assert replicator.wait(10)

    for step in (1, 2):
        send(step, near, far)
    far.has_lost = True
    send(3, near, far)
    far.has_lost = False
    send(4, near, far)
    whole, changed = 5 << 16, 1 << 16
    assert near.got == [(1, None, whole), (2, 1, changed), (3, 2, changed), (4, 3, changed)]
    assert far.got == [(1, None, whole), (2, 1, changed), (3, None, whole), (4, 3, changed)]
    assert replicator.nbytes_sent == 3 * whole + 5 * changed
