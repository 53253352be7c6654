"""The state that the tests of storage save, and the check that exactly this state restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import UNSHARDED, Layout, abstract_mesh

MESH = abstract_mesh({"x": 2, "y": 2})
WHOLES = {
    "w": tensor_of("w", (32, 20), "float32"),
    "large": tensor_of("large", (512, 256), "float32"),
    "small": tensor_of("small", (5,), "bfloat16"),
}


def state(step: int, wholes: Mapping[str, torch.Tensor] = WHOLES) -> dict[str, Any]:
    """Return the tensors, of which one is sharded and tells the step."""
    return {**wholes, "w": packed(wholes["w"] + step, Layout([("y", "x"), UNSHARDED], MESH)), "step": step}


def save(path: Any, step: int = 1, **options: Any) -> dtckpt.SaveReport:
    """Save the state of a step, over what is there."""
    return dtckpt.save(path, state(step), options=dtckpt.SaveOptions(overwrite=True, **options))


def holds(path: Any, step: int = 1, wholes: Mapping[str, torch.Tensor] = WHOLES) -> bool:
    """Whether the state of a step restores, bit for bit."""
    restored, expected = dtckpt.restore(path), {**wholes, "w": wholes["w"] + step}
    return restored["step"] == step and all(bits_of(restored[name]) == bits_of(expected[name]) for name in wholes)
