"""Random programs give with DTensors what they give with plain tensors: values, metadata, aliases, gradients, errors.

A failure is shown as a small script. Its seed replays it: ``DTCKPT_PROGRAM_SEED=<seed>``, with
``DTCKPT_PROGRAM_CLIENTS=<n>`` if it was on several clients. ``PYTHONPATH=tests python -m support.program_search`` runs
any number of programs, and groups what fails.
"""

import os

import pytest
from support.program_draw import draw
from support.program_search import failure_of, failures_on_clients

SEED = os.environ.get("DTCKPT_PROGRAM_SEED")
CLIENTS = int(os.environ.get("DTCKPT_PROGRAM_CLIENTS", "1"))


def batches(clients, count, size):
    """Return ranges of seeds: of all programs, or of the one that is replayed."""
    if SEED is not None:
        return [range(int(SEED), int(SEED) + 1)] if clients == CLIENTS else []
    return [range(first, first + size) for first in range(0, count, size)]


def name_of(seeds):
    return f"{seeds.start}-{seeds.stop - 1}"


@pytest.mark.share(4)
@pytest.mark.parametrize("seeds", batches(1, 20_000, 100), ids=name_of)
def test_one_process(seeds):
    for seed in seeds:
        if found := failure_of(draw(seed)):
            pytest.fail(str(found), pytrace=False)


@pytest.mark.share(1, of="programs on clients")
@pytest.mark.parametrize(
    ("clients", "seeds"),
    [(clients, seeds) for clients, count in ((2, 2000), (4, 1000)) for seeds in batches(clients, count, 50)],
    ids=str,
)
def test_clients(pool, tmp_path, clients, seeds):
    for found in failures_on_clients(pool, seeds, clients, tmp_path / "seed"):
        pytest.fail(str(found), pytrace=False)
