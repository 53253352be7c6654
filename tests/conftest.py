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

import pytest
from hypothesis import HealthCheck, settings
from support import forkserver, schedule, shares
from support.client_processes import Pool
from support.slow import is_slow

from dtckpt.coordination.connect import set_coordination
from dtckpt.layout import clients

settings.register_profile(
    "ci", deadline=None, max_examples=100, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=1000)
settings.load_profile("nightly" if shares.IS_ALL else "ci")

# Processes that tests start inherit what this one ignores.
forkserver.reset_signals()

TESTS = Path(__file__).parent
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Twice as many workers as cores, as tests of client processes wait more than they work; eight at most.

    Without those tests one more worker than cores: each costs the imports and the collection.
    """
    cores = min(len(os.sched_getaffinity(0)), 4)
    return cores + 1 if "not processes" in config.option.markexpr else 2 * cores


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
    """Mark tests, let ``-k`` and ``-m`` choose, then take today's shares; the first workers get those with clients."""
    for item in items:
        if {"pool", "framework_pool"} & {*item.fixturenames}:
            item.add_marker("processes")
        if is_slow(str(item.path.relative_to(TESTS)), item.function.__name__):
            item.add_marker("slow")
    yield
    chosen = shares.todays(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    # Those of one worker, which need not be imported by several.
    items.sort(key=lambda item: "framework_pool" not in item.fixturenames)
    if hasattr(config, "workerinput"):
        items[:] = schedule.dealt(items, config.workerinput["workercount"], lambda item: "processes" in item.keywords)


def pytest_collection_finish():
    """Let the cycle collector pass over what is imported and collected: it stays until the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Run few tests with client processes at a time: they are about time, and each starts several processes."""
    if "processes" not in item.keywords:
        return (yield)
    with schedule.slot(item.config.cache.mkdir("client-processes")):
        return (yield)


@pytest.fixture(scope="session")
def pool():
    """Client processes for `Pool.run`."""
    with Pool() as started:
        yield started
