"""Pack components into DTensors and unpack them: `pack`, `unpack`.

`pack` checks that the components of all clients fit each other. Clients exchange a summary of their components (shapes,
dtypes, errors), never the values; so an error of one client is raised on all. When a later call gets similar
components, it takes their global shape for granted, without an exchange (`dtckpt.redistribution.agreements`).
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dtckpt.comm.collectives import byte_view
from dtckpt.comm.process_groups import is_connected, is_fake, validate_connected
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.gather_objects import gather_objects
from dtckpt.dtensor.tensor import DTensor, wrap_components
from dtckpt.dtensor.tensor_spec import global_stride, intern_spec
from dtckpt.errors import (
    ComponentError,
    DtckptError,
    LayoutError,
    LayoutTypeError,
    ReplicaMismatchError,
    capped,
    from_wire,
    to_wire,
)
from dtckpt.layout.layout import MATCH, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import validate_reductions
from dtckpt.redistribution import agreements
from dtckpt.redistribution.execute import report_error

T = TypeVar("T")

_PURPOSE = "from_local/pack"
"""The purpose of the exchanged summaries; `gather_objects` keeps exchanges of different purposes apart."""


def pack(
    tensors: Sequence[Any],
    layout: Layout,
    shape: Sequence[int] | None = None,
    *,
    run_check: bool = False,
) -> DTensor:
    """Make a DTensor from the components of this client's devices.

    Component ``i`` belongs to ``layout.mesh.local_devices()[i]`` and is that device's region of the global tensor.
    A component that is on its device already, or on the meta device, shares memory with the result.

    Collective: Over the mesh's clients if ``shape`` is None or with ``run_check``, if the mesh spans several clients:
    they exchange shapes and dtypes, and raise the same error. Otherwise the call sends nothing; if it fails on one
    client, the others raise that error in their next collective call.
    Without ``run_check``, clients exchange these facts once for components of the same shapes, dtype and layout.
    If only some clients' components change later, the next exchange raises LayoutError on all clients; pass ``shape``
    if this may happen.

    Args:
        tensors: One tensor, array, scalar or nested sequence of numbers per local device.
        layout: The layout; every tensor dim needs a spec.
        shape: Global shape. Without it the shape follows from the components; a client outside the mesh must pass it.
        run_check: Compare the values of components that are copies of each other, on all clients (collective then).

    Raises:
        LayoutTypeError: ``layout`` is no Layout, or ``tensors`` no sequence.
        LayoutError: The layout cannot hold a tensor (MATCH, single device, empty mesh, bitwise reductions of floats).
        ComponentError: Count, rank, shapes or dtypes do not fit the layout or each other.
        ReplicaMismatchError: Copies differ (with ``run_check``).
        CoordinationError: Clients must talk, and no process group connects them.
    """
    return pack_strided(tensors, layout, shape, run_check=run_check)


def pack_strided(
    tensors: Sequence[Any],
    layout: Layout,
    shape: Sequence[int] | None = None,
    *,
    stride: Sequence[int] | None = None,
    run_check: bool = False,
    compares_values: bool = True,
    requires_grad: bool = False,
    origin: Hashable = None,
) -> DTensor:
    """As `pack`, with strides.

    Args:
        tensors: As there.
        layout: As there.
        shape: As there.
        stride: Strides of the global tensor in a single memory. Default: they follow from the largest component if
            ``shape`` is None, and otherwise from ``shape``, as for a contiguous tensor.
        run_check: As there.
        compares_values: False if ``run_check`` only compares shapes and dtypes.
        requires_grad: Whether this client's components need a gradient; ``run_check`` compares this. A client whose
            components need no gradient takes no part in the backward pass, and the others would wait for it.
        origin: The source of the components, equal on all clients. When the origin changes, all clients exchange
            summaries, even clients with components similar to earlier components.
    """
    _validate_mesh(layout)
    case = None
    if shape is None and isinstance(tensors, list | tuple) and _can_agree(layout.mesh):
        case = (*_case_of(tensors, layout), stride, origin)
        if not run_check and (again := _pack_again(tensors, layout, case)) is not None:
            return again
    if shape is None and layout.mesh.is_remote():
        raise ComponentError(
            f"this client has no device in mesh {layout.mesh.name!r} {layout.mesh.axis_sizes} of clients "
            f"{capped(layout.mesh.clients)}, so it cannot find the global shape; got no shape, expected one"
        )
    components: list[torch.Tensor] = []
    global_shape: tuple[int, ...] | None = None
    failure: DtckptError | None = None
    try:
        global_shape = None if shape is None else _integers("global shape", shape)
        components = _components(tensors, layout)
    except DtckptError as error:
        # Kept and not raised: the other clients wait for this client's summary, and raise the error with it.
        failure = error
    summary = ComponentSummary.of(components, layout, failure, global_shape, requires_grad=run_check and requires_grad)
    # Otherwise nothing is sent, and each client checks its own components against the shape that it was given.
    is_gathered = (shape is None or run_check) and is_shared(layout.mesh)
    if is_gathered:
        summary = _gathered(summary, layout.mesh, failure)
    try:
        summary.validate_agreement(layout)
        if global_shape is None:
            global_shape = summary.global_shape(layout)
        summary.validate(layout, global_shape)
    except DtckptError as error:
        if not is_gathered:  # then the others may find no error, and wait for this client in their next call
            report_error(error, [layout.mesh])
        raise
    if run_check and compares_values:
        _validate_replicas(components, layout, global_shape)
    if stride is None and shape is None:
        stride = summary.global_stride(global_shape)
    if case is not None:
        is_as_given = all(map(operator.is_, components, tensors))
        agreements.remember(layout.mesh.clients, case, (global_shape, stride, is_as_given))
    # A client outside the mesh has no component and hears of none; so float32 is a stand-in there.
    dtype = components[0].dtype if components else getattr(torch, summary.dtype or "float32")
    return _strided(components, layout, global_shape, stride, dtype)


def _strided(
    components: Sequence[torch.Tensor],
    layout: Layout,
    shape: tuple[int, ...],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
) -> DTensor:
    """Return the DTensor with these strides; None stands for the strides of a contiguous tensor."""
    if stride is None:
        return DTensor(components, layout, shape, dtype)
    return wrap_components(components, intern_spec(layout, shape, tuple(stride), dtype))


def _pack_again(tensors: Sequence[Any], layout: Layout, case: tuple[Any, ...]) -> DTensor | None:
    """Return the DTensor of components of a kind that `pack` has seen before; None for a new kind."""
    known = agreements.recall(layout.mesh.clients, case)
    if known is None:
        return None
    shape, stride, is_as_given = known
    components = tensors if is_as_given else _components(tensors, layout)
    return _strided(components, layout, shape, stride, components[0].dtype)


def _gathered(summary: ComponentSummary, mesh: Mesh, failure: DtckptError | None) -> ComponentSummary:
    """Return the summary of all clients' components. Under a fake process group they are like this client's."""
    if is_fake():
        return summary.on_all_devices(mesh)
    try:
        return ComponentSummary.merged(gather_objects(summary, mesh, _PURPOSE))
    except DtckptError as error:
        # The others do something else, and raise because this client does not. Its own failure says why.
        raise failure or error from error


def _can_agree(mesh: Mesh) -> bool:
    return not mesh.is_remote() and (mesh.num_clients == 1 or is_connected(mesh.clients))


def _case_of(tensors: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """Return all facts, except values, that determine the work of `pack` on this client's components."""
    # Equal meshes may be seen from different clients of one process.
    return layout, id(layout.mesh), *map(_kind_of, tensors)


def _kind_of(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return object()  # equal to nothing: such components are looked at each time
    # Tensors that are not dense are refused, and may have no strides.
    stride = tensor.stride() if tensor.layout is torch.strided else None
    return (
        type(tensor),
        tensor.shape,
        stride,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def shared_failure(error: DtckptError, mesh: Mesh) -> DtckptError:
    """Return the error that all clients raise: the error of the first client that has any.

    Collective: Over the mesh's clients. The exchange here takes the place of the exchange in `pack`, which this client
    cannot reach.
    """
    if mesh.num_clients < 2 or not _can_agree(mesh):
        return error
    summaries = gather_objects(ComponentSummary({}, {}, to_wire(error)), mesh, _PURPOSE)
    return from_wire(*(ComponentSummary.merged(summaries).failure or to_wire(error)))


def unpack(tensor: DTensor) -> list[torch.Tensor]:
    """Return the components of this client's devices, in `Mesh.local_devices` order; they share memory.

    Raises:
        LayoutTypeError: The argument is no DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"unpack needs a DTensor; got {type(tensor).__name__}")
    return list(tensor.components)


def is_shared(mesh: Mesh) -> bool:
    """Whether the clients of the mesh must communicate.

    Raises:
        CoordinationError: The clients must communicate, and cannot.
    """
    if mesh.num_clients < 2 or mesh.is_remote():
        return False
    validate_connected(mesh.clients, "comparing components")
    return True


def _validate_mesh(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"pack needs a Layout; got {type(layout).__name__}")
    if layout.mesh.is_single_device() or not layout.mesh.device_ids:
        raise LayoutError(f"pack needs a layout on a mesh of devices; got {layout.to_string()}")


def strides_of(stride: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the strides that a caller gives for a tensor of so many dims.

    Raises:
        LayoutTypeError: ``stride`` is no sequence of integers.
        ComponentError: There is not one for each dim.
    """
    strides = _integers("stride", stride)
    if len(strides) != rank:
        raise ComponentError(f"stride: got {strides}, expected {rank}, one for each dim")
    return strides


def _integers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutTypeError(f"{what}: got {values!r}, expected a sequence of integers") from None


def _components(tensors: Sequence[Any], layout: Layout) -> list[torch.Tensor]:
    if MATCH in layout.sharding_specs:
        raise LayoutError(f"pack needs a spec for every dim; got 'match' in {layout.sharding_specs}")
    if isinstance(tensors, torch.Tensor | np.ndarray | str | bytes) or not isinstance(tensors, Sequence):
        raise LayoutTypeError(f"pack needs a sequence of components; got {type(tensors).__name__}")
    devices = [device_of(name) for name in layout.mesh.local_devices()]
    components = []
    for position, value in enumerate(tensors):
        if isinstance(value, DTensor) or value is None:
            raise ComponentError(f"component {position} must be a plain tensor; got {type(value).__name__}")
        try:
            component = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ComponentError(f"component {position} cannot become a tensor: {error}") from error
        if component.layout != torch.strided:
            raise ComponentError(f"component {position} must be dense; got {component.layout}")
        # Kernels that run on components ignore pending conjugation and negation.
        components.append(component.resolve_conj().resolve_neg())
    if len(components) != len(devices):
        raise ComponentError(
            f"pack needs one component per local device; got {len(components)}, expected {len(devices)}"
        )
    for position, component in enumerate(components):
        if component.ndim != layout.rank:
            raise ComponentError(
                f"component {position} does not fit the layout's rank; got shape {tuple(component.shape)}, "
                f"expected {layout.rank} dims"
            )
    if len({component.is_meta for component in components}) > 1:
        raise ComponentError("components must all be on the meta device or none; got some that are and some that not")
    return [part if part.is_meta else part.to(device) for part, device in zip(components, devices, strict=True)]


@dataclass(frozen=True, slots=True)
class ComponentSummary:
    """Shapes, dtypes and errors of components, of this client's devices or of all clients'.

    Args:
        shapes: Component shape by global device id.
        dtypes: Component dtype by global device id.
        failure: ``(code, message)`` of an error, if a client has no components because of it.
        strides: Component strides by global device id, of components that are not contiguous.
        layouts: The layouts that clients pass, as texts, and whether their tensors are meta tensors or need a gradient;
            each text once.
        global_shapes: The global shapes that clients pass, each once.
    """

    shapes: Mapping[int, tuple[int, ...]]
    dtypes: Mapping[int, str]
    failure: tuple[str, str] | None
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    global_shapes: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(
        cls,
        components: Sequence[torch.Tensor],
        layout: Layout,
        failure: DtckptError | None,
        shape: tuple[int, ...] | None,
        *,
        requires_grad: bool = False,
    ) -> ComponentSummary:
        """Return the summary of this client's components."""
        kind = " on meta" * _are_meta(components) + " with requires_grad" * requires_grad
        # Not strict: with a failure there are no components.
        by_device = dict(zip(layout.mesh.local_device_ids(), components, strict=False))
        return cls(
            {device: tuple(component.shape) for device, component in by_device.items()},
            {device: str(component.dtype).removeprefix("torch.") for device, component in by_device.items()},
            to_wire(failure) if failure else None,
            {device: part.stride() for device, part in by_device.items() if not part.is_contiguous()},
            () if failure else (f"{', '.join(map(str, layout.placements))}{kind}",),
            (shape,),
        )

    def on_all_devices(self, mesh: Mesh) -> ComponentSummary:
        """Return the summary of components on all devices of a mesh that are like this client's first one."""

        def on_all(by_device: Mapping[int, T]) -> dict[int, T]:
            return dict.fromkeys(mesh.device_ids, next(iter(by_device.values()))) if by_device else {}

        return replace(self, shapes=on_all(self.shapes), dtypes=on_all(self.dtypes), strides=on_all(self.strides))

    @classmethod
    def merged(cls, summaries: Sequence[ComponentSummary]) -> ComponentSummary:
        """Merge the summaries of all clients; of several failures, the first client's counts."""
        shapes = {device: shape for each in summaries for device, shape in each.shapes.items()}
        dtypes = {device: dtype for each in summaries for device, dtype in each.dtypes.items()}
        failure = next((each.failure for each in summaries if each.failure), None)
        strides = {device: stride for each in summaries for device, stride in each.strides.items()}
        layouts = tuple(sorted({text for each in summaries for text in each.layouts}))
        global_shapes = tuple(dict.fromkeys(shape for each in summaries for shape in each.global_shapes))
        return cls(shapes, dtypes, failure, strides, layouts, global_shapes)

    @property
    def dtype(self) -> str | None:
        """The dtype of any component, or None if there is no component."""
        return next(iter(self.dtypes.values()), None)

    def global_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the global shape that follows from the components of all devices."""
        sizes = []
        for dim in range(layout.rank):
            # Several devices may hold one shard; `validate` finds those whose sizes differ.
            lengths = {layout.shard_index(device)[dim]: shape[dim] for device, shape in self.shapes.items()}
            sizes.append(sum(lengths.values()))
        return tuple(sizes)

    def global_stride(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the strides of the global tensor, with dims in the order that the largest component has them.

        None stands for a contiguous tensor. All clients must find the same: components with dims of size 1, or without
        elements, do not tell the order.
        """
        if not self.strides:
            return None
        largest = max(sorted(self.shapes), key=lambda device: math.prod(self.shapes[device]))
        if largest not in self.strides:
            return None
        component = torch.empty_strided(self.shapes[largest], self.strides[largest], device="meta")
        return global_stride(component, shape)

    def validate_agreement(self, layout: Layout) -> None:
        """Check that every client has components, that all have one dtype and layout, and that these fit each other."""
        if self.failure:
            raise from_wire(*self.failure)
        if len(self.layouts) > 1:
            raise ComponentError(f"clients give different placements; got {capped(self.layouts)}; expected the same")
        if len(self.global_shapes) > 1:
            raise ComponentError(f"clients give different global shapes; got {capped(self.global_shapes)}")
        if len(set(self.dtypes.values())) > 1:
            raise ComponentError(f"components must have one dtype; got {', '.join(sorted(set(self.dtypes.values())))}")
        if self.dtype:
            validate_reductions(layout.partial, getattr(torch, self.dtype))

    def validate(self, layout: Layout, shape: tuple[int, ...]) -> None:
        """Check that the components belong to a tensor of ``shape``."""
        if len(shape) != layout.rank:
            raise ComponentError(f"global shape does not fit the layout; got {shape}, expected {layout.rank} dims")
        # In order of devices, so that all clients name the same one.
        for device, actual in sorted(self.shapes.items()):
            expected = layout.region(device, shape).shape
            if actual != expected:
                raise ComponentError(
                    f"component of device {device} does not fit global shape {shape}; got {actual}, "
                    f"expected {expected} "
                    "(shards follow torch.chunk: ceil(size / shards) each, the last ones shorter or empty)"
                )


def _are_meta(components: Sequence[torch.Tensor]) -> bool:
    return any(component.is_meta for component in components)


def _validate_replicas(components: Sequence[torch.Tensor], layout: Layout, shape: tuple[int, ...]) -> None:
    """Compare components that must be copies of each other, on all clients."""
    # Terms of a pending reduction differ by design, and meta tensors have no values.
    if layout.partial or _are_meta(components):
        return
    names = layout.mesh.local_devices()
    digests = [
        (layout.region(device, shape), name, hashlib.blake2b(_bits(component).numpy().data, digest_size=16).digest())
        for device, name, component in zip(layout.mesh.local_device_ids(), names, components, strict=True)
    ]
    if is_shared(layout.mesh):
        # Digests travel, never values: 16 bytes for each component, however large it is.
        digests = [item for listed in gather_objects(digests, layout.mesh, "run_check") for item in listed]
    first: dict[Any, tuple[str, bytes]] = {}
    for region, name, digest in digests:
        other_name, other = first.setdefault(region, (name, digest))
        if digest != other:
            raise ReplicaMismatchError(f"components of {other_name} and {name} must be copies of each other but differ")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Bits, not values: NaN is equal to itself here, and 0.0 differs from -0.0.
    return byte_view(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit (so NaN equals itself)."""
    return one.numel() == 0 or torch.equal(_bits(one), _bits(other))
