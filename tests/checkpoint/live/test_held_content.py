"""Memory counts as held only if that is certain: histories that would have taken other bits for the version."""

import time

import pytest
import torch

from dtckpt import UNSHARDED, RestoreOptions
from dtckpt.checkpoint.parts.held_boxes import BoxContent, HeldBoxes
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.errors import ConfigError, VersionGoneError
from dtckpt.layout.region import Region

from .one_process import FEED, Jobs, blank, on_mesh, wrong

ROWS, COLUMNS = ("x", UNSHARDED), (UNSHARDED, "x")


@pytest.fixture
def jobs(port, tmp_path):
    made = Jobs(port, tmp_path / "memory")
    yield made
    made.close()


def test_equal_bits_of_another_dtype_are_other_numbers(jobs):
    """The trainer publishes the same bits as another dtype, and the reader converts them."""
    bits = torch.arange(48, dtype=torch.uint8).reshape(6, 8) * 5
    target = {"w": torch.zeros(6, 8)}
    with jobs.subscriber(target, options=RestoreOptions(cast="any")) as subscriber:
        for step, whole in enumerate([bits, bits.view(torch.int8), bits]):
            jobs.publish({"w": whole}, step)
            jobs.update(subscriber)
            assert target["w"].equal(whole.float()), step


def test_a_read_whose_lease_ended_leaves_nothing_behind(jobs, monkeypatch):
    """The reader stood still amid a box that has no digest; its source had other elements when it went on.

    The next version has the piece unchanged. What the failed read left must not count as the piece.
    """
    whole = {"w": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}
    target = on_mesh(blank(whole), {"x": 2}, {"w": COLUMNS})
    jobs.publish(on_mesh(whole, {"x": 2}, {"w": ROWS}), 0)
    with jobs.subscriber(target) as subscriber:
        with monkeypatch.context() as patch:

            def elements(part, number, verified=OpenPart.elements):
                found = verified(part, number).copy()
                found[...] = 7.0  # the publisher has filled the memory with another version
                (lease,) = (lease for (feed, _), lease in jobs.feeds("engine")._leases.items() if feed == FEED)
                lease.ends_at = time.monotonic()
                return found

            patch.setattr(OpenPart, "elements", elements)
            with pytest.raises(VersionGoneError, match="could not be renewed in time"):
                jobs.update(subscriber)
        assert not wrong(target, blank(whole))
        jobs.publish(on_mesh(whole, {"x": 2}, {"w": ROWS}), 1)
        jobs.update(subscriber)
        assert not wrong(target, whole)


def test_scratch_memory_is_not_private_memory_later():
    """Reads of tied tensors go through scratch memory; memory beside the target may get its address."""
    begins = []
    held = HeldBoxes(lambda address: address in begins)
    memory = torch.zeros(4, 4).numpy()
    content = BoxContent("w", Region.full((4, 4)), "float32", 1, Region.full((4, 4)), 1)
    held.begin()
    held.note(memory, content)
    begins.append(memory.ctypes.data)
    held.begin()
    assert held.take(memory) is None
    held.note(memory, content)
    assert held.has(memory, content)


def test_one_publisher_of_a_feed_in_a_process(jobs):
    """A second one would free the versions of the first."""
    whole = {"w": torch.ones(3)}
    jobs.publish(whole, 1)
    for _ in range(2):
        with jobs.job("trainer"), pytest.raises(ConfigError, match=f"feed '{FEED}' has a publisher in this process"):
            type(jobs.publisher)(FEED, folder=jobs.folder, address="127.0.0.1")
    target = {"w": torch.zeros(3)}
    with jobs.subscriber(target) as subscriber:
        jobs.update(subscriber)
        assert target["w"].equal(whole["w"])
        jobs.publisher.close()
        jobs.publisher = None
        jobs.publish({"w": torch.full((3,), 2.0)}, 2)
        jobs.update(subscriber)
    assert target["w"].equal(torch.full((3,), 2.0))
    with pytest.raises(ConfigError, match="the subscriber of feed 'policy' is closed"):
        jobs.update(subscriber)
