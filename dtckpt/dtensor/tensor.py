"""`DTensor`: a tensor of global shape whose components live on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtckpt.errors import DtckptError, LayoutError, LayoutTypeError, capped
from dtckpt.layout import text_format
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

if TYPE_CHECKING:
    from dtckpt.dtensor.operators.tensor_spec import Spec
    from dtckpt.dtensor.operators.view_tracking import View
    from dtckpt.dtensor.tensorflow_names import MeshLike
    from dtckpt.redistribution.execute import Running

EARLY_KEY_NAME = "DeferredInit"
EARLY_KEY = torch._C._dispatch_key_parse(EARLY_KEY_NAME)
"""A dispatch key that DTensors alone have, as PyTorch has no kernels for it: `dtckpt.dtensor.operators.pre_autograd`.

It comes before autograd, and after PyTorch has noted the state that it restores for ``__torch_dispatch__``.
"""
KEYS = torch._C.DispatchKeySet(EARLY_KEY)

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


class DTensor(torch.Tensor):
    """A `torch.Tensor` of global shape, held as one component per local device and a `Layout`.

    Made by `pack`; the constructor checks nothing.

    Args:
        components: One plain tensor per local device, in `Mesh.local_devices` order.
        layout: How the global tensor is laid out over the mesh.
        shape: Global shape.
        dtype: Dtype of the components.
        device: Where they would be, if there are none.
    """

    _components: tuple[torch.Tensor, ...]
    _layout: Layout
    _pending: Running | None = None
    """What the components wait for before they may be read; see `redistribute`."""
    _spec: Spec | None = None
    """See `dtckpt.dtensor.operators.tensor_spec`; made when it is first asked for."""
    _view: View | None = None
    """How the tensor follows another one whose values it shares, but not the memory."""
    _writes: list[int] | None = None
    """How often any of the tensors that share values with this one was written to; None if there are none."""

    _dispatch: Callable[..., Any]
    """Runs operators; `dtckpt.dtensor.operators.dispatch` puts it here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch types it otherwise

    @staticmethod
    def __new__(
        cls,
        components: Sequence[torch.Tensor],
        layout: Layout,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
    ) -> DTensor:
        device = components[0].device if components else device or torch.device("cpu")
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, _extra_dispatch_keys=KEYS
        )
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
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._view is not None:
            self._view.refresh(self)
        return self._components

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; setting it, as ``Module.to`` does, exchanges components and layout too."""
        detached: torch.Tensor = _DATA.__get__(self)
        return detached

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, DTensor):
            raise LayoutTypeError(f"the data of a DTensor is a DTensor; got {type(tensor).__name__}")
        _DATA.__set__(self, tensor)
        from dtckpt.dtensor.operators import view_tracking

        alias = view_tracking.alias_of(tensor)
        self._components, self._layout, self._spec = alias._components, alias._layout, None
        self._view, self._writes = alias._view, alias._writes

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, as of any tensor, in the tensor's own layout; of a Partial tensor, replicated.

        What backward passes add up may wait for reductions, or lie in another layout; it is brought here once, when it
        is read, and kept so.

        Collective: Over the mesh's clients, when it is read for the first time after a backward pass.
        """
        found: torch.Tensor | None = _GRAD.__get__(self)
        if found is None:
            return None
        if isinstance(found, DTensor) and found._layout is self._layout and not self._layout.partial:
            return found
        from dtckpt.dtensor import autograd
        from dtckpt.dtensor.operators import plain_tensors

        gradient = plain_tensors.gradient_to_dtensor(found, self.device_mesh)
        wanted = autograd.gradient_layout(self._layout)
        if gradient._layout != wanted:
            gradient = autograd.redistribute(gradient, wanted)
        if gradient is not found:
            _GRAD.__set__(self, gradient)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            if not isinstance(gradient, DTensor):
                raise LayoutTypeError(f"the gradient of a DTensor is a DTensor; got {type(gradient).__name__}")
            if gradient.device_mesh != self.device_mesh:
                raise LayoutError(
                    f"gradient: got {described(gradient.layout)}, expected one on the mesh of the tensor, "
                    f"{described(self.layout)}"
                )
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: MeshLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Return the DTensor of which each client's ``local_tensor`` is a component. Differentiable.

        Collective: Over the mesh's clients if ``shape`` is None or with ``run_check``: they exchange shapes and
        digests.

        Args:
            local_tensor: This client's component; it is shared, never written to.
            device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
            placements: One per mesh axis; None means replicated.
            run_check: Compare the values of copies on all clients.
            shape: Global shape; without it the clients find it together, uneven shards included.
            stride: Accepted for PyTorch's sake; the global tensor is always contiguous.
            grad_placements: Placements of the component's gradient; default the tensor's, Partial as Replicate.

        Raises:
            ComponentError: Components do not fit each other, the layout or ``shape``, or clients give other placements.
            LayoutError: The placements do not fit the mesh or the tensor.
            ReplicaMismatchError: Copies differ.
        """
        del stride
        from dtckpt.dtensor import autograd, factories
        from dtckpt.dtensor import components as packing

        mesh = factories.require_mesh(device_mesh)
        try:
            if not isinstance(local_tensor, torch.Tensor):
                raise LayoutTypeError(f"from_local needs a tensor; got {type(local_tensor).__name__}")
            layout = autograd.from_placements(mesh, placements, local_tensor.ndim)
            gradient = None if grad_placements is None else Layout.from_placements(mesh, grad_placements, layout.rank)
        except DtckptError as error:
            raise packing.shared_failure(error, mesh) if shape is None or run_check else error from None
        return autograd.from_local(local_tensor, layout, shape=shape, gradient=gradient, run_check=run_check)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the component of this client's only device; it shares memory with the tensor. Differentiable.

        A client that is no member of the mesh gets a tensor of shape (0,).

        Args:
            grad_placements: Placements that the component's gradient is in; default the tensor's, Partial as Replicate.

        Raises:
            ComponentError: This client has several devices in the mesh; `unpack` gives all components.
        """
        from dtckpt.dtensor import autograd

        if grad_placements is None:
            return autograd.to_local(self, autograd.gradient_layout(self._layout))
        return autograd.to_local(self, Layout.from_placements(self.device_mesh, grad_placements, self.ndim))

    @property
    def _local_tensor(self) -> torch.Tensor:
        """`to_local` without a gradient, by a name that programs for PyTorch's read although it is private."""
        with torch.no_grad():
            return self.to_local()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor as a plain one, with pending reductions done. Differentiable.

        Collective: Over the mesh's clients, unless every client holds every part. The exchange goes through
        ``torch.distributed`` and is bounded by the process group's timeout.

        Args:
            grad_placements: Placements of the gradient on the mesh of one device per client; default replicated.
        """
        from dtckpt.dtensor import autograd

        if grad_placements is None:
            return autograd.full_tensor(self)
        hosts = autograd.one_device_per_client(self.device_mesh)
        return autograd.full_tensor(self, Layout.from_placements(hosts, grad_placements, self.ndim))

    def redistribute(
        self,
        device_mesh: MeshLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the tensor with other placements, on its mesh or on another. Differentiable, twice too.

        Collective: Over the clients of both meshes, unless nothing changes or every client holds the whole tensor.

        Args:
            device_mesh: The new mesh; default the present one.
            placements: One per axis of the new mesh; None means replicated.
            async_op: Return while the last transfer is under way; the first use of the result waits for it.
            forward_dtype: Convert to this dtype before moving.
            backward_dtype: Convert the gradient to this dtype before moving it back.
        """
        is_plain = device_mesh is None and forward_dtype is None and backward_dtype is None
        # The commonest change of all, none, costs no more than finding that out.
        if is_plain and isinstance(placements, list | tuple) and tuple(placements) == self.placements:
            return self
        from dtckpt.dtensor import autograd

        mesh = self.device_mesh
        try:
            if device_mesh is not None:
                from dtckpt.dtensor import factories

                mesh = factories.require_mesh(device_mesh)
            layout = autograd.from_placements(mesh, placements, self.ndim)
        except DtckptError as error:
            from dtckpt.redistribution import execute

            execute.tell(error, [self.device_mesh, mesh])
            raise
        return autograd.redistribute(
            self, layout, forward_dtype=forward_dtype, backward_dtype=backward_dtype, is_async=async_op
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance method
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; see `dtckpt.dtensor.operators`."""
        del types
        return cls._dispatch(func, args, kwargs or {})

    # --- copying, pickling, PyTorch's distributed checkpoint ------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        from dtckpt.dtensor import serialization

        return serialization.reduce(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        from dtckpt.dtensor import serialization

        return serialization.deepcopy(self, memo)

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes that this client holds; see `dtckpt.dtensor.torch_checkpoint`."""
        from dtckpt.dtensor import torch_checkpoint

        return torch_checkpoint.chunk_list(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002  (PyTorch's name)
        from dtckpt.dtensor import torch_checkpoint

        return torch_checkpoint.write_items(fqn, object)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from dtckpt.dtensor import torch_checkpoint

        return torch_checkpoint.shard_at(self, index)

    # --- values as numbers, which are global: every client gets all of them ---------------------------------------

    def tolist(self) -> Any:
        """Return the values as nested lists. Collective: As `full_tensor`."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, in memory of its own. Collective: As `full_tensor`."""
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        values = self.full_tensor().numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        del tensor_contents
        parts = ", ".join(
            f"{name.rpartition('/')[2].removeprefix('device:')}: {component!r}"
            for name, component in zip(self.device_mesh.local_devices(), self.components, strict=True)
        )
        return f"{type(self).__name__}({{{parts}}}, shape={tuple(self.shape)}, layout={self._layout.to_string()!r})"


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
        raise LayoutError(f"layout of the tensor differs; got {described(have)}, expected {described(layout)}")


def described(layout: Layout) -> str:
    """Return a text for errors, which is the same on every client and does not name every device."""
    mesh = layout.mesh
    if mesh.is_single_device() or not mesh.device_ids:
        return layout.to_string()
    specs, _, _ = text_format.layout_to_text(layout.record).partition(" mesh:")
    return f"{specs} on {mesh.device_type} mesh {mesh.name!r} {mesh.axis_sizes} of clients {capped(mesh.clients)}"
