"""Checkpoints as other libraries wrote them, and the digests of what those libraries load: the folder `SAMPLES`.

Beside each is ``….expected.json``: shape, dtype and SHA-256 of the elements, by the writer's name of the tensor.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import dtckpt

SAMPLES = Path(__file__).with_name("samples")
Facts = tuple[list[int], str, str]
"""Shape, dtype and digest of a tensor."""

PATHS = {
    "fsdp/fsdp1_orig_2": "sharded",
    "megatron_versions/v0.13.1": "iter_0000007",
    "megatron_versions/v0.15.3": "iter_0000007",
    "megatron_versions/v0.19.0": "iter_0000007",
    "orbax/v0_manager": "3",
}
"""By sample, the path in it that is opened, if that is not the sample or its only prefix."""


def sample_names() -> list[str]:
    """Return the folders of all samples, below `SAMPLES`."""
    folders = (path for form in SAMPLES.iterdir() if form.is_dir() for path in form.iterdir() if path.is_dir())
    return sorted(str(path.relative_to(SAMPLES)) for path in folders)


def copied_sample(name: str, to: Path) -> tuple[Path, Path]:
    """Copy a sample to a new folder; return the folder, and the path in it that is opened."""
    shutil.copytree(SAMPLES / name, to)
    prefix = next((file.stem for file in to.glob("*.index")), "")
    return to, to / PATHS.get(name, prefix)


def content(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a sample's tensors and values, and the notes about it."""
    read = json.loads((folder / f"{name}.expected.json").read_text())
    return read["tensors"], read.get("notes", {})


def expected(folder: Path, name: str) -> dict[str, Facts]:
    """Return the facts of a sample's tensors, by the writer's name."""
    tensors, _ = content(folder, name)
    return {key: (each["shape"], each["dtype"], each["sha256"]) for key, each in tensors.items() if "sha256" in each}


def facts(tensor: torch.Tensor) -> Facts:
    """Return the facts of a tensor."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), hashlib.sha256(data).hexdigest()


def entry(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the facts of a tensor as `content` has them."""
    return dict(zip(("shape", "dtype", "sha256"), facts(tensor), strict=True))


def read_all(path: Path | str) -> dict[str, Facts]:
    """Return the facts of all tensors of a checkpoint, by name."""
    with dtckpt.open_checkpoint(path) as checkpoint:
        return {name: facts(checkpoint.read(name)) for name in checkpoint.tensors}
