"""Random histories of saves and restores of optimizers that change, each compared with plain dicts by name.

``DTCKPT_HISTORY_SEED=<seed>`` runs that history alone, and the pipeline of that seed.
"""

import os

import pytest
from support import shares

from . import optimizer_histories, optimizer_jobs

SEED = os.environ.get("DTCKPT_HISTORY_SEED")
SHARES = 10


def _seeds(share):
    if SEED is not None:
        return [int(SEED)] if share == int(SEED) % SHARES else []
    return shares.share(range(share, 500, SHARES), 5, f"optimizer histories {share}")


@pytest.mark.parametrize("share", range(SHARES))
def test_histories(tmp_path, share):
    for seed in _seeds(share):
        history = optimizer_jobs.draw(seed)
        if optimizer_histories.run(history, tmp_path):
            history = optimizer_histories.shrunk(history, lambda each: bool(optimizer_histories.run(each, tmp_path)))
            lines = [str(history), *optimizer_histories.run(history, tmp_path)]
            pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize(("stages", "others"), [(2, 1), (1, 2), (2, 4), (4, 2), (4, 3)])
def test_pipelines(pool, tmp_path, stages, others):
    seeds = shares.share(range(100), 4, f"pipelines {stages} {others}") if SEED is None else [int(SEED)]
    saved = pool.values(optimizer_histories.save_stages, f"{tmp_path}", seeds, clients=stages, group=True)
    assert saved == [[""] * len(seeds)] * stages
    found = pool.values(optimizer_histories.restore_stages, f"{tmp_path}", seeds, clients=others, group=True)
    for seed, answers in zip(seeds, zip(*found, strict=True), strict=True):
        if wrong := optimizer_histories.wrong_in_stages(seed, answers):
            pytest.fail("\n".join([str(optimizer_jobs.draw_stages(seed)), *wrong]), pytrace=False)
