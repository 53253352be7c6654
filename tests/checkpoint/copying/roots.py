"""Roots with small checkpoints for the tests of copies and scrubs."""

import filecmp
import os
import shutil

import torch

import dtckpt
from dtckpt import SaveOptions


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.rand(300, 257, generator=generator),  # chunks of several blocks
        "half": torch.rand(64, 33, generator=generator).bfloat16(),
        "tiny": torch.rand(3, generator=generator),
        "step": step,
    }


OPTIONS = {
    "ocdbt": SaveOptions(chunk_nbytes=100_000, overwrite=True),
    "zarr": SaveOptions(kvstore="zarr", chunk_nbytes=100_000, overwrite=True),
    "zstd": SaveOptions(codec="zstd", chunk_nbytes=100_000, overwrite=True),
    "blosc in zarr": SaveOptions(kvstore="zarr", codec="blosc", chunk_nbytes=100_000, overwrite=True),
}


def save_steps(root, steps, kind="ocdbt"):
    with dtckpt.CheckpointManager(root, is_async=False, options=OPTIONS[kind]) as manager:
        for step in steps:
            manager.save(step, state(step), metrics={"loss": step / 10}, force=True)
    return root


def step_folder(root, step):
    return root / f"step_{step:08d}"


def files_in(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def is_equal(a, b):
    """Whether two folders have the same files."""
    names = [file.relative_to(a) for file in files_in(a)]
    return names == [file.relative_to(b) for file in files_in(b)] and all(
        filecmp.cmp(a / name, b / name, shallow=False) for name in names
    )


def is_step(path, step):
    """Whether a checkpoint has the state of a step."""
    tree = dtckpt.restore(path)
    return tree["step"] == step and all(tree[name].equal(state(step)[name]) for name in ("w", "half", "tiny"))


def link_copy(source, target):
    """Copy a checkpoint by hard links, as a save does that finds nothing changed."""
    shutil.copytree(source, target, copy_function=os.link)


def flip(file, position, mask=1):
    """Change a byte of a file in place, so that all its names change."""
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ mask]))


def leftovers(folder):
    """Names of everything beside the checkpoints in a folder."""
    return [name for name in os.listdir(folder) if name.startswith(".") and "dtckpt-new" in name]
