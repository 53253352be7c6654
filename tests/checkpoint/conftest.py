import os
import signal
import subprocess
import sys
import time

import pytest

from dtckpt.checkpoint.saving import save_handle


@pytest.fixture(scope="session")
def coordinator(tmp_path_factory):
    """Address of a coordinator that runs as a separate process."""
    folder = tmp_path_factory.mktemp("coordinator")
    file, log = folder / "port", folder / "log"
    arguments = ["serve", "--insecure", "--port", "0", "--port-file", str(file), "--heartbeat-timeout-s", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from dtckpt_server.main import main; main()", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None, f"the coordinator ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"the coordinator did not start: {log.read_text()}"
        time.sleep(0.05)
    yield f"127.0.0.1:{file.read_text().split(':')[-1].strip()}"
    os.kill(process.pid, signal.SIGTERM)
    process.wait(20)


@pytest.fixture(params=["process_group", "grpc"])
def meeting(request):
    """Keyword arguments of `Pool.run`: clients meet at the store, then at the coordinator."""
    if request.param == "process_group":
        return {}
    return {"coordinator": request.getfixturevalue("coordinator")}


@pytest.fixture(autouse=True)
def nothing_in_flight():
    """Leave no save in flight to the next test, nor a failure that no test has looked at."""
    yield
    if save_handle._latest is not None:
        save_handle._latest.wait(30)
    save_handle._latest = None


@pytest.fixture
def run(capsys):
    """Run the command in this process; return its exit code and its output."""
    from dtckpt.cli.main import main

    def call(*args):
        capsys.readouterr()
        return main([*map(str, args)]), capsys.readouterr()

    return call
