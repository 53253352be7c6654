import itertools
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.storage.locations import location_of
from dtckpt.storage.places import open_folder

_buckets = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """URL of an S3 server that runs as a process of its own."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 60
    while not (found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text())):
        assert process.poll() is None, f"the S3 server ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"the S3 server did not start: {log.read_text()}"
        time.sleep(0.05)
    yield found[1]
    os.kill(process.pid, signal.SIGTERM)
    process.wait(20)


@pytest.fixture
def s3_environment(s3_server):
    """What the environment of a process must hold to reach the server."""
    return {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def s3(s3_server, s3_environment, monkeypatch):
    """URL of a new bucket."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{os.getpid()}-{next(_buckets)}"
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/{bucket}", method="PUT"), timeout=20).close()
    return f"s3://{bucket}"


KINDS = ["directory ocdbt", "directory zarr", "s3 ocdbt", "s3 zarr", "memory zarr", "local zarr"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def kvstore(kind):
    return kind.split()[1]


@pytest.fixture
def root(request, kind, tmp_path):
    """Where checkpoints of the test may lie: a directory, or the URL of a place that is empty."""
    match kind.split()[0]:
        case "directory":
            yield str(tmp_path)
        case "s3":
            yield request.getfixturevalue("s3") + "/some/run"
        case "memory":
            MemoryFileSystem.store.clear()
            yield "memory://some/run"
            MemoryFileSystem.store.clear()
        case "local":
            yield f"local://{tmp_path}/run"


def folder_at(url):
    """The folder at a URL."""
    return open_folder(location_of(url))
