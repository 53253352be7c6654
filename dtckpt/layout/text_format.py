"""Text and proto forms of meshes and layouts, as TensorFlow writes them.

The functions convert between text or proto and plain records. `Mesh` and `Layout` validate the records. Texts and bytes
equal TensorFlow's for everything that TensorFlow can express. There are two extensions: a dim split by several axes is
written ``x+y``, and pending reductions are written ``partial:y=sum,`` between the specs and the mesh.

TensorFlow's ``shape_and_slices`` strings say that a tensor is a slice of a larger one (`parse_slice_spec`). For example
``"4 5 0,2:-"`` is the slice ``[0:2, :]`` of a tensor of shape (4, 5). TensorFlow's ``SaveV2`` uses this form: the dims
of the larger tensor, then ``start,length`` or ``-`` (all) per dim, joined by colons. The empty string stands for the
whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dtckpt._proto import layout_pb2
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, MeshTypeError, SliceError
from dtckpt.layout.device_names import full_name
from dtckpt.layout.region import Region

Spec = str | tuple[str, ...]
"""How one tensor dim is split: a mesh axis, axes in order (major first), ``"unsharded"`` or ``"match"``."""

EMPTY_MESH = "empty_mesh"
EMPTY_LAYOUT = "empty_layout"
XLA_SPMD = "use_xla_spmd"
TEXT_PREFIXES = {"STATIC": "sharding_specs:", "PARTED": "parted:"}
SINGLE_DEVICE_PREFIX = "maximal:"

_INTEGER = re.compile(r"-?[0-9]+")
_REDUCTION = re.compile(r"(?P<axis>[^=]+)=(?P<op>[^=]+)")


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """The fields of a mesh; all empty for the empty mesh."""

    dims: tuple[tuple[str, int], ...] = ()
    global_device_ids: tuple[int, ...] = ()
    name: str = ""
    local_device_ids: tuple[int, ...] = ()
    local_devices: tuple[str, ...] = ()
    global_devices: tuple[str, ...] = ()
    use_xla_spmd: bool = False
    single_device: str = ""


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """The fields of a layout; ``kind`` is a name of the proto's ``LayoutType``."""

    kind: str
    specs: tuple[Spec, ...] = ()
    partial: tuple[tuple[str, str], ...] = ()
    mesh: MeshRecord = MeshRecord()


# --- meshes -------------------------------------------------------------------------------------------------------


def mesh_to_text(mesh: MeshRecord) -> str:
    """Return TensorFlow's text form of a mesh."""
    if mesh.single_device:
        return mesh.single_device
    if not mesh.global_device_ids:
        return EMPTY_MESH
    parts = [
        mesh.name,
        ",".join(f"{axis}={size}" for axis, size in mesh.dims),
        ",".join(map(str, mesh.global_device_ids)),
        ",".join(map(str, mesh.local_device_ids)),
        ",".join(mesh.local_devices),
    ]
    if mesh.global_devices:
        parts.append(",".join(mesh.global_devices))
    if mesh.use_xla_spmd:
        parts.append(XLA_SPMD)
    return "|".join(parts)


def mesh_from_text(text: str) -> MeshRecord:
    """Read the text form of a mesh: full, compact (``name|x=2|*CPU``), a single device, or ``empty_mesh``.

    Drops the global devices if the flag for XLA SPMD follows them, as TensorFlow does.

    Raises:
        MeshError: The text is in no known form.
    """
    if not isinstance(text, str):
        raise MeshTypeError(f"mesh text: got {type(text).__name__}, expected str")
    if text == EMPTY_MESH:
        return MeshRecord()
    parts = text.split("|")
    if len(parts) == 1:
        full_name(text)
        return MeshRecord(single_device=text)
    if len(parts) == 3:
        return _mesh_from_compact(text, *parts)
    if len(parts) not in (5, 6, 7):
        raise MeshError(f"mesh text: got {len(parts)} parts in {text!r}, expected 3, 5, 6 or 7 separated by '|'")
    if len(parts) == 7 and parts[6] != XLA_SPMD:
        raise MeshError(f"mesh text: got {parts[6]!r} as 7th part of {text!r}, expected {XLA_SPMD!r}")
    name, dims, global_ids, local_ids, local_devices, *rest = parts
    if not global_ids:
        return MeshRecord()
    if not dims:
        raise MeshError(f"mesh text: got device ids but no axes in {text!r}, expected axes such as 'x=2'")
    return MeshRecord(
        dims=_dims(dims, text),
        global_device_ids=_integers(global_ids, text),
        name=name,
        local_device_ids=_integers(local_ids, text),
        local_devices=_items(local_devices),
        global_devices=_items(rest[0]) if len(rest) == 1 and rest[0] != XLA_SPMD else (),
        use_xla_spmd=bool(rest) and rest[-1] == XLA_SPMD,
    )


def _mesh_from_compact(text: str, name: str, dims: str, devices: str) -> MeshRecord:
    _, *kind = devices.split("*")
    if len(kind) != 1:
        raise MeshError(f"mesh text: got {devices!r} as 3rd part of {text!r}, expected one '*' before a device type")
    if not dims:
        return MeshRecord()
    axes = _dims(dims, text)
    count = 1
    for _, size in axes:
        count *= max(size, 0)
    ids = tuple(range(count))
    names = tuple(f"/job:localhost/task:0/device:{kind[0]}:{index}" for index in ids)
    return MeshRecord(axes, ids, name, ids, names)


def _dims(text: str, whole: str) -> tuple[tuple[str, int], ...]:
    pairs = [item.rpartition("=") for item in text.split(",")]
    if any(not (separator and _INTEGER.fullmatch(size)) for _, separator, size in pairs):
        raise MeshError(f"mesh text: got axes {text!r} in {whole!r}, expected a form such as 'x=2,y=4'")
    return tuple((name, int(size)) for name, _, size in pairs)


def _integers(text: str, whole: str) -> tuple[int, ...]:
    items = _items(text)
    if not all(map(_INTEGER.fullmatch, items)):
        raise MeshError(f"mesh text: got device ids {text!r} in {whole!r}, expected integers separated by ','")
    return tuple(map(int, items))


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def mesh_to_proto(mesh: MeshRecord) -> layout_pb2.MeshProto:
    """Return the proto of a mesh."""
    return layout_pb2.MeshProto(
        mesh_dimensions=[layout_pb2.MeshDimensionProto(name=name, size=size) for name, size in mesh.dims],
        global_device_ids=mesh.global_device_ids,
        name=mesh.name,
        local_device_ids=mesh.local_device_ids,
        local_devices=mesh.local_devices,
        global_devices=mesh.global_devices,
        use_xla_spmd=mesh.use_xla_spmd,
        single_device=mesh.single_device,
    )


def mesh_from_proto(proto: layout_pb2.MeshProto) -> MeshRecord:
    """Read the proto of a mesh.

    Raises:
        MeshTypeError: The argument is no ``MeshProto``.
        MeshError: The proto has fields that this version does not know.
    """
    if not isinstance(proto, layout_pb2.MeshProto):
        raise MeshTypeError(f"mesh proto: got {type(proto).__name__}, expected MeshProto")
    if unknown := _unknown_fields(proto, *proto.mesh_dimensions):
        raise MeshError(f"mesh proto: got unknown fields {unknown}, expected only the fields of this version")
    return MeshRecord(
        dims=tuple((dim.name, dim.size) for dim in proto.mesh_dimensions),
        global_device_ids=tuple(proto.global_device_ids),
        name=proto.name,
        local_device_ids=tuple(proto.local_device_ids),
        local_devices=tuple(proto.local_devices),
        global_devices=tuple(proto.global_devices),
        use_xla_spmd=proto.use_xla_spmd,
        single_device=proto.single_device,
    )


# --- layouts ------------------------------------------------------------------------------------------------------


def spec_to_text(spec: Spec) -> str:
    """Return the text form of a sharding spec: ``x``, ``x+y`` or ``unsharded``."""
    return spec if isinstance(spec, str) else "+".join(spec)


def spec_from_text(text: str) -> Spec:
    """Read the form that `spec_to_text` writes; the names are not checked."""
    axes = tuple(text.split("+"))
    return axes if len(axes) > 1 else text


def layout_to_text(layout: LayoutRecord) -> str:
    """Return TensorFlow's text form of a layout, with the extensions that this module describes."""
    if layout.kind == "UNKNOWN":
        return EMPTY_LAYOUT
    mesh = f"mesh:{mesh_to_text(layout.mesh)}"
    if layout.kind == "SINGLE_DEVICE":
        return f"{SINGLE_DEVICE_PREFIX}true, {mesh}"
    specs = TEXT_PREFIXES[layout.kind] + "".join(f"{spec_to_text(spec)}," for spec in layout.specs)
    partial = ["partial:" + "".join(f"{axis}={op}," for axis, op in layout.partial)] if layout.partial else []
    return " ".join([specs, *partial, mesh])


def layout_from_text(text: str) -> LayoutRecord:
    """Read the text form of a layout.

    Every spec ends with a comma; text after the last comma is ignored, as in TensorFlow.

    Raises:
        LayoutError: The text is malformed.
        MeshError: The mesh in the text is malformed.
    """
    if not isinstance(text, str):
        raise LayoutTypeError(f"layout text: got {type(text).__name__}, expected str")
    if text == EMPTY_LAYOUT:
        return LayoutRecord("UNKNOWN")
    head, *partial, mesh_text = text.split(" ") if " " in text else ("", "")
    if not head or len(partial) > 1 or not all(item.startswith("partial:") for item in partial):
        raise LayoutError(f"layout text: got {text!r}, expected a form such as 'sharding_specs:x,unsharded, mesh:...'")
    mesh = mesh_from_text(mesh_text.removeprefix("mesh:"))
    if head.startswith(SINGLE_DEVICE_PREFIX) and not partial:
        return LayoutRecord("SINGLE_DEVICE", mesh=mesh)
    for kind, prefix in TEXT_PREFIXES.items():
        if head.startswith(prefix):
            specs = head.removeprefix(prefix).split(",")[:-1]
            if "scalar" in specs and len(specs) > 1:
                raise LayoutError(f"layout text: got 'scalar' next to other specs in {text!r}, expected it alone")
            return LayoutRecord(
                kind,
                tuple(map(spec_from_text, specs)) if specs != ["scalar"] else (),
                tuple(reduction for item in partial for reduction in _reductions(item, text)),
                mesh,
            )
    raise LayoutError(
        f"layout text: got {head!r} in {text!r}, expected it to start with 'sharding_specs:' or 'parted:'"
    )


def _reductions(item: str, whole: str) -> Iterator[tuple[str, str]]:
    matches = [_REDUCTION.fullmatch(pair) for pair in item.removeprefix("partial:").split(",")[:-1]]
    if not item.endswith(",") or not all(matches):
        raise LayoutError(f"layout text: got {item!r} in {whole!r}, expected a form such as 'partial:y=sum,'")
    return ((match["axis"], match["op"]) for match in matches if match)


def specs_to_proto(specs: Iterable[Spec]) -> list[layout_pb2.ShardingSpec]:
    """Return the protos of sharding specs."""
    return [
        layout_pb2.ShardingSpec(sharding_spec=spec) if isinstance(spec, str) else layout_pb2.ShardingSpec(axes=spec)
        for spec in specs
    ]


def specs_from_proto(protos: Sequence[layout_pb2.ShardingSpec]) -> tuple[Spec, ...]:
    """Read protos of sharding specs; the names are not checked.

    Raises:
        LayoutError: A proto has unknown fields, or both a single name and several names.
    """
    for proto in protos:
        if unknown := _unknown_fields(proto):
            raise LayoutError(
                f"sharding spec proto: got unknown fields {unknown}, expected only the fields of this version"
            )
        if bool(proto.sharding_spec) and bool(proto.axes):
            raise LayoutError(
                f"sharding spec proto: got both {proto.sharding_spec!r} and {list(proto.axes)}, expected one of them"
            )
    return tuple(tuple(proto.axes) if proto.axes else proto.sharding_spec for proto in protos)


def partial_to_proto(partial: Iterable[tuple[str, str]]) -> list[layout_pb2.AxisReduction]:
    """Return the protos of pending reductions."""
    return [layout_pb2.AxisReduction(axis=axis, reduce_op=op) for axis, op in partial]


def partial_from_proto(protos: Sequence[layout_pb2.AxisReduction]) -> tuple[tuple[str, str], ...]:
    """Read protos of pending reductions; the names are not checked.

    Raises:
        LayoutError: A proto has unknown fields.
    """
    if unknown := _unknown_fields(*protos):
        raise LayoutError(f"reduction proto: got unknown fields {unknown}, expected only the fields of this version")
    return tuple((proto.axis, proto.reduce_op) for proto in protos)


def layout_to_proto(layout: LayoutRecord) -> layout_pb2.LayoutProto:
    """Return the proto of a layout; its mesh is set even if it is empty."""
    return layout_pb2.LayoutProto(
        sharding_specs=specs_to_proto(layout.specs),
        mesh_config=mesh_to_proto(layout.mesh),
        type=layout_pb2.LayoutProto.LayoutType.Value(layout.kind),
        partial=partial_to_proto(layout.partial),
    )


def layout_from_proto(proto: layout_pb2.LayoutProto) -> LayoutRecord:
    """Read the proto of a layout.

    Raises:
        LayoutTypeError: The argument is no ``LayoutProto``.
        LayoutError: The proto has fields or a type that this version does not know.
    """
    if not isinstance(proto, layout_pb2.LayoutProto):
        raise LayoutTypeError(f"layout proto: got {type(proto).__name__}, expected LayoutProto")
    if unknown := _unknown_fields(proto):
        raise LayoutError(f"layout proto: got unknown fields {unknown}, expected only the fields of this version")
    kinds = layout_pb2.LayoutProto.LayoutType
    if proto.type not in kinds.values():
        raise LayoutError(f"layout proto: got type {proto.type}, expected one of {', '.join(kinds.keys())}")
    return LayoutRecord(
        kinds.Name(proto.type),
        specs_from_proto(proto.sharding_specs),
        partial_from_proto(proto.partial),
        mesh_from_proto(proto.mesh_config),
    )


def layout_from_bytes(data: bytes) -> LayoutRecord:
    """Read the serialized proto of a layout; a layout of older TensorFlow, without a type, is STATIC.

    Raises:
        LayoutError: The bytes are no serialized layout.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise LayoutTypeError(f"layout bytes: got {type(data).__name__}, expected bytes")
    proto = layout_pb2.LayoutProto()
    try:
        proto.ParseFromString(bytes(data))
    except DecodeError as error:
        raise LayoutError(f"layout bytes: got {len(data)} bytes that do not parse, expected a LayoutProto") from error
    if proto.type == layout_pb2.LayoutProto.UNKNOWN and proto.mesh_config.ByteSize():
        proto.type = layout_pb2.LayoutProto.STATIC
    return layout_from_proto(proto)


def _unknown_fields(*messages: Message) -> list[int]:
    unknown = map(UnknownFieldSet, messages)
    return [fields[index].field_number for fields in unknown for index in range(len(fields))]


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """A slice: the shape of the larger tensor, and the region of it that the tensor fills."""

    full_shape: tuple[int, ...]
    region: Region

    def __str__(self) -> str:
        if self.region == Region.full(self.full_shape):
            return ""
        parts = (
            "-" if (start, length) == (0, size) else f"{start},{length}"
            for start, length, size in zip(self.region.offset, self.region.shape, self.full_shape, strict=True)
        )
        return " ".join([*map(str, self.full_shape), ":".join(parts)])


def parse_slice_spec(text: str, shape: Sequence[int]) -> SliceSpec:
    """Parse the slice string of a tensor of global shape ``shape``.

    Raises:
        SliceError: The text is malformed, lies outside the full shape, or does not have the tensor's shape.
    """
    shape = tuple(shape)
    if not isinstance(text, str):
        raise SliceError(f"shape_and_slices entries must be str; got {type(text).__name__}")
    if not text:
        return SliceSpec(shape, Region.full(shape))
    *dims, slices = text.split(" ")
    try:
        full = tuple(_number(dim) for dim in dims)
        parts = slices.split(":") if slices else []
        if len(parts) != len(full):
            raise ValueError(f"{len(full)} dims and {len(parts)} slices")
        bounds = [(0, size) if part == "-" else _bounds(part) for part, size in zip(parts, full, strict=True)]
    except ValueError as error:
        raise SliceError(
            f"cannot read slice string {text!r}: {error}; expected the dims, then 'start,length' or '-' per dim "
            "joined by ':', as in '4 5 0,2:-'"
        ) from None
    for dim, ((start, length), size) in enumerate(zip(bounds, full, strict=True)):
        if start + length > size:
            raise SliceError(f"slice string {text!r} leaves dim {dim}; got [{start}, {start + length}), size {size}")
    region = Region(tuple(start for start, _ in bounds), tuple(length for _, length in bounds))
    if region.shape != shape:
        raise SliceError(f"slice string {text!r} does not fit its tensor; got shape {shape}, expected {region.shape}")
    return SliceSpec(full, region)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a number of elements")
    return int(text)


def _bounds(text: str) -> tuple[int, int]:
    start, comma, length = text.partition(",")
    if not comma:
        raise ValueError(f"{text!r} has no comma")
    return _number(start), _number(length)
