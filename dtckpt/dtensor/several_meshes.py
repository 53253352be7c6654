"""Functions of PyTorch over all parameters of a model, if these are on several meshes: gradient norms and LBFGS.

Such a function merges values of all parameters into one tensor. Here that tensor is on one mesh with a device of each
client, so that each client can read it. `install` replaces PyTorch's functions; for tensors on one mesh the
replacements call them::

    get_total_norm    norm of each gradient, on its mesh  -->  all norms on the common mesh  -->  norm of the norms
    LBFGS             each gradient, flat, on its mesh    -->  one vector on the common mesh  -->  each mesh, its part
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.derived_layouts import cached_layout, mesh_of_all_clients
from dtckpt.dtensor.redistribute import redistribute_all
from dtckpt.dtensor.tensor import DTensor
from dtckpt.dtensor.torch_compile import traced
from dtckpt.layout.mesh import Mesh

_clip_grad: Any = torch_private.gradient_clipping
_get_total_norm, _clip_grads_with_norm = _clip_grad._get_total_norm, _clip_grad._clip_grads_with_norm_
_lbfgs: Any = torch_private.lbfgs
_gather_flat_grad, _add_grad = _lbfgs._gather_flat_grad, _lbfgs._add_grad


def _meshes_of(tensors: Iterable[Any]) -> list[Mesh]:
    """Return the meshes of the DTensors among some values, each once."""
    return list(dict.fromkeys(one.device_mesh for one in tensors if isinstance(one, DTensor)))


def _to_mesh(tensors: Sequence[torch.Tensor], mesh: Mesh | None) -> list[torch.Tensor]:
    """Return tensors replicated on a mesh, or whole as plain tensors if it is None; return plain tensors unchanged.

    Collective: As `redistribute_all`, over the clients of all meshes.
    """
    moving = [one for one in tensors if isinstance(one, DTensor)]
    if mesh is None:
        whole = iter([one.full_tensor() for one in moving])
    else:
        whole = iter(redistribute_all(moving, [cached_layout(mesh, None, one.ndim) for one in moving]))
    return [next(whole) if isinstance(one, DTensor) else one for one in tensors]


# --- norms of gradients -------------------------------------------------------------------------------------------


@traced
@wraps(_get_total_norm)
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if any(isinstance(one, DTensor) for one in tensors):
        tensors = _norms_on_one_mesh(tensors, float(norm_type), foreach)
    total: torch.Tensor = _get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    return total


def _norms_on_one_mesh(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """Return tensors on one mesh with the same total norm: the tensors themselves, or else the norms of these tensors.

    The norm of norms equals the norm of their absolute values, so PyTorch's function may take norms for gradients.
    """
    meshes = _meshes_of(tensors)
    if len(meshes) < 2:
        return tensors
    with torch.no_grad():
        if foreach is False:
            norms = [torch.linalg.vector_norm(one, order) for one in tensors]
        else:
            norms = list(torch_private.foreach_norm(tensors, order))
        return _to_mesh(norms, mesh_of_all_clients(meshes))


@traced
@wraps(_clip_grads_with_norm)
def _clip_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(isinstance(one, DTensor) for one in (*parameters, total_norm)):
        _clip_grads_with_norm(parameters, max_norm, total_norm, foreach)
        return
    for part, norm in _with_norms(parameters, total_norm):
        _clip_grads_with_norm(part, max_norm, norm, foreach)


def _with_norms(parameters: list[torch.Tensor], norm: torch.Tensor) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return the parameters of each mesh, and the plain parameters, each group with the norm on its mesh."""
    with_gradients = [one for one in parameters if one.grad is not None]
    if len(_meshes_of([*with_gradients, norm])) < 2:
        return [(with_gradients, norm)]
    by_mesh: dict[Mesh | None, list[torch.Tensor]] = {}
    for one in with_gradients:
        by_mesh.setdefault(one.device_mesh if isinstance(one, DTensor) else None, []).append(one)
    with torch.no_grad():
        return [(part, _to_mesh([norm], mesh)[0]) for mesh, part in by_mesh.items()]


# --- LBFGS --------------------------------------------------------------------------------------------------------


@wraps(_gather_flat_grad)
def _gather_on_one_mesh(optimizer: Any) -> torch.Tensor:
    """Return all gradients as one vector, on a mesh of all clients."""
    meshes = _meshes_of(optimizer._params)
    if len(meshes) < 2:
        return _gather_flat_grad(optimizer)  # type: ignore[no-any-return]
    flat = [_gather_flat_grad(SimpleNamespace(_params=[one])) for one in optimizer._params]
    return torch.cat(_to_mesh(flat, mesh_of_all_clients(meshes)))


@wraps(_add_grad)
def _add_on_each_mesh(optimizer: Any, step_size: Any, update: torch.Tensor) -> None:
    """Add to each parameter its part of a vector on a mesh of all clients."""
    if len(_meshes_of(optimizer._params)) < 2:
        _add_grad(optimizer, step_size, update)
        return
    sizes = [one.numel() * (2 if one.is_complex() else 1) for one in optimizer._params]
    for parameter, size, part in zip(optimizer._params, sizes, torch.split(update, sizes), strict=True):
        (moved,) = _to_mesh([part], parameter.device_mesh if isinstance(parameter, DTensor) else None)
        _add_grad(SimpleNamespace(_params=[parameter], _numel=lambda size=size: size), step_size, moved)


def install() -> None:
    """Replace PyTorch's functions."""
    # ``torch.nn.utils`` shows them under names without underscore.
    _clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _total_norm
    _clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = _clip_with_norm
    _lbfgs._gather_flat_grad, _lbfgs._add_grad = _gather_on_one_mesh, _add_on_each_mesh
