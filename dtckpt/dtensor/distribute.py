"""Put existing tensors and modules on a mesh: `distribute_tensor`, `distribute_module`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dtckpt.comm.collectives import all_gather_object
from dtckpt.comm.host_memory import copied
from dtckpt.comm.process_groups import is_connected
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.derived_layouts import cached_layout
from dtckpt.dtensor.factories import require_mesh
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor, described
from dtckpt.dtensor.tensorflow_names import MeshLike, copy_to_mesh
from dtckpt.errors import (
    ComponentError,
    DtckptError,
    LayoutError,
    LayoutTypeError,
    MeshError,
    capped,
    from_wire,
    to_wire,
)
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, validate_reductions

_APPLIED = "_distribute_module_applied"


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return a DTensor of the values that one client's ``tensor`` has. The result is a leaf.

    Collective: Over the mesh's clients, unless ``src_data_rank`` is None.

    Args:
        tensor: On every client a tensor of one shape and dtype; the values count on one of them only. Of a meta tensor
            the components are meta tensors. A DTensor that has the wanted mesh and placements is returned as it is.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
        placements: One per mesh axis; None means replicated.
        src_data_rank: Position along every axis of the device whose client gives the values; None: every client uses
            its own, which must be the same, and nothing is communicated.

    Raises:
        ComponentError: The clients' tensors differ in shape or dtype, or the other arguments do.
        LayoutError: A DTensor has another mesh or other placements; redistribute does that. The tensor is no leaf.
        MeshError: The mesh has no such position.
    """
    mesh = require_mesh(device_mesh)
    if isinstance(tensor, DTensor):
        return _as_it_is(tensor, cached_layout(mesh, placements, tensor.ndim))
    wanted = _wanted(tensor, mesh, placements, src_data_rank)
    if src_data_rank is not None and not mesh.is_remote() and mesh.num_clients > 1:
        wanted = _agreed(wanted, tensor, mesh, src_data_rank)
    if isinstance(wanted, DtckptError):
        raise wanted
    plain = Layout(wanted.sharding_specs, mesh)
    if src_data_rank is None or tensor.is_meta or mesh.num_clients == 1:
        placed = copy_to_mesh(tensor.detach(), plain)
    else:
        placed = _own(redistribute(_on_one_device(tensor.detach(), mesh, src_data_rank), plain), tensor)
    result = redistribute(placed, wanted)
    result.requires_grad_(tensor.requires_grad)
    return result


def _as_it_is(tensor: DTensor, layout: Layout) -> DTensor:
    if tensor.layout != layout:
        raise LayoutError(
            f"the tensor is distributed already; got {described(tensor.layout)}, expected {described(layout)}; "
            "use redistribute"
        )
    return tensor


def _wanted(
    tensor: object, mesh: Mesh, placements: Sequence[Placement] | None, position: int | None
) -> Layout | DtckptError:
    """Return the layout, or what is wrong with the arguments as this client alone sees them."""
    try:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutTypeError(f"distribute_tensor needs a tensor; got {type(tensor).__name__}")
        if not tensor.is_leaf:
            raise LayoutError(
                "distribute_tensor makes leaves, so no gradient would get through; got a tensor that was computed, "
                "expected a leaf; use DTensor.from_local and redistribute, or detach it"
            )
        if tensor.layout != torch.strided:
            raise LayoutError(f"distribute_tensor needs a dense tensor; got layout {tensor.layout}")
        layout = cached_layout(mesh, placements, tensor.ndim)
        validate_reductions(layout.partial, tensor.dtype)
        for name in mesh.local_devices():
            device_of(name)
        if position is not None and (not isinstance(position, int) or not 0 <= position < min(mesh.shape)):
            raise MeshError(f"src_data_rank is {position!r}; expected a position along every axis of {mesh.axis_sizes}")
        return layout
    except DtckptError as error:
        return error


def _agreed(wanted: Layout | DtckptError, tensor: torch.Tensor, mesh: Mesh, position: int) -> Layout | DtckptError:
    """Return ``wanted`` if all clients want the same, else one error, the same one on all of them."""
    if not is_connected(mesh.clients):
        return wanted
    if isinstance(wanted, DtckptError):
        seen: tuple[Any, ...] = (to_wire(wanted), None)
    else:
        where = ("meta",) if tensor.is_meta else ()
        seen = (None, (tuple(tensor.shape), str(tensor.dtype), str(wanted.placements), position, *where))
    facts = all_gather_object(seen, mesh.clients)
    failure = next((failure for failure, _ in facts if failure is not None), None)
    if failure is not None:
        return from_wire(*failure)
    asked = [asked for _, asked in facts]
    if len(set(asked)) > 1:
        return ComponentError(
            f"distribute_tensor: clients differ in shape, dtype, placements or src_data_rank; got {capped(asked)}; "
            "expected the same on every client"
        )
    return wanted


def _on_one_device(tensor: torch.Tensor, mesh: Mesh, position: int) -> DTensor:
    """Return the tensor as the one component of a mesh that has only the device at ``position`` along every axis."""
    device = mesh.device_ids[int(np.ravel_multi_index((position,) * mesh.ndim, mesh.shape))]
    name = mesh.portable().global_devices()[device - mesh.min_global_device_id()]
    is_mine = device in mesh.local_device_ids()
    source = Mesh(["source"], np.arange(1), [0] if is_mine else [], [name] if is_mine else [], "", [name])
    components = [tensor.to(device_of(name))] if is_mine else []
    return DTensor(components, Layout.replicated(source, tensor.ndim), tensor.shape, tensor.dtype)


def _own(made: DTensor, tensor: torch.Tensor) -> DTensor:
    """Return the DTensor with memory of its own: a component that did not have to move is the caller's tensor still."""
    storage = tensor.untyped_storage().data_ptr()
    components = [copied(part) if part.untyped_storage().data_ptr() == storage else part for part in made.components]
    return DTensor(components, made.layout, made.shape, made.dtype)


def distribute_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place; those that are tied stay so.

    Collective: Over the mesh's clients, as `distribute_tensor` for every parameter and buffer.

    Args:
        module: The module.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
        partition_fn: Called with name, submodule and mesh for every submodule, the root (``""``) first; it may replace
            parameters by DTensors. What it leaves plain is replicated.
        input_fn: Called with module, inputs and mesh before the module's forward; what it returns are the inputs.
        output_fn: Called with module, outputs and mesh after it; what it returns are the outputs.

    Returns:
        ``module``.

    Raises:
        LayoutError: The module was distributed before, or ``partition_fn`` gave a tensor that several names stand for
            several layouts.
    """
    mesh = require_mesh(device_mesh)
    if getattr(module, _APPLIED, False):
        raise LayoutError("distribute_module was applied to this module already; a module can be distributed once")
    tied = _Tied(module)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh, tied)
    tied.tie()
    if input_fn is not None:
        module.register_forward_pre_hook(lambda root, inputs: input_fn(root, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda root, _, outputs: output_fn(root, outputs, mesh))
    setattr(module, _APPLIED, True)
    return module


Registry = dict[str, Any]
"""Parameters or buffers of one module by name."""


class _Tied:
    """Where a module keeps every parameter and buffer that it had at first, so that one tensor becomes one DTensor."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[tuple[Registry, str]]] = {}
        self._originals: list[torch.Tensor] = []  # kept alive, so that no other tensor takes over an id
        for registry in (registry for submodule in module.modules() for registry in _registries(submodule)):
            for name, tensor in registry.items():
                if tensor is not None:
                    self._names.setdefault(id(tensor), []).append((registry, name))
                    self._originals.append(tensor)

    def made_of(self, tensor: torch.Tensor) -> DTensor | None:
        """Return the DTensor that has taken a tensor's place under another name, if there is one."""
        return next(iter(self._made(self._names.get(id(tensor), []))), None)

    def tie(self) -> None:
        """Have all names of one tensor stand for one DTensor, also where each was distributed by itself."""
        for names in self._names.values():
            made = self._made(names)
            layouts = list(dict.fromkeys(tensor.layout for tensor in made))
            if len(layouts) > 1:
                raise LayoutError(
                    f"distribute_module: got layouts {capped(map(described, layouts))} for one tensor, registered as "
                    f"{capped(name for _, name in names)}, expected one; have partition_fn give each name the same"
                )
            for registry, name in names:
                if isinstance(registry.get(name), DTensor):
                    registry[name] = made[0]

    @staticmethod
    def _made(names: Sequence[tuple[Registry, str]]) -> list[DTensor]:
        now = (registry.get(name) for registry, name in names)
        return [tensor for tensor in now if isinstance(tensor, DTensor)]


def _registries(module: nn.Module) -> tuple[Registry, Registry]:
    return module._parameters, module._buffers


def _replicate_rest(module: nn.Module, mesh: Mesh, tied: _Tied) -> None:
    for registry in _registries(module):
        for name, tensor in registry.items():
            if tensor is not None and not isinstance(tensor, DTensor):
                made = tied.made_of(tensor)
                registry[name] = _replicated(tensor, mesh) if made is None else made


def _replicated(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return distribute_tensor(tensor, mesh)
    return nn.Parameter(distribute_tensor(tensor.detach(), mesh), requires_grad=tensor.requires_grad)
