"""Jobs of one client each, at a coordinator in this process."""

import pytest
from support.coordinators import server_in_thread

from dtckpt.checkpoint.live import sources

from .jobs_here import Jobs


@pytest.fixture(scope="module")
def port():
    """Of one coordinator for all tests of a module."""
    with server_in_thread(heartbeat_timeout_s=10.0) as number:
        yield number


@pytest.fixture
def jobs(tmp_path):
    with server_in_thread(heartbeat_timeout_s=5.0) as port:
        made = Jobs(port, tmp_path)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def over_http(monkeypatch):
    """Readers find no part on this host."""
    monkeypatch.setattr(sources, "folder_of", lambda _: None)
