"""Every promise of the coordinator's rules, under events in any order.

``DTCKPT_TESTS=all`` makes the random part a million events.
"""

import random
from collections import Counter

from dtckpt_server.events import Cancel, Heartbeat, Leave
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.shares import amount, examples

from .coordinator_simulation import JOBS, NUM_CLIENTS, ORPHAN, TICK_S, TIMEOUT_S, Simulation, run_randomly

EVENTS = amount(20_000, 1_000_000)
EVENTS_EACH = 1000


class Jobs(RuleBasedStateMachine):
    """Anything may happen in any order; `Simulation` checks what must never happen."""

    people = st.tuples(st.just(JOBS[0]), st.integers(0, NUM_CLIENTS - 1), st.integers(0, 1))

    @initialize()
    def begin(self):
        self.simulation = Simulation()

    @rule(who=people)
    def register(self, who):
        self.simulation.register(self.simulation.identity(*who))

    @rule(who=people)
    def heartbeat(self, who):
        self.simulation.happen(Heartbeat(self.simulation.identity(*who)))

    @rule(who=people)
    def leave(self, who):
        self.simulation.happen(Leave(self.simulation.identity(*who)))

    @rule()
    def next_attempt(self):
        self.simulation.attempts[JOBS[0]] += 1

    @rule(
        who=people,
        name=st.sampled_from("ab"),
        which=st.sampled_from(["alone", "first", "later", "orphan", "repeated"]),
        position=st.sampled_from(["", "step 1", "step 2"]),
        certain=st.sampled_from(["", "", "is_certain", "is_again", "was_cut_off"]),
        participants=st.sampled_from([(), (), (0, 1), (1, 2)]),
        ok=st.sampled_from([True, True, True, False]),
        topic=st.sampled_from([b"", b"", b"", b"t"]),
        timeout_s=st.sampled_from([2.0, 30.0]),
    )
    def arrive(self, who, name, which, position, certain, participants, ok, topic, timeout_s):
        simulation, who = self.simulation, self.simulation.identity(*who)
        arrivals = simulation.callers[who].arrivals
        if which == "repeated" and arrivals:
            simulation.happen(arrivals[-1])
            return
        operation = {"first": "", "later": simulation.operations[who.job][-1], "orphan": ORPHAN}.get(which)
        more = {certain: True} if certain else {}
        options = {"ok": ok, "topic": topic, "operation": operation, "position": position, **more}
        simulation.happen(simulation.arrival(who, name, participants, timeout_s, **options))

    @rule(who=people, gives_up=st.booleans())
    def go_on(self, who, gives_up):
        who = self.simulation.identity(*who)
        self.simulation.go_on(who, gives_up=gives_up)
        self.simulation.happen(Heartbeat(who, report=self.simulation.callers[who].report))

    @rule(who=people, choice=st.integers(0, 3))
    def cancel(self, who, choice):
        if ids := sorted(self.simulation.open):
            self.simulation.happen(Cancel(self.simulation.identity(*who), ids[choice % len(ids)], "cancelled"))

    @rule(seconds=st.sampled_from([TICK_S, 3.0, TIMEOUT_S + 1]))
    def pass_time(self, seconds):
        self.simulation.pass_time(seconds)

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.finish()


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=max(EVENTS // EVENTS_EACH, 1), deadline=None)
def test_promises_hold_under_random_events(seed):
    simulation = Simulation()
    run_randomly(simulation, random.Random(seed), EVENTS_EACH)
    simulation.finish()


def test_the_random_events_bring_about_every_kind_of_end():
    outcomes, passed = Counter(), Counter()
    for seed in range(20):
        simulation = Simulation()
        run_randomly(simulation, random.Random(seed), EVENTS_EACH)
        outcomes += simulation.outcomes
        passed += simulation.passed
    assert set(outcomes) == {"PASSED", "VOTE", "TIMEOUT", "TASK_LOST", "CONFLICT", "CANCELLED", "FENCED"}, outcomes
    assert min(passed[kind] for kind in (None, "", "later")) > 25, passed
