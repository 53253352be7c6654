"""Parameters of parallel modules: one parameter that several modules have becomes one DTensor."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dtckpt.dtensor.derived_layouts import cached_layout
from dtckpt.dtensor.distribute import distribute_tensor
from dtckpt.dtensor.tensor import DTensor, described, fetch_layout
from dtckpt.errors import LayoutError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

_replacements: MutableMapping[nn.Parameter, weakref.ref[nn.Parameter]] = WeakIdKeyDictionary()
"""By plain parameter, a weak reference to the DTensor that has replaced it in one module.

Another module may have the plain one still: it is a tied parameter, whose other module was parallelized alone.
"""


def distribute_parameter(
    module: nn.Module, name: str, mesh: Mesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Replace a module's parameter by a DTensor; one that another module shares becomes the same DTensor in both.

    Collective: As `distribute_tensor`, unless the parameter was distributed with another module.

    Args:
        module: The module.
        name: Of the parameter. If the module has None for it, nothing happens.
        mesh: A mesh of one axis.
        placement: On that axis.
        src_data_rank: As for `distribute_tensor`.

    Raises:
        LayoutError: The parameter was distributed already, in another layout.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    distributed = parameter if isinstance(parameter, DTensor) else replacement_of(parameter)
    if distributed is None:
        made = distribute_tensor(parameter.detach(), mesh, (placement,), src_data_rank=src_data_rank)
        distributed = nn.Parameter(made, requires_grad=parameter.requires_grad)
        _replacements[parameter] = weakref.ref(distributed)
    layout, present = cached_layout(mesh, (placement,), distributed.ndim), fetch_layout(distributed)
    if present != layout:
        raise LayoutError(
            f"parameter {name!r} of {type(module).__name__} was distributed before, perhaps as the parameter of "
            f"another module that shares it; got {described(layout)}, expected {described(present)}; have one style "
            "for all modules that share a parameter, or give each its own copy"
        )
    module.register_parameter(name, distributed)


def replacement_of(parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the DTensor that has replaced a plain parameter in some module that lives; None if there is none."""
    reference = _replacements.get(parameter)
    return None if reference is None else reference()


def tie(module: nn.Module) -> None:
    """Replace, in a module and those inside of it, plain parameters that are DTensors in other modules already."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and (replacement := replacement_of(parameter)) is not None:
                each._parameters[name] = replacement
