"""The situations of live versions that need several processes of one job; see ``test_situations``."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.client_processes import Pool
from support.coordinators import server_in_thread

from . import situation_cases

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pools():
    with Pool() as publishers, Pool() as readers:
        yield publishers, readers


@pytest.mark.parametrize("in_place", [False, True])
def test_05_one_client_fails(pools, tmp_path, in_place):
    publishers, readers = pools
    with server_in_thread(heartbeat_timeout_s=5.0) as port, ThreadPoolExecutor(1) as thread:
        options = {"group": True, "coordinator": f"127.0.0.1:{port}"}
        published = thread.submit(
            publishers.values, situation_cases.publish_and_stay, tmp_path, [3, 4], clients=1, **options
        )
        found = readers.values(situation_cases.read_while_one_fails, tmp_path, in_place, clients=2, **options)
        published.result()
    for client in found:
        error, *rest = client
        assert error in ("OSError", "ClientFailedError")
        # Beside the target nothing has changed on any client; in place, all know that the target is mixed.
        assert rest[:3] == ([None, True, False] if in_place else [3, False, True])
        assert in_place or not rest[3]
        assert rest[4:] == [4, False, []]


def test_34_bound_of_a_host(pools, tmp_path):
    publishers, _ = pools
    with server_in_thread(heartbeat_timeout_s=5.0) as port:
        found = publishers.values(
            situation_cases.publish_within_bounds, tmp_path, clients=2, group=True, coordinator=f"127.0.0.1:{port}"
        )
    assert found == [(["published", "StorageFullError", "skipped"], True)] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_clients_that_publish_differently(pools, tmp_path):
    publishers, _ = pools
    with server_in_thread(heartbeat_timeout_s=5.0) as port:
        found = publishers.values(
            situation_cases.publish_differently, tmp_path, clients=2, group=True, coordinator=f"127.0.0.1:{port}"
        )
    assert found[0] == found[1]
    assert found[0][0] == ("ConfigError", True)
    assert len(found[0]) == 2
