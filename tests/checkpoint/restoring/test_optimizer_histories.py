"""Random histories of saves and restores of optimizers that change, each compared with plain dicts by name.

``DTCKPT_HISTORY_SEED=<seed>`` runs that history alone.
"""

import os

import pytest
from support import optimizer_histories, shares

SEED = os.environ.get("DTCKPT_HISTORY_SEED")
SHARES = 10


def _seeds(share):
    if SEED is not None:
        return [int(SEED)] if share == int(SEED) % SHARES else []
    return shares.share(range(share, 500, SHARES), 5, f"optimizer histories {share}")


@pytest.mark.parametrize("share", range(SHARES))
def test_histories(tmp_path, share):
    for seed in _seeds(share):
        history = optimizer_histories.draw(seed)
        if optimizer_histories.run(history, tmp_path):
            history = optimizer_histories.shrunk(history, lambda each: bool(optimizer_histories.run(each, tmp_path)))
            lines = [str(history), *optimizer_histories.run(history, tmp_path)]
            pytest.fail("\n".join(lines), pytrace=False)
