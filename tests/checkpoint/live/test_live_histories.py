"""Random histories of real processes: publishers and readers that die, stand still and come back, a coordinator, too.

Always: a target is one published version, whole, or its reader says that it is mixed or has none; numbers only grow; a
reader with a lease sees no changed byte; every call ends in time; in the end the newest version arrives, and no file
stays.
"""

import random

import pytest
from support.client_processes import Pool
from support.shares import SEED, amount

from .live_histories import CALL_S, History

pytestmark = pytest.mark.processes

SECONDS = 8.0
EXPECTED = (
    "BarrierTimeoutError", "ClientFailedError", "ClientLostError", "CoordinationError", "CoordinatorUnavailableError",
    "FencedError", "SourceLostError", "StorageFullError", "VersionGoneError", "VersionLeasedError",
    "VersionTimeoutError",
)  # fmt: skip
"""What calls may raise here. No memory is damaged, so a reader that finds damage has read freed memory."""
NOT_NOW = "CheckpointNotFoundError: there is no version at live://policy: "
"""What a reader is told that opens the feed while no version can be read: opening waits for none.

Before the first version is whole; when its publisher has died, or has taken the version back that it had lent; and
until a publisher has told a coordinator that was restarted.
"""


@pytest.mark.parametrize("number", range(amount(2, 200)))
def test_random_histories_of_processes(tmp_path, number):
    with Pool() as trainers, Pool() as engines, Pool() as judges:
        pools = {"trainer": trainers, "engine": engines, "judge": judges}
        history = History(tmp_path, f"live {number} {SEED}", pools)
        try:
            history.run(SECONDS)
            story = history.story()
            assert not history.errors, story
            for script, answers in history.answers:
                for answer in answers:
                    assert answer.has_died or not answer.error, f"{script}: {answer}\n{story}"
            uids = {}
            for who, facts in history.lines():
                assert facts.get("is_whole", True), f"{who}: {facts}\n{story}"
                error = facts.get("error", "")
                is_expected = error.partition(":")[0] in EXPECTED or error.startswith(NOT_NOW)
                assert not error or is_expected, f"{who}: {facts}\n{story}"
                assert not facts.get("is_older"), f"{who}: {facts}\n{story}"
                assert facts.get("seconds", 0.0) < CALL_S, f"{who}: {facts}\n{story}"
                if facts.get("number"):
                    assert facts["step"] == facts["told_step"], f"{who}: {facts}\n{story}"
                    assert uids.setdefault(facts["number"], facts["uid"]) == facts["uid"], f"{who}: {facts}\n{story}"
            # Numbers and attempts grow together: what is stale never passes for new.
            attempts = [uid // 1000 for _, uid in sorted(uids.items())]
            assert attempts == sorted(attempts), f"{uids}\n{story}"
            _ends_well(history)
        finally:
            history.close()


def _ends_well(history):
    """A publisher that begins once more leaves nothing behind."""
    chance = random.Random(1)
    answers = history.attempt("trainer", history.last_attempts["trainer"], chance, is_calm=True)
    assert [answer.value for answer in answers] == ["end"] * len(answers), history.story()
    left = [path for path in history.memory.rglob("*") if path.is_file()]
    assert not left, f"{left}\n{history.story()}"
