"""Run the training as given by all other arguments, and kill -9 one of its clients in the middle of a save."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import dtckpt
from examples import train_bytes_lm


def die_while_writing(checkpoint: str) -> None:
    """Kill this process when it has written its chunks of a checkpoint and opens the file that lists them.

    An audit hook runs inside the call that it observes, so the moment does not depend on the machine's speed.
    """

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and f".{checkpoint}.dtckpt-new-" in str(arguments[0]):
            folder = Path(str(arguments[0])).parent
            nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"kill -9 after {nbytes} bytes in {folder.name}/", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--victim", type=int, required=True, help="id of the client to be killed")
    parser.add_argument("--during", required=True, help="name of the checkpoint, such as step_36")
    own, training = parser.parse_known_args()
    if dtckpt.client_id() == own.victim:
        die_while_writing(own.during)
    train_bytes_lm.main(training)
