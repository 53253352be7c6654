"""State as the checkpoint engine sees it: what every leaf is, and where its parts lie in this client's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from dtckpt import interop
from dtckpt.dtensor import DTensor, DVariable
from dtckpt.errors import DTypeError, LayoutError
from dtckpt.format.dtypes import DTYPES, validate_dtype
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.region import Region


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state as a tree (modules, optimizers, samplers)."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as a tree."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Take over a state tree."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor of a state tree.

    Args:
        shape: Global shape.
        dtype: Dtype name.
        layout: Its layout; None for a plain tensor, of which every client has a copy.
        parts: This client's parts: the region that each covers, and the memory that holds it.
        save_as_bf16: Whether it wants to be stored as bfloat16.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    parts: tuple[tuple[Region, torch.Tensor], ...]
    save_as_bf16: bool = False

    def distinct_parts(self) -> dict[Region, list[torch.Tensor]]:
        """Return the non-empty regions of this client and their local copies."""
        found: dict[Region, list[torch.Tensor]] = {}
        for region, memory in self.parts:
            if not region.is_empty:
                found.setdefault(region, []).append(memory)
        return found


def is_tensor(value: object) -> bool:
    """Whether a value of a state tree is stored as an array."""
    return isinstance(value, torch.Tensor)


def mesh_of(value: Any) -> Mesh | None:
    """Return the mesh that a tensor is on; None for a plain one."""
    if interop.is_torch_dtensor(value):
        return interop.mesh_of(value.device_mesh)
    return value.device_mesh if isinstance(value, DTensor) else None


def as_leaf(value: torch.Tensor) -> Leaf:
    """Describe a DTensor (ours or PyTorch's) or a plain tensor.

    Raises:
        DTypeError: The dtype or the memory format cannot be stored.
        LayoutError: The layout has MATCH specs or pending reductions.
    """
    if interop.is_torch_dtensor(value):
        layout, local = interop.layout_and_local(value)
        components: tuple[torch.Tensor, ...] = () if local is None else (local,)
    elif isinstance(value, DTensor):
        layout, components = value.layout, value.components
    else:
        layout, components = None, (value,)
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    validate_dtype(dtype)
    for memory in components:
        if memory.layout != torch.strided or memory.is_quantized or memory.is_meta or memory.is_nested:
            raise DTypeError(f"only dense tensors with data can be stored; got {memory.layout} on {memory.device}")
    if layout is None:
        return Leaf(shape, dtype, None, ((Region.full(shape), value),))
    if layout.partial:
        raise LayoutError(
            f"a tensor with pending reductions has no values yet; got partial axes {dict(layout.partial)}; "
            "relayout it to sharded or replicated first"
        )
    regions = (layout.region(device, shape) for device in layout.mesh.local_device_ids())
    save_as_bf16 = isinstance(value, DVariable) and value.save_as_bf16
    return Leaf(shape, dtype, layout, tuple(zip(regions, components, strict=True)), save_as_bf16)


def host_array(memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a numpy view of a CPU tensor; a tensor elsewhere is copied to the host."""
    memory = memory.detach().resolve_conj().resolve_neg().cpu()
    dtype = DTYPES[str(memory.dtype).removeprefix("torch.")]
    if memory.dtype in (
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    ):
        # numpy has no such type; the bits travel as integers of the same size.
        memory = memory.view(torch.int16 if memory.itemsize == 2 else torch.uint8)
    return memory.numpy().view(dtype)


def shares_host_memory(memory: torch.Tensor) -> bool:
    """Whether `host_array` of a tensor is its own memory, so that writing there fills the tensor."""
    return memory.device.type == "cpu" and not memory.is_conj() and not memory.is_neg()


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101  (every name in DTYPES is a torch dtype)
    return dtype
