import os

# Both ends of a TCPStore connection look up the other's name. It is an IPv6 form of 127.0.0.1, which no hosts file has,
# and a DNS answer that gets lost would stop all clients for 5 s. Set before anything resolves a name, or loads torch.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
from hypothesis import HealthCheck, settings
from support.client_processes import Pool

from dtckpt.coordination.connect import set_coordination
from dtckpt.layout import clients

settings.register_profile("dtckpt", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtckpt")

_PREFIXES = ("DTENSOR_", "DTCKPT_", "TORCHELASTIC_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def one_client_alone(monkeypatch):
    """Whatever environment the tests run in, and whatever a test before has set up."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)
    set_coordination(None)
    yield
    set_coordination(None)
    clients._virtual_devices.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what runs on client processes, so that it can be run apart."""
    for item in items:
        if "pool" in item.fixturenames:
            item.add_marker("processes")


@pytest.fixture(scope="session")
def pool():
    """Client processes for `Pool.run`."""
    with Pool() as started:
        yield started
