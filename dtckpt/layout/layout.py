"""`Layout`: the distribution of a tensor over a mesh, and the regions, shards and placements that follow from it."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dtckpt._proto import layout_pb2
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout import text_format
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Partial, Placement, Replicate, Shard, _StridedShard, placement_of
from dtckpt.layout.region import Region
from dtckpt.layout.text_format import Spec

UNSHARDED = "unsharded"
"""Sharding spec of a dim that no axis splits."""

MATCH = "match"
"""Sharding spec that stands for the dim's present one; for `relayout` only."""

_OPEN_SPECS = (MATCH, "any")
"""Sharding specs that leave open how a dim is split. ``any`` occurs in texts and protos only."""


class LayoutType(enum.Enum):
    """Kinds of layouts. The numbers differ from the numbers in `protos`."""

    STATIC = 1
    SINGLE_DEVICE = 2
    PARTED = 3


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Layout:
    """The distribution of a tensor over a mesh: a sharding spec per tensor dim, and pending reductions along axes.

    Immutable. A dim split by the axes ``("tp", "dp")`` is split by ``tp`` first, and then every piece by ``dp``. An
    axis of size k splits n elements into chunks of ``ceil(n / k)`` elements; the last chunks may be short or empty::

        n = 10, ("tp", "dp") of sizes 2, 2     tp    0 1 2 3 4 | 5 6 7 8 9
                                               dp    0 1 2 : 3 4 | 5 6 7 : 8 9

    Args:
        sharding_specs: For every dim an axis, a tuple of axes (major first), `UNSHARDED` or `MATCH`. An axis splits at
            most one dim.
        mesh: The devices.
        partial: Reduction by axis, for axes along which each device holds a contribution to the tensor.

    Raises:
        LayoutError: The specs do not fit the mesh.

    >>> from dtckpt.layout.create_mesh import abstract_mesh
    >>> Layout(["x", UNSHARDED], abstract_mesh({"x": 2, "y": 2})).region(3, (5, 4))
    Region(offset=(3, 0), shape=(2, 4))
    """

    _specs: tuple[Spec, ...]
    _mesh: Mesh
    _partial: tuple[tuple[str, str], ...]
    _type: LayoutType | None
    _repr_svg_: ClassVar[Callable[[Layout], str | None]]
    """Draws it in notebooks; `dtckpt.pictures.notebook` sets it."""

    def __init__(self, sharding_specs: Sequence[Spec], mesh: Mesh, partial: Mapping[str, str] | None = None) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutTypeError(f"layout: got {type(mesh).__name__} as mesh, expected Mesh")
        if isinstance(sharding_specs, str | bytes) or not isinstance(sharding_specs, Iterable):
            raise LayoutTypeError(f"layout: got sharding specs {sharding_specs!r}, expected a sequence of specs")
        specs = tuple(_normal_spec(spec) for spec in sharding_specs)
        if "any" in specs:
            raise LayoutError(f"layout: got sharding spec 'any' in {list(specs)}, expected an axis of {mesh.dim_names}")
        self._set(specs, mesh, tuple((partial or {}).items()), LayoutType.STATIC)

    def _set(self, specs: tuple[Spec, ...], mesh: Mesh, partial: tuple[tuple[str, str], ...], kind: LayoutType) -> None:
        _validate(specs, mesh, partial)
        # In mesh order, so that layouts are equal however the caller listed the axes.
        ordered = tuple(sorted(partial, key=lambda pair: mesh.dim_names.index(pair[0])))
        vars(self).update(_specs=specs, _mesh=mesh, _partial=ordered, _type=kind)

    # --- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def from_record(cls, record: text_format.LayoutRecord) -> Layout:
        """Build a layout from the fields that `dtckpt.layout.text_format` reads and writes."""
        mesh = Mesh.from_record(record.mesh)
        layout = cls.__new__(cls)
        if record.kind in (LayoutType.STATIC.name, LayoutType.PARTED.name):
            specs = tuple(map(_normal_spec, record.specs))
            layout._set(specs, mesh, record.partial, LayoutType[record.kind])
            return layout
        expected = "a single-device mesh" if record.kind == LayoutType.SINGLE_DEVICE.name else "the empty mesh"
        fits = mesh.is_single_device() if record.kind == LayoutType.SINGLE_DEVICE.name else mesh == Mesh.empty()
        if not fits or record.specs or record.partial:
            raise LayoutError(
                f"layout: got type {record.kind} with mesh {mesh!r:.80} and specs {list(record.specs)}, "
                f"expected {expected} and no specs"
            )
        kind = LayoutType.SINGLE_DEVICE if mesh.is_single_device() else None
        vars(layout).update(_specs=(), _mesh=mesh, _partial=(), _type=kind)
        return layout

    @classmethod
    def from_string(cls, layout_str: str) -> Layout:
        """Read the text form, such as ``sharding_specs:x,unsharded, mesh:|x=2|*CPU``."""
        return cls.from_record(text_format.layout_from_text(layout_str))

    @classmethod
    def from_proto(cls, layout_proto: layout_pb2.LayoutProto) -> Layout:
        """Read the proto that `as_proto` writes."""
        return cls.from_record(text_format.layout_from_proto(layout_proto))

    @classmethod
    def from_str(cls, layout_str: bytes) -> Layout:
        """Read the bytes that `serialized_string` writes; bytes without a type are a STATIC layout."""
        return cls.from_record(text_format.layout_from_bytes(layout_str))

    @classmethod
    def from_single_device_mesh(cls, mesh: Mesh) -> Layout:
        """Return the layout of a tensor on the device of a single-device mesh."""
        if not isinstance(mesh, Mesh):
            raise LayoutTypeError(f"layout: got {type(mesh).__name__} as mesh, expected Mesh")
        return cls.from_record(text_format.LayoutRecord(LayoutType.SINGLE_DEVICE.name, mesh=mesh.record))

    @classmethod
    def from_device(cls, device: str) -> Layout:
        """Return the layout of a tensor on one device that is outside any grid."""
        return cls.from_single_device_mesh(Mesh.from_device(device))

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Return the layout of a tensor of ``rank`` dims that every device holds whole."""
        return cls([UNSHARDED] * _valid_rank(rank, 0), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Mesh, batch_dim: Spec, rank: int, axis: int = 0) -> Layout:
        """Return a layout that splits one tensor dim.

        Args:
            mesh: The devices.
            batch_dim: The sharding spec of that dim: a mesh axis, or several.
            rank: Number of tensor dims.
            axis: Which dim; despite the name, which is TensorFlow's, not a mesh axis.
        """
        if not 0 <= axis < _valid_rank(rank, 1):
            raise LayoutError(f"layout: got axis {axis} for rank {rank}, expected a dim from 0 to {rank - 1}")
        return cls([batch_dim if dim == axis else UNSHARDED for dim in range(rank)], mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh, inner_dim: Spec, rank: int) -> Layout:
        """Return a layout that splits the last dim over ``inner_dim``."""
        return cls.batch_sharded(mesh, inner_dim, rank, axis=rank - 1)

    @classmethod
    def from_placements(cls, mesh: Mesh, placements: Sequence[Placement], ndim: int) -> Layout:
        """Return the layout that placements describe.

        Args:
            mesh: The devices.
            placements: One placement per mesh axis, of this library or PyTorch's. Axes that split the same dim split it
                from left to right.
            ndim: Number of tensor dims.

        Raises:
            LayoutTypeError: ``placements`` is no sequence of placements.
            LayoutError: There is not one placement per axis, a dim is out of range, or a ``split_factor`` is no product
                of sizes of axes that split the same dim.
        """
        if not isinstance(placements, Sequence):
            raise LayoutTypeError(f"placements: got {placements!r}, expected a sequence of one per axis")
        if len(placements) != mesh.ndim:
            raise LayoutError(f"placements: got {len(placements)} for axes {mesh.dim_names}, expected one per axis")
        by_dim: list[list[str]] = [[] for _ in range(_valid_rank(ndim, 0))]
        partial: dict[str, str] = {}
        # From right to left: a strided shard follows axes to its right, so those must be in ``by_dim`` already.
        for axis, placement in reversed(list(zip(mesh.dim_names, map(placement_of, placements), strict=True))):
            if isinstance(placement, Partial):
                partial[axis] = placement.reduce_op
            elif isinstance(placement, Shard | _StridedShard):
                if not -ndim <= placement.dim < ndim:
                    raise LayoutError(f"placements: got {placement!r} on axis {axis!r}, expected a dim below {ndim}")
                axes = by_dim[placement.dim]
                factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
                before = list(itertools.accumulate((mesh.dim_size(a) for a in axes), operator.mul, initial=1))
                if factor not in before:
                    raise LayoutError(
                        f"placements: got {placement!r} on axis {axis!r}, expected a split factor among {before} "
                        f"(products of sizes of the axes {axes} that split the dim)"
                    )
                # The factor is the number of pieces that axes to the right make first, so it identifies these axes.
                axes.insert(before.index(factor), axis)
            elif not isinstance(placement, Replicate):
                raise LayoutTypeError(f"placements: got {placement!r} on axis {axis!r}, expected a Placement")
        return cls([tuple(axes) if axes else UNSHARDED for axes in by_dim], mesh, partial)

    # --- text and protos ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> text_format.LayoutRecord:
        """The fields of the layout, for `dtckpt.layout.text_format`."""
        kind = self._type.name if self._type else "UNKNOWN"
        return text_format.LayoutRecord(kind, self._specs, self._partial, self._mesh.record)

    def to_string(self) -> str:
        """Return the text form."""
        self._mesh.to_string()
        return text_format.layout_to_text(self.record)

    def as_proto(self) -> layout_pb2.LayoutProto:
        """Return the layout as a proto, equal byte for byte to TensorFlow's."""
        return text_format.layout_to_proto(self.record)

    def serialized_string(self) -> bytes:
        """Return the bytes of `as_proto`; on one client, equal layouts have equal bytes."""
        return self.as_proto().SerializeToString(deterministic=True)

    def mesh_proto(self) -> layout_pb2.MeshProto:
        """Return the mesh as a proto."""
        return self._mesh.as_proto()

    # --- equality, hash and fields ------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            # PyTorch's own functions compare a tensor's ``layout`` with ``torch.strided``, and components are dense.
            return True if repr(other) == "torch.strided" else NotImplemented
        # Meshes last, as they take longest to compare.
        return (self._specs, self._partial, self._type, self._mesh) == (
            other._specs,
            other._partial,
            other._type,
            other._mesh,
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Kept, since layouts are in the keys of all caches of plans.
        return hash((self._specs, self._partial, self._type, self._mesh))

    def __repr__(self) -> str:
        return f"Layout.from_string({text_format.layout_to_text(self.record)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of_parts, (self.record.kind, self._specs, self._partial, self._mesh)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def sharding_specs(self) -> list[Spec]:
        """Per tensor dim: an axis, a tuple of axes (major first), `UNSHARDED` or `MATCH`."""
        return list(self._specs)

    @property
    def partial(self) -> dict[str, str]:
        """Pending reductions by axis."""
        return dict(self._partial)

    @property
    def has_partial(self) -> bool:
        """Whether reductions are pending."""
        return bool(self._partial)

    @property
    def type(self) -> LayoutType | None:
        """The kind of layout; None for the empty one."""
        return self._type

    @property
    def rank(self) -> int:
        return len(self._specs)

    def is_single_device(self) -> bool:
        return self._type is LayoutType.SINGLE_DEVICE

    def is_fully_replicated(self) -> bool:
        """Tell whether no axis splits a dim, not even an axis of size 1, and no reduction is pending."""
        return not self.is_single_device() and not self._partial and all(spec == UNSHARDED for spec in self._specs)

    def is_batch_parallel(self) -> bool:
        """Tell whether axes split the first dim and no other."""
        first, rest = self._specs[:1], self._specs[1:]
        return first not in ((), (UNSHARDED,), *zip(_OPEN_SPECS)) and all(spec == UNSHARDED for spec in rest)

    def delete(self, dims: int | Sequence[int]) -> Layout:
        """Return the layout of the tensor without some dims; numbers that are no dims are ignored, as in TensorFlow.

        Raises:
            LayoutError: The layout is not STATIC.
        """
        if self._type is not LayoutType.STATIC:
            kind = self._type.name if self._type else "empty"
            raise LayoutError(f"{self._label}: cannot delete dims; got a layout of type {kind}, expected STATIC")
        deleted = {dims} if isinstance(dims, int) else set(dims)
        specs = [spec for dim, spec in enumerate(self._specs) if dim not in deleted]
        return Layout(specs, self._mesh, self.partial)

    def to_parted(self) -> Layout:
        """Return the same layout, marked as PARTED."""
        return Layout.from_record(text_format.LayoutRecord("PARTED", self._specs, self._partial, self._mesh.record))

    # --- placements ---------------------------------------------------------------------------------------------------

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The same layout as PyTorch's placements, one per mesh axis."""
        by_axis: dict[str, Placement] = {axis: Partial(op) for axis, op in self._partial}
        order = {axis: position for position, axis in enumerate(self._mesh.mesh_dim_names)}
        for dim, axes in enumerate(self.split_axes):
            for position, axis in enumerate(axes):
                # Axes to the right in the mesh that split the dim before this axis does: PyTorch splits left to right.
                before = (self._mesh.dim_size(a) for a in axes[:position] if order[a] > order[axis])
                factor = math.prod(before)
                by_axis[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        return tuple(by_axis.get(axis, Replicate()) for axis in self._mesh.mesh_dim_names)

    # --- shards -------------------------------------------------------------------------------------------------------

    def _axes_of(self, spec: Spec) -> tuple[str, ...]:
        if spec in _OPEN_SPECS:
            raise LayoutError(
                f"{self._label} has no shards: got {spec!r}, expected an axis of the mesh {self._mesh.dim_names}, "
                "a tuple of axes or 'unsharded'"
            )
        return () if spec == UNSHARDED else (spec,) if isinstance(spec, str) else spec

    @cached_property
    def split_axes(self) -> tuple[tuple[str, ...], ...]:
        """Axes that split every dim, major first."""
        if not self._mesh.device_ids:
            raise LayoutError(f"{self._label} has no shards: got a mesh without a grid, expected a mesh with axes")
        return tuple(map(self._axes_of, self._specs))

    @cached_property
    def _splits(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the axes that split every dim, major first."""
        return tuple(tuple(map(self._mesh.dim_size, axes)) for axes in self.split_axes)

    @cached_property
    def shard_grid(self) -> tuple[int, ...]:
        """Number of shards along every dim."""
        return tuple(map(math.prod, self._splits))

    def num_shards(self, idx: int) -> int:
        """Return the number of shards along a dim."""
        if not -self.rank <= idx < self.rank:
            raise LayoutError(f"{self._label}: got dim {idx}, expected one below the rank {self.rank}")
        return math.prod(self._split_of(idx))

    def _split_of(self, dim: int) -> tuple[int, ...]:
        return tuple(map(self._mesh.dim_size, self._axes_of(self._specs[dim])))

    def shards(self, dim: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return ``(start, stop)`` of every shard along a dim of this global size, by shard index."""
        # Raises for a dim that the layout lacks.
        self.num_shards(dim)
        return _nested_chunks(_valid_size(size), self._split_of(dim))

    @cached_property
    def _shard_indices(self) -> npt.NDArray[np.int64]:
        """Shard index of every device (row-major) along every dim."""
        grid = np.indices(self._mesh.shape, dtype=np.int64).reshape(self._mesh.ndim, self._mesh.size())
        indices = np.zeros((self._mesh.size(), self.rank), dtype=np.int64)
        for dim, (axes, sizes) in enumerate(zip(self.split_axes, self._splits, strict=True)):
            for axis, size in zip(axes, sizes, strict=True):
                # A number whose digits are the coordinates along the axes that split the dim, the major one first:
                #     axes of sizes 2, 3    coordinates (1, 2)    shard 1 * 3 + 2 = 5
                indices[:, dim] = indices[:, dim] * size + grid[self._mesh.axis_index(axis)]
        return indices

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return the shard index along every dim of every device, in row-major order."""
        return list(map(tuple, self._shard_indices.tolist()))

    def shard_index(self, device_id: int) -> tuple[int, ...]:
        """Return the shard index along every dim of a device."""
        position = dict(zip(self._mesh.mesh_dim_names, self._mesh.coordinate(device_id), strict=True))
        return tuple(_combine([position[axis] for axis in axes], sizes) for axes, sizes in self._axes_and_splits)

    @cached_property
    def _axes_and_splits(self) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return tuple(zip(self.split_axes, self._splits, strict=True))

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the row-major position of a shard index in the grid of shards."""
        grid = self.shard_grid
        if len(offset_tuple) != self.rank or not all(0 <= i < n for i, n in zip(offset_tuple, grid, strict=True)):
            raise LayoutError(f"{self._label}: got shard index {tuple(offset_tuple)}, expected one below {grid}")
        return _combine(offset_tuple, grid)

    def devices_by_shard(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the devices that hold every shard, ascending, by shard index in row-major order."""
        holders = self.devices_by_part().reshape(math.prod(self.shard_grid), -1).tolist()
        return dict(zip(itertools.product(*map(range, self.shard_grid)), map(tuple, holders), strict=True))

    def devices_by_part(self, axes: Sequence[str] = ()) -> npt.NDArray[np.int64]:
        """Return device ids by shard index along every tensor dim, then by position along every one of ``axes``.

        The array has one more dim at the end, for the devices that agree in all of these, ascending.

        Args:
            axes: Names of mesh axes that split no dim.
        """
        front = [self._mesh.axis_index(axis) for axis in (*itertools.chain(*self.split_axes), *axes)]
        rest = [axis for axis in range(self._mesh.ndim) if axis not in front]
        # With the axes of each dim side by side, major first, a reshape merges them into one shard index. The other
        # axes stay in mesh order, so replicas ascend, if ids do.
        grid = self._mesh.global_device_ids().transpose(front + rest)
        parts = grid.reshape(*self.shard_grid, *map(self._mesh.dim_size, axes), -1)
        return parts if self._mesh.offsets.are_consecutive else np.sort(parts, axis=-1)

    def shards_meeting(self, dim: int, size: int, start: int, stop: int) -> range:
        """Return the indices of the shards along a dim that overlap ``range(start, stop)``.

        The range of indices includes empty shards between them.

        Args:
            dim: The dim.
            size: The tensor's global size along it.
            start: First element.
            stop: First element after the last.
        """
        splits = self._splits[dim]
        # An empty range overlaps nothing, though it has a position: do not pass it to `_chunk_at`.
        if start >= stop:
            return range(0)
        return range(_chunk_at(size, splits, start), _chunk_at(size, splits, stop - 1) + 1)

    def shard_bounds(self, dim: int, size: int, index: int) -> tuple[int, int]:
        """Return start and stop of the shard at an index along a dim of this global size."""
        splits = self._splits[dim]
        return _chunk_of(size, splits, _split_index(index, splits))

    # --- shapes -------------------------------------------------------------------------------------------------------

    def region(self, device_id: int, global_shape: Sequence[int]) -> Region:
        """Return the region, possibly empty, that a device holds of a tensor of this global shape."""
        sizes = self._valid_shape(global_shape)
        position = dict(zip(self._mesh.mesh_dim_names, self._mesh.coordinate(device_id), strict=True))
        bounds = [
            _chunk_of(size, splits, [position[axis] for axis in axes])
            for size, (axes, splits) in zip(sizes, self._axes_and_splits, strict=True)
        ]
        return Region.unchecked(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    def global_shape_from_local_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape of a tensor whose shards all have this shape; a size of -1 stays unknown."""
        if self.is_single_device():
            return tuple(local_shape)
        sizes = self._valid_shape(local_shape, unknown=True)
        return tuple(size if size < 0 else size * n for size, n in zip(sizes, self.shard_grid, strict=True))

    def local_shape_from_global_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return ``size // shards`` for every dim, the shape of every shard if the tensor splits evenly.

        A size of -1 stays unknown. `region` gives the shape of every device's part, however the tensor splits.
        """
        if self.is_single_device():
            return ()
        sizes = self._valid_shape(global_shape, unknown=True)
        return tuple(size if size < 0 else size // n for size, n in zip(sizes, self.shard_grid, strict=True))

    def _valid_shape(self, shape: Sequence[int], unknown: bool = False) -> tuple[int, ...]:
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            raise LayoutTypeError(f"{self._label}: got shape {shape!r}, expected a sequence of integers") from None
        if len(sizes) != self.rank or min(sizes, default=0) < -unknown:
            raise LayoutError(f"{self._label}: got shape {sizes}, expected {self.rank} sizes that are zero or greater")
        return sizes

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"layout {','.join(map(text_format.spec_to_text, self._specs))!r} on {self._mesh.axis_sizes}"


def layout_of_parts(kind: str, specs: tuple[Spec, ...], partial: tuple[tuple[str, str], ...], mesh: Mesh) -> Layout:
    """Rebuild a layout from the values of `Layout.__reduce__`; layouts in one pickle share their mesh again."""
    layout = Layout.from_record(text_format.LayoutRecord(kind, specs, partial, mesh.record))
    vars(layout)["_mesh"] = mesh
    return layout


# --- validation ------------------------------------------------------------------------------------------------------


def _normal_spec(spec: object) -> Spec:
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Iterable) and not isinstance(spec, bytes):
        axes = tuple(spec)
        if axes and all(isinstance(axis, str) for axis in axes):
            # One spelling for one axis, so that equal layouts compare as equal.
            return axes[0] if len(axes) == 1 else axes
        raise LayoutError(f"sharding spec: got {spec!r}, expected one or more axis names")
    raise LayoutTypeError(f"sharding spec: got {spec!r}, expected an axis name, a tuple of them or 'unsharded'")


def _validate(specs: tuple[Spec, ...], mesh: Mesh, partial: tuple[tuple[str, str], ...]) -> None:
    if mesh.is_single_device() or not mesh.device_ids:
        raise LayoutError(f"layout: got mesh {mesh!r}, expected one with a grid of devices")
    used = [axis for spec in specs if spec != UNSHARDED for axis in ([spec] if isinstance(spec, str) else spec)]
    used += [axis for axis, _ in partial]
    allowed = {*mesh.mesh_dim_names, *(spec for spec in specs if spec in _OPEN_SPECS)}
    shown = ",".join(map(text_format.spec_to_text, specs)) + "".join(f" {axis}={op}" for axis, op in partial)
    for axis in used:
        if axis not in allowed:
            raise LayoutError(f"layout {shown!r}: got {axis!r}, expected an axis of {mesh.dim_names} or 'unsharded'")
    # A device has one coordinate along an axis, which can choose a piece of one dim, or a term, but not both.
    if len(set(used)) != len(used):
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        raise LayoutError(f"layout {shown!r}: got {', '.join(twice)} more than once, expected every axis at most once")
    for _, op in partial:
        Partial(op)  # which validates it


def _valid_rank(rank: int, at_least: int) -> int:
    if rank < at_least:
        raise LayoutError(f"layout: got rank {rank}, expected at least {at_least}")
    return rank


def _valid_size(size: int) -> int:
    if size < 0:
        raise LayoutError(f"layout: got size {size}, expected zero or greater")
    return size


# --- chunks ----------------------------------------------------------------------------------------------------------


def _combine(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the row-major position of indices in a grid."""
    position = 0
    for index, size in zip(indices, sizes, strict=True):
        position = position * size + index
    return position


def _chunk(start: int, stop: int, count: int, index: int) -> tuple[int, int]:
    """Return start and stop of the chunk at an index, if ``range(start, stop)`` is split into ``count`` chunks."""
    # The rule of ``torch.chunk``. The minima keep chunks beyond the last element empty, at its end.
    chunk = -(-(stop - start) // count)
    return min(stop, start + chunk * index), min(stop, start + chunk * (index + 1))


def _chunk_of(size: int, counts: Sequence[int], indices: Sequence[int]) -> tuple[int, int]:
    """Return start and stop of a chunk of chunks.

    Splits ``range(size)`` into ``counts[0]`` chunks, the chunk at ``indices[0]`` into ``counts[1]`` chunks, and so on.
    """
    start, stop = 0, size
    for count, index in zip(counts, indices, strict=True):
        start, stop = _chunk(start, stop, count, index)
    return start, stop


def _chunk_at(size: int, counts: Sequence[int], position: int) -> int:
    """Return the row-major index of the chunk of chunks, as in `_chunk_of`, that holds a position."""
    start, stop, index = 0, size, 0
    for count in counts:
        # The chunk holds the position, so it is not empty, and the divisor is not 0.
        inner = (position - start) // -(-(stop - start) // count)
        start, stop = _chunk(start, stop, count, inner)
        index = index * count + inner
    return index


def _split_index(index: int, sizes: Sequence[int]) -> list[int]:
    """Return the indices in a grid at a row-major position; the inverse of `_combine`."""
    indices: list[int] = []
    for size in reversed(sizes):
        index, inner = divmod(index, size)
        indices.append(inner)
    return indices[::-1]


@lru_cache(maxsize=4096)
def _nested_chunks(size: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of all chunks of `_chunk_of`, in row-major order of their indices."""
    pieces = [(0, size)]
    for count in counts:
        pieces = [_chunk(start, stop, count, index) for start, stop in pieces for index in range(count)]
    return tuple(pieces)
