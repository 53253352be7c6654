"""A training loop with a `DataLoader` and its workers, as a program; a signal comes to its whole process group."""

import itertools
import signal
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import dtckpt


class Numbers(Dataset):
    """Some numbers."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.tensor(float(index))


def ignore_the_signal(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def train(root, start, case):
    """Train until a signal comes; print whether its step, and no other one, is saved.

    Args:
        root: Where checkpoints go.
        start: How workers start.
        case: Whether workers ignore the signal (``ignored``), or the loop fails before it saves (``failed``).
    """
    loader = DataLoader(
        Numbers(),
        num_workers=2,
        multiprocessing_context=start,
        worker_init_fn=ignore_the_signal if case == "ignored" else None,
    )
    weight = torch.zeros(4)
    with dtckpt.CheckpointManager(root, save_when=lambda step: False) as manager, manager.preemption():
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for step, batch in enumerate(batches):
            weight += batch
            if step == 5:
                print("running", flush=True)
            if case != "failed":
                manager.save(step, {"weight": weight})
            if manager.reached_preemption:
                break
    print(manager.all_steps() == [step], flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])
