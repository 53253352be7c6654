"""Jobs of one name on one host, each with its coordinator: their versions share a folder, and nothing else."""

import pytest
from support.coordinators import server_in_thread

import dtckpt
from dtckpt import Subscriber
from dtckpt.coordination.feeds import rules

from .jobs_here import FEED, Jobs, blank, files, has_step, publish, weights


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs of one script."""
    monkeypatch.setattr(rules, "MAX_SKIPPED", 1 << 40)
    with server_in_thread(heartbeat_timeout_s=10.0) as first, server_in_thread(heartbeat_timeout_s=10.0) as second:
        made = [Jobs(port, tmp_path / "memory") for port in (first, second)]
        try:
            yield made
        finally:
            for each in made:
                each.close()


def publish_alike(runs, publishers, step):
    """Let both publish versions of one number and step, with different elements."""
    number = max(publisher._next_number for publisher in publishers)
    for run, publisher in enumerate(publishers):
        publisher._next_number = number
        publish(publisher, step, weights(100 * run + step))


def read(runs, subscribers, targets, step):
    for run, (jobs, subscriber, target) in enumerate(zip(runs, subscribers, targets, strict=True)):
        assert jobs.update(subscriber).step == step
        assert has_step(target, 100 * run + step)


def num_parts(folder):
    return len([path for path in files(folder) if path.suffix == ".data" and path.parent.name != "spare"])


def test_versions_of_one_number(runs):
    """Neither removes nor reads the other's, also where a clock gave both the same numbers."""
    publishers = [jobs.publisher(keep=1) for jobs in runs]
    targets = [blank(), blank()]
    subscribers = [Subscriber(FEED, target) for target in targets]
    for step in (1, 2, 3):
        publish_alike(runs, publishers, step)
        read(runs, subscribers, targets, step)
        assert all(subscriber.report.nbytes_mapped for subscriber in subscribers)
    assert num_parts(runs[0].folder) == 4  # the newest, and the one before, of each
    # The end of one is no end for the other.
    publishers[0].close()
    runs[0].feeds("engine").close()
    with runs[1].being("engine"):
        assert dtckpt.restore(f"live://{FEED}")["a"].equal(weights(103)["a"])
    publishers[1].close()
    assert files(runs[0].folder) == []


def test_relays(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("DTCKPT_HOST", "trainer host")
    publishers = [jobs.publisher(keep=1) for jobs in runs]
    monkeypatch.setenv("DTCKPT_HOST", "engine host")
    targets = [blank(), blank()]
    options = {"serve": True, "folder": tmp_path / "relays", "address": "127.0.0.1"}
    with Subscriber(FEED, targets[0], **options) as one, Subscriber(FEED, targets[1], **options) as other:
        for step in (1, 2, 3):
            publish_alike(runs, publishers, step)
            read(runs, [one, other], targets, step)
            nbytes = sum(value.nbytes for value in targets[0].values())
            for subscriber in (one, other):
                assert subscriber.report.nbytes_pulled_by_host == {"trainer host": nbytes}
                assert subscriber.report.nbytes_mapped == nbytes
        assert num_parts(tmp_path / "relays") == 2
        one.close()
        with runs[1].being("judge"):
            assert dtckpt.restore(f"live://{FEED}")["a"].equal(weights(103)["a"])
    assert num_parts(tmp_path / "relays") == 0
