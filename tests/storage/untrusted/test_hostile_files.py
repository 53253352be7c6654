"""Hostile files of all formats, read by every command: none takes more memory or time than is stated, none ends it.

``DTCKPT_TESTS=all`` runs 200 bombs, and 2 000 mutations for each kind of checkpoint. So does ``python -m
storage.untrusted.hostile_runs``, for some kinds, too.
"""

import pytest
from support.shares import SEED, amount

from .hostile_files import KINDS
from .hostile_runs import NAMES, report, run_all

pytestmark = pytest.mark.processes


def test_bombs(tmp_path):
    runs = list(run_all(tmp_path, "bomb", range(amount(6, 200)), amount(4, len(NAMES)), SEED))
    assert all(run.is_fine for run in runs), report(runs)


def test_mutations(tmp_path):
    runs = list(run_all(tmp_path, "mutation", range(amount(50, 2000 * len(KINDS))), 1, SEED))
    assert all(run.is_fine for run in runs), report(runs)
