"""`DTensor`: a tensor of global shape whose components live on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from typing_extensions import override

from dtckpt.comm import torch_private
from dtckpt.dtensor.tensor_spec import Spec, intern_spec
from dtckpt.errors import LayoutError, LayoutTypeError, OperatorError, capped
from dtckpt.layout import text_format
from dtckpt.layout.device_mesh import MeshLike
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.redistribution.execute import RunningRedistribution

EARLY_KEY_NAME = "DeferredInit"
EARLY_KEY = torch_private.dispatch_key(EARLY_KEY_NAME)
"""A dispatch key that DTensors alone have, as PyTorch has no kernels for it: `dtckpt.dtensor.operators.registry`.

The key comes before autograd, and after PyTorch has noted the state that it restores for ``__torch_dispatch__``.
"""
KEYS = torch_private.DispatchKeySet(EARLY_KEY)

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """Functions that methods of `DTensor` call, as they need operators. `dtckpt.dtensor.methods` has the one table."""

    from_local: Callable[..., DTensor]
    to_local: Callable[..., torch.Tensor]
    full_tensor: Callable[..., torch.Tensor]
    redistribute: Callable[..., DTensor]
    validate_gradient: Callable[[DTensor], None]
    become_alias: Callable[[DTensor, DTensor], None]
    gradient_of: Callable[[DTensor, torch.Tensor], DTensor]
    gradient_to_store: Callable[[DTensor, torch.Tensor], DTensor]
    reduce: Callable[[DTensor], tuple[Any, ...]]
    shallow_copy: Callable[[DTensor], DTensor]
    deepcopy: Callable[[DTensor, dict[int, Any]], DTensor]
    chunk_list: Callable[[DTensor], list[Any]]
    write_items: Callable[[str, Any], list[Any]]
    shard_at: Callable[[DTensor, Any], torch.Tensor]
    draw: Callable[[DTensor], str | None]


class DTensor(torch.Tensor):
    """A `torch.Tensor` of global shape, held as one component per local device and a `Layout`.

    Made by `pack`; the constructor checks nothing.

    Args:
        components: One plain tensor per local device, in `Mesh.local_devices` order.
        layout: How the global tensor is laid out over the mesh.
        shape: Global shape.
        dtype: Dtype of the components.
        device: The device of a tensor without components on this client; default the host.
        stride: Strides of the global tensor; default: the strides of a contiguous tensor.
        offset: Storage offset of the global tensor; only with ``stride``.
    """

    _components: tuple[torch.Tensor, ...]
    _layout: Layout
    _pending: RunningRedistribution | None = None
    """The redistribution that still writes to the components; each reader of the components waits for it."""
    _is_async: bool = False
    """Whether ``async_op`` made the tensor: then programs may call ``wait`` on the result of `to_local`."""
    _spec: Spec | None = None
    """Description for operators, made by `spec_of` when an operator first asks for it."""
    _view: Any = None
    """For a view that shares no memory with its source: the `View` that makes it again after a write to the source."""
    _writes: Any = None
    """One counter of writes for all tensors that share values with this one; None if there are none."""

    _dispatch: Callable[..., Any]
    """Runs operators; `dtckpt.dtensor.operators.dispatch` sets it."""
    _methods: Methods

    __torch_function__ = torch_private.disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        components: Sequence[torch.Tensor],
        layout: Layout,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        stride: Sequence[int] | None = None,
        offset: int | None = None,
    ) -> DTensor:
        # On a client outside the mesh there is no component to tell the device.
        device = components[0].device if components else device or torch.device("cpu")
        # The wrapper has sizes and strides but no memory: the values are in the components alone.
        wrapper: DTensor = torch_private.make_wrapper(
            cls,
            tuple(shape),
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=device,
            _extra_dispatch_keys=KEYS,
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
            # Forget it only after it has returned: after a failed redistribution, every later use raises the same
            # error.
            self._pending.wait()
            self._pending = None
        if self._view is not None:
            self._view.refresh(self)
        return self._components

    @override
    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        if requires_grad:
            self._methods.validate_gradient(self)
        super().requires_grad_(requires_grad)
        return self

    def _set_requires_grad(self, requires_grad: bool) -> None:
        if requires_grad:
            self._methods.validate_gradient(self)
        _REQUIRES_GRAD.__set__(self, requires_grad)

    # Without a Python function for reading, because operators read it all the time.
    requires_grad = property(_REQUIRES_GRAD.__get__, _set_requires_grad)

    @property
    def data(self) -> torch.Tensor:
        """The tensor, detached. Setting it, as ``Module.to`` does, sets components and layout too."""
        detached: torch.Tensor = _DATA.__get__(self)
        return detached

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, DTensor):
            raise LayoutTypeError(f"the data of a DTensor is a DTensor; got {type(tensor).__name__}")
        _DATA.__set__(self, tensor)
        # Both share memory from now on, so they share the write counter too.
        self._methods.become_alias(self, tensor)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, in the layout of the tensor; a Partial tensor has a replicated gradient.

        A backward pass may leave a gradient with pending reductions, or in another layout. The first read redistributes
        such a gradient, and stores the result. A gradient that is assigned in another layout shares its values with the
        stored gradient.

        Collective: Over the mesh's clients, at the first read after a backward pass, and at an assignment of a gradient
        in another layout.
        """
        stored: torch.Tensor | None = _GRAD.__get__(self)
        if stored is None:
            return None
        # The common case first: an optimizer reads every gradient at every step.
        if isinstance(stored, DTensor) and stored._layout is self._layout and not self._layout.partial:
            return stored
        gradient = self._methods.gradient_of(self, stored)
        if gradient is not stored:
            _GRAD.__set__(self, gradient)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _GRAD.__set__(self, None if gradient is None else self._methods.gradient_to_store(self, gradient))

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

        Collective: Over the mesh's clients if ``shape`` is None or with ``run_check``: they exchange shapes, and with
        ``run_check`` also values. Otherwise the call sends nothing, but every client must still make it. If it fails on
        one client, the others raise that error in their next collective call.

        Args:
            local_tensor: This client's component, which shares memory with the result, unless ``run_check`` replaces
                it. A client outside the mesh passes a tensor of the same shape and dtype; the result has no component
                there.
            device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the innermost block's (see `run_on`).
            placements: One per mesh axis; None means replicated.
            run_check: Compare shapes, dtypes and ``requires_grad`` on all clients, then give every copy the values of
                the first device along the replicated axes. No tensor of a caller is written to.
            shape: Global shape. Without it the clients find it together, also for uneven shards. A client outside the
                mesh assumes even shards.
            stride: Strides of the global tensor. Without it they follow from the components if ``shape`` is None; with
                ``shape`` they are the strides of a contiguous tensor.
            grad_placements: Placements of the component's gradient. Default: the tensor's placements, in which
                Replicate takes the place of Partial.

        Raises:
            ComponentError: Components do not fit each other, the layout or ``shape``, or clients give other placements.
            LayoutError: The placements do not fit the mesh or the tensor.
        """
        return DTensor._methods.from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the component of this client's only device; it shares memory with the tensor. Differentiable.

        A client outside the mesh gets a tensor of shape (0,). After ``redistribute`` with ``async_op`` the result has a
        method ``wait``, which returns the result.

        Args:
            grad_placements: Placements of the component's gradient. Default: the tensor's placements, in which
                Replicate takes the place of Partial.

        Raises:
            ComponentError: This client has several devices in the mesh; `unpack` gives all components.
            LayoutError: ``grad_placements`` do not fit the mesh, or would give components of other shapes.
        """
        return self._methods.to_local(self, grad_placements)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """`to_local` without a gradient. Programs for PyTorch's DTensor use this name although it is private."""
        with torch.no_grad():
            return self.to_local()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor as a plain one, with pending reductions done. Differentiable.

        Collective: Over the mesh's clients, unless every client holds every part; bounded by the process group's
        timeout.

        Args:
            grad_placements: Placements of the whole tensor's gradient, one per mesh axis: Partial if each client has a
                term of the gradient. Default replicated.

        Raises:
            LayoutError: ``grad_placements`` do not fit the mesh, or shard the gradient of a whole tensor.
        """
        return self._methods.full_tensor(self, grad_placements)

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

        The result is a new tensor, which shares memory with this tensor if nothing moves and the dtype stays.

        Collective: Over the clients of both meshes. The call sends nothing if nothing changes, or if every client
        holds the whole tensor; but every client must still make it.

        Args:
            device_mesh: A `Mesh` or PyTorch's ``DeviceMesh``; default the present one.
            placements: One per axis of the new mesh; None means replicated.
            async_op: Return while the last exchange is in progress; the first use of the result waits for it.
            forward_dtype: Convert to this dtype before moving.
            backward_dtype: Convert the gradient to this dtype before moving it back.
        """
        return self._methods.redistribute(
            self,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
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
        return self._methods.reduce(self)

    def __copy__(self) -> DTensor:
        return self._methods.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return self._methods.deepcopy(self, memo)

    @property
    def fsdp_pre_all_gather(self) -> Any:
        """Refuse PyTorch's ``fully_shard``, which looks for this name and would treat components as whole tensors."""
        raise LayoutError(
            "PyTorch's fully_shard got a module that holds DTensors of dtckpt; shard them by distribute_module alone, "
            "or pass parameters made by dtckpt.interop.to_torch"
        )

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks that this client holds; see `dtckpt.dtensor.torch_checkpoint`."""
        return self._methods.chunk_list(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002  (PyTorch's name)
        return self._methods.write_items(fqn, object)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._methods.shard_at(self, index)

    # --- memory of the components, as the tensor itself has none ---------------------------------------------------

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]  # torch lists them
        """Return a plain tensor of some data, of this dtype on this device, as PyTorch's DTensor does."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(data, **options)

    def new(self, *args: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]  # torch lists overloads
        """As `torch.Tensor.new`; the result is a plain tensor."""
        plain: torch.Tensor = torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **options)
        return plain

    def share_memory_(self) -> DTensor:
        """Move the components to shared memory, and return the tensor."""
        for component in self.components:
            component.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def is_shared(self) -> bool:
        """Whether all components are in shared memory."""
        return all(component.is_shared() for component in self.components)  # type: ignore[no-untyped-call]  # as above

    def __dlpack__(self, **options: Any) -> Any:
        raise without_memory("DLPack")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse, because PyTorch would use memory that does not exist. Raises: OperatorError, always."""
        raise without_memory("untyped_storage")

    def storage(self) -> torch.TypedStorage:
        """Refuse, as `untyped_storage` does. Raises: OperatorError, always."""
        raise without_memory("storage")

    def apply_(self, callable: Callable[..., Any]) -> Any:  # noqa: A002, ARG002  (PyTorch's name; there is no way)
        """Refuse, because PyTorch would write to memory that a DTensor does not have.

        Raises:
            OperatorError: Always.
        """
        raise OperatorError("apply_: not for DTensors; local_map runs a function on the components")

    # --- values as numbers: every client gets the whole tensor -----------------------------------------------------

    def tolist(self) -> Any:
        """Return the values as nested lists. Collective: As `full_tensor`."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, in separate memory. Collective: As `full_tensor`."""
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

    def _repr_svg_(self) -> str | None:
        return self._methods.draw(self)


def without_memory(what: str) -> OperatorError:
    """Return the error of a function that needs a tensor's memory as one piece."""
    return OperatorError(
        f"{what}: a DTensor itself has no memory to hand out; to_local returns a component, full_tensor all "
        "values, and is_set_to tells whether two tensors are the same memory"
    )


@overload
def fetch_layout(tensor: torch.Tensor) -> Layout: ...
@overload
def fetch_layout(tensor: object) -> Layout | None: ...
def fetch_layout(tensor: object) -> Layout | None:
    """Return a DTensor's layout; None for a value that is no tensor, as in TensorFlow.

    Raises:
        LayoutError: The argument is a plain tensor.
    """
    if isinstance(tensor, DTensor):
        return tensor.layout
    if isinstance(tensor, torch.Tensor):
        raise LayoutError(f"fetch_layout needs a DTensor; got {type(tensor).__name__}")
    return None


def check_layout(tensor: object, layout: Layout) -> None:
    """Check that a DTensor has a layout.

    Raises:
        LayoutError: The tensor has another layout, or the argument is a plain tensor.
        LayoutTypeError: The argument is no tensor.
    """
    actual = fetch_layout(tensor)
    if actual is None:
        raise LayoutTypeError(f"check_layout needs a DTensor; got {type(tensor).__name__}")
    if actual != layout:
        raise LayoutError(f"layout of the tensor differs; got {described(actual)}, expected {described(layout)}")


def described(layout: Layout) -> str:
    """Describe a layout for errors; the text is equal on every client and does not name every device."""
    mesh = layout.mesh
    if mesh.is_single_device() or not mesh.device_ids:
        return layout.to_string()
    specs, _, _ = text_format.layout_to_text(layout.record).partition(" mesh:")
    return f"{specs} on {mesh.device_type} mesh {mesh.name!r} {mesh.axis_sizes} of clients {capped(mesh.clients)}"


def spec_of(tensor: DTensor) -> Spec:
    """Return a tensor's spec."""
    known: Spec | None = tensor._spec
    if known is None:
        known = tensor._spec = intern_spec(tensor._layout, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        tensor._layout = known.layout
    return known


def wrap_components(
    components: Sequence[torch.Tensor], described: Spec, device: torch.device | None = None, *, offset: int = 0
) -> DTensor:
    """Return the DTensor that has these components and this spec.

    Args:
        components: One tensor per local device.
        described: The spec.
        device: Device type of a DTensor without components.
        offset: Storage offset of the global tensor. The offset is no part of the spec: plans do not depend on it.
    """
    tensor: DTensor = torch_private.make_wrapper(
        DTensor,
        described.shape,
        strides=described.stride,
        storage_offset=offset,
        dtype=described.dtype,
        device=components[0].device if components else device or torch.device("cpu"),
        _extra_dispatch_keys=KEYS,
    )
    tensor._components = tuple(components)
    tensor._layout = described.layout
    tensor._spec = described
    return tensor


def with_stride(tensor: DTensor, stride: tuple[int, ...]) -> DTensor:
    """Return a new tensor, which no other code holds yet, with these strides; its components stay as they are."""
    if tensor.stride() == stride:
        return tensor
    result = wrap_components(
        tensor._components, intern_spec(tensor._layout, tuple(tensor.shape), stride, tensor.dtype), tensor.device
    )
    result._pending, result._is_async = tensor._pending, tensor._is_async
    result._view, result._writes = tensor._view, tensor._writes
    torch_private.set_storage(result, tensor)
    return result
