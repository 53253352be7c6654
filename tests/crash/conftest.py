import pytest

from . import seccomp
from .forked_clients import Nursery


@pytest.fixture(scope="session")
def nursery():
    """Clients whose file operations can be counted, recorded and sabotaged."""
    if reason := seccomp.reason_unsupported():
        pytest.skip(f"system calls cannot be supervised here: {reason}")
    with Nursery() as started:
        yield started
