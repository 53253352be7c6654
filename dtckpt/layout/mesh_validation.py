"""Validation of the fields of a mesh and of its callers, and the fields of meshes that are derived from another mesh.

The functions work on `text_format.MeshRecord`, the plain fields of a mesh, and on arguments of `Mesh`'s methods.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dtckpt.errors import MeshError, MeshTypeError, capped
from dtckpt.layout import text_format
from dtckpt.layout.device_names import DEVICE_KINDS, DeviceSpec, kind_of, task_of, with_task

RESERVED_NAMES = ("unsharded", "match", "any", "scalar")
"""Words of the text form; they cannot be names of axes."""

_NOT_IN_NAMES = frozenset("|,=*+ ")


def tuple_of(what: str, items: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items of the argument ``what`` as a tuple. Raises MeshTypeError: it is no sequence."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise MeshTypeError(f"mesh: got {what} {items!r}, expected a sequence")
    return tuple(items)


def ids_of(what: str, items: Iterable[int]) -> tuple[int, ...]:
    """Return the integers of the argument ``what`` as a tuple. Raises MeshTypeError: it is no sequence of integers."""
    try:
        return tuple(map(operator.index, tuple_of(what, items)))
    except TypeError:
        raise MeshTypeError(f"mesh: got {what} {items!r}, expected a sequence of integers") from None


def dims_of(dim_names: Sequence[str], ids: object) -> tuple[tuple[str, int], ...]:
    """Return names and sizes of the axes of an array of device ids.

    Raises:
        MeshError: The ids are no such array, or the names do not fit it.
    """
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        raise MeshError(f"mesh: got global_device_ids {ids!r:.80}, expected a numpy array of integers")
    names = tuple_of("dim_names", dim_names)
    if len(names) != ids.ndim:
        raise MeshError(
            f"mesh: got {len(names)} axis names {names} for ids of shape {ids.shape}, expected one name per axis"
        )
    if not ids.size:
        raise MeshError(f"mesh: got no devices (ids of shape {ids.shape}), expected at least one")
    if not DeviceOffsets(flat := ids.ravel().tolist()).are_consecutive:
        raise MeshError(f"mesh: got global ids {capped(flat)}, expected ids that count up by one in row-major order")
    return tuple(zip(names, ids.shape, strict=True))


def validate_record(record: text_format.MeshRecord, *, may_lack_names: bool = True) -> None:
    """Refuse fields that describe no mesh.

    Args:
        record: The fields.
        may_lack_names: Whether a remote mesh need not name its devices.

    Raises:
        MeshError: The fields describe no mesh.
    """
    if record.single_device or not record.global_device_ids:
        if record not in (text_format.MeshRecord(), text_format.MeshRecord(single_device=record.single_device)):
            raise MeshError(f"mesh: got {record!r:.200}, expected device ids, or one single device and nothing else")
        return
    _validate_names(record)
    _validate_ids(record)
    if record.local_devices or record.global_devices or record.local_device_ids:
        _validate_devices(record)
    elif not may_lack_names:
        raise MeshError("mesh: got neither local nor global devices, expected at least one of the lists")


def _validate_names(record: text_format.MeshRecord) -> None:
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


def _validate_ids(record: text_format.MeshRecord) -> None:
    ids, local_ids = record.global_device_ids, record.local_device_ids
    sizes = [size for _, size in record.dims]
    if min(sizes, default=1) < 1 or math.prod(sizes) != len(ids):
        raise MeshError(f"mesh: got {len(ids)} device ids for axes {dict(record.dims)}, expected their product")
    if min(ids) < 0 or len(set(ids)) != len(ids):
        raise MeshError(f"mesh: got global ids {capped(ids)}, expected distinct ids from 0")
    if len(set(local_ids)) != len(local_ids) or not set(local_ids) <= set(ids):
        raise MeshError(
            f"mesh: got local ids {capped(local_ids)}, expected distinct ones of the global ids {capped(ids)}"
        )
    if local_ids and len(ids) % len(local_ids):
        raise MeshError(
            f"mesh: got {len(local_ids)} local of {len(ids)} global devices, "
            "expected equally many devices on every client"
        )
    if local_ids and not record.global_devices and len(local_ids) != len(ids):
        start = min(local_ids) - min(ids)
        is_run = max(ids) - min(ids) == len(ids) - 1 and max(local_ids) - min(local_ids) == len(local_ids) - 1
        if start % len(local_ids) or not is_run:
            raise MeshError(
                f"mesh: got local ids {capped(local_ids)} of {len(ids)}, expected an aligned run of consecutive ids; "
                "pass global_devices to say which clients own the others"
            )


def _validate_devices(record: text_format.MeshRecord) -> None:
    local, everyone = record.local_devices, record.global_devices
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
    offsets = DeviceOffsets(record.global_device_ids)
    if everyone and any(
        everyone[offsets.of(i) or 0] != name for i, name in zip(record.local_device_ids, local, strict=True)
    ):
        raise MeshError(
            f"mesh: got local devices {capped(local)}, expected the names that global_devices has for their ids"
        )
    if record.use_xla_spmd and kinds[0].upper() != "TPU":
        raise MeshError(f"mesh: got use_xla_spmd on {kinds[0]} devices, expected TPU devices")


def names_of_all(record: text_format.MeshRecord, label: str) -> tuple[str, ...]:
    """Return the names of all devices; if the record lacks them, derive them from this client's, by their tasks.

    Without ``global_devices`` every client owns a block of consecutive ids, as many as this client, and the task
    numbers of the blocks ascend by one. ``label`` names the mesh in errors.

    Raises:
        MeshError: The record names no device.
    """
    ids = record.global_device_ids
    if ids and not record.global_devices and not record.local_devices:
        raise MeshError(f"{label}: got no names of its devices, expected some, which tell whose the devices are")
    if record.global_devices or not record.local_devices:
        return record.global_devices
    by_id = dict(zip(record.local_device_ids, record.local_devices, strict=True))
    if len(by_id) == len(ids):
        return tuple(by_id[device_id] for device_id in ids)
    local = [by_id[device_id] for device_id in sorted(by_id)]
    first = min(ids)
    own_block = (min(by_id) - first) // len(local)
    first_tasks = [task_of(name) - own_block for name in local]
    places = (divmod(device_id - first, len(local)) for device_id in ids)
    return tuple(with_task(local[place], first_tasks[place] + block) for block, place in places)


def slice_record(
    record: text_format.MeshRecord, devices: Sequence[str], parts: Sequence[tuple[str, tuple[str, ...]]], label: str
) -> tuple[text_format.MeshRecord, list[int]]:
    """Return the slice of a mesh along some axes; along the others, at the position of the local devices.

    Args:
        record: The mesh.
        devices: Names of all its devices.
        parts: Name of every new axis, and the old axes that it combines, major first.
        label: The mesh's name in errors.

    Returns:
        The fields of the slice, and the row-major offsets of its devices in the mesh.
    """
    axes, shape = [axis for axis, _ in record.dims], [size for _, size in record.dims]
    kept_axes = [axes.index(axis) for _, combined in parts for axis in combined]
    if not kept_axes or len(set(kept_axes)) != len(kept_axes):
        raise MeshError(f"{label}: got axes {[axes[axis] for axis in kept_axes]} to keep, expected some, each once")
    other_axes = [axis for axis in range(len(axes)) if axis not in kept_axes]
    # One row per slice: the offsets of its devices, with the kept axes in the new order.
    offsets = np.arange(len(devices)).reshape(shape).transpose(other_axes + kept_axes)
    offsets = offsets.reshape(-1, math.prod(shape[axis] for axis in kept_axes))
    mine = _local_offsets(record)
    rows = np.flatnonzero(np.isin(offsets, mine).any(axis=1)) if other_axes else np.array([0])
    if len(rows) != 1:
        raise MeshError(
            f"{label}: got {len(mine)} local devices in {len(rows)} slices along {[name for name, _ in parts]}, "
            "expected this client's devices in exactly one slice"
        )
    picked: list[int] = offsets[rows[0]].tolist()
    dims = tuple((name, math.prod(shape[axes.index(axis)] for axis in combined)) for name, combined in parts)
    return _record_of_offsets(record, dims, picked, devices), picked


def parse_backend_override(backend_override: Any, names: Sequence[str]) -> dict[str, tuple[str | None, Any]]:
    """Return backend and options by axis.

    Args:
        backend_override: As for PyTorch: a mapping from axes or their positions, or a sequence with one item per axis.
            An item is a backend, its options, or a pair of both.
        names: Names of the axes.

    Raises:
        MeshError: An axis does not exist, or is there twice.
    """
    backends: dict[str, tuple[str | None, Any]] = {}
    is_mapping = isinstance(backend_override, Mapping)
    for key, item in backend_override.items() if is_mapping else enumerate(backend_override or ()):
        axis: Any = names[key] if isinstance(key, int) and 0 <= key < len(names) else key
        if axis not in names or axis in backends:
            raise MeshError(
                f"backend_override: got axis {key!r} in {backend_override!r:.200}, expected names or positions of the "
                f"axes {list(names)}, each at most once"
            )
        backend, options = item if isinstance(item, tuple) else (item, None)
        backends[axis] = (backend, options) if backend is None or isinstance(backend, str) else (None, backend)
    return backends


def host_record(record: text_format.MeshRecord, label: str) -> text_format.MeshRecord:
    """Return the unnamed mesh of the same grid on CPU devices of the same clients; ``label`` names it in errors."""
    if not record.global_device_ids:
        raise MeshError(f"{label}: got a mesh without a grid of devices, expected a mesh with a host mesh")
    specs = [DeviceSpec.parse(name) for name in record.local_devices]
    devices = tuple(
        DeviceSpec(spec.job, spec.replica or 0, spec.task, "CPU", spec.device_index).to_string() for spec in specs
    )
    if not devices:
        raise MeshError(f"{label}: got a mesh without local devices, expected this client to own some")
    return text_format.MeshRecord(record.dims, record.global_device_ids, "", record.local_device_ids, devices)


def unflattened_record(
    record: text_format.MeshRecord, axis: int, sizes: Sequence[int], names: Sequence[str], label: str
) -> text_format.MeshRecord:
    """Return the mesh with one axis split into several, major first; ``label`` names the mesh in errors."""
    new_sizes, new_names = ids_of("mesh_sizes", sizes), tuple_of("mesh_dim_names", names)
    name, size = record.dims[axis]
    if len(new_sizes) != len(new_names) or math.prod(new_sizes) != size:
        raise MeshError(
            f"{label}: got sizes {new_sizes} named {new_names} for axis {name!r}, expected one name per size, and "
            f"sizes whose product is {size}"
        )
    new = tuple(zip(new_names, new_sizes, strict=True))
    return replace(record, dims=(*record.dims[:axis], *new, *record.dims[axis + 1 :]))


def concatenated_record(
    record: text_format.MeshRecord,
    devices: Sequence[str],
    parts: Sequence[tuple[tuple[tuple[str, int], ...], Sequence[int]]],
) -> tuple[text_format.MeshRecord, list[int]]:
    """Return the mesh with the axes of several slices of one mesh, at the position of the local devices.

    Args:
        record: The mesh.
        devices: Names of all its devices.
        parts: Axes of every slice, and the row-major offsets of its devices in the mesh.

    Returns:
        The fields of the new mesh, and the row-major offsets of its devices in the mesh.
    """
    dims = tuple(dim for axes, _ in parts for dim in axes)
    mine = _local_offsets(record)
    if not mine:
        raise MeshError(f"meshes to concatenate: got axes {dict(dims)}, expected this client to have a device in them")
    grid = np.array(mine[0])
    for _, offsets in parts:
        # Slices are evenly spaced: a step along one slice changes the offset by the same amount from any device of
        # another.
        grid = np.add.outer(grid, np.array(offsets) - mine[0])
    picked: list[int] = grid.ravel().tolist()
    if len(set(picked)) != len(picked) or not set(picked) <= set(range(len(devices))):
        raise MeshError(
            f"meshes to concatenate: got axes {[name for name, _ in dims]} that overlap, expected a step along one to "
            "lead elsewhere than any along the others"
        )
    return _record_of_offsets(record, dims, picked, devices), picked


def _local_offsets(record: text_format.MeshRecord) -> list[int]:
    """Return the row-major offsets of the local devices."""
    offsets = DeviceOffsets(record.global_device_ids)
    return [offset for device_id in record.local_device_ids if (offset := offsets.of(device_id)) is not None]


def _record_of_offsets(
    record: text_format.MeshRecord, dims: tuple[tuple[str, int], ...], picked: Sequence[int], devices: Sequence[str]
) -> text_format.MeshRecord:
    """Return the mesh of the devices at some offsets in a mesh, this client's devices among them."""
    mine = _local_offsets(record)
    return replace(
        record,
        dims=dims,
        global_device_ids=tuple(range(len(picked))),
        local_device_ids=tuple(map(picked.index, mine)),
        global_devices=tuple(devices[offset] for offset in picked),
    )


# --- offsets of devices in row-major order ---------------------------------------------------------------------------


def unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the position along every axis of the device at a row-major offset in a mesh of this shape."""
    coordinate: list[int] = []
    for size in reversed(shape):
        offset, index = divmod(offset, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


class DeviceOffsets:
    """The row-major offsets of devices by their ids, which mostly count up by one.

    Args:
        ids: The ids in row-major order, each once.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    @cached_property
    def are_consecutive(self) -> bool:
        """Whether the ids count up by one."""
        return not self._ids or tuple(self._ids) == tuple(range(self._ids[0], self._ids[0] + len(self._ids)))

    @cached_property
    def lowest(self) -> int:
        """The lowest id; there must be one."""
        return min(self._ids)

    @cached_property
    def _by_id(self) -> dict[int, int]:
        return {device_id: offset for offset, device_id in enumerate(self._ids)}

    @cached_property
    def _ascending(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ids in ascending order, and their offsets."""
        ids = np.array(self._ids, dtype=np.int64)
        order = ids.argsort()
        return ids[order], order

    def of(self, device_id: int) -> int | None:
        """Return the offset of a device, None if there is no such id."""
        if not self.are_consecutive:
            return self._by_id.get(operator.index(device_id))
        offset = operator.index(device_id) - self._ids[0] if self._ids else -1
        return offset if 0 <= offset < len(self._ids) else None

    def of_all(self, device_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the offsets of an array of ids, all of which exist, in its shape."""
        if self.are_consecutive:
            return device_ids - self._ids[0]
        ids, offsets = self._ascending
        return offsets[ids.searchsorted(device_ids)]


# --- callers ---------------------------------------------------------------------------------------------------------

# FSDP, PyTorch's DTensors and tensor parallelism need a mesh of PyTorch's own class. These packages accept any mesh at
# first, and fail later, in the middle of a step. So a mesh checks the caller of each method that these packages use.
_PARTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")


def validate_caller(what: str, depth: int = 2) -> None:
    """Check that the caller is not in these parts of PyTorch.

    Args:
        what: The requested name.
        depth: The number of calls between the caller in question and this function.

    Raises:
        MeshTypeError: The caller is in these parts.
    """
    caller = str(sys._getframe(depth).f_globals.get("__name__"))
    if caller.startswith(_PARTS):
        raise MeshTypeError(
            f"{caller} asks for {what} of a mesh of dtckpt, and works with a DeviceMesh of PyTorch only; pass "
            "mesh.to_device_mesh(), or use dtckpt.dtensor, which takes both"
        )
