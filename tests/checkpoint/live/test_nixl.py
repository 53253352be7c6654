"""Versions by NIXL, from a job to another."""

import importlib.util

import pytest

from dtckpt import Subscriber, errors
from dtckpt.checkpoint.live import sources
from dtckpt.checkpoint.parts.peers import Peer

from .jobs_here import FEED, blank, has_step, publish

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed: pip install 'dtckpt[nixl]'"
)


@pytest.fixture(autouse=True)
def by_nixl(monkeypatch):
    monkeypatch.setenv("DTCKPT_DATA_NIXL", "1")
    monkeypatch.setattr(sources, "folder_of", lambda _: None)


def test_versions_by_nixl(jobs, monkeypatch):
    """Nothing comes from the server but the way to the memory, which is used again meanwhile."""
    publisher, target, sent = jobs.publisher(keep=1), blank(), []

    def read(peer, save, client, boxes, whole=Peer.read):
        sent.extend(boxes)
        return whole(peer, save, client, boxes)

    monkeypatch.setattr(Peer, "read", read)
    with Subscriber(FEED, target) as whole:
        for step in range(1, 6):
            publish(publisher, step)
            assert jobs.update(whole, in_place=step % 2 == 0).step == step
            assert has_step(target, step)
            assert whole.report.nbytes_verified == whole.report.nbytes_received == 3 * target["a"].nbytes
    assert not sent


def test_the_publisher_goes_without_the_memory(jobs):
    publish(jobs.publisher(), 1)
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        jobs.kill("trainer")
        with pytest.raises(errors.SourceLostError):
            jobs.fetch(subscriber)
        assert all(not value.count_nonzero() for value in target.values())
