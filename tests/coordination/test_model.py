"""Jobs through random faults, against the real rules: nothing is ever mixed, and the job heals.

A run goes through a share of a hundred thousand histories, another one each day; ``DTCKPT_TESTS=all`` through all.
"""

import random
from collections import Counter

import pytest
from support.shares import share

from dtckpt.coordination import operation_ordinals

from .job_model import FAULTS, HEARTBEAT_TIMEOUT_S, Fault, Job, World, random_job

HISTORIES = share(range(100_000), 150, "histories of the model")
AT_ONCE = 1000
"""Histories of one case: they take about a minute."""
TAIL = 8
"""The last steps of a job that runs free, by which who was behind has caught up."""


def history(seed):
    job = random_job(random.Random(seed))
    world = World(job, seed)
    world.run()
    return job, world


def too_many_failures(job, world):
    """Return the steps that were not saved though the job had time to heal."""
    if not job.is_lockstep:
        gone_ahead = sum(fault.seconds for fault in job.faults) / job.step_s
        return world.failures_after(job.num_steps - TAIL - 1) if gone_ahead < job.num_steps / 2 else []
    if job.gives_step or len(job.faults) == 1:
        return world.failures_after(world.last_fault_step)[1:]
    # Without steps, faults of one client between two saves can hide behind each other until it was waited for in vain.
    return world.failures_after(job.num_steps - 3)


@pytest.mark.parametrize("first", range(0, len(HISTORIES), AT_ONCE))
def test_no_history_mixes_operations_and_every_job_heals(first):
    for seed in HISTORIES[first : first + AT_ONCE]:
        job, world = history(seed)
        assert not world.mixed(), (seed, job, world.trace)
        assert not too_many_failures(job, world), (seed, job, world.trace)


def test_the_histories_hold_every_fault_and_every_kind_of_end():
    faults, ends = Counter(), Counter()
    for seed in range(100):
        job, world = history(seed)
        faults.update(fault.kind for fault in job.faults)
        ends.update(outcome.partition(":")[0] for client in world.clients for outcome in client.outcomes.values())
    assert set(faults) == set(FAULTS)
    assert set(ends) >= {"saved", "skipped", "VerdictError", "NoVerdictError", "DisagreementError", "KeyboardInterrupt"}


@pytest.mark.parametrize("is_lockstep", [True, False])
@pytest.mark.parametrize("gives_step", [True, False])
def test_after_one_cut_one_save_fails(gives_step, is_lockstep):
    world = World(Job(2, 12, is_lockstep, gives_step, (Fault("cut", 1, 4, 0.02, 1.0),)), seed=1)
    world.run()
    assert world.failures_after(4) == []
    assert not world.mixed()


@pytest.mark.parametrize("first", [0, 1])
def test_client_that_skipped_and_is_always_the_first_to_come(first):
    """Its grace is over each time before the other one comes."""
    lead_s = 3 * HEARTBEAT_TIMEOUT_S / 6
    job = Job(
        2, 12, is_lockstep=True, gives_step=False, faults=(Fault("skip", first, 3, 0.0, 0.0),), lead=(first, lead_s)
    )
    world = World(job, seed=1)
    world.run()
    assert world.failures_after(3) in ([4], [4, 5], [4, 5, 6]), world.trace


def test_the_model_sees_what_the_comparison_prevents(monkeypatch):
    """With a comparison that finds all clients level, operations are mixed."""
    monkeypatch.setattr(operation_ordinals, "compare", lambda *_: operation_ordinals.SAME)
    assert any(history(seed)[1].mixed() for seed in range(100))


def test_the_model_sees_what_catching_up_prevents(monkeypatch):
    """With a comparison that always levels the counts, operations are mixed once a client was cut off."""
    compare = operation_ordinals.compare

    def level(found, *arguments):
        return compare(
            {client: operation_ordinals.Ordinal(each.number, each.step) for client, each in found.items()}, *arguments
        )

    monkeypatch.setattr(operation_ordinals, "compare", level)
    assert any(history(seed)[1].mixed() for seed in range(200))
