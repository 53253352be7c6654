"""`CheckpointManager.resize`: the state moves to other clients, in processes that go on."""

from __future__ import annotations

import pytest

from . import resize_cases as cases


def test_what_replicas_have_moves_and_nothing_is_lost(pool, tmp_path):
    answers = pool.run(cases.move, tmp_path, [[0, 1], [1, 0, 2]], clients=3)
    print(answers)
    assert [a.value for a in answers] == [[(3, 0, "", True)]] * 3
