"""A process that has redistributed exits with its own status, whatever its background threads do."""

import subprocess
import sys

EXIT_WHILE_THE_WATCHER_ASKS = """
import threading
from datetime import timedelta

import torch.distributed as dist

from dtckpt.redistribution import watcher

store = dist.HashStore()
asks = threading.Event()

def ask(_):
    # In C++, without the interpreter's lock, while the main thread ends.
    asks.set()
    store.wait(["never"], timedelta(seconds=1))

class Call:
    poll = staticmethod(ask)

watcher.PATIENCE_S = 0.01
watcher._waiting[-1] = Call()
watcher.ensure_running(None)
assert asks.wait(30)
"""


def test_a_process_exits_while_the_watcher_asks_the_store():
    ran = subprocess.run(
        [sys.executable, "-c", EXIT_WHILE_THE_WATCHER_ASKS], capture_output=True, text=True, timeout=180, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
