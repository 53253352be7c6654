"""Make new DTensors: `zeros`, `ones`, `full`, `empty`, `rand`, `randn`; each device makes its own component alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypedDict, Unpack

import torch

from dtckpt.comm import host_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.derived_layouts import cached_layout, gradient_layout
from dtckpt.dtensor.random import agreed_key
from dtckpt.dtensor.random import fill as fill_randomly
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.layout.region import Region

Fill = Callable[[torch.Tensor, Region], object]
"""Fills one device's component, given its region of the global tensor."""
FillMaker = Callable[[Mesh, tuple[int, ...]], Fill]
"""Returns a function that fills the components of a tensor, given its mesh and global shape."""


class Options(TypedDict, total=False):
    """Arguments of every factory beside the size.

    Args:
        dtype: Default torch's default dtype.
        layout: ``torch.strided``; there is no other.
        requires_grad: Whether gradients are wanted.
        device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
        placements: One per mesh axis; None means replicated. Terms of a Partial tensor reduce to the values.
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: MeshLike | None
    placements: Sequence[Placement] | None


def _known(factory: str, options: Options) -> Options:
    """Return the options that a factory got, if each is one of `Options`."""
    for name in options:
        if name not in Options.__annotations__:
            known = ", ".join(Options.__annotations__)
            raise LayoutTypeError(f"{factory}() got an unexpected keyword argument {name!r}, expected one of {known}")
    return options


def _make(
    size: Sequence[Any],
    make_fill: FillMaker,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a new DTensor, filled by the function that ``make_fill`` returns; the other arguments are `Options`."""
    if layout != torch.strided:
        raise LayoutError(f"only dense tensors are made; got layout {layout}, expected {torch.strided}")
    mesh = require_mesh(device_mesh)
    shape = _shape_of(size)
    target = cached_layout(mesh, placements, len(shape))
    complete = gradient_layout(target)  # nothing pending: terms come from the values
    fill = make_fill(mesh, shape)
    components = []
    for device, name in zip(mesh.local_device_ids(), mesh.local_devices(), strict=True):
        region = complete.region(device, shape)
        component = host_memory.allocate(region.shape, dtype, device_of(name))
        fill(component, region)
        components.append(component)
    tensor = DTensor(components, complete, shape, dtype or torch.get_default_dtype())
    result = redistribute(tensor, target)
    result.requires_grad_(requires_grad)
    return result


def _shape_of(size: Sequence[Any]) -> tuple[int, ...]:
    sizes = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    if not all(isinstance(item, SupportsIndex) and operator.index(item) >= 0 for item in sizes):
        raise LayoutTypeError(f"size must be integers that are zero or greater, or one sequence of them; got {sizes!r}")
    return tuple(map(operator.index, sizes))


def _value(value: complex) -> FillMaker:
    return lambda *_: lambda part, _: part.fill_(value)


def _random(distribution: str) -> FillMaker:
    """Fill components with random numbers, which depend on the element's global index and not on the layout.

    Collective: At some calls; see `agreed_key`.
    """

    def make_fill(mesh: Mesh, shape: tuple[int, ...]) -> Fill:
        key = agreed_key(mesh)
        return lambda part, region: fill_randomly(distribution, part, region, shape, key)

    return make_fill


def zeros(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of zeros. ``size``: integers, or one sequence of them; the rest: `Options`."""
    return _make(size, _value(0), **_known("zeros", options))


def ones(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of ones; arguments as for `zeros`."""
    return _make(size, _value(1), **_known("ones", options))


def full(size: Sequence[int], fill_value: complex, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of one value, of the value's dtype unless one is given; arguments as for `zeros`."""
    options["dtype"] = options.get("dtype") or torch.full((), fill_value).dtype
    return _make([size], _value(fill_value), **_known("full", options))


def empty(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of uninitialised values; arguments as for `zeros`."""
    return _make(size, lambda *_: lambda part, _: part, **_known("empty", options))


def rand(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of numbers uniform in [0, 1), the same in every layout; arguments as for `zeros`.

    Collective: At some calls, over the mesh's clients; see `agreed_key`.

    Raises:
        GeneratorMismatchError: The generators of clients differ now; see `agreed_key`.
    """
    return _make(size, _random("uniform"), **_known("rand", options))


def randn(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of standard normal numbers, as `rand` otherwise."""
    return _make(size, _random("normal"), **_known("randn", options))
