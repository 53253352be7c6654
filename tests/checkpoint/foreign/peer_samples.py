"""Checkpoints as other libraries wrote them, with the digests of what those libraries load: `peers.tar.xz`.

DeepSpeed 0.19.8, Megatron-Core 0.13.1, 0.15.3, 0.16.1 and 0.19.0, and FSDP1 of PyTorch 2.13 wrote them. Beside each is
``….expected.json``: shape, dtype, and SHA-256 of the elements, by the writer's name of the tensor.
"""

import hashlib
import json
from pathlib import Path

import torch

import dtckpt

ARCHIVE = Path(__file__).parent / "peers.tar.xz"


def expected(peers: Path, name: str) -> dict[str, tuple[list[int], str, str]]:
    """Return the facts of a sample's tensors: shape, dtype and digest, by the writer's name."""
    tensors = json.loads((peers / f"{name}.expected.json").read_text())["tensors"]
    return {name: (each["shape"], each["dtype"], each["sha256"]) for name, each in tensors.items() if "sha256" in each}


def facts(tensor: torch.Tensor) -> tuple[list[int], str, str]:
    """Return shape, dtype and digest of a tensor."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), hashlib.sha256(data).hexdigest()


def read_all(path: Path | str) -> dict[str, tuple[list[int], str, str]]:
    """Return the facts of all tensors of a checkpoint, by name."""
    with dtckpt.open_checkpoint(path) as checkpoint:
        return {name: facts(checkpoint.read(name)) for name in checkpoint.tensors}
