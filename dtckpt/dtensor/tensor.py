"""`DTensor`: a tensor of global shape whose components live on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtckpt.dtensor import dispatch, gather
from dtckpt.errors import ComponentError, LayoutError
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Placement


class DTensor(torch.Tensor):
    """A `torch.Tensor` of global shape, held as one component per local device and a `Layout`.

    Made by `pack`; the constructor checks nothing.

    Args:
        components: One plain tensor per local device, in `Mesh.local_devices` order.
        layout: How the global tensor is laid out over the mesh.
        shape: Global shape.
    """

    _components: tuple[torch.Tensor, ...]
    _layout: Layout

    @staticmethod
    def __new__(
        cls, components: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int], dtype: torch.dtype
    ) -> DTensor:
        device = components[0].device if components else torch.device("cpu")
        wrapper = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        wrapper._components = tuple(components)
        wrapper._layout = layout
        return wrapper

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # torch's ``layout`` (strided, sparse) gives way
        """Mesh and sharding of the tensor."""
        return self._layout

    @property
    def device_mesh(self) -> Mesh:
        """The mesh whose devices hold the components."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as one placement per mesh axis."""
        return self._layout.placements

    @property
    def components(self) -> tuple[torch.Tensor, ...]:
        """The components of this client's devices, in `Mesh.local_devices` order; they share memory with it."""
        return self._components

    def to_local(self) -> torch.Tensor:
        """Return the component of this client's only device; it shares memory with the tensor.

        A client that is no member of the mesh gets a tensor of shape (0,).

        Raises:
            ComponentError: This client has several devices in the mesh; `unpack` gives all components.
        """
        if len(self._components) > 1:
            raise ComponentError(
                f"to_local needs one local device; got {len(self._components)}; unpack returns every component"
            )
        return self._components[0] if self._components else torch.empty(0, dtype=self.dtype)

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor as a plain one, with pending reductions done.

        Collective: Over the mesh's clients, unless every client holds every part. The exchange goes through
        ``torch.distributed`` and is bounded by the process group's timeout.
        """
        return gather.full_tensor(self._components, self._layout, self.shape, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance method
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; see `dtckpt.dtensor.dispatch`."""
        del types
        return dispatch.dispatch(DTensor, func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        del tensor_contents
        parts = ", ".join(
            f"{name.rpartition('/')[2].removeprefix('device:')}: {component!r}"
            for name, component in zip(self.device_mesh.local_devices(), self._components, strict=True)
        )
        return f"DTensor({{{parts}}}, shape={tuple(self.shape)}, layout={self._layout.to_string()!r})"


def fetch_layout(tensor: object) -> Layout:
    """Return a DTensor's layout.

    Raises:
        LayoutError: The argument is no DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"fetch_layout needs a DTensor; got {type(tensor).__name__}")
    return tensor.layout


def check_layout(tensor: object, layout: Layout) -> None:
    """Check that a DTensor has a layout.

    Raises:
        LayoutError: It has another one (both are named), or the argument is no DTensor.
    """
    have = fetch_layout(tensor)
    if have != layout:
        raise LayoutError(f"layout of the tensor differs; got {have.to_string()}, expected {layout.to_string()}")
