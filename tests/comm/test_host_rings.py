"""Rings of buffers in shared memory: two clients in one process, each with a ring."""

import threading

import numpy as np
import pytest

from dtckpt.comm import host_rings
from dtckpt.comm.host_rings import NUM_SLOTS, HostRings, OwnRing
from dtckpt.errors import BarrierTimeoutError, CheckpointCorruptError


@pytest.fixture
def pair():
    owns = [OwnRing(), OwnRing()]
    addresses = {client: own.address for client, own in enumerate(owns)}
    pair = [HostRings(own, addresses, client, 0.3) for client, own in enumerate(owns)]
    yield pair
    for rings in pair:
        rings.__exit__(None, None, None)


def join(pair):
    """Let both join; return their findings."""
    found = {}
    threads = [threading.Thread(target=lambda each=each: found.update({id(each): each.join()})) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found.get(id(each)) for each in pair]


def wait_forever(rings, clients):
    while True:
        rings.wait(clients)


def test_spans_arrive_in_order_and_slots_are_filled_again_only_when_they_are_consumed(pair):
    assert join(pair) == [True, True]
    producer, consumer = pair
    consumed, produced = [], 0
    draw = np.random.default_rng(0)
    while len(consumed) < 100:
        if draw.random() < 0.6 and (slot := producer.take_slot(1000, 64 * produced, NUM_SLOTS)) is not None:
            slot[:] = produced
            producer.publish()
            produced += 1
        elif (span := consumer.next_span(0, 1000)) is not None:
            assert (span == span[0]).all()
            consumed.append(int(span[0]))
            consumer.consume(0)
        assert produced - len(consumed) <= NUM_SLOTS
    assert consumed == list(range(100))


def test_no_more_slots_are_in_use_than_the_limit(pair):
    assert join(pair) == [True, True]
    for _ in range(2):
        assert pair[0].take_slot(10, 0, 2) is not None
        pair[0].publish()
    assert pair[0].take_slot(10, 0, 2) is None
    assert pair[0].slow_consumers() == [1]
    pair[1].consume(0)
    assert pair[0].take_slot(10, 0, 2) is not None


def test_others_cannot_write_to_a_ring(pair):
    assert join(pair) == [True, True]
    pair[0].take_slot(10, 0, NUM_SLOTS)
    pair[0].publish()
    assert not pair[1].next_span(0, 10).flags.writeable


@pytest.mark.parametrize("first", [0, 1])
def test_a_client_that_leaves_before_it_joined_is_a_refusal(pair, first):
    pair[first].__exit__(None, None, None)
    assert pair[1 - first].join() is False


def test_a_client_that_cannot_open_a_ring_makes_all_refuse(pair, monkeypatch):
    opened, cls = [], host_rings._PeerRing

    def open_first_only(address):
        opened.append(address)
        if len(opened) > 1:
            raise PermissionError("forbidden")
        return cls(address)

    monkeypatch.setattr(host_rings, "_PeerRing", open_first_only)
    found = []
    thread = threading.Thread(target=lambda: found.append(pair[0].join()))
    thread.start()
    while not opened:
        pass
    found.append(pair[1].join())
    pair[1].__exit__(None, None, None)
    thread.join(10)
    assert found == [False, False]


def test_an_error_reaches_the_other_client(pair):
    assert join(pair) == [True, True]
    pair[0].__exit__(CheckpointCorruptError, CheckpointCorruptError("chunk 3 is damaged"), None)
    with pytest.raises(CheckpointCorruptError, match="chunk 3 is damaged"):
        pair[1].wait([0])


def test_a_wait_is_bounded(pair):
    assert join(pair) == [True, True]
    with pytest.raises(BarrierTimeoutError, match=r"clients \[0\] of this host"):
        wait_forever(pair[1], [0])


def test_another_file_at_the_address_is_refused(pair):
    rings = HostRings(OwnRing(), {0: pair[0]._own.address._replace(token=1), 1: pair[1]._own.address}, 1, 1.0)
    with rings:
        assert rings.join() is False
