"""Random histories of resizes, with real processes, against a process that never stops."""

from __future__ import annotations

import random

import pytest
from support.shares import SEED, amount

from .resize_histories import PROCESSES, expected_steps, play, worlds_of


@pytest.mark.parametrize("number", range(amount(3, 60)))
def test_random_histories(pool, tmp_path, number):
    """The state equals the state of a process that never stops, bit for bit; no more steps are lost than promised."""
    chance = random.Random(f"resize {number} {SEED}")
    worlds = worlds_of(chance)
    tier = tmp_path / "tier" if chance.random() < 0.5 else None
    answers = pool.run(play, tmp_path / "root", tier, worlds, clients=PROCESSES)
    story = "\n".join(map(str, (*worlds, *answers)))
    promised = expected_steps(worlds)
    for process, answer in enumerate(answers):
        if any(world.killed == process for world in worlds):
            assert answer.has_died, story
            continue
        assert not answer.error, f"{answer.trace}\n{story}"
        mine = [(*begun, True) for world, begun in zip(worlds, promised, strict=True) if process in world.members]
        assert answer.value == mine, f"process {process} must tell {mine}\n{story}"
