"""Views whose components are no views of their source's: the values had to move first.

Such a view remembers how it was made. It is made again when the source has been written to since, and what is written
to the view is written to the source; so it shares values with the source as any view does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Operator, tensors_in, with_tensors
from dtckpt.dtensor.operators.moving import brought, replicated, write
from dtckpt.dtensor.tensor import DTensor


@dataclass(slots=True)
class View:
    """How a view was made.

    Args:
        source: Another DTensor that is what the tensor was when it was viewed; that one may be reshaped in place.
        func: The operator.
        args: Its arguments, ``source`` first.
        kwargs: Its arguments by name.
        number: Which of the results the view is; None if there is one.
        version: The source's when the components were made; None if it has none, as in inference mode.
    """

    source: DTensor
    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None
    version: int | None

    def of(self, tensor: Any, args: tuple[Any, ...] | None = None) -> Any:
        """Return the view of another tensor."""
        made = self.func(tensor, *(args or self.args)[1:], **self.kwargs)
        return made if self.number is None else made[self.number]

    def refresh(self, tensor: DTensor) -> None:
        """Make the view, ``tensor``, again if the source was written to since. Collective: As its operator."""
        _ = self.source.components  # which may have to be made again itself
        version = version_of(self.source)
        if version is None or version != self.version:
            with torch.no_grad():
                again = self.of(self.source)
                again._view = None  # it is up to date, and must not be made again itself
                tensor._components = brought([again], [tensor._layout])[0].components
            self.version = version


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor and its views were written to; None if that is not counted."""
    return None if tensor.is_inference() else tensor._version


def remember(view: DTensor, source: DTensor, call: Any, number: int | None) -> None:
    """Note how a view was made."""
    alias = alias_of(source)
    view._view = View(alias, call.func, call.args, call.kwargs, number, version_of(alias))


def alias_of(tensor: DTensor) -> DTensor:
    """Return another DTensor with the same memory, layout and count of versions, which follows what the tensor does."""
    view, tensor._components, tensor._view = tensor._view, tensor.components, None
    try:
        with _with_versions():
            alias: DTensor = tensor.detach()  # type: ignore[assignment]  # of a DTensor it is one
    finally:
        tensor._view = view
    alias._view = None if view is None else replace(view)
    return alias


def _with_versions() -> AbstractContextManager[None]:
    """Have views made below autograd count versions together with their sources, as those above it do."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard


def write_through(tensor: DTensor) -> None:
    """Write a view's values to its source. Collective: Over the mesh's clients, unless all hold everything."""
    view = tensor._view
    assert view is not None  # noqa: S101  (else nobody calls this)
    with torch.no_grad():
        (whole,) = replicated([view.source], is_copied=True)
        # What was written has yet to reach the source, so that the view must not be made again from that.
        tensor._view = None
        (value,) = replicated([tensor])
        values = value.components
        tensor._view = view
        others = list(tensors_in((*view.args[1:], *view.kwargs.values())))
        for number, component in enumerate(whole.components):
            local = [other.components[number] for other in replicated(others)]
            args, kwargs = with_tensors(view.args[1:], view.kwargs, local)
            made = view.func(component, *args, **kwargs)
            (made if view.number is None else made[view.number]).copy_(values[number])
        write(whole, view.source)
    if view.source._view is not None:
        write_through(view.source)
