"""What `StagedVersion.apply` copies: tensors that changed, and tensors of the target that do not have the version."""

import threading

import pytest
import torch

from dtckpt import UNSHARDED, RestoreOptions
from dtckpt.checkpoint.restoring import restore
from dtckpt.errors import CheckpointError, VersionTimeoutError

from .one_process import Jobs, blank, on_mesh, use_http, wrong

ROWS, COLUMNS = ("x", UNSHARDED), (UNSHARDED, "x")


@pytest.fixture(params=["mapped", "http"])
def jobs(request, port, tmp_path, monkeypatch):
    if request.param == "http":
        use_http(monkeypatch)
    made = Jobs(port, tmp_path / "memory")
    yield made
    made.close()


@pytest.fixture
def copied(monkeypatch):
    """The shapes of the tensors that the last `apply` copied."""
    found = []

    def copy_into(leaves, beside, whole=restore.copy_into):
        found.extend(leaf.shape for leaf in leaves)
        whole(leaves, beside)

    monkeypatch.setattr(restore, "copy_into", copy_into)
    return found


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    base = torch.Generator().manual_seed(100)
    return {
        "base": torch.randn(24, 36, generator=base),
        "adapter": torch.randn(12, 12, generator=generator),
        "norm": torch.randn(6, generator=base),
    }


SPECS = {"base": ROWS, "adapter": ROWS, "norm": None}
TARGET_SPECS = {"base": COLUMNS, "adapter": COLUMNS, "norm": None}


def taking_steps(jobs, target, subscriber, steps, before=lambda _: None):
    for step in steps:
        jobs.publish(on_mesh(weights(step), {"x": 2}, SPECS), step)
        before(step)
        jobs.update(subscriber)
        assert not wrong(target, weights(step))


def test_tensors_that_did_not_change_are_not_copied(jobs, copied):
    target = on_mesh(blank(weights(0)), {"x": 3}, TARGET_SPECS)
    with jobs.subscriber(target) as subscriber:
        taking_steps(jobs, target, subscriber, [0, 1])
        copied.clear()
        taking_steps(jobs, target, subscriber, [2, 3])
    assert copied == [(12, 12)] * 2


def test_weights_that_the_engine_wrote_to_are_copied(jobs, copied):
    """No caller said so: neither autograd's counters nor `invalidate`. Any component counts, also a replica's."""
    specs = {"base": (UNSHARDED, UNSHARDED), "adapter": ROWS, "norm": None}
    target = on_mesh(blank(weights(0)), {"x": 3}, specs)
    parts = [*target["base"].components, target["norm"]]

    def write(step):
        if step >= 2:
            parts[step - 2].view(torch.uint8)[..., 5] ^= 1

    with jobs.subscriber(target) as subscriber:
        taking_steps(jobs, target, subscriber, [0, 1])
        copied.clear()
        taking_steps(jobs, target, subscriber, range(2, 6), write)
    assert sorted(copied) == sorted([(12, 12)] * 4 + [(24, 36)] * 3 + [(6,)])


def test_a_version_that_was_never_applied_counts_for_nothing(jobs):
    """The memory beside the target has the base, and the target has not."""
    target = on_mesh(blank(weights(0)), {"x": 2}, TARGET_SPECS)
    with jobs.subscriber(target) as subscriber:
        for step in range(3):
            jobs.publish(on_mesh(weights(step), {"x": 2}, SPECS), step)
            with jobs.job("engine"):
                staged = subscriber.fetch()
        assert subscriber.report is None
        staged.apply()
        assert not wrong(target, weights(2))


def test_converted_tensors_are_copied(jobs, copied):
    """Of these there is no digest."""
    target = on_mesh(blank(weights(0), {"base": torch.bfloat16}), {"x": 2}, TARGET_SPECS)
    with jobs.subscriber(target, options=RestoreOptions(cast="any")) as subscriber:
        taking_steps(jobs, target, subscriber, [0, 1])
        copied.clear()
        taking_steps(jobs, target, subscriber, [2])
    assert sorted(copied) == [(12, 12), (24, 36)]


def fetching(jobs, subscriber, found, **options):
    """Let another thread of the engine fetch."""

    def fetch():
        with jobs.job("engine"):
            try:
                found.append(subscriber.fetch(**options))
            except VersionTimeoutError as error:
                found.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    return thread


def test_a_fetch_waits_until_another_thread_has_applied(jobs, monkeypatch):
    """Both use the memory beside the target: else the target would get parts of both versions."""
    target = on_mesh(blank(weights(0)), {"x": 2}, TARGET_SPECS)
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(weights(0), {"x": 2}, SPECS), 0)
        with jobs.job("engine"):
            staged, later = subscriber.fetch(), []
        jobs.publish(on_mesh(weights(1), {"x": 2}, SPECS), 1)

        def copy_into(leaves, beside, whole=restore.copy_into):
            whole(leaves[:1], beside[:1])
            later.append(fetching(jobs, subscriber, later))
            later[0].join(0.5)
            whole(leaves[1:], beside[1:])

        with monkeypatch.context() as patch:
            patch.setattr(restore, "copy_into", copy_into)
            staged.apply()
        assert (subscriber.version.step, wrong(target, weights(0))) == (0, [])
        later[0].join()
        later[1].apply()
        assert (subscriber.version.step, wrong(target, weights(1))) == (1, [])


def test_apply_does_not_wait_for_the_fetch_that_dropped_its_version(jobs):
    target = on_mesh(blank(weights(0)), {"x": 2}, TARGET_SPECS)
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(weights(0), {"x": 2}, SPECS), 0)
        with jobs.job("engine"):
            staged, later = subscriber.fetch(), []
        waiting = fetching(jobs, subscriber, later, step=9, timeout_s=3.0)
        while staged._staged is not None:
            waiting.join(0.01)
        with pytest.raises(CheckpointError, match="was applied or dropped"):
            staged.apply()
        assert not later, "the fetch goes on"
        waiting.join()
        assert isinstance(later[0], VersionTimeoutError)
