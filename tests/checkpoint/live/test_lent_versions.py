"""Versions that lie in the tensors of their publisher: `Publisher.publish(copy=False)`.

Either a reader gets the version whole, or it gets an error: whatever the tensors are changed to, and when.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.client_processes import Pool
from support.coordinators import ServerProcess, server_in_thread

import dtckpt
from dtckpt import Subscriber, errors
from dtckpt.checkpoint.parts import lending_folder, peers, server
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.layout.region import Region

from . import lent_cases
from .jobs_here import FEED, WAIT_S, Jobs, blank, has_step, weights


def lend(publisher, step, tree=None, **options):
    return publisher.publish(weights(step) if tree is None else tree, step=step, copy=False, **options)


def train(tree):
    for value in tree.values():
        value.fill_(7.0)


def test_a_lent_version_is_read_and_not_copied(jobs):
    publisher, target = jobs.publisher(), blank()
    with Subscriber(FEED, target) as subscriber:
        for step in (1, 2):
            tree = weights(step)
            with lend(publisher, step, tree):
                assert not list(jobs.folder.rglob("*.data"))
                assert jobs.update(subscriber).step == step
            train(tree)
            assert has_step(target, step)
        with pytest.raises(errors.VersionTimeoutError):
            jobs.fetch(subscriber, newer=False, timeout_s=0.1)
        publisher.publish(weights(3), step=3, wait=True)
        with lend(publisher, 4):
            assert jobs.update(subscriber).step == 4
        # The copied version is offered again.
        assert jobs.update(subscriber, newer=False).step == 3
    assert has_step(target, 3)


def test_tensors_of_any_strides_are_served(jobs):
    """And boxes that no reader has announced: the source verifies a copy of their piece."""
    publisher, generator = jobs.publisher(), torch.Generator().manual_seed(1)
    tree = {
        "transposed": torch.randn(30, 20, generator=generator).t(),
        "slice": torch.randn(40, 50, generator=generator)[3:30:2, 5:45],
        "expanded": torch.randn(1, 8, generator=generator).expand(6, 8),
        "number": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(9, 5, generator=generator).bfloat16(),
    }
    with jobs.being("engine"), lend(publisher, 1, tree):
        restored = dtckpt.restore("live://policy")
        assert all(restored[name].equal(value) for name, value in tree.items())
        box = {"slice": torch.zeros(14, 40)}
        with Subscriber(FEED, box, options=dtckpt.RestoreOptions(allow_unexpected=True)) as subscriber:
            jobs.update(subscriber)
        assert box["slice"].equal(tree["slice"])
        with dtckpt.open_checkpoint("live://policy") as checkpoint:
            region = Region((2, 3), (17, 9))
            assert checkpoint.read("transposed", region).equal(tree["transposed"][region.slices()])


def opened(jobs):
    """Open the version as another job, which has a lease until it closes it."""
    with jobs.being("slow"):
        return dtckpt.open_checkpoint("live://policy")


def test_the_exit_waits_for_readers(jobs):
    publisher, tree = jobs.publisher(timeout_s=WAIT_S), weights(1)
    with lend(publisher, 1, tree):
        held = opened(jobs)
        assert held.read("a").equal(weights(1)["a"])
        read = []

        def go_on():
            time.sleep(0.5)
            read.append(held.read("b"))
            held.close()

        reader = threading.Thread(target=go_on)
        reader.start()
    assert read[0].equal(weights(1)["b"]), "the exit came before the reader had done"
    reader.join()
    train(tree)


@pytest.mark.parametrize("region", [Region((0, 0), (8, 6)), Region((0, 1), (8, 3))], ids=["piece", "box"])
def test_a_late_reader_gets_nothing_more(jobs, region):
    publisher, tree = jobs.publisher(), weights(1)
    publisher._timeout_s = 0.3  # and not the time that the server gives a request
    start = time.monotonic()
    held = []

    def be_late():
        with lend(publisher, 1, tree):
            held.append(opened(jobs))
            assert held[0].read("a", region).equal(weights(1)["a"][region.slices()])

    with pytest.raises(errors.VersionLeasedError, match=r"leased by 'slow/.*waited for 0.3 s.* take a newer version"):
        be_late()
    assert time.monotonic() - start < WAIT_S
    train(tree)
    for name in ("a", "b"):
        with pytest.raises(
            errors.SourceLostError, match="was in the memory of its publisher's training, which goes on"
        ):
            held[0].read(name, region)
    # Neither the reader nor its lease is in the way of what comes next.
    with Subscriber(FEED, blank()) as subscriber:
        with lend(publisher, 2):
            assert jobs.update(subscriber).step == 2
        assert publisher.publish(weights(3), step=3, wait=True) is not None
        assert jobs.update(subscriber).step == 3
    held[0].close()


@pytest.mark.parametrize("moment", ["before", "verified", "sent"])
@pytest.mark.parametrize("region", [Region((0, 0), (8, 6)), Region((0, 1), (8, 3))], ids=["piece", "box"])
def test_tensors_that_change_too_early_are_found(jobs, monkeypatch, region, moment):
    """Situation 17: training breaks its word. A reader gets the old elements, or an error."""
    publisher, tree = jobs.publisher(), weights(1)
    with lend(publisher, 1, tree):
        held = opened(jobs)
        if moment == "before":
            train(tree)
        elif moment == "sent":

            def answer(handler, parts, *status, whole=server._PartHandler._answer):
                train(tree)
                whole(handler, parts, *status)

            monkeypatch.setattr(server._PartHandler, "_answer", answer)
        else:
            # After the look at the piece that a box lies in, before its digest for the way.
            assert held.read("a", region).equal(weights(1)["a"][region.slices()])
            train(tree)
        try:
            assert held.read("a", region).equal(weights(1)["a"][region.slices()])
        except errors.CheckpointCorruptError:
            pass
        else:
            assert moment != "before"
        held.close()


def test_memory_that_is_lent_no_more():
    memory, elements = LentMemory(), weights(1)["a"].numpy()
    offset, steps = memory.place(elements)
    assert (offset, steps) == (0, (6, 1))
    assert memory.elements(0) is elements
    memory.end()
    with pytest.raises(FileNotFoundError, match="training, which goes on"):
        memory.elements(0)


def test_an_error_of_the_body_goes_first(jobs):
    publisher, tree = jobs.publisher(timeout_s=WAIT_S), weights(1)
    start = time.monotonic()
    held = []

    def fail():
        with lend(publisher, 1, tree):
            held.append(opened(jobs))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert time.monotonic() - start < WAIT_S / 2, "it waits for no reader"
    train(tree)
    with pytest.raises(errors.SourceLostError):
        held[0].read("b")
    held[0].close()
    with lend(publisher, 2):
        target = blank()
        with Subscriber(FEED, target) as subscriber:
            assert jobs.update(subscriber).step == 2
    assert has_step(target, 2)


def test_one_loan_at_a_time(jobs):
    publisher = jobs.publisher()
    with lend(publisher, 1) as first:
        for copy in (True, False):
            with pytest.raises(errors.ConfigError, match="the version of step 1 is in the training's tensors"):
                publisher.publish(weights(2), step=2, copy=copy)
    assert publisher.publish(weights(2), step=2, wait=True) is not None
    with lend(publisher, 3), first:
        pass  # a loan ends once, and no other loan with it
    with lend(publisher, 4):
        with first:
            pass
        assert jobs.update(Subscriber(FEED, blank())).step == 4


def test_a_publisher_that_is_closed_amid_a_loan(jobs):
    publisher, tree = jobs.publisher(timeout_s=0.2), weights(1)
    with lend(publisher, 1, tree):
        held = opened(jobs)
        publisher.close()
        train(tree)
        with pytest.raises(errors.SourceLostError):
            held.read("a")
        held.close()
    assert not list(jobs.folder.rglob("*.data"))


def test_what_cannot_be_lent(jobs, monkeypatch):
    publisher = jobs.publisher()
    with pytest.raises(errors.ConfigError, match="copy=False makes no copy that could be cast"):
        publisher.publish(weights(1), step=1, copy=False, cast={"*": torch.bfloat16})
    conjugate = torch.zeros(4, 4, dtype=torch.complex64).conj()
    with pytest.raises(errors.ConfigError, match=r"copy=False serves tensors from their own memory.* 'c'"):
        lend(publisher, 1, weights(1) | {"c": conjugate})
    # The publisher is as it was.
    with lend(publisher, 2):
        assert jobs.update(Subscriber(FEED, blank())).step == 2


def test_digests_that_fail_lend_nothing(jobs, monkeypatch):
    publisher, tree = jobs.publisher(), weights(1)
    with monkeypatch.context() as patch:
        patch.setattr(lending_folder.LendingFolder, "lend", _raise)
        with pytest.raises(OSError, match="full"):
            lend(publisher, 1, tree)
    with Subscriber(FEED, blank()) as subscriber:
        with pytest.raises(errors.VersionTimeoutError):
            jobs.fetch(subscriber, timeout_s=0.1)
        with lend(publisher, 2):
            assert jobs.update(subscriber).step == 2


def _raise(*_):
    raise OSError("full")


def test_relays_serve_a_lent_version_on(jobs, monkeypatch, tmp_path):
    """The relay pulls it whole; when the loan is over no reader begins to read it there."""
    publisher, tree, target = jobs.publisher(timeout_s=WAIT_S), weights(1), blank()
    monkeypatch.setenv("DTCKPT_HOST", "engine host")
    with Subscriber(FEED, target, serve=True, folder=tmp_path / "relay", address="127.0.0.1") as relay:
        with lend(publisher, 1, tree):
            jobs.update(relay)
            assert relay.report.nbytes_mapped == sum(value.nbytes for value in target.values())
            with jobs.being("judge"), dtckpt.open_checkpoint("live://policy") as checkpoint:
                assert checkpoint.read("a").equal(weights(1)["a"])
        train(tree)
        assert has_step(target, 1)
        with Subscriber(FEED, blank()) as late, pytest.raises(errors.VersionTimeoutError):
            jobs.fetch(late, "judge", timeout_s=0.1)


def test_lent_boxes_are_announced_and_held(jobs):
    """What a reader has is not sent, and later boxes are verified where they arrive, as of copied versions."""
    publisher, tree, target = jobs.publisher(), weights(1), {"a": torch.zeros(8, 6)}
    options = dtckpt.RestoreOptions(allow_unexpected=True)
    with Subscriber(FEED, target, options=options) as subscriber:
        for step in range(3):
            tree["a"][step] = float(step)
            with lend(publisher, step, tree):
                jobs.update(subscriber)
            assert target["a"].equal(tree["a"])
            assert subscriber.report.nbytes_verified == target["a"].nbytes
        with lend(publisher, 4, tree):
            jobs.update(subscriber)
        assert (subscriber.report.nbytes_received, subscriber.report.nbytes_unchanged) == (0, target["a"].nbytes)


def test_a_source_that_ends_amid_an_answer(jobs, monkeypatch):
    """The loan ends between two boxes of one answer: the reader gets neither of them."""
    publisher, tree = jobs.publisher(), weights(1)
    publisher._timeout_s = 0.2
    ended, goes_on = threading.Event(), threading.Event()

    def fill(answer, buffer, digest, whole=peers._Answer.fill):
        goes_on.set()
        assert ended.wait(WAIT_S)
        whole(answer, buffer, digest)

    monkeypatch.setattr(peers._Answer, "fill", fill)
    target, found = blank(), []
    with Subscriber(FEED, target) as subscriber:

        def read():
            try:
                jobs.update(subscriber)
            except errors.DtckptError as error:
                found.append(error)

        with pytest.raises(errors.VersionLeasedError), lend(publisher, 1, tree):  # noqa: PT012
            reader = threading.Thread(target=read)
            reader.start()
            assert goes_on.wait(WAIT_S)
        train(tree)
        ended.set()
        reader.join()
        assert found or has_step(target, 1)
        assert (subscriber.version is None) == bool(found)


@pytest.mark.processes
def test_the_coordinator_goes_amid_a_loan(tmp_path):
    """The coordinator does not know the readers then. Training goes on, and a coordinator that comes back offers the
    version to no reader."""
    coordinator = ServerProcess(heartbeat_timeout_s=2.0)
    jobs = Jobs(coordinator.port, tmp_path, heartbeat_timeout_s=2.0)
    try:
        publisher, tree = jobs.publisher(), weights(1)
        start = time.monotonic()
        with pytest.raises(errors.CoordinatorUnavailableError), lend(publisher, 1, tree):
            coordinator.kill()
        assert time.monotonic() - start < WAIT_S
        train(tree)
        coordinator = ServerProcess(port=coordinator.port, heartbeat_timeout_s=2.0)
        with Subscriber(FEED, blank()) as subscriber:
            with pytest.raises(errors.VersionTimeoutError):
                jobs.fetch(subscriber, timeout_s=4.0)
            with lend(publisher, 2):
                assert jobs.update(subscriber).step == 2
    finally:
        jobs.close()
        coordinator.kill()


@pytest.mark.processes
def test_loans_of_two_clients(tmp_path):
    """Both clients' exits end alike, whichever client a late reader still reads from, and whichever client raises."""
    with Pool() as trainers, Pool() as engines, server_in_thread(heartbeat_timeout_s=5.0) as port:
        options = {"group": True, "coordinator": f"127.0.0.1:{port}", "clients": 2}
        with ThreadPoolExecutor(1) as thread:
            lent = thread.submit(trainers.values, lent_cases.lend_to_readers, tmp_path, **options)
            found = engines.values(lent_cases.read_lent, tmp_path, **options)
            ends = lent.result()
    assert found == [[[], "SourceLostError"]] * 2
    for client, (first, second, third, fourth, is_quick) in enumerate(ends):
        assert (first, second, is_quick) == ("taken back", ("VersionLeasedError", True), True)
        assert third == ("ConfigError", True)
        assert fourth == ("KeyError" if client == 1 else "ClientFailedError")
