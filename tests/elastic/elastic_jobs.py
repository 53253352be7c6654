"""Jobs under real torchrun, whose clients log every step that they have done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.client_calls import wait_until

WAIT_S = 120.0
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Agents hear within seconds that a node has gone."""


@dataclass(frozen=True)
class Done:
    """A step that a client has done."""

    attempt: int
    client: int
    num_clients: int
    pid: int
    step: int
    time_s: float


class Job:
    """A job that runs.

    Args:
        log: What its clients write.
        agents: The processes of torchrun, one per node.
    """

    def __init__(self, log: Path, agents: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
        self.agents = agents
        self.began_s = time.time()
        self._log = log
        self._outputs = outputs

    def done(self) -> list[Done]:
        """Return the steps that clients have done so far, in the order in which they have said so."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [Done(*map(int, line.split()[:5]), float(line.split()[5])) for line in lines]

    def wait_for(self, is_wanted: Callable[[Done], bool]) -> Done:
        """Return the first step that is wanted, when it is done."""
        found: list[Done] = []

        def look() -> bool:
            assert all(agent.poll() in (None, 0, -signal.SIGKILL) for agent in self.agents), self.output()
            found.extend(done for done in self.done() if is_wanted(done))
            return bool(found)

        try:
            wait_until(look, within_s=WAIT_S)
        except AssertionError as error:
            raise AssertionError(self.output()) from error
        return found[0]

    def kill_node(self, node: int) -> None:
        """Kill an agent and its clients."""
        agent = self.agents[node]
        clients = [pid for pid in {done.pid for done in self.done()} if _parent_of(pid) == agent.pid]
        for pid in [agent.pid, *clients]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def output(self) -> str:
        """Return what torchrun and the clients have written."""
        return "\n".join(path.read_text()[-6000:] for path in self._outputs)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


@contextmanager
def running(
    folder: Path, arguments: Sequence[str], *options: str, nodes: int = 1, env: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """Run a program under torchrun, with one agent per node, of which the first hosts the store; end what is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = [folder / f"node_{node}.txt" for node in range(nodes)]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={folder.name}"]
    program = str(Path(__file__).with_name("elastic_training.py"))
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--local-addr=127.0.0.1", *options]
    agents = []
    try:
        for output in outputs:
            is_host = f"is_host={int(not agents)}"
            with output.open("wb") as file:
                agents.append(
                    subprocess.Popen(
                        [*command, f"--rdzv-conf={is_host},{SOON}", program, *arguments],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
                    )
                )
        yield Job(Path(arguments[2]), agents, outputs)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # it ends its clients
                agent.wait(60)
