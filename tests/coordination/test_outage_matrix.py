"""Every outage at every barrier of a save: before, in and after it, of a client, of the leader and of the coordinator.

At each barrier there are three jobs at one coordinator, one for each moment, so that an outage is one for all of them.
"""

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.client_calls import wait_until
from support.coordinators import server_process

from .saving_clients import HEARTBEAT_S, NUM_CLIENTS, UNEVEN_SIZE, Halt, Savers, stopped
from .test_outages import LATE, MOMENTS, TOLD_WITHIN_S, VICTIM, is_whole, missing

pytestmark = pytest.mark.processes

LEADER = 0
"""The client that commits."""
BARRIERS = ("save/begin", "save/edges", "save/written", "save/merged")


@dataclass
class Scene:
    """One job, whose clients save until they are at one moment of one barrier."""

    barrier: str
    moment: str
    job: str
    crew: Savers
    path: Path
    victim: int = VICTIM
    saves: int = 0

    @property
    def halted(self):
        return LATE if self.moment == "in" else self.victim

    @property
    def is_last(self):
        """Whether all clients that are not halted have ended."""
        return self.moment == "after" and self.barrier == BARRIERS[-1]

    @property
    def is_committed(self):
        """Whether the leader has committed at this moment; it does so before it arrives at the last barrier."""
        return self.barrier == BARRIERS[-1] or (self.is_before_commit and self.victim != LEADER)

    @property
    def is_before_commit(self):
        """Whether the commit is what the victim would have come to next, were it the leader."""
        return self.moment == "after" and self.barrier == BARRIERS[-2]

    @property
    def target(self):
        return self.path / str(self.saves)

    def begin(self, server):
        """Let all clients save; return when each is where it shall be."""
        self.saves += 1
        halt = Halt(self.barrier, "after" if self.moment == "after" else "before")
        for client in range(NUM_CLIENTS):
            self.crew.tell(client, "save unevenly", str(self.target), halt if client == self.halted else None)
        assert self.crew.answer(self.halted) == "halted"
        if self.is_last:  # earlier, a coordinator that dies might not have told them
            others = set(range(NUM_CLIENTS)) - {self.halted}
            wait_until(lambda: all(self.crew.has_answered(client) for client in others))
        else:
            where = BARRIERS[BARRIERS.index(self.barrier) + (self.moment == "after")]
            wait_until(lambda: missing(server, where, self.job) == (self.halted,))

    def all_saved(self):
        self.crew.release(self.halted)
        assert {self.crew.answer(client)[0] for client in range(NUM_CLIENTS)} == {"saved"}, self
        assert is_whole(self.target, UNEVEN_SIZE)

    def others_end(self, gone_at):
        """They fail, soon, naming the victim, or have saved already; return how."""
        early = ({LEADER, VICTIM} - {self.victim}).pop()
        first = self.crew.answer(early)
        if self.moment == "in":
            self.crew.release(LATE)  # earlier, and the barrier would pass
        answers = [first, self.crew.answer(LATE)]
        (outcome,) = {answer[:3] for answer in answers}
        if self.is_last:
            assert outcome == ("saved", "", ()), self
        else:
            assert max(answer[3] for answer in answers) - gone_at < TOLD_WITHIN_S, self
            assert (outcome[0], outcome[2]) == ("ClientLostError", (self.victim,)), (self, outcome)
        return outcome

    def is_as_expected(self):
        return is_whole(self.target, UNEVEN_SIZE) == self.is_committed


class Stage(ExitStack):
    """A coordinator, and the jobs of all moments of one barrier."""

    def start(self, barrier, path):
        self.server = self.enter_context(server_process(heartbeat_timeout_s=HEARTBEAT_S))
        self._barrier, self._path = barrier, path
        self.start_jobs("first")

    def start_jobs(self, row):
        self.scenes = []
        for moment in MOMENTS:
            job = f"{row} {moment}"
            crew = Savers([self.server.port] * NUM_CLIENTS, job=job)
            self.callback(crew.end)
            self.scenes.append(Scene(self._barrier, moment, job, crew, self._path / job))

    def begin(self, victim):
        for scene in self.scenes:
            scene.victim = victim
            scene.begin(self.server)

    def coordinator_is_killed(self):
        """It comes back at the same port, knowing nothing."""
        self.server.kill()
        self.server = self.enter_context(server_process(port=self.server.port, heartbeat_timeout_s=HEARTBEAT_S))
        for scene in self.scenes:
            scene.all_saved()

    def coordinator_is_frozen(self):
        """For longer than the timeout; time in which it did not listen is not held against any client."""
        with stopped(self.server.process.pid):
            time.sleep(1.5 * HEARTBEAT_S)  # for this long it is frozen
        for scene in self.scenes:
            scene.all_saved()

    def client_is_frozen(self):
        """For longer than the timeout; it is told what the others were told."""
        for scene in self.scenes:
            scene.crew.signal(scene.victim, signal.SIGSTOP)
        gone_at = time.monotonic()
        outcomes = [scene.others_end(gone_at) for scene in self.scenes]
        for scene, outcome in zip(self.scenes, outcomes, strict=True):
            assert scene.is_as_expected(), scene
            scene.crew.signal(scene.victim, signal.SIGCONT)
            if scene.moment != "in":
                scene.crew.release(scene.victim)
            assert scene.crew.answer(scene.victim)[:3] == outcome, scene
            # A leader that comes back amid the commit goes on with it: what all have written is whole.
            assert is_whole(scene.target, UNEVEN_SIZE) == (scene.is_committed or scene.is_before_commit), scene

    def client_is_killed(self):
        for scene in self.scenes:
            scene.crew.signal(scene.victim, signal.SIGKILL)
        gone_at = time.monotonic()
        for scene in self.scenes:
            scene.others_end(gone_at)
            assert scene.is_as_expected(), scene


@pytest.mark.share(1, of="outages")
@pytest.mark.parametrize("barrier", BARRIERS)
def test_outages_at(barrier, tmp_path):
    with Stage() as stage:
        stage.start(barrier, tmp_path)
        for victim, outage in (
            (VICTIM, stage.coordinator_is_killed),
            (VICTIM, stage.coordinator_is_frozen),
            (VICTIM, stage.client_is_frozen),
            (LEADER, stage.client_is_frozen),
            (VICTIM, stage.client_is_killed),
        ):
            stage.begin(victim)
            outage()
        stage.start_jobs("second")  # no client of the first may be missing
        stage.begin(LEADER)
        stage.client_is_killed()
