"""`Mesh`: an n-d grid of devices with named axes, its slices, its process groups and its clients."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dtckpt._proto import layout_pb2
from dtckpt.config import Config
from dtckpt.errors import AxisNotFoundError, MeshError, MeshTypeError
from dtckpt.layout import mesh_validation, submesh, text_format
from dtckpt.layout.device_names import DeviceSpec, full_name, kind_of, task_of
from dtckpt.layout.mesh_validation import (
    RESERVED_NAMES,
    DeviceOffsets,
    dims_of,
    ids_of,
    tuple_of,
    unravel,
    validate_caller,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["RESERVED_NAMES", "Mesh"]

_TORCH_TYPES = {"GPU": "cuda"}

_blocks: ContextVar[tuple[Mesh, ...]] = ContextVar("dtckpt_default_mesh", default=())
"""Meshes of the open ``with mesh:`` and `run_on` blocks, the innermost last."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Mesh:
    """An n-d grid of devices with named axes, seen from one client.

    Immutable. Two meshes are equal if axes, device ids, devices and name are equal; the client that sees a mesh makes
    no difference. Global device ids count up by one in row-major order, unless a text or a proto has others.

    Args:
        dim_names: Name of every axis, major first.
        global_device_ids: Array of ids whose shape is the shape of the mesh.
        local_device_ids: Ids of this client's devices.
        local_devices: Complete names of this client's devices, in the order of ``local_device_ids``.
        mesh_name: Name of the mesh.
        global_devices: Complete names of all devices, row-major. Without them, every client counts as the owner of an
            equal run of consecutive ids, with names like this client's, but the owner's task number.
        use_xla_spmd: A mark for TPU meshes.

    Raises:
        MeshError: The arguments describe no mesh.
    """

    _record: text_format.MeshRecord
    _repr_svg_: ClassVar[Callable[[Mesh], str | None]]
    """Draws it in notebooks; `dtckpt.pictures.notebook` sets it."""

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
        record = text_format.MeshRecord(
            dims=dims_of(dim_names, global_device_ids),
            global_device_ids=tuple(global_device_ids.ravel().tolist()),
            name=mesh_name,
            local_device_ids=ids_of("local_device_ids", local_device_ids),
            local_devices=tuple(map(full_name, tuple_of("local_devices", local_devices))),
            global_devices=tuple(map(full_name, tuple_of("global_devices", global_devices or ()))),
            use_xla_spmd=bool(use_xla_spmd),
        )
        mesh_validation.validate_record(record, may_lack_names=False)
        object.__setattr__(self, "_record", record)

    # --- constructors and conversions ---------------------------------------------------------------------------------

    @classmethod
    def from_record(cls, record: text_format.MeshRecord) -> Mesh:
        """Build a mesh from the fields that `dtckpt.layout.text_format` reads and writes."""
        mesh_validation.validate_record(record)
        mesh = cls.__new__(cls)
        object.__setattr__(mesh, "_record", record)
        return mesh

    @classmethod
    def empty(cls) -> Mesh:
        """Return the mesh without devices."""
        return cls.from_record(text_format.MeshRecord())

    @classmethod
    def from_string(cls, mesh_str: str) -> Mesh:
        """Read the text form: full, compact (``name|x=2,y=4|*CPU``), one device's name, or ``empty_mesh``."""
        return cls.from_record(text_format.mesh_from_text(mesh_str))

    @classmethod
    def from_proto(cls, proto: layout_pb2.MeshProto) -> Mesh:
        """Read the proto that `as_proto` writes."""
        return cls.from_record(text_format.mesh_from_proto(proto))

    @classmethod
    def from_device(cls, device: str) -> Mesh:
        """Return the single-device mesh of a device, which is outside any grid."""
        if not isinstance(device, str) or not device:
            raise MeshError(f"single-device mesh: got device {device!r}, expected a name")
        return cls.from_record(text_format.MeshRecord(single_device=device))

    @staticmethod
    def from_device_mesh(device_mesh: Any) -> Mesh:
        """Return the mesh of a PyTorch ``DeviceMesh``; its `get_group` returns the ``DeviceMesh``'s process groups.

        Collective: All clients of the mesh call it, though nothing is sent.
        """
        # Here, because that module imports torch, which meshes do without, and this module.
        from dtckpt.layout.device_mesh import adopt

        return adopt(device_mesh)

    @staticmethod
    def from_group(group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Any = None) -> Mesh:
        """Return the mesh with given process groups; see `dtckpt.layout.device_mesh.DeviceMesh.from_group`."""
        from dtckpt.layout.device_mesh import DeviceMesh  # here for the reasons in `from_device_mesh`

        return DeviceMesh.from_group(group, device_type, mesh, mesh_dim_names=mesh_dim_names)

    def to_device_mesh(self) -> Any:
        """Return the PyTorch ``DeviceMesh`` with this mesh's process groups; every client owns at most one device.

        Collective: As `get_all_groups`.
        """
        from dtckpt.layout.device_mesh import device_mesh_of  # here for the reasons in `from_device_mesh`

        return device_mesh_of(self)

    def to_string(self) -> str:
        """Return the text form.

        Raises:
            MeshError: The mesh has both global devices and the mark for XLA SPMD, which no text form can express.
        """
        if self._record.use_xla_spmd and self._record.global_devices:
            raise MeshError(
                f"mesh {self.name!r}: no text form holds both global devices and use_xla_spmd; got both, "
                "expected one of them; use as_proto instead"
            )
        return text_format.mesh_to_text(self._record)

    def as_proto(self) -> layout_pb2.MeshProto:
        """Return the mesh as a proto, equal byte for byte to TensorFlow's."""
        return text_format.mesh_to_proto(self._record)

    @property
    def record(self) -> text_format.MeshRecord:
        """The fields of the mesh, for `dtckpt.layout.text_format`."""
        return self._record

    def portable(self) -> Mesh:
        """Return the equal mesh that names all devices and has no local devices, so that any client can read it."""
        if not self._record.global_device_ids:
            return self
        return Mesh.from_record(
            replace(self._record, local_device_ids=(), local_devices=(), global_devices=self.device_names)
        )

    def seen_by(self, client: int) -> Mesh:
        """Return the equal mesh as another client sees it, which need not own a device."""
        record = self.portable().record
        # The portable form, because a mesh that was made without ``global_devices`` records only local names.
        own = self.devices_of(client)
        names = tuple(map(self.device_name, own))
        return Mesh.from_record(replace(record, local_device_ids=own, local_devices=names))

    # --- equality, hash, pickle, with ---------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """The fields that are equal on all clients: name, axes, ids, names of all devices, marks."""
        record, ids = self._record, self._record.global_device_ids
        ids = ids[:1] if self.offsets.are_consecutive else ids  # the first id and the axes tell them all
        names = self.device_names if record.local_devices or record.global_devices else ()
        return record.name, record.dims, ids, names, record.use_xla_spmd, record.single_device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        # Meshes keep their hashes. So most comparisons of different meshes end before the names of all devices.
        return self is other or (hash(self) == hash(other) and self.identity == other.identity)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"Mesh.from_string({text_format.mesh_to_text(self._record)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return mesh_of_bytes, (self.as_proto().SerializeToString(deterministic=True), self.origins)

    def __enter__(self) -> Mesh:
        """Make this the default mesh for the body of a with statement, as `run_on` does."""
        _blocks.set((*_blocks.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.set(_blocks.get()[:-1])

    # --- axes ---------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def dim_names(self) -> list[str]:
        """Names of the axes, major first."""
        return list(self.mesh_dim_names)

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the axes, major first, under PyTorch's name."""
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
        """Distance between the ids of neighbours along every axis."""
        return [math.prod(self.shape[axis + 1 :]) for axis in range(self.ndim)]

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of devices, or the size of one axis given by name or position."""
        if mesh_dim is None:
            return len(self._record.global_device_ids)
        return self.shape[self.axis_index(mesh_dim)]

    def dim_size(self, dim_name: str) -> int:
        """Return the size of an axis."""
        return self.shape[self.axis_index(dim_name)]

    def axis_index(self, axis: int | str) -> int:
        """Return the position of an axis, given by name or by position, which may be negative."""
        if isinstance(axis, str):
            if axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
        elif -self.ndim <= operator.index(axis) < self.ndim:
            return operator.index(axis) % self.ndim
        raise AxisNotFoundError(f"{self.label}: got axis {axis!r}, expected one of {self.dim_names} or its position")

    def contains_dim(self, dim_name: str) -> bool:
        """Tell whether the mesh has an axis of this name."""
        if not isinstance(dim_name, str):
            raise MeshTypeError(f"{self.label}: got {dim_name!r} as axis name, expected str")
        return dim_name in self.mesh_dim_names

    def __contains__(self, dim_name: str) -> bool:
        return self.contains_dim(dim_name)

    # --- devices ------------------------------------------------------------------------------------------------------

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Global ids of all devices in row-major order."""
        return self._record.global_device_ids

    def global_device_ids(self) -> npt.NDArray[np.int64]:
        """Return the global ids as an array of the mesh's shape."""
        # The empty mesh has no axes, but an array of shape () would have one element; hence (0,).
        return np.array(self.device_ids, dtype=np.int64).reshape(self.shape if self.device_ids else (0,))

    def global_devices(self) -> list[str]:
        """Return the names of all devices if the mesh was made with them, else an empty list."""
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
        if not self.device_ids:
            raise MeshError(f"{self.label}: got a mesh without a grid of devices, expected a mesh with ids")
        return self.offsets.lowest

    def is_remote(self) -> bool:
        """Tell whether this client owns none of the devices."""
        return bool(self.device_ids) and not self._record.local_device_ids

    def is_single_device(self) -> bool:
        """Tell whether the mesh is one device outside any grid (`from_device`)."""
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

    @cached_property
    def device_type(self) -> str:
        """The device kind as PyTorch's device type: ``"cpu"``, ``"cuda"``, ``"tpu"``."""
        return _TORCH_TYPES.get(self.device_kind, self.device_kind.lower())

    @cached_property
    def mesh(self) -> torch.Tensor:
        """The grid as a CPU tensor of the mesh's shape: ranks (client ids), or device ids if a client owns several."""
        import torch  # here, because everything else works without torch, whose import takes seconds

        items = self.owners if self.num_clients == self.size() else self.global_device_ids()
        return torch.tensor(items, dtype=torch.int, device="cpu")

    def host_mesh(self) -> Mesh:
        """Return an unnamed mesh of the same grid on CPU devices of the same clients."""
        return Mesh.from_record(mesh_validation.host_record(self._record, self.label))

    # --- coordinates of devices ---------------------------------------------------------------------------------------

    def coordinate(self, device_id: int) -> tuple[int, ...]:
        """Return the position of a device along every axis."""
        return unravel(self._offset(device_id), self.shape)

    def device_location(self, offset: int) -> list[int]:
        """Return the position along every axis of the device at a row-major offset from 0 (not an id)."""
        return list(unravel(self._valid_offset(offset), self.shape))

    def coords(self, device_idx: int) -> npt.NDArray[np.int64]:
        """Return `device_location` as an array."""
        return np.array(self.device_location(device_idx), dtype=np.int64)

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return the position of every device, by row-major offset and axis name."""
        grid = np.indices(self.shape).reshape(self.ndim, -1).T.tolist() if self.ndim else [[]] * self.size()
        return {offset: dict(zip(self.mesh_dim_names, position, strict=True)) for offset, position in enumerate(grid)}

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return the position of every local device, by axis name."""
        if self.device_ids and self.offsets.lowest != 0:
            raise MeshError(
                f"{self.label}: local_device_locations got ids from {self.offsets.lowest}, expected ids from 0; "
                "use coordinate(device_id)"
            )
        coordinates = map(self.coordinate, self._record.local_device_ids)
        return [dict(zip(self.mesh_dim_names, coordinate, strict=True)) for coordinate in coordinates]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the position of this client's only device along every axis, None if it has no device in the mesh."""
        ids = self._record.local_device_ids
        if len(ids) > 1:
            raise MeshError(
                f"{self.label}: got {len(ids)} local devices, expected one; use coordinate(device_id) for each"
            )
        return self.coordinate(ids[0]) if ids else None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the position of this client's only device along an axis; a mesh of one axis needs no argument."""
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"{self.label}: got no local device, expected this client to own one")
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(f"{self.label}: got no axis, expected one of {self.dim_names}")
        if isinstance(mesh_dim, str) and mesh_dim not in self.mesh_dim_names:
            return self[mesh_dim].get_local_rank()
        return coordinate[self.axis_index(0 if mesh_dim is None else mesh_dim)]

    # --- slices -------------------------------------------------------------------------------------------------------

    def __getitem__(self, names: str | Sequence[str]) -> Mesh:
        """Return the slice along the named axes, in the order of the names, that holds this client's devices.

        Devices keep their names; their ids count from 0 in the slice.

        Args:
            names: Names of axes, or names that `flatten` has given.

        Raises:
            MeshError: There are no such axes, this client has no device here, or has devices in several slices.
        """
        return submesh.slice_mesh(self, names)

    def flatten(self, axes: Sequence[str] | None = None, name: str | None = None) -> Mesh:
        """Return the mesh with one axis that combines some axes; the first of them varies slowest.

        The name then works as an index: ``mesh[name]``, on this mesh and on the mesh that it was sliced from.

        Args:
            axes: Names of the axes; default: all.
            name: Name of the one axis; default: the names of the axes, joined by ``_``.

        Raises:
            MeshError: The name stands for other axes already. Also as for slices.
        """
        return submesh.flatten_mesh(self, axes, name)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> Mesh:
        """Flatten all axes, under PyTorch's name."""
        flat = self.flatten(name=mesh_dim_name)
        if backend_override is not None and flat is not self:
            self.backends.update(mesh_validation.parse_backend_override({0: backend_override}, flat.mesh_dim_names))
        return flat

    def _unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], backend_override: Any = None
    ) -> Mesh:
        """Return the mesh with one axis split into several, major first, under PyTorch's name."""
        return submesh.unflatten_mesh(self, dim, mesh_sizes, mesh_dim_names, backend_override)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[Mesh]) -> Mesh:
        """Return the mesh with the axes of several slices of one mesh, in this order, under PyTorch's name."""
        return submesh.concatenate_meshes(device_mesh_list)

    @cached_property
    def origins(self) -> dict[str, tuple[str, ...]]:
        """Axes of the root mesh by name, also by names that `flatten` gave. The root and all its slices share the dict.

        The root is the mesh that is no slice of another.
        """
        return {name: (name,) for name in self.mesh_dim_names}

    @cached_property
    def slices(self) -> dict[tuple[tuple[str, tuple[str, ...]], ...], Mesh]:
        """Cache of slices, by the name of every axis and the axes of this mesh that it combines."""
        return {}

    @cached_property
    def root_offsets(self) -> tuple[Mesh, Sequence[int]]:
        """The root mesh, which may be this mesh, and the row-major offsets in it of this mesh's devices."""
        return self, range(self.size())

    @cached_property
    def backends(self) -> dict[str, tuple[str | None, Any]]:
        """By axis, the chosen backend and options of its process group. A mesh and its slices share the dict."""
        return {}

    # --- process groups -----------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return this client's id, its rank in the default process group. The client need not own a device here."""
        # A device's name contains its client, also in a process without a process group.
        if self._record.local_devices:
            return task_of(self._record.local_devices[0])
        from dtckpt.comm import process_groups  # here, because it imports torch, which meshes do without

        rank = process_groups.rank()
        return Config.from_environ().client_id if rank is None else rank

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the process group of the clients along an axis; make it at the first call.

        Ranks in it ascend with client ids. Meshes share the groups of the same clients. A mesh of one axis needs no
        argument.

        Collective: The first time over those clients (see `dtckpt.comm.process_groups.process_group_of`).

        Args:
            mesh_dim: Name or position of the axis.

        Raises:
            MeshError: There is no such axis, this client has no device here, or its devices see different clients
                along the axis.
            MeshTypeError: FSDP or DTensors of PyTorch call.
            CoordinationError: No default process group spans the clients.
        """
        validate_caller("get_group")
        from dtckpt.comm import process_groups  # here, because it imports torch, which meshes do without

        clients = self.clients_along(mesh_dim)
        name = mesh_dim if isinstance(mesh_dim, str) else self.mesh_dim_names[mesh_dim or 0]
        return process_groups.process_group_of(clients, self.device_type, self.backends.get(name, (None, None)))

    def __getattr__(self, name: str) -> Any:
        validate_caller(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the process group of every axis. Collective and raises: as `get_group`."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def clients_along(self, axis: int | str | None) -> tuple[int, ...]:
        """Return the owners of this client's devices, and of the devices that differ from them only along an axis."""
        if axis is None and self.ndim != 1:
            raise MeshError(f"{self.label}: got no axis, expected one of {self.dim_names}")
        if isinstance(axis, str) and axis not in self.mesh_dim_names:
            return self[axis].clients
        return submesh.clients_of_line(self, self.axis_index(0 if axis is None else axis))

    # --- clients ------------------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> npt.NDArray[np.int64]:
        """Client of every device, as a read-only array of the mesh's shape. Raises: as `device_names`."""
        owners = np.array([task_of(name) for name in self.device_names], dtype=np.int64)
        # Every caller gets this one array.
        owners.flags.writeable = False
        return owners.reshape(self.shape if self.device_ids else (0,))

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that own devices, ascending."""
        # `np.unique` imports `numpy.ma`, which takes longer than all other work on a mesh.
        return tuple(sorted(set(self.owners.ravel().tolist())))

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @cached_property
    def local_client(self) -> int | None:
        """The id of the client that sees the mesh, None if it owns no device here."""
        ids = self._record.local_device_ids
        return self.client_of(ids[0]) if ids else None

    def client_of(self, device_id: int) -> int:
        """Return the client that owns a device."""
        return int(self.owners.flat[self._offset(device_id)])

    def devices_of(self, client: int) -> tuple[int, ...]:
        """Return the ids of a client's devices, ascending."""
        return tuple(sorted(self.device_ids[offset] for offset in np.flatnonzero(self.owners == client).tolist()))

    def device_name(self, device_id: int) -> str:
        """Return the complete name of a device. Raises: as `device_names`."""
        return self.device_names[self._offset(device_id)]

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of all devices in row-major order. Raises MeshError: The mesh is remote and names none."""
        return mesh_validation.names_of_all(self._record, self.label)

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Name and axes of the mesh, for error messages."""
        axes = ",".join(f"{name}={size}" for name, size in self._record.dims)
        return f"mesh {self.name!r} ({axes or self.single_device or 'empty'})"

    @cached_property
    def offsets(self) -> DeviceOffsets:
        """The row-major offsets of the devices by their ids."""
        return DeviceOffsets(self.device_ids)

    def _offset(self, device_id: int) -> int:
        first = self.min_global_device_id()
        if (offset := self.offsets.of(device_id)) is None:
            raise MeshError(
                f"{self.label}: got device {device_id}, expected an id from {first} to {max(self.device_ids)}"
            )
        return offset

    def _valid_offset(self, offset: int) -> int:
        if not 0 <= offset < self.size():
            raise MeshError(f"{self.label}: got device offset {offset}, expected one from 0 to {self.size() - 1}")
        return offset


def mesh_of_bytes(data: bytes, origins: dict[str, tuple[str, ...]]) -> Mesh:
    """Rebuild a mesh from the plain values of `Mesh.__reduce__`; `torch.load(weights_only=True)` takes them."""
    mesh = Mesh.from_proto(layout_pb2.MeshProto.FromString(data))
    vars(mesh)["origins"] = origins
    return mesh


def get_default_mesh() -> Mesh | None:
    """Return the default mesh, from the innermost ``with mesh:`` or `run_on` block, or None outside of any."""
    return next(reversed(_blocks.get()), None)
