"""Redistribute between two hosts: two network namespaces of this machine, with Gloo between them.

Run, as root: ``python -m benchmarks.two_hosts [--max-mib 64]``. Each host has one client, and its own end of a
virtual cable. `benchmarks.redistribute` runs in both, without the messages in host memory that clients of one host use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HOSTS = ("dtckpt-a", "dtckpt-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29655


def ip(*words: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Make the hosts and the cable; remove them at the end."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "cable", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            for words in (("addr", "add", f"{address}/24", "dev", "cable"), ("link", "set", "cable", "up")):
                ip("-n", host, *words)
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-mib", default="64")
    options = parser.parse_args()
    try:
        with namespaces():
            run(options.max_mib)
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        print(f"skipped: this machine lets nobody make network namespaces: {text}")


def run(max_mib: str) -> None:
    """Run the benchmark in both namespaces."""
    environment = {**os.environ, "DTCKPT_HOST_TRANSPORT": "0", "GLOO_SOCKET_IFNAME": "cable"}
    started = []
    for number, host in enumerate(HOSTS):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node-rank={number}", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}"]
        command += [f"--master-port={PORT}", "-m", "benchmarks.redistribute", "--max-mib", max_mib]
        started.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"the clients ended with {codes}")


if __name__ == "__main__":
    main()
