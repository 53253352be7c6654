"""Distribute plain tensors and modules over a mesh: `distribute_tensor`, `distribute_module`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from dtckpt.comm.host_memory import detached_clone
from dtckpt.comm.process_groups import validate_connected
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.derived_layouts import cached_layout, gradient_layout
from dtckpt.dtensor.gather_objects import gather_objects
from dtckpt.dtensor.redistribute import count_unchanged, redistribute
from dtckpt.dtensor.tensor import DTensor, described
from dtckpt.dtensor.tensorflow_names import copy_to_mesh
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
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, validate_reductions
from dtckpt.redistribution import agreements
from dtckpt.redistribution.execute import report_error

_APPLIED = "_distribute_module_applied"


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return a DTensor of the values of one client's ``tensor``. The result is a leaf.

    Collective: Over the mesh's clients, unless ``src_data_rank`` is None.

    Args:
        tensor: A tensor of the same shape and dtype on every client; one client's values count. For a meta tensor, the
            components are meta tensors. A DTensor with this mesh and these placements is returned unchanged.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
        placements: One per mesh axis; None means replicated.
        src_data_rank: Position, along every axis, of the device whose client sends the values. None: every client uses
            its own values, which must be equal, without communication.

    Raises:
        ComponentError: The clients' tensors differ in shape or dtype, or clients pass different arguments.
        LayoutError: A DTensor has another mesh or other placements (use redistribute), or the tensor is no leaf.
        MeshError: The mesh has no such position.
        CoordinationError: Clients must talk, and no process group connects them.
    """
    mesh = require_mesh(device_mesh)
    if isinstance(tensor, DTensor):
        return _validated(tensor, mesh, placements)
    layout = _layout_of(tensor, mesh, placements, src_data_rank)
    if src_data_rank is not None and not mesh.is_remote() and mesh.num_clients > 1:
        # Agree before any client sends: with an error here, or other arguments, the other clients would wait for
        # values. So a client keeps an error as a value until all clients have reported theirs.
        layout = _agreed_layout(layout, tensor, mesh, src_data_rank)
    if isinstance(layout, DtckptError):
        raise layout
    # In two steps: values travel once, then each device makes its term of a Partial tensor, without messages.
    complete = gradient_layout(layout)  # nothing pending
    if src_data_rank is None or tensor.is_meta or mesh.num_clients == 1:
        distributed = copy_to_mesh(tensor.detach(), complete)
    else:
        source = _on_one_device(tensor.detach(), mesh, src_data_rank)
        # The sender's own component may be a view of the caller's tensor, whose later writes must not reach the result.
        distributed = _without_shared_memory(redistribute(source, complete), tensor)
    result = redistribute(distributed, layout)
    result.requires_grad_(tensor.requires_grad)
    return result


def _validated(tensor: DTensor, mesh: Mesh, placements: Sequence[Placement] | None) -> DTensor:
    """Return a DTensor after a check that it has this mesh and these placements already."""
    try:
        layout = cached_layout(mesh, placements, tensor.ndim)
        if tensor.layout != layout:
            raise LayoutError(
                f"the tensor is distributed already; got {described(tensor.layout)}, expected {described(layout)}; "
                "use redistribute"
            )
    except DtckptError as error:
        report_error(error, [tensor.device_mesh, mesh], is_numbered=True)
        raise
    count_unchanged(tensor)
    return tensor


def _layout_of(
    tensor: object, mesh: Mesh, placements: Sequence[Placement] | None, position: int | None
) -> Layout | DtckptError:
    """Return the layout that the arguments ask for, or the error that this client finds in them."""
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
        # Raises for a device that this client lacks, while the others can still hear of it.
        for name in mesh.local_devices():
            device_of(name)
        if position is not None and (not isinstance(position, int) or not 0 <= position < min(mesh.shape)):
            raise MeshError(f"src_data_rank is {position!r}; expected a position along every axis of {mesh.axis_sizes}")
        return layout
    except DtckptError as error:
        return error


def _agreed_layout(
    layout: Layout | DtckptError, tensor: torch.Tensor, mesh: Mesh, position: int
) -> Layout | DtckptError:
    """Return ``layout`` if all clients ask for the same layout, else an error, equal on all clients.

    Collective: Over the mesh's clients.

    Raises:
        CoordinationError: No process group connects the clients.
    """
    validate_connected(mesh.clients, "distribute_tensor")
    if isinstance(layout, DtckptError):
        failure_and_request: tuple[Any, ...] = (to_wire(layout), None)
    else:
        case = "distribute_tensor", tensor.shape, tensor.dtype, tensor.is_meta, layout, position
        # Where the arguments of another client have changed, the redistribution that follows raises on all.
        if agreements.recall(mesh.clients, case):
            return layout
        # A meta tensor has no values to send. Other clients, with values, would wait for its client.
        device = ("meta",) if tensor.is_meta else ()
        request = (tuple(tensor.shape), str(tensor.dtype), str(layout.placements), position, *device)
        failure_and_request = (None, request)
    try:
        gathered = gather_objects(failure_and_request, mesh, "distribute_tensor")
    except DtckptError as error:
        # The others make another call, and raise because this client does not join it. Its own failure is the reason.
        raise (layout if isinstance(layout, DtckptError) else error) from error
    failure = next((failure for failure, _ in gathered if failure is not None), None)
    if failure is not None:
        return from_wire(*failure)
    requests = [request for _, request in gathered]
    if len(set(requests)) > 1:
        return ComponentError(
            f"distribute_tensor: clients differ in shape, dtype, placements or src_data_rank; got {capped(requests)}; "
            "expected the same on every client"
        )
    agreements.remember(mesh.clients, case, fact=True)
    return layout


def _on_one_device(tensor: torch.Tensor, mesh: Mesh, position: int) -> DTensor:
    """Return the tensor as the one component of a mesh that has only the device at ``position`` along every axis."""
    source = _source_mesh(mesh, id(mesh), position)
    components = [tensor.to(device_of(name)) for name in source.local_devices()]
    return DTensor(components, cached_layout(source, None, tensor.ndim), tensor.shape, tensor.dtype)


@lru_cache(maxsize=256)
def _source_mesh(mesh: Mesh, identity: int, position: int) -> Mesh:
    # Equal meshes may be seen from different clients of one process.
    del identity
    device = mesh.device_ids[int(np.ravel_multi_index((position,) * mesh.ndim, mesh.shape))]
    name = mesh.device_name(device)
    is_local = device in mesh.local_device_ids()
    # A mesh of this one device: to send the values is then a redistribution between meshes like any other.
    return Mesh(["source"], np.arange(1), [0] if is_local else [], [name] if is_local else [], "", [name])


def _without_shared_memory(result: DTensor, tensor: torch.Tensor) -> DTensor:
    """Return the DTensor with copies of the components that share memory with the caller's tensor."""
    storage = tensor.untyped_storage().data_ptr()
    components = [
        detached_clone(part) if part.untyped_storage().data_ptr() == storage else part for part in result.components
    ]
    return DTensor(components, result.layout, result.shape, result.dtype)


def distribute_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place; tied parameters stay tied.

    Collective: Over the mesh's clients, as `distribute_tensor` for every parameter and buffer.

    Args:
        module: The module.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
        partition_fn: Called with name, submodule and mesh for every submodule, the root (``""``) first; it may replace
            parameters by DTensors. Remaining plain parameters become replicated.
        input_fn: Called with module, inputs and mesh before the module's forward; returns the inputs to use.
        output_fn: Called with module, outputs and mesh after it; returns the outputs to use. Hooks without the module
            are deprecated.

    Returns:
        ``module``.

    Raises:
        LayoutError: The module was distributed before, a hook takes neither three arguments nor two, or
            ``partition_fn`` gave several layouts to one tensor that is registered under several names.
    """
    mesh = require_mesh(device_mesh)
    if getattr(module, _APPLIED, False):
        raise LayoutError("distribute_module was applied to this module already; a module can be distributed once")
    before, after = _with_module("input_fn", "inputs", input_fn), _with_module("output_fn", "outputs", output_fn)
    tied = _Tied(module)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh, tied)
    # After all submodules, since ``partition_fn`` may have replaced a tied tensor under one of its names only.
    tied.tie()
    if before is not None:
        module.register_forward_pre_hook(lambda root, inputs: before(root, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda root, _, outputs: after(root, outputs, mesh))
    setattr(module, _APPLIED, True)
    return module


def _with_module(name: str, values: str, hook: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a hook that takes module, values and mesh; wrap an old hook that takes only values and mesh."""
    if hook is None:
        return None
    if _takes(hook, 3):
        return hook
    if not _takes(hook, 2):
        raise LayoutError(
            f"distribute_module: got {name} with parameters {inspect.signature(hook)}, expected module, {values}, mesh"
        )
    warnings.warn(
        f"distribute_module: {name} of two arguments is deprecated; let it take module, {values} and mesh",
        FutureWarning,
        stacklevel=3,
    )
    return lambda _, given, mesh: hook(given, mesh)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


Registry = dict[str, Any]
"""Parameters or buffers of one module by name."""


class _Tied:
    """The names under which a module registers each parameter and buffer, so that one tensor becomes one DTensor."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[tuple[Registry, str]]] = {}
        self._originals: list[torch.Tensor] = []  # kept alive, so that no other tensor takes over an id
        for registry in (registry for submodule in module.modules() for registry in _registries(submodule)):
            for name, tensor in registry.items():
                if tensor is not None:
                    self._names.setdefault(id(tensor), []).append((registry, name))
                    self._originals.append(tensor)

    def replacement_of(self, tensor: torch.Tensor) -> DTensor | None:
        """Return the DTensor that has replaced a tensor under another name, if there is one."""
        return next(iter(self._replacements(self._names.get(id(tensor), []))), None)

    def tie(self) -> None:
        """Register one DTensor under all names of one tensor, also if each name was distributed by itself."""
        for names in self._names.values():
            replacements = self._replacements(names)
            layouts = list(dict.fromkeys(tensor.layout for tensor in replacements))
            if len(layouts) > 1:
                raise LayoutError(
                    f"distribute_module: got layouts {capped(map(described, layouts))} for one tensor, registered as "
                    f"{capped(name for _, name in names)}, expected one; have partition_fn give each name the same"
                )
            for registry, name in names:
                if isinstance(registry.get(name), DTensor):
                    registry[name] = replacements[0]

    @staticmethod
    def _replacements(names: Sequence[tuple[Registry, str]]) -> list[DTensor]:
        registered = (registry.get(name) for registry, name in names)
        return [tensor for tensor in registered if isinstance(tensor, DTensor)]


def _registries(module: nn.Module) -> tuple[Registry, Registry]:
    return module._parameters, module._buffers


def _replicate_rest(module: nn.Module, mesh: Mesh, tied: _Tied) -> None:
    for registry in _registries(module):
        for name, tensor in registry.items():
            if tensor is not None and not isinstance(tensor, DTensor):
                # An optimizer would update two DTensors of one tied parameter separately, and they would differ.
                replacement = tied.replacement_of(tensor)
                registry[name] = _replicated(tensor, mesh) if replacement is None else replacement


def _replicated(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return distribute_tensor(tensor, mesh)
    return nn.Parameter(distribute_tensor(tensor.detach(), mesh), requires_grad=tensor.requires_grad)
