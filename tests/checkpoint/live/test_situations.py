"""The situations that live versions must survive, by their numbers.

===  ==========================================================================================================
 1   `test_01_reader_joins_amid_a_publish`, ``test_feeds.test_version_is_readable_with_its_last_part``
 2   ``test_feeds.test_publisher_that_dies_between_two_parts``, ``test_live_histories``
 3   `test_03_publisher_dies_after_its_version_is_readable`, `test_03_source_dies_amid_an_answer`
 4   `test_04_readers_that_die_amid_a_read`, ``test_feeds.test_lease_of_a_killed_reader_ends``
 5   ``test_situations_of_processes.test_05_one_client_fails``
 6   `test_06_update_in_place_that_fails`, `test_06_bytes_that_other_clients_bring_count`
 7   `test_07_publisher_comes_back_on_another_mesh`, ``test_live_histories``
 8   `test_08_steps_that_go_back`, ``test_feeds.test_step_that_goes_back_is_marked``
 9   `test_09_two_publishers_of_one_name`, ``test_feeds.test_two_publishers_of_one_name``
10   `test_10_slow_reader`, ``test_feed_rules.test_lease_has_a_longest_life``
11   `test_10_slow_reader`: versions have memory of their own
12   `test_12_versions_that_are_passed_over`
13   ``test_feeds.test_coordinator_is_killed_and_started_again``, ``test_live_histories``
14   `test_14_coordinator_goes_amid_a_read`, `test_14_publisher_ends_without_a_coordinator`
15   `test_15_publisher_that_cannot_ask_frees_nothing`
16   `test_16_source_that_does_not_answer`
17   `test_17_training_goes_on_after_publish`, `test_17_memory_that_was_freed_under_an_ended_lease`
18   needs a GPU: ``tests/test_gpu.py`` has saves of tensors on GPUs, which stage as `Publisher.publish` does
19   `test_19_staged_version_loses_its_memory_to_the_next`, `test_19_a_fetch_that_fails_drops_the_version_before`
20   ``test_live.test_another_job_takes_versions_onto_its_mesh``: a round trip, with the bytes that came
21   `test_21_no_version_before_the_first_apply`
22   ``test_live.test_updates_in_place``: `Subscriber.invalidate`
23   needs an engine: the cache is the engine's; see the adapters' tests
24   `test_24_layout_tags`
25   ``test_coverage``
26   `test_26_coverage_both_ways`, ``test_coverage``
27   `test_27_tied_tensors`, ``test_coverage.test_tied_parameters_are_covered_once``
28   `test_28_buffers`
29   `test_29_casts`, `test_29_dtype_is_the_published_one`
30   needs an engine: `test_24_layout_tags` and `test_26_coverage_both_ways` stand for it, with scales as tensors
31   ``test_live.test_another_job_takes_versions_onto_its_mesh``: addresses stay
32   needs an engine; `test_32_experts_move` stands for it
33   needs an engine: see the adapters' tests
34   `test_34_memory_of_the_publisher`, ``test_situations_of_processes.test_34_bound_of_a_host``
35   `test_35_memory_of_the_reader`
36   `test_36_versions_of_readers_are_visible`, `test_36_what_is_fetched_is_not_applied`
37   `test_37_nobody_on_the_other_side`
38   ``test_strangers.test_38_damaged_memory``
39   ``test_feed_rules.test_holders_show_that_they_have_the_version``; see the tests of readers that serve on
40   ``test_strangers.test_40_strangers_at_the_server``, ``test_feeds.test_tickets_are_checked_offline``
===  ==========================================================================================================
"""

import json
import socket
import threading
import time

import pytest
import torch
from support.coordinators import ServerProcess
from torch import nn

import dtckpt
from dtckpt import Subscriber, errors
from dtckpt.checkpoint.live import publisher as publisher_module
from dtckpt.checkpoint.live import sources
from dtckpt.checkpoint.live.version_checkpoint import save_of_lease
from dtckpt.checkpoint.parts import server as part_server
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.restore import StagedRestore
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.layout.clients import virtual_devices
from dtckpt.layout.region import Region

from .jobs_here import FEED, WAIT_S, Jobs, blank, files, has_step, publish, weights

# --- publishing and reading ------------------------------------------------------------------------------------------


def test_01_reader_joins_amid_a_publish(jobs, monkeypatch):
    publisher, target = jobs.publisher(), blank()
    with Subscriber(FEED, target) as subscriber:
        publish(publisher, 1)
        digested, goes_on = threading.Event(), threading.Event()

        def digest_late(data, digest=publisher_module.index_digest):
            digested.set()
            assert goes_on.wait(WAIT_S)
            return digest(data)

        monkeypatch.setattr(publisher_module, "index_digest", digest_late)
        handle = publish(publisher, 2, wait=False)
        assert digested.wait(WAIT_S)
        assert jobs.update(subscriber).step == 1
        assert has_step(target, 1)
        with pytest.raises(errors.VersionTimeoutError, match=r"version \d+ \(step 2\) has 0 of 1 parts"):
            jobs.fetch(subscriber, timeout_s=0.1)
        goes_on.set()
        handle.result()
        assert jobs.update(subscriber).step == 2
        assert has_step(target, 2)


def test_03_publisher_dies_after_its_version_is_readable(jobs, over_http):
    publish(jobs.publisher(), 1)
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        jobs.kill("trainer")  # the coordinator does not know yet
        with pytest.raises(errors.SourceLostError, match=r"client 0: host .*: read indexes: Connection"):
            jobs.fetch(subscriber)
        assert (subscriber.version, subscriber.is_mixed, has_step(target, 1)) == (None, False, False)


def test_03_source_dies_amid_an_answer(jobs, over_http, monkeypatch):
    publish(jobs.publisher(), 1)
    with Subscriber(FEED, blank()) as subscriber:

        def die(handler, *_):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n1234")
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True

        monkeypatch.setattr(part_server._PartHandler, "_read", die)
        with pytest.raises(errors.SourceLostError, match="the answer ended before its length"):
            jobs.fetch(subscriber)


def test_04_readers_that_die_amid_a_read(jobs, over_http):
    publisher = jobs.publisher()
    publish(publisher, 1)
    before = threading.active_count()
    lease = jobs.feeds("engine").subscribe(FEED, timeout_s=WAIT_S)
    save = save_of_lease(lease)
    url = publisher._server.url
    host, _, port = url.rpartition(":")
    body = json.dumps([[0, [0, 0], [8, 6], None]])
    request = (
        f"POST /v1/read/{save.name}/0 HTTP/1.1\r\nHost: {url}\r\nAuthorization: Bearer {lease.parts[0].ticket.hex()}"
        f"\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    for number in range(100):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request[: len(request) * (1 + number) // 100])
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        assert jobs.update(subscriber).step == 1
    assert has_step(target, 1)
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() > before + 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 8


def test_06_update_in_place_that_fails(jobs, monkeypatch):
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1)
    with Subscriber(FEED, target) as subscriber:
        jobs.update(subscriber, in_place=True)
        publish(publisher, 2)
        with monkeypatch.context() as patch:
            calls = []

            def copy(part, *args, whole=OpenPart.copy):
                calls.append(args)
                if len(calls) == 2:
                    raise OSError("the memory is gone")
                whole(part, *args)

            patch.setattr(OpenPart, "copy", copy)
            with pytest.raises(OSError, match="the memory is gone"):
                jobs.update(subscriber, in_place=True)
        assert (subscriber.version, subscriber.is_mixed, subscriber.ready()) == (None, True, False)
        assert not has_step(target, 1)
        assert not has_step(target, 2)
        assert jobs.update(subscriber, timeout_s=1.0).step == 2
        assert (subscriber.is_mixed, subscriber.ready(), has_step(target, 2)) == (False, True, True)


def test_06_bytes_that_other_clients_bring_count(jobs, monkeypatch):
    """A client that fails before its own first read may have been written by others already."""
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1)
    with Subscriber(FEED, target) as subscriber:
        jobs.update(subscriber)
        publish(publisher, 2)

        def read_all(*_, **__):
            target["a"].fill_(7.0)  # as an exchange between clients does
            raise errors.ClientLostError("client 1 is lost", clients=(1,))

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "read_all", read_all)
            with pytest.raises(errors.ClientLostError):
                jobs.update(subscriber, in_place=True)
        assert (subscriber.version, subscriber.is_mixed) == (None, True)


def test_06_a_staged_version_does_not_take_the_target_back(jobs):
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1)
    with Subscriber(FEED, target) as subscriber:
        staged = jobs.fetch(subscriber)
        publish(publisher, 2)
        jobs.update(subscriber, in_place=True)
        with pytest.raises(errors.CheckpointError, match="was applied or dropped"):
            staged.apply()
        assert (subscriber.version.step, has_step(target, 2)) == (2, True)


def test_07_publisher_comes_back_on_another_mesh(jobs):
    def on_mesh(step, devices):
        with virtual_devices(CPU=devices):
            mesh = dtckpt.create_mesh({"x": devices}, device_type="CPU")
            layout = dtckpt.Layout(["x", dtckpt.UNSHARDED], mesh)
            return {
                name: dtckpt.dtensor.distribute_tensor(value, mesh, layout.placements)
                for name, value in weights(step).items()
            }

    former = jobs.publisher()
    publish(former, 1, on_mesh(1, 4))
    target = blank()
    with Subscriber(FEED, target) as subscriber, jobs.being("judge"), dtckpt.open_checkpoint("live://policy") as held:
        jobs.update(subscriber)
        again = jobs.publisher(attempt=1)
        with pytest.raises(errors.FencedError, match="attempt 1"):
            publish(former, 2)
        for save in former._held.values():
            again._folder.remove_save(save)  # as the next attempt does when the former one is dead
        assert held.read("a").equal(weights(1)["a"])
        publish(again, 1, on_mesh(1, 2))
        publish(again, 2, on_mesh(2, 2))
        assert held.read("b").equal(weights(1)["b"])
        assert jobs.update(subscriber).step == 2
        assert has_step(target, 2)


def test_08_steps_that_go_back(jobs):
    publish(jobs.publisher(), 100)
    target = blank()
    with (
        Subscriber(FEED, target) as subscriber,
        Subscriber(FEED, blank(), allow_rewound=False) as forward,
    ):
        first = jobs.update(subscriber)
        jobs.update(forward)
        jobs.kill("trainer")
        publisher = jobs.publisher(attempt=1)
        publish(publisher, 90)
        rewound = jobs.update(subscriber)
        assert (rewound.step, rewound.is_rewound, rewound.number > first.number) == (90, True, True)
        assert jobs.update(forward, timeout_s=0) is None
        publish(publisher, 101)
        assert jobs.update(forward).step == 101


def test_09_two_publishers_of_one_name(jobs):
    publish(jobs.publisher(), 1)
    with pytest.raises(errors.FencedError, match="is published by job 'trainer', attempt 0, which is alive"):
        jobs.publisher("rival")


def test_10_slow_reader(jobs):
    """And a publisher that is faster than its readers: memory is named by version, and none is used twice."""
    publisher = jobs.publisher(keep=1, when_full="raise")
    publish(publisher, 1)
    with jobs.being("slow"), dtckpt.open_checkpoint("live://policy") as held:
        publish(publisher, 2)
        with pytest.raises(errors.StorageFullError, match=r"2 versions in memory, and keeps 1; .* is leased by 'slow/"):
            publish(publisher, 3)
        publisher._when_full = "skip"
        assert publish(publisher, 4) is None
        publisher._when_full, publisher._timeout_s = "wait", 0.3
        with pytest.raises(errors.StorageFullError):
            publish(publisher, 5)
        assert all(held.read(name).equal(value) for name, value in weights(1).items())
    assert publish(publisher, 6) is not None
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        assert jobs.update(subscriber).step == 6
    assert has_step(target, 6)


def test_12_versions_that_are_passed_over(jobs):
    publisher, target = jobs.publisher(keep=3), blank()
    for step in (1, 2, 3):
        publish(publisher, step)
    with Subscriber(FEED, target) as subscriber:
        assert jobs.update(subscriber, step=2).step == 2
        assert jobs.update(subscriber).step == 3
        assert jobs.update(subscriber, timeout_s=0) is None
        assert jobs.update(subscriber, step=1, newer=False).step == 1
        with pytest.raises(errors.VersionTimeoutError, match="step 9"):
            jobs.fetch(subscriber, step=9, timeout_s=0.1)
        assert has_step(target, 1)


def test_19_staged_version_loses_its_memory_to_the_next(jobs):
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1)
    with Subscriber(FEED, target) as subscriber:
        first = jobs.fetch(subscriber)
        publish(publisher, 2)
        second = jobs.fetch(subscriber)
        with pytest.raises(errors.CheckpointError, match="was applied or dropped; fetch again"):
            first.apply()
        second.apply()
        assert (subscriber.version.step, has_step(target, 2)) == (2, True)
        with pytest.raises(errors.CheckpointError, match="was applied or dropped"):
            second.apply()


def test_19_a_fetch_that_fails_drops_the_version_before(jobs, monkeypatch):
    """Its memory has parts of both."""
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1)
    with Subscriber(FEED, target) as subscriber:
        first = jobs.fetch(subscriber)
        publish(publisher, 2)
        copies = []

        def copy(part, *args, whole=OpenPart.copy):
            copies.append(whole(part, *args))
            if len(copies) == 2:
                raise OSError("the memory is gone")

        with monkeypatch.context() as patch:
            patch.setattr(OpenPart, "copy", copy)
            with pytest.raises(OSError, match="the memory is gone"):
                jobs.fetch(subscriber)
        with pytest.raises(errors.CheckpointError, match="was applied or dropped"):
            first.apply()
        assert (subscriber.version, subscriber.is_mixed, has_step(target, 1)) == (None, False, False)
        assert jobs.update(subscriber).step == 2
    assert has_step(target, 2)


def test_21_no_version_before_the_first_apply(jobs):
    publish(jobs.publisher(), 1)
    with Subscriber(FEED, blank()) as subscriber:
        assert (subscriber.version, subscriber.ready()) == (None, False)
        staged = jobs.fetch(subscriber)
        assert (subscriber.version, subscriber.ready()) == (None, False)
        staged.apply()
        assert (subscriber.version.step, subscriber.ready()) == (1, True)
        subscriber.invalidate()
        assert not subscriber.ready()


def test_36_versions_of_readers_are_visible(jobs):
    publisher = jobs.publisher()
    with Subscriber(FEED, blank()) as one, Subscriber(FEED, blank()) as other:
        for step in (1, 2):
            publish(publisher, step)
            jobs.update(one, "engine-1")
            if step == 1:
                jobs.update(other, "engine-2")
        assert one.version.number > other.version.number
        await_uses(jobs, ("engine-1", one.version.number, "applied"), ("engine-2", other.version.number, "applied"))


def await_uses(jobs, *expected):
    """Wait until the registry says that readers use versions; they tell it in the background."""
    deadline = time.monotonic() + WAIT_S
    found = None
    while found != set(expected) and time.monotonic() < deadline:
        (status,) = jobs.feeds("judge").list()
        found = {(each.reader.partition("/")[0], each.number, each.outcome) for each in status.latest}
        time.sleep(0.01)
    assert found == set(expected)


@pytest.mark.parametrize("fails", [False, True])
def test_36_what_is_fetched_is_not_applied(jobs, monkeypatch, fails):
    publisher = jobs.publisher(keep=3)
    publish(publisher, 1)
    with Subscriber(FEED, blank()) as subscriber:
        first = jobs.fetch(subscriber)
        assert not first._choice.opened  # nothing of the publisher's memory stays mapped
        await_uses(jobs, ("engine", first.version.number, "fetched"))
        first.apply()
        await_uses(jobs, ("engine", first.version.number, "applied"))
        publish(publisher, 2)
        second = jobs.fetch(subscriber)
        before = ("engine", first.version.number, "applied")
        await_uses(jobs, before, ("engine", second.version.number, "fetched"))
        if not fails:
            second.apply()
            await_uses(jobs, ("engine", second.version.number, "applied"))
            publish(publisher, 3)
            last = jobs.update(subscriber, in_place=True)
            await_uses(jobs, ("engine", last.number, "applied"))
            return
        monkeypatch.setattr(StagedRestore, "apply", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.apply()
        assert subscriber.is_mixed
        await_uses(jobs, ("engine", second.version.number, "failed"))  # it has no whole version
        with pytest.raises(errors.VersionTimeoutError):
            jobs.fetch(subscriber, step=9, timeout_s=0.1)
        await_uses(jobs, ("engine", second.version.number, "failed"))


# --- clients that are gone, or do not answer -------------------------------------------------------------------------


@pytest.fixture
def killable(tmp_path):
    """Jobs, and a coordinator that can be killed."""
    server = ServerProcess(heartbeat_timeout_s=2.0)
    made = Jobs(server.port, tmp_path, heartbeat_timeout_s=2.0)
    try:
        yield server, made
    finally:
        server.kill()
        made.close()


@pytest.mark.processes
@pytest.mark.parametrize("in_place", [False, True])
def test_14_coordinator_goes_amid_a_read(killable, monkeypatch, in_place):
    server, jobs = killable
    publish(jobs.publisher(), 1)
    target = blank()
    with Subscriber(FEED, target) as subscriber:

        def copy(part, *args, whole=OpenPart.copy):
            server.kill()
            whole(part, *args)

        monkeypatch.setattr(OpenPart, "copy", copy)
        assert jobs.update(subscriber, in_place=in_place).step == 1
        assert (has_step(target, 1), subscriber.is_mixed) == (True, False)
        start = time.monotonic()
        with pytest.raises(errors.CoordinatorUnavailableError):
            jobs.fetch(subscriber, timeout_s=1.0)
        assert time.monotonic() - start < WAIT_S
        assert has_step(target, 1)


@pytest.mark.processes
def test_15_publisher_that_cannot_ask_frees_nothing(killable, over_http):
    """And it goes on serving readers that have tickets."""
    server, jobs = killable
    publisher = jobs.publisher(keep=1, max_nbytes=None)
    publish(publisher, 1)
    with jobs.being("judge"), dtckpt.open_checkpoint("live://policy") as reader:
        publish(publisher, 2)
        held = dict(publisher._held)
        memory = {path: path.read_bytes() for path in files(jobs.folder) if path.suffix == ".data"}
        server.kill()
        assert reader.read("a").equal(weights(1)["a"])
        start = time.monotonic()
        with pytest.raises(errors.CoordinatorUnavailableError):
            publish(publisher, 3)
        assert time.monotonic() - start < WAIT_S
        assert publisher._held == held
        assert {path: path.read_bytes() for path in memory} == memory


@pytest.mark.processes
def test_14_publisher_ends_without_a_coordinator(killable, monkeypatch):
    """Its versions are not offered again when the coordinator is back, though the process lives on."""
    server, jobs = killable
    publisher = jobs.publisher(keep=3)
    for step in (1, 2, 3):
        publish(publisher, step)
    server.kill()
    asked = []

    def counting(call):
        return lambda *args: [asked.append(call), call(*args)]

    with monkeypatch.context() as patch:
        for name in ("retire", "withdraw"):
            patch.setattr(FeedClient, name, counting(getattr(FeedClient, name)))
        publisher.close()
    assert len(asked) == 1, "it does not wait for the coordinator once for each version"
    assert files(jobs.folder) == []
    again = ServerProcess(port=server.port, heartbeat_timeout_s=2.0)
    try:
        with Subscriber(FEED, blank()) as subscriber, pytest.raises(errors.VersionTimeoutError):
            jobs.fetch(subscriber, timeout_s=4.0)
        other = jobs.publisher(keep=3)
        publish(other, 4)
        with Subscriber(FEED, blank()) as subscriber:
            assert jobs.update(subscriber).step == 4
        other.close()
    finally:
        again.kill()


def test_14_a_closed_publisher_is_forgotten(jobs):
    """It ends by an error while a reader has a lease; when the reader is done, nothing is left."""
    publisher = jobs.publisher()
    publish(publisher, 1)
    jobs.feeds("trainer")._coordination.heartbeat_timeout_s = 0.6  # it looks again soon
    with jobs.being("judge"), dtckpt.open_checkpoint("live://policy") as held:
        assert held.read("a").equal(weights(1)["a"])
        publisher.close(has_failed=True)
        assert held.read("b").equal(weights(1)["b"])  # mapped
        with Subscriber(FEED, blank()) as subscriber, pytest.raises(errors.VersionTimeoutError, match="RETIRING"):
            jobs.fetch(subscriber, timeout_s=0.1)
    deadline = time.monotonic() + WAIT_S
    while jobs.feeds("judge").list()[0].versions and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not jobs.feeds("judge").list()[0].versions


def test_14_a_job_that_left_stays_away(killable):
    """A process that left its job and lives on does not bring it back, however long it has versions in memory."""
    _, jobs = killable
    publish(jobs.publisher(), 1)
    before = threading.active_count()
    jobs.connection("trainer").leave()
    time.sleep(2.5)  # renewals are due, and the coordinator has forgotten it
    (status,) = jobs.feeds("engine").list()
    assert status.num_publishers == 0
    with Subscriber(FEED, blank()) as subscriber, pytest.raises(errors.VersionTimeoutError, match="lost"):
        jobs.fetch(subscriber, timeout_s=0.1)
    assert threading.active_count() <= before + 8
    jobs.connection("trainer").register()  # it may come back
    jobs.feeds("trainer").open(FEED)
    deadline = time.monotonic() + WAIT_S
    with Subscriber(FEED, blank()) as subscriber:
        assert jobs.update(subscriber).step == 1
    assert time.monotonic() < deadline


def test_16_source_that_does_not_answer(jobs, over_http, monkeypatch):
    publish(jobs.publisher(), 1)
    target, end = blank(), threading.Event()
    monkeypatch.setattr(part_server._PartHandler, "_read", lambda *_: end.wait(WAIT_S))
    try:
        with Subscriber(FEED, target, timeout_s=0.5) as subscriber:
            start = time.monotonic()
            with pytest.raises(errors.SourceLostError, match="read a part: TimeoutError"):
                jobs.fetch(subscriber)
            assert time.monotonic() - start < WAIT_S
            assert all(not value.count_nonzero() for value in target.values())
    finally:
        end.set()


def test_37_nobody_on_the_other_side(jobs):
    with Subscriber(FEED, blank()) as subscriber:
        start = time.monotonic()
        with pytest.raises(errors.VersionTimeoutError, match=r"no lease within 0.3 s: no job publishes feed 'policy'"):
            jobs.fetch(subscriber, timeout_s=0.3)
        assert time.monotonic() - start < WAIT_S
        # A publisher without readers does not wait.
        publisher = jobs.publisher(keep=1)
        for step in range(4):
            publish(publisher, step)
        assert len(publisher._held) == 2
        publisher.close()
        assert files(jobs.folder) == []


# --- memory ----------------------------------------------------------------------------------------------------------


def test_17_training_goes_on_after_publish(jobs):
    publisher, tree, target = jobs.publisher(), weights(1), blank()
    handle = publish(publisher, 1, tree, wait=False)
    for value in tree.values():
        value.fill_(7.0)
    handle.result()
    with Subscriber(FEED, target) as subscriber:
        jobs.update(subscriber)
    assert has_step(target, 1)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole pieces", "boxes"])
@pytest.mark.parametrize("way", ["mapped", "http"])
def test_17_memory_that_was_freed_under_an_ended_lease(jobs, monkeypatch, is_whole, way):
    """A reader stood still for so long that its lease ended; its memory has another version meanwhile."""
    if way == "http":
        monkeypatch.setattr(sources, "folder_of", lambda _: None)
    publisher = jobs.publisher(keep=1)
    publish(publisher, 1)
    region = Region((0, 0), (8, 6)) if is_whole else Region((0, 1), (8, 3))
    with jobs.being("judge"):
        held = dtckpt.open_checkpoint("live://policy")

    assert held.read("a", region).equal(weights(1)["a"][region.slices()])
    # As the coordinator sees it, the lease has ended.
    jobs.feeds("judge").close()
    jobs.feeds("judge").done(held.lease, "failed")
    held.lease.ends_at = time.monotonic()
    for step in (2, 3, 4):
        publish(publisher, step)
    with pytest.raises(errors.VersionGoneError, match="could not be renewed in time; take a new one"):
        held.read("a", region)


def test_34_memory_of_the_publisher(jobs):
    tree = {"w": torch.ones(1 << 16)}
    nbytes = tree["w"].nbytes
    publisher = jobs.publisher(max_nbytes=int(1.5 * nbytes), when_full="raise")
    publish(publisher, 1, tree)
    with pytest.raises(errors.StorageFullError, match=r"KiB of its max_nbytes, 384\.0 KiB, .* 256\.0 KiB more"):
        publish(publisher, 2, tree)
    tree["w"].add_(1)  # training goes on
    assert sum(path.stat().st_size for path in files(jobs.folder) if path.suffix == ".data") == nbytes
    with Subscriber(FEED, {"w": torch.zeros(1 << 16)}) as subscriber:
        assert jobs.update(subscriber).step == 1


def test_35_memory_of_the_reader(jobs):
    publish(jobs.publisher(), 1)
    target = blank()
    nbytes = sum(value.nbytes for value in target.values())
    with Subscriber(FEED, target, max_staging_nbytes=nbytes - 1) as subscriber:
        with pytest.raises(errors.CheckpointError, match="raise it, or update in place"):
            jobs.fetch(subscriber)
        assert jobs.update(subscriber, in_place=True).step == 1
    assert has_step(target, 1)


# --- names, layouts and dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_24_layout_tags(jobs, in_place):
    publisher, target = jobs.publisher(), blank()
    publish(publisher, 1, layout_tags={"a": "interleaved", "c": "nvfp4 scales"})
    for expected, text in (
        ({}, r"'a' has tag 'interleaved', expected ''; .*'c' has tag 'nvfp4 scales'|'a' has tag 'interleaved'"),
        ({"a": "interleaved", "c": "other"}, "'c' has tag 'nvfp4 scales', expected 'other'"),
        ({"*": "interleaved", "c": "nvfp4 scales"}, "'b' has tag '', expected 'interleaved'"),
    ):
        with Subscriber(FEED, target, layout_tags=expected) as subscriber:
            with pytest.raises(errors.LayoutError, match=text):
                jobs.update(subscriber, in_place=in_place)
            assert not subscriber.is_mixed
            assert all(not value.count_nonzero() for value in target.values())
    with jobs.being("engine"), pytest.raises(errors.LayoutError, match="'a' has tag 'interleaved'"):
        dtckpt.restore("live://policy", target)
    with Subscriber(FEED, target, layout_tags={"a": "interleaved", "c": "nvfp4 scales"}) as subscriber:
        jobs.update(subscriber, in_place=in_place)
    assert has_step(target, 1)
    # Tags of tensors that a reader does not want are none of its business; to look at them needs none.
    options = dtckpt.RestoreOptions(allow_unexpected=True)
    with Subscriber(FEED, {"b": torch.zeros(8, 6)}, options=options) as subscriber:
        jobs.update(subscriber)
    with jobs.being("engine"), dtckpt.open_checkpoint("live://policy") as checkpoint:
        assert checkpoint.read("a").equal(weights(1)["a"])
    with pytest.raises(errors.ConfigError, match="layout_tags has 'a': '3'"):
        Subscriber(FEED, target, layout_tags={"a": 3})
    with pytest.raises(errors.ConfigError, match="layout_tags has ''"):
        publish(publisher, 2, layout_tags={"": "x"})


def test_26_coverage_both_ways(jobs):
    tree = weights(1) | {"a_scale": torch.ones(8)}
    publish(jobs.publisher(), 1, tree)
    with (
        Subscriber(FEED, blank()) as subscriber,
        pytest.raises(errors.UnexpectedTensorError, match="'a_scale'"),
    ):
        jobs.fetch(subscriber)
    with (
        Subscriber(FEED, blank() | {"a_scale": torch.zeros(8), "d": torch.zeros(2)}) as subscriber,
        pytest.raises(errors.TensorNotFoundError, match="'d'"),
    ):
        jobs.fetch(subscriber)
    with Subscriber(FEED, blank(), options=dtckpt.RestoreOptions(allow_unexpected=True)) as subscriber:
        jobs.update(subscriber)
        assert list(subscriber.report.restore.unexpected) == ["a_scale"]


class Tied(nn.Module):
    def __init__(self, *, is_tied):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("is_tied", [True, False])
def test_27_tied_tensors(jobs, is_tied):
    model, target = Tied(is_tied=True), Tied(is_tied=is_tied)
    with torch.no_grad():
        model.embed.weight.copy_(weights(1)["a"])
    publish(jobs.publisher(), 1, {"model": model})
    (file,) = (path for path in files(jobs.folder) if path.suffix == ".data")
    assert file.stat().st_size == model.embed.weight.nbytes
    with Subscriber(FEED, {"model": target}, covers=target) as subscriber:
        jobs.update(subscriber)
    assert target.embed.weight.equal(weights(1)["a"])
    assert target.head.weight.equal(weights(1)["a"])
    assert (target.head.weight is target.embed.weight) == is_tied


def test_28_buffers(jobs):
    model, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    publish(jobs.publisher(), 1, {"model": model})
    with Subscriber(FEED, {"model": target}, covers=target) as subscriber:
        jobs.update(subscriber)
    assert target.running_mean.equal(model.running_mean)
    assert target.num_batches_tracked == 1


@pytest.mark.parametrize("way", ["mapped", "http"])
def test_29_casts(jobs, monkeypatch, way):
    if way == "http":
        monkeypatch.setattr(sources, "folder_of", lambda _: None)
    publisher = jobs.publisher()
    large = torch.randn(400, 500, generator=torch.Generator().manual_seed(2))
    tree = weights(1) | {"router": large, "count": torch.arange(5), "large": large}
    publish(publisher, 1, tree, cast={"router": torch.float32, "*": "bfloat16"})
    target = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in weights(1).items()}
    target |= {"router": torch.zeros(400, 500), "count": torch.zeros(5, dtype=torch.int64)}
    target["large"] = torch.zeros(400, 500, dtype=torch.bfloat16)
    with Subscriber(FEED, target) as subscriber:
        jobs.update(subscriber)
        # Exactly the published bytes: half of the elements' own.
        assert subscriber.report.nbytes_received == sum(value.nbytes for value in target.values())
    for name, value in target.items():
        assert value.equal(tree[name].to(value.dtype)), name
    assert large.dtype == torch.float32  # training's tensors stay
    for cast, text in (
        ({"x*": "bfloat16"}, r"no float16 or .* tensor matches 'x\*'"),
        ({"count": "bfloat16"}, "tensor matches 'count'"),
        ({"*": "int8"}, r"cast has '\*': 'int8'; expected globs, and one of float16"),
        ({"": "float16"}, "cast has ''"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            publish(publisher, 2, tree, cast=cast)
    publish(publisher, 3, tree, cast={"*": torch.float64})
    with (
        Subscriber(FEED, tree | {"router": torch.zeros(400, 500, dtype=torch.float64)}) as subscriber,
        pytest.raises(errors.DtckptError, match="float64"),
    ):
        jobs.fetch(subscriber)


def test_29_dtype_is_the_published_one(jobs):
    publish(jobs.publisher(), 1)
    with jobs.being("engine"), dtckpt.open_checkpoint("live://policy") as checkpoint:
        assert checkpoint.info("a").dtype_name == "float32"
    narrow = {name: value.to(torch.bfloat16) for name, value in blank().items()}
    with Subscriber(FEED, narrow) as subscriber, pytest.raises(errors.DtckptError, match="bfloat16"):
        jobs.fetch(subscriber)
    with Subscriber(FEED, narrow, options=dtckpt.RestoreOptions(cast="any")) as subscriber:
        jobs.update(subscriber)
    assert all(narrow[name].equal(value.to(torch.bfloat16)) for name, value in weights(1).items())


def test_32_experts_move(jobs):
    """Experts are rows of one stacked tensor; another assignment, with a copy of one, is another target."""
    experts = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3))
    publisher = jobs.publisher()
    publish(publisher, 1, {f"expert.{number}": experts[number] for number in range(4)})
    for mapping in ([0, 1, 2, 3], [3, 1, 0, 2]):
        slots = torch.zeros(4, 3, 5)
        with Subscriber(FEED, {f"expert.{expert}": slots[slot] for slot, expert in enumerate(mapping)}) as subscriber:
            jobs.update(subscriber)
        assert slots.equal(experts[mapping])
