"""Checkpoints as other libraries wrote them, and the digests of what those libraries load: the folder `SAMPLES`.

Beside each is ``….expected.json``: shape, dtype and SHA-256 of the elements, by the writer's name of the tensor.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import dtckpt

SAMPLES = Path(__file__).with_name("samples")
Facts = tuple[list[int], str, str]
"""Shape, dtype and digest of a tensor."""


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
