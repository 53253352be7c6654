"""A coordinator whose pod was replaced."""

import subprocess
import sys
from pathlib import Path

import pytest

OWN_HOSTS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
"""Runs a command that has the next argument for its ``/etc/hosts``."""
BACK_WITHIN_S = 10.0
"""Far from the 30 s after which gRPC by default asks for an address again."""


@pytest.mark.processes
@pytest.mark.skipif(
    subprocess.run([*OWN_HOSTS, __file__, "true"], check=False, capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)
def test_clients_find_a_coordinator_that_has_moved(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.touch()
    run = [*OWN_HOSTS, hosts, sys.executable, Path(__file__).with_name("moved_coordinator.py")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < BACK_WITHIN_S
