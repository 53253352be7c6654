"""`parallelize_module`: apply styles to a module, and to the submodules that a plan names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from dtckpt.dtensor.parallel.styles import ParallelStyle
from dtckpt.dtensor.parallel.values import tie
from dtckpt.errors import LayoutTypeError
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.mesh import Mesh

Plan: TypeAlias = "ParallelStyle | Mapping[str, Plan]"
"""One style, or a plan for each path of modules."""


def parallelize_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a module in place, and return it. Parameters that modules share stay shared.

    Collective: Over the mesh's clients, as `distribute_tensor` for every parameter; with the same plan on all.

    Args:
        module: The module.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``, of one axis for all styles of this package; default the
            innermost block's (see `run_on`).
        parallelize_plan: A style for the module, or a dict of styles for modules inside of it. A key is a path of
            names with dots between them; each name may be a pattern, as in ``"layers.*.attention.wq"``. An empty key
            is the module itself. A value may be a dict again. Without a plan, the call only warns.
        src_data_rank: Position, on the axis, of the device whose client sends the values of parameters. None: every
            client uses its own values, which must be equal, without communication.

    Raises:
        LayoutError: A module was parallelized before, or two that share a parameter get styles of different layouts.
        LayoutTypeError: The plan holds a value that is no style.
        MeshError: No mesh was given or is active, or the mesh has several axes.
        UnsupportedModuleError: A style cannot be applied to a module of this class.
    """
    mesh = require_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module: got no parallelize_plan, so nothing was parallelized", stacklevel=2)
        return module
    parallelized = _apply(module, mesh, parallelize_plan, src_data_rank)
    tie(parallelized)
    return parallelized


def _apply(module: nn.Module, mesh: Mesh, plan: Plan, src_data_rank: int | None) -> nn.Module:
    """Apply a style to a module, or a plan to the modules inside of it; return the module."""
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = src_data_rank
        return plan._apply(module, mesh)
    if not isinstance(plan, Mapping):
        raise LayoutTypeError(
            f"parallelize_plan: got {type(plan).__name__}, expected a ParallelStyle, or a dict of them by the "
            "path of a module"
        )
    for path, inner in plan.items():
        found = list(_modules_at(module, path))
        if not found:
            warnings.warn(
                f"parallelize_module: no module inside of {type(module).__name__} matches {path!r}; that part of the "
                "plan was left out",
                stacklevel=3,
            )
        for each in found:
            _apply(each, mesh, inner, src_data_rank)
    return module


def _modules_at(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules at a path of patterns; the module itself for an empty one."""
    if not path:
        yield module
        return
    pattern, _, rest = path.partition(".")
    for name, child in module.named_children():
        if fnmatchcase(name, pattern):
            yield from _modules_at(child, rest)
