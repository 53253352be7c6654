import gc
import logging
import os
from pathlib import Path

# Both ends of a TCPStore connection look up the other's name. It is an IPv6 form of 127.0.0.1, which no hosts file has,
# and a DNS answer that gets lost would stop all clients for 5 s. Set before anything resolves a name, or loads torch.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Several test processes share the cores, and threads that wait for each other there take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # and a process that forks should have no other threads
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # nor have used CUDA

import pytest
from hypothesis import HealthCheck, settings
from support import forkserver, shares
from support.client_processes import Pool
from support.forked_workers import ForkedWorkers, num_workers
from support.slow import is_slow

from dtckpt.coordination.connect import set_coordination
from dtckpt.layout import clients

settings.register_profile(
    "ci", deadline=None, max_examples=50, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=1000)
settings.load_profile("nightly" if shares.IS_ALL else "ci")

# It would look through all that is imported while tests are collected, again and again, for a sixth of the time.
gc.disable()
# Processes that tests start inherit the signals that this process ignores.
forkserver.reset_signals()

TESTS = Path(__file__).parent
ONCE = ("framework_pool", "store_of")
"""Fixtures of a session that take ten seconds of the processor and more: one worker has them."""
_PREFIXES = ("DTENSOR_", "DTCKPT_", "TORCHELASTIC_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def one_client_alone(monkeypatch):
    """Whatever environment the tests run in, and whatever a test before has set up."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)
    set_coordination(None)
    level = logging.getLogger().level  # the coordinator's command changes it
    yield
    logging.getLogger().setLevel(level)
    set_coordination(None)
    clients._virtual_devices.clear()


def pytest_report_header():
    return shares.header()


def pytest_collection_finish():
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--workers", default="0", help="run the tests in so many processes, or auto")


def pytest_configure(config):
    without_clients = "not processes" in config.option.markexpr
    count = num_workers(config.option.workers, len(os.sched_getaffinity(0)), without_clients=without_clients)
    if count and not config.option.usepdb:
        config.pluginmanager.register(ForkedWorkers(count), "forked-workers")


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests `make check` leaves out: PyTorch's operator database alone takes seconds."""
    if "not slow" not in config.option.markexpr or not collection_path.is_relative_to(TESTS):
        return None
    is_asked_for = any(Path(arg.partition("::")[0]).resolve() == collection_path for arg in config.args)
    return True if is_slow(str(collection_path.relative_to(TESTS)), "") and not is_asked_for else None


def pytest_generate_tests(metafunc):
    """Refuse cases from a set: each worker would have them in another order, and the run would stop."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(isinstance(cases, set | frozenset) for cases in (*mark.args, *mark.kwargs.values())):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: the cases of parametrize are a set, sort them")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests, let ``-k`` and ``-m`` choose, then take today's shares."""
    for item in items:
        if {"pool", "framework_pool"} & {*item.fixturenames}:
            item.add_marker("processes")
        for fixture in {*ONCE} & {*item.fixturenames}:
            item.add_marker(pytest.mark.together(fixture))
        if is_slow(str(item.path.relative_to(TESTS)), item.function.__name__):
            item.add_marker("slow")
    yield
    chosen = shares.todays(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    items.sort(key=_turn)


def _turn(item):
    """Tests of one worker stand together; these and slow ones come first, so that the workers end at the same time."""
    marker = item.get_closest_marker("together")
    return marker is None, marker.args if marker else (), "slow" not in item.keywords


@pytest.fixture(scope="session")
def pool():
    """Client processes for `Pool.run`."""
    with Pool() as started:
        yield started
