"""A process that saves once in the background, and says by how many bytes its resident memory grew at most."""

import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import dtckpt


def peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def save(nbytes: int, bound: int, pipe: Connection) -> None:
    tensors = {f"w{number}": torch.full((nbytes // 4 // 8,), float(number)) for number in range(8)}
    with tempfile.TemporaryDirectory() as folder:
        dtckpt.save(f"{folder}/warm_up", {"a": torch.ones(4)})
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now
        before = peak_nbytes()
        options = dtckpt.SaveOptions(staging_nbytes=bound or None)
        handle = dtckpt.save_async(f"{folder}/s", tensors, options=options)
        for tensor in tensors.values():
            tensor.fill_(-1)
        handle.result()
        grown = peak_nbytes() - before
        restored = dtckpt.restore(f"{folder}/s")
    assert all(bool((restored[f"w{number}"] == number).all()) for number in range(8))
    pipe.send(grown)
