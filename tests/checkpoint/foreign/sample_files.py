"""Checkpoints that other libraries wrote, and the digests of what these libraries load."""

import hashlib
import json
from pathlib import Path

import torch

SAMPLES = Path(__file__).with_name("samples")


def expected(kind, name):
    """Return the expected entries of a sample, and the notes about it."""
    content = json.loads((SAMPLES / kind / f"{name}.expected.json").read_text())
    return content["tensors"], content["notes"]


def entry(tensor):
    """Return shape, dtype and digest of a tensor, as the expected entries have them."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "sha256": hashlib.sha256(data).hexdigest()}
