"""What the coordinator tells of a feed that two clients publish."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.client_calls import wait_until
from support.client_processes import Pool
from support.coordinators import server_in_thread

from dtckpt.coordination.grpc_credentials import PLAINTEXT
from dtckpt.coordination.grpc_status import StatusClient

from . import live_cases

pytestmark = pytest.mark.processes


def test_the_bytes_of_a_version_are_those_of_its_tensors(tmp_path):
    nbytes = sum(tensor.nbytes for tensor in live_cases.values(0).values())
    with server_in_thread(heartbeat_timeout_s=20.0) as port, Pool() as publishers, ThreadPoolExecutor(1) as thread:
        options = {"clients": 2, "group": True, "coordinator": f"127.0.0.1:{port}"}
        published = thread.submit(publishers.values, live_cases.publish_and_wait, tmp_path, [4, 5], **options)
        wait_until(lambda: (tmp_path / "published").exists() or published.done(), 60)
        status = StatusClient(f"127.0.0.1:{port}", PLAINTEXT)
        (feed,) = status.feeds()
        status.close()
        live_cases.note(tmp_path, "done")
        published.result()
    assert [(version.step, version.nbytes, version.num_parts) for version in feed.versions] == [
        (4, nbytes, 2),
        (5, nbytes, 2),
    ]
