"""Every promise of the rules of feeds, under events in any order and restarts of the coordinator.

``DTCKPT_TESTS=all`` makes the random part 20 000 histories.
"""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import amount

from .feed_simulation import Simulation, run_randomly

HISTORIES = amount(100, 20_000)
EVENTS_EACH = 1000
"""Of a long history."""
LENGTHS = (20, 40, 60, 80, 100, 100, 100, EVENTS_EACH)
"""Most histories are short: faults at the beginning are as likely as later ones."""


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=HISTORIES, deadline=None)
def test_promises_hold_under_random_events(seed):
    simulation, draw = Simulation(), random.Random(seed)
    run_randomly(simulation, draw, draw.choice(LENGTHS))
    simulation.finish()


def test_the_random_events_bring_about_every_answer():
    outcomes = Counter()
    for seed in range(10):
        simulation = Simulation()
        run_randomly(simulation, random.Random(seed), EVENTS_EACH)
        outcomes += simulation.outcomes
    for outcome in (
        "OpenFeed FeedOpened",
        "OpenFeed FencedError",
        "Announce VersionState",
        "Announce FeedConflictError",
        "Announce VersionGoneError",
        "Announce NotKnownError",
        "PutPart VersionState",
        "PutPart FeedConflictError",
        "PutPart VersionGoneError",
        "PutPart NotKnownError",
        "Abort NoneType",
        "Retire VersionState",
        "Withdraw VersionState",
        "Withdraw VersionLeasedError",
        "Withdraw FeedConflictError",
        "Subscribe Leased",
        "Subscribe NotYet",
        "Subscribe VersionGoneError",
        "Subscribe SourceLostError",
        "Renew VersionState",
        "Renew NotKnownError",
        "Done NoneType",
        "Serve Served",
        "Serve FeedConflictError",
        "StopServing NoneType",
    ):
        assert outcomes[outcome] > 10, (outcome, "\n".join(map(str, sorted(outcomes.items()))))
