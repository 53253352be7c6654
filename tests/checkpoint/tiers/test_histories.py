"""Random histories of jobs whose hosts are real directories and whose clients are real processes.

Each restore gives exactly one save that was voted complete: the newest with all parts.
"""

import random

import pytest
from support.shares import SEED, amount

from .tier_histories import World, play, script_of, told_by

ATTEMPTS = 6


@pytest.mark.parametrize("number", range(amount(1, 100)))
def test_random_histories_of_processes(pool, tmp_path, number):
    """Local and durable saves, deaths at any point, lost hosts, damage, other numbers of clients, runs that go back."""
    chance = random.Random(f"tiers {number} {SEED}")
    world, told = World(tmp_path / "root", tmp_path / "tier"), tmp_path / "told"
    world.root.mkdir()
    told.mkdir()
    log = []
    for attempt in range(1, ATTEMPTS + 1):
        names = [f"host{each}" for each in range(4)]
        hosts = [chance.choice(names) for _ in range(4)] if chance.random() < 0.3 else chance.sample(names, 4)
        hosts = hosts[: chance.randint(1, 4)]
        expected, script = world.expected(hosts), script_of(attempt, len(hosts), chance)
        log.append(f"{attempt}: {hosts} {script}, must restore {expected}")
        answers = pool.run(
            play, world.root, world.folder, hosts, script, told,
            clients=len(hosts), group=True, heartbeat_timeout_s=1.5,
        )  # fmt: skip
        story = "\n".join([*log, *map(str, answers)])
        if not script.victims:
            assert all(not answer.has_died and answer.value == "" for answer in answers), story
        found = told_by(told, attempt)
        assert found is not None, story
        assert found["is_equal"], f"no save was restored whole\n{story}"
        assert (found["uid"], found["is_local"]) == (expected or (None, False)), f"{found}\n{story}"
        world.note_saves(script, found["step"])
        for host in names:
            if chance.random() < 0.15:
                log.append(f"{host} is lost")
                world.lose(host)
        while chance.random() < 0.4:
            world.damage(chance)
