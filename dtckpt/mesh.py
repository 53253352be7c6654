"""Meshes: n-d grids of devices with named axes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dtckpt import wire
from dtckpt._proto import layout_pb2
from dtckpt.devices import DEVICE_KINDS, DeviceSpec, full_name, kind_of, task_of, with_task
from dtckpt.errors import MeshError, MeshTypeError, capped

if TYPE_CHECKING:
    import torch

RESERVED_NAMES = ("unsharded", "match", "any", "scalar")
"""Words of the text form that no axis may be called."""

_TORCH_TYPES = {"GPU": "cuda"}
_NOT_IN_NAMES = frozenset("|,=*+ ")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Mesh:
    """An n-d grid of devices with named axes, seen from one client.

    Immutable. Two meshes are equal when axes, device ids, devices and name are equal, no matter from which client
    they are seen. Global device ids count up by one in row-major order.

    Args:
        dim_names: name of every axis, major first.
        global_device_ids: array of ids whose shape is the shape of the mesh.
        local_device_ids: ids of this client's devices.
        local_devices: complete names of this client's devices, in the order of ``local_device_ids``.
        mesh_name: name of the mesh.
        global_devices: complete names of all devices. Without them, every client is taken to own an equal run of
            consecutive ids and to name its devices as this one does.
        use_xla_spmd: a mark for TPU meshes.

    Raises:
        MeshError: the arguments describe no mesh.
    """

    _record: wire.MeshRecord

    def __init__(  # noqa: PLR0917  (positions are TensorFlow's)
        self,
        dim_names: Sequence[str],
        global_device_ids: npt.NDArray[np.integer[Any]],
        local_device_ids: Sequence[int],
        local_devices: Sequence[DeviceSpec | str],
        mesh_name: str = "",
        global_devices: Sequence[DeviceSpec | str] | None = None,
        use_xla_spmd: bool = False,
    ) -> None:
        if not isinstance(global_device_ids, np.ndarray) or not np.issubdtype(global_device_ids.dtype, np.integer):
            raise MeshError(
                f"mesh: got global_device_ids {global_device_ids!r:.80}, expected a numpy array of integers"
            )
        names = _sequence("dim_names", dim_names)
        if len(names) != global_device_ids.ndim:
            raise MeshError(
                f"mesh: got {len(names)} axis names {names} for ids of shape {global_device_ids.shape}, "
                "expected one name per axis"
            )
        if not global_device_ids.size:
            raise MeshError(f"mesh: got no devices (ids of shape {global_device_ids.shape}), expected at least one")
        record = wire.MeshRecord(
            dims=tuple(zip(names, global_device_ids.shape, strict=True)),
            global_device_ids=tuple(global_device_ids.ravel().tolist()),
            name=mesh_name,
            local_device_ids=_ids("local_device_ids", local_device_ids),
            local_devices=tuple(map(full_name, _sequence("local_devices", local_devices))),
            global_devices=tuple(map(full_name, _sequence("global_devices", global_devices or ()))),
            use_xla_spmd=bool(use_xla_spmd),
        )
        validate_record(record)
        object.__setattr__(self, "_record", record)

    # --- other ways to make one -----------------------------------------------------------------------------------

    @classmethod
    def from_record(cls, record: wire.MeshRecord) -> Mesh:
        """Build a mesh from the fields that `dtckpt.wire` reads and writes."""
        validate_record(record)
        mesh = cls.__new__(cls)
        object.__setattr__(mesh, "_record", record)
        return mesh

    @classmethod
    def empty(cls) -> Mesh:
        """Return the mesh without devices."""
        return cls.from_record(wire.MeshRecord())

    @classmethod
    def from_string(cls, mesh_str: str) -> Mesh:
        """Read the text form: full, compact (``name|x=2,y=4|*CPU``), one device's name, or ``empty_mesh``."""
        return cls.from_record(wire.mesh_from_text(mesh_str))

    @classmethod
    def from_proto(cls, proto: layout_pb2.MeshProto) -> Mesh:
        """Read the message that `as_proto` writes."""
        return cls.from_record(wire.mesh_from_proto(proto))

    @classmethod
    def from_device(cls, device: str) -> Mesh:
        """Return the single-device mesh of a device."""
        if not isinstance(device, str) or not device:
            raise MeshError(f"single-device mesh: got device {device!r}, expected a name")
        return cls.from_record(wire.MeshRecord(single_device=device))

    def to_string(self) -> str:
        """Return the text form.

        Raises:
            MeshError: the mesh has both global devices and the mark for XLA SPMD, which no text can carry.
        """
        if self._record.use_xla_spmd and self._record.global_devices:
            raise MeshError(
                f"mesh {self.name!r}: no text form holds both global devices and use_xla_spmd; got both, "
                "expected one of them; use as_proto instead"
            )
        return wire.mesh_to_text(self._record)

    def as_proto(self) -> layout_pb2.MeshProto:
        """Return the mesh as a message, equal byte for byte to TensorFlow's."""
        return wire.mesh_to_proto(self._record)

    @property
    def record(self) -> wire.MeshRecord:
        """The fields of the mesh, for `dtckpt.wire`."""
        return self._record

    def portable(self) -> Mesh:
        """Return the equal mesh that names all devices and holds nothing of the client it is seen from."""
        if not self._record.global_device_ids:
            return self
        return Mesh.from_record(
            replace(self._record, local_device_ids=(), local_devices=(), global_devices=self._device_names)
        )

    # --- being a value --------------------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """What the mesh is, whichever client sees it: name, axes, first id, names of all devices, marks."""
        record = self._record
        first = record.global_device_ids[:1]
        return record.name, record.dims, first, self._device_names, record.use_xla_spmd, record.single_device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (hash(self) == hash(other) and self.identity == other.identity)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"Mesh.from_string({wire.mesh_to_text(self._record)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.from_record, (self._record,)

    # --- axes -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def dim_names(self) -> list[str]:
        """Names of the axes, major first."""
        return list(self.mesh_dim_names)

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the axes, as PyTorch spells it."""
        return tuple(name for name, _ in self._record.dims)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self._record.dims)

    @property
    def ndim(self) -> int:
        return len(self._record.dims)

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Size of every axis by its name, in mesh order."""
        return dict(self._record.dims)

    @property
    def strides(self) -> list[int]:
        """How far ids lie apart along every axis."""
        return [math.prod(self.shape[axis + 1 :]) for axis in range(self.ndim)]

    def size(self, dim: int | str | None = None) -> int:
        """Return the number of devices, or the size of one axis given by name or position."""
        if dim is None:
            return len(self._record.global_device_ids)
        return self.shape[self.axis_index(dim)]

    def dim_size(self, dim_name: str) -> int:
        """Return the size of an axis."""
        return self.shape[self.axis_index(dim_name)]

    def axis_index(self, axis: int | str) -> int:
        """Return the position of an axis given by name or (also negative) position."""
        if isinstance(axis, str):
            if axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
        elif -self.ndim <= operator.index(axis) < self.ndim:
            return operator.index(axis) % self.ndim
        raise MeshError(f"{self._label}: got axis {axis!r}, expected one of {self.dim_names} or its position")

    def contains_dim(self, dim_name: str) -> bool:
        """Tell whether the mesh has an axis of this name."""
        if not isinstance(dim_name, str):
            raise MeshTypeError(f"{self._label}: got {dim_name!r} as axis name, expected str")
        return dim_name in self.mesh_dim_names

    def __contains__(self, dim_name: str) -> bool:
        return self.contains_dim(dim_name)

    # --- devices --------------------------------------------------------------------------------------------------

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Global ids of all devices in row-major order."""
        return self._record.global_device_ids

    def global_device_ids(self) -> npt.NDArray[np.int64]:
        """Return the global ids as an array of the mesh's shape."""
        return np.array(self._record.global_device_ids, dtype=np.int64).reshape(self.shape if self.device_ids else (0,))

    def global_devices(self) -> list[str]:
        """Return the names of all devices if the mesh was given them, else nothing."""
        return list(self._record.global_devices)

    def local_devices(self) -> list[str]:
        """Return the names of this client's devices."""
        return list(self._record.local_devices)

    def local_device_ids(self) -> list[int]:
        """Return the global ids of this client's devices."""
        return list(self._record.local_device_ids)

    def num_local_devices(self) -> int:
        return len(self._record.local_devices)

    def min_global_device_id(self) -> int:
        """Return the lowest global id."""
        return self._first_id

    def is_remote(self) -> bool:
        """Tell whether none of the devices belongs to this client."""
        return bool(self.device_ids) and not self._record.local_device_ids

    def is_single_device(self) -> bool:
        """Tell whether this stands for one device outside any grid (`from_device`)."""
        return bool(self._record.single_device)

    @property
    def single_device(self) -> str:
        """The device of a single-device mesh, else an empty string."""
        return self._record.single_device

    def use_xla_spmd(self) -> bool:
        return self._record.use_xla_spmd

    @cached_property
    def device_kind(self) -> str:
        """``"CPU"``, ``"GPU"`` or ``"TPU"``; empty for the empty mesh."""
        if self.single_device:
            return (DeviceSpec.parse(self.single_device).device_type or "").upper()
        names = self._record.local_devices or self._record.global_devices
        return kind_of(names[0]).upper() if names else ""

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``, as PyTorch spells it."""
        return _TORCH_TYPES.get(self.device_kind, self.device_kind.lower())

    @cached_property
    def mesh(self) -> torch.Tensor:
        """The global ids as a CPU tensor of the mesh's shape."""
        import torch

        return torch.tensor(self.device_ids, dtype=torch.int).reshape(self.shape if self.device_ids else (0,))

    def host_mesh(self) -> Mesh:
        """Return an unnamed mesh of the same grid on CPU devices of the same clients."""
        if not self.device_ids:
            raise MeshError(f"{self._label}: got a mesh without a grid of devices, expected one that has a host mesh")
        specs = [DeviceSpec.parse(name) for name in self._record.local_devices]
        devices = tuple(
            DeviceSpec(spec.job, spec.replica or 0, spec.task, "CPU", spec.device_index).to_string() for spec in specs
        )
        record = self._record
        if not devices:
            raise MeshError(f"{self._label}: got a mesh without local devices, expected this client to own some")
        return Mesh.from_record(
            wire.MeshRecord(record.dims, record.global_device_ids, "", record.local_device_ids, devices)
        )

    # --- where devices stand --------------------------------------------------------------------------------------

    def coordinate(self, device_id: int) -> tuple[int, ...]:
        """Return the position of a device along every axis."""
        return self._unravel(self._offset(device_id))

    def device_location(self, offset: int) -> list[int]:
        """Return the position along every axis of the device at a row-major offset (0-based; not an id)."""
        return list(self._unravel(self._valid_offset(offset)))

    def coords(self, device_idx: int) -> npt.NDArray[np.int64]:
        """Return `device_location` as an array."""
        return np.array(self.device_location(device_idx), dtype=np.int64)

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return the position of every device, by row-major offset and axis name."""
        grid = np.indices(self.shape).reshape(self.ndim, -1).T.tolist() if self.ndim else [[]] * self.size()
        return {offset: dict(zip(self.mesh_dim_names, place, strict=True)) for offset, place in enumerate(grid)}

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return the position of every local device, by axis name."""
        if self.device_ids and self._first_id != 0:
            raise MeshError(
                f"{self._label}: local_device_locations got ids from {self._first_id}, expected ids from 0; "
                "use coordinate(device_id)"
            )
        places = map(self.coordinate, self._record.local_device_ids)
        return [dict(zip(self.mesh_dim_names, place, strict=True)) for place in places]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the position of this client's only device, or None when it has none in the mesh."""
        ids = self._record.local_device_ids
        if len(ids) > 1:
            raise MeshError(
                f"{self._label}: got {len(ids)} local devices, expected one; use coordinate(device_id) for each"
            )
        return self.coordinate(ids[0]) if ids else None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return where this client's only device stands along an axis, which may be left out if there is one only."""
        place = self.get_coordinate()
        if place is None:
            raise MeshError(f"{self._label}: got no local device, expected this client to own one")
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(f"{self._label}: got no axis, expected one of {self.dim_names}")
        return place[self.axis_index(0 if mesh_dim is None else mesh_dim)]

    # --- clients --------------------------------------------------------------------------------------------------

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that own devices, ascending."""
        return tuple(np.unique(self._owners).tolist())

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    def client_of(self, device_id: int) -> int:
        """Return the client that owns a device."""
        return int(self._owners[self._offset(device_id)])

    def devices_of(self, client: int) -> tuple[int, ...]:
        """Return the ids of a client's devices, ascending; none when it has none."""
        return tuple((np.flatnonzero(self._owners == client) + self._first_id).tolist())

    @cached_property
    def _owners(self) -> npt.NDArray[np.int64]:
        return np.array([task_of(name) for name in self._device_names], dtype=np.int64)

    @cached_property
    def _device_names(self) -> tuple[str, ...]:
        """Names of all devices in row-major order; those of other clients are this client's with another task."""
        record = self._record
        if record.global_devices or not record.local_devices:
            return record.global_devices
        local = [name for _, name in sorted(zip(record.local_device_ids, record.local_devices, strict=True))]
        own_block = (min(record.local_device_ids) - self._first_id) // len(local)
        first_tasks = [task_of(name) - own_block for name in local]
        blocks = range(len(record.global_device_ids) // len(local))
        if len(blocks) == 1:
            return tuple(local)
        return tuple(
            with_task(name, first + block) for block in blocks for name, first in zip(local, first_tasks, strict=True)
        )

    # --- inner parts ----------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in self._record.dims)
        return f"mesh {self.name!r} ({axes or self.single_device or 'empty'})"

    @property
    def _first_id(self) -> int:
        if not self.device_ids:
            raise MeshError(f"{self._label}: got a mesh without a grid of devices, expected one that has ids")
        return self.device_ids[0]

    def _offset(self, device_id: int) -> int:
        offset = operator.index(device_id) - self._first_id
        if not 0 <= offset < self.size():
            raise MeshError(
                f"{self._label}: got device {device_id}, expected an id from {self._first_id} to {self.device_ids[-1]}"
            )
        return offset

    def _valid_offset(self, offset: int) -> int:
        if not 0 <= offset < self.size():
            raise MeshError(f"{self._label}: got device offset {offset}, expected one from 0 to {self.size() - 1}")
        return offset

    def _unravel(self, offset: int) -> tuple[int, ...]:
        place: list[int] = []
        for size in reversed(self.shape):
            offset, index = divmod(offset, size)
            place.append(index)
        return tuple(reversed(place))


# --- what makes a mesh valid ---------------------------------------------------------------------------------------


def validate_record(record: wire.MeshRecord) -> None:
    """Refuse fields that describe no mesh.

    Raises:
        MeshError: with what was found and what was expected.
    """
    if record.single_device or not record.global_device_ids:
        if record not in (wire.MeshRecord(), wire.MeshRecord(single_device=record.single_device)):
            raise MeshError(f"mesh: got {record!r:.200}, expected device ids, or one single device and nothing else")
        return
    _validate_names(record)
    _validate_ids(record)
    _validate_devices(record)


def _validate_names(record: wire.MeshRecord) -> None:
    if not isinstance(record.name, str):
        raise MeshTypeError(f"mesh name: got {record.name!r}, expected str")
    if not record.name.isprintable() or {"|", " "} & set(record.name):
        raise MeshError(f"mesh name: got {record.name!r}, expected printable text without spaces and '|'")
    names = [name for name, _ in record.dims]
    for name in names:
        if not isinstance(name, str):
            raise MeshTypeError(f"axis name: got {name!r}, expected str")
        if not name or not name.isprintable() or _NOT_IN_NAMES & set(name):
            raise MeshError(
                f"axis name: got {name!r} among {names}, expected printable text without spaces and any of | , = * +"
            )
        if name in RESERVED_NAMES:
            raise MeshError(f"axis name: got {name!r}, expected another than the reserved {', '.join(RESERVED_NAMES)}")
    if len(set(names)) != len(names):
        raise MeshError(f"axis names: got {names}, expected each name once")


def _validate_ids(record: wire.MeshRecord) -> None:
    ids, local_ids = record.global_device_ids, record.local_device_ids
    sizes = [size for _, size in record.dims]
    if min(sizes, default=1) < 1 or math.prod(sizes) != len(ids):
        raise MeshError(f"mesh: got {len(ids)} device ids for axes {dict(record.dims)}, expected their product")
    if ids[0] < 0 or ids != tuple(range(ids[0], ids[0] + len(ids))):
        raise MeshError(f"mesh: got global ids {capped(ids)}, expected ids that count up by one in row-major order")
    if len(set(local_ids)) != len(local_ids) or not set(local_ids) <= set(range(ids[0], ids[0] + len(ids))):
        raise MeshError(
            f"mesh: got local ids {capped(local_ids)}, expected distinct ids from {ids[0]} to {ids[-1]}, the global ids"
        )
    if local_ids and len(ids) % len(local_ids):
        raise MeshError(
            f"mesh: got {len(local_ids)} local of {len(ids)} global devices, "
            "expected equally many devices on every client"
        )
    if local_ids and not record.global_devices:
        start = min(local_ids) - ids[0]
        if start % len(local_ids) or max(local_ids) - min(local_ids) != len(local_ids) - 1:
            raise MeshError(
                f"mesh: got local ids {capped(local_ids)} of {len(ids)}, expected an aligned run of consecutive ids; "
                "pass global_devices to say who owns the others"
            )


def _validate_devices(record: wire.MeshRecord) -> None:
    local, everyone = record.local_devices, record.global_devices
    if not local and not everyone:
        raise MeshError("mesh: got neither local nor global devices, expected at least one of the lists")
    if len(local) != len(record.local_device_ids):
        raise MeshError(
            f"mesh: got {len(record.local_device_ids)} local ids and {len(local)} local devices, expected as many"
        )
    if everyone and len(everyone) != len(record.global_device_ids):
        raise MeshError(
            f"mesh: got {len(record.global_device_ids)} global ids and {len(everyone)} global devices, expected as many"
        )
    kinds = sorted({kind_of(name) for name in (*local, *everyone)})
    if len(kinds) > 1 or kinds[0].upper() not in DEVICE_KINDS:
        raise MeshError(f"mesh: got device types {', '.join(kinds)}, expected one of {', '.join(DEVICE_KINDS)}")
    if len(set(local)) not in (1, len(local)) or (len(local) > len(set(local)) and kinds[0].upper() != "CPU"):
        raise MeshError(
            f"mesh: got local devices {capped(local)}, expected each once (or one and the same CPU everywhere)"
        )
    if everyone and any(
        everyone[i - record.global_device_ids[0]] != name
        for i, name in zip(record.local_device_ids, local, strict=True)
    ):
        raise MeshError(
            f"mesh: got local devices {capped(local)}, expected the names that global_devices has for their ids"
        )
    if record.use_xla_spmd and kinds[0].upper() != "TPU":
        raise MeshError(f"mesh: got use_xla_spmd on {kinds[0]} devices, expected TPU devices")


def _sequence(what: str, items: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise MeshTypeError(f"mesh: got {what} {items!r}, expected a sequence")
    return tuple(items)


def _ids(what: str, items: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, _sequence(what, items)))
    except TypeError:
        raise MeshTypeError(f"mesh: got {what} {items!r}, expected a sequence of integers") from None
