"""Hostile files of all formats, read by every command: none takes more memory or time than is stated, none ends it.

``python -m storage.untrusted.hostile_runs`` runs 10 000 mutations and 200 bombs, as ``DTCKPT_TESTS=all`` does.
"""

import pytest
from support.shares import SEED, amount

from .hostile_runs import NAMES, report, run_all

pytestmark = pytest.mark.processes


def test_bombs(tmp_path):
    runs = list(run_all(tmp_path, "bomb", range(amount(6, 200)), amount(4, len(NAMES)), SEED))
    assert all(run.is_fine for run in runs), report(runs)


def test_mutations(tmp_path):
    runs = list(run_all(tmp_path, "mutation", range(amount(50, 10_000)), 1, SEED))
    assert all(run.is_fine for run in runs), report(runs)
