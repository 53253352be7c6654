"""Find which tensors of a checkpoint a map takes, and which tensors it makes of them; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtckpt.checkpoint.mapping.map_places import Place, common_box, numel_of
from dtckpt.checkpoint.mapping.map_rules import MapRule, NamePattern, TensorMap, View
from dtckpt.errors import (
    ConfigError,
    RegionNotFoundError,
    ShapeMismatchError,
    TensorNameError,
    TensorNotFoundError,
    capped,
)

Shape = tuple[int, ...]
MAX_TENSORS = 1 << 20
"""Bound on the tensors that one rule makes of one set of tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedTensor:
    """A tensor that a map makes.

    Args:
        name: Its name.
        sources: The tensors that it is made of, each with its place; None: the tensor has another name only.
        place: Its place among the axes of the rule.
    """

    name: str
    sources: Mapping[str, Place | None]
    place: Place | None = None


@dataclass(slots=True, eq=False)
class MapMatch:
    """The tensors that a map makes of a checkpoint.

    Args:
        tensors: By name.
        taken: The names of the tensors that they are made of.
        left: Of some of these, how many elements no tensor takes.
    """

    tensors: dict[str, MappedTensor] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)

    def add(self, tensor: MappedTensor) -> None:
        """Add a tensor. Raises: `TensorNameError`."""
        if tensor.name in self.tensors:
            raise TensorNameError(f"two rules of the map make a tensor {tensor.name[:200]!r}")
        self.tensors[tensor.name] = tensor
        self.taken |= tensor.sources.keys()


def match_map(rules: TensorMap, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> MapMatch:
    """Match a map with the tensors of a checkpoint.

    Args:
        rules: The map.
        shapes: The shapes of the tensors, by name.
        sizes: Sizes of axes from the checkpoint or its configuration; sizes that the map gives take precedence.

    Raises:
        TensorNotFoundError: A rule lacks tensors.
        ShapeMismatchError: A tensor has another shape than its view.
        ConfigError: The size of an axis is not known, or tensors of a side overlap.
        RegionNotFoundError: Elements of a new tensor are in no tensor of the checkpoint.
        TensorNameError: Two tensors would have one name.
    """
    match = MapMatch()
    for rule in rules.rules:
        found = _found(rule, [name for name in shapes if name not in match.taken])
        if not found and not rule.optional:
            raise TensorNotFoundError(
                f"the map has a rule for {_texts(rule.source)}, and the checkpoint has no such tensor; it has "
                f"{capped(map(repr, shapes))}"
            )
        for stars, members in found.items():
            if None in rule.source.values():
                _rename(rule, stars, members, match)
            else:
                _Group(rule, stars, members, shapes, sizes=rules.sizes, found=sizes).add_to(match)
    if not match.tensors:
        raise TensorNotFoundError(f"no rule of the map fits the checkpoint; it has {capped(map(repr, shapes))}")
    for name in match.tensors:
        if name in shapes and name not in match.taken:
            raise TensorNameError(f"the map makes a tensor {name[:200]!r}, and the checkpoint has another one")
    return match


_Members = dict[NamePattern, dict[tuple[int, ...], str]]
"""The names that match the patterns of a side, by the indices in them."""


def _found(rule: MapRule, names: Sequence[str]) -> dict[tuple[str, ...], _Members]:
    """Return, by the texts of ``*``, the tensors that match the patterns of a rule."""
    found: dict[tuple[str, ...], _Members] = {}
    taken: set[str] = set()
    for pattern in rule.source:
        compiled = pattern.compiled()
        for name in names:
            match = compiled.fullmatch(name)
            groups = None if match is None or name in taken else pattern.groups(match)
            if groups is not None:
                taken.add(name)
                stars, indices = groups
                found.setdefault(stars, {}).setdefault(pattern, {})[tuple(indices.values())] = name
    return found


def _rename(rule: MapRule, stars: tuple[str, ...], members: _Members, match: MapMatch) -> None:
    (new,) = rule.target
    for pattern, names in members.items():
        for indices, name in names.items():
            by_axis = dict(zip(dict.fromkeys(pattern.axes), indices, strict=True))
            match.add(MappedTensor(new.name(stars, by_axis), {name: None}))


class _Group:
    """The tensors of a rule that have the same texts for ``*``.

    Args:
        rule: The rule.
        stars: The texts.
        members: The names of the tensors.
        shapes: The shapes of the checkpoint's tensors.
        sizes: The sizes of axes that the map has.
        found: Sizes that count if shapes do not tell them.
    """

    def __init__(
        self,
        rule: MapRule,
        stars: tuple[str, ...],
        members: _Members,
        shapes: Mapping[str, Shape],
        *,
        sizes: Mapping[str, int],
        found: Mapping[str, int],
    ) -> None:
        self._rule = rule
        self._stars = stars
        self._members = members
        self._shapes = shapes
        self._bounds = {**found, **sizes}
        if lost := [pattern.text for pattern in rule.source if pattern not in members]:
            some = next(iter(next(iter(members.values())).values()))
            raise TensorNotFoundError(
                f"a rule of the map takes {some[:200]!r}, and lacks a tensor that is named {capped(map(repr, lost))}"
            )
        self._sizes = {axis: size for axis, size in sizes.items() if axis in rule.axes}
        self._count_indices()
        self._solve(found)

    def add_to(self, match: MapMatch) -> None:
        """Add the tensors of the other side."""
        places = {
            pattern: {indices: self._place(pattern, self._rule.source[pattern], indices) for indices in names}
            for pattern, names in self._members.items()
        }
        for pattern, names in self._members.items():
            for indices, name in names.items():
                if (shape := places[pattern][indices].shape) != self._shapes[name]:
                    raise self._mismatch(name, shape)
        self._validate_apart(self._rule.source)
        self._validate_apart(self._rule.target)
        used = dict.fromkeys((name for names in self._members.values() for name in names.values()), 0)
        for target, view in self._rule.target.items():
            axes = tuple(dict.fromkeys(target.axes))
            if math.prod(self._sizes[axis] for axis in axes) > MAX_TENSORS:
                raise ConfigError(f"a rule of the map makes more than {MAX_TENSORS} tensors {target.text[:200]!r}")
            for indices in itertools.product(*(range(self._sizes[axis]) for axis in axes)):
                place = self._place(target, view, indices)
                name = target.name(self._stars, dict(zip(axes, indices, strict=True)))
                sources: dict[str, Place | None] = {}
                lost = numel_of(place.box)
                for source, own in self._near(place, places):
                    box = common_box(place.box, own.box)
                    if box is not None or not lost + len(sources):  # a tensor without elements is made of any
                        sources[source] = own
                    if box is not None:
                        used[source] += numel_of(box)
                        lost -= numel_of(box)
                if lost:
                    raise RegionNotFoundError(
                        f"the map makes a tensor {name[:200]!r} of shape {place.shape}, and {lost} of its elements are "
                        f"in no tensor that is named {_texts(self._rule.source)}"
                    )
                match.add(MappedTensor(name, sources, place))
        match.left |= {
            name: math.prod(self._shapes[name]) - count
            for name, count in used.items()
            if count < math.prod(self._shapes[name])
        }
        match.taken |= used.keys()

    def _near(
        self, place: Place, places: Mapping[NamePattern, Mapping[tuple[int, ...], Place]]
    ) -> Iterator[tuple[str, Place]]:
        """Yield the tensors whose indices are in the box of another."""
        for pattern, names in self._members.items():
            axes = dict.fromkeys(pattern.axes)
            for indices in itertools.product(*(range(*place.box[axis]) for axis in axes)):
                yield names[indices], places[pattern][indices]

    # --- sizes of axes ------------------------------------------------------------------------------------------

    def _count_indices(self) -> None:
        """Learn sizes from the indices in names, none of which may be missing."""
        for pattern, names in self._members.items():
            axes = tuple(dict.fromkeys(pattern.axes))
            counts = [max(each) + 1 for each in zip(*names, strict=True)]
            if len(names) != math.prod(counts):
                lost = next(each for each in itertools.product(*map(range, counts)) if each not in names)
                name = pattern.name(self._stars, dict(zip(axes, lost, strict=True)))
                raise TensorNotFoundError(f"the map needs a tensor {name[:200]!r}, which the checkpoint lacks")
            for axis, count in zip(axes, counts, strict=True):
                if self._sizes.setdefault(axis, count) != count:
                    raise ShapeMismatchError(
                        f"the names {pattern.text[:200]!r} have {count} {axis}, expected {self._sizes[axis]}"
                    )

    def _solve(self, found: Mapping[str, int]) -> None:
        """Learn sizes from the shapes, then from sizes learnt so, and then from ranges whose ends are numbers."""
        self._solve_by_shapes()
        self._sizes = {axis: size for axis, size in found.items() if axis in self._rule.axes} | self._sizes
        self._solve_by_shapes()
        for side in (self._rule.source, self._rule.target):
            for axis in self._rule.axes - self._sizes.keys():
                ranges = [
                    part.bounds(self._bounds)
                    for view in side.values()
                    for dim in view or ()
                    for part in dim
                    if part.axis == axis
                ]
                if ranges and all(start[0] == stop[0] == 0 for start, stop in ranges):
                    self._sizes[axis] = max(stop[1] for _, stop in ranges)
            self._solve_by_shapes()
        if unknown := sorted(self._rule.axes - self._sizes.keys()):
            raise ConfigError(
                f"the size of axis {unknown[0]!r} for {_texts(self._rule.source)} is not known from shapes; pass it, "
                f"as --map-size {unknown[0]}=N"
            )

    def _solve_by_shapes(self) -> None:
        is_new = True
        while is_new:
            is_new = False
            for pattern, names in self._members.items():
                name = next(iter(names.values()))
                view = self._rule.source[pattern] or ()
                if len(view) != len(self._shapes[name]):
                    raise ShapeMismatchError(
                        f"tensor {name[:200]!r} has shape {self._shapes[name]}, expected {len(view)} dims by the map"
                    )
                for dim, size in zip(view, self._shapes[name], strict=True):
                    known, unknown = 1, []
                    for part in dim:
                        (first, start), (last, stop) = part.bounds(self._bounds)
                        if part.axis in self._sizes or first == last:
                            known *= (last - first) * self._sizes.get(part.axis, 0) + stop - start
                        else:
                            unknown.append((part.axis, stop - start))
                    if len(unknown) == 1 and known > 0 and size % known == 0:
                        axis, offset = unknown[0]
                        self._sizes[axis] = size // known - offset
                        is_new = True

    # --- places -------------------------------------------------------------------------------------------------

    def _place(self, pattern: NamePattern, view: View | None, indices: Sequence[int]) -> Place:
        axes = dict.fromkeys(pattern.axes)
        box = {axis: (index, index + 1) for axis, index in zip(axes, indices, strict=True)}
        for part in (part for dim in view or () for part in dim):
            size = self._sizes[part.axis]
            start, stop = (factor * size + offset for factor, offset in part.bounds(self._bounds))
            if not 0 <= start <= stop <= size:
                raise ShapeMismatchError(
                    f"{pattern.text[:200]!r} takes indices {start} to {stop} of axis {part.axis!r}, which has {size}"
                )
            box[part.axis] = start, stop
        return Place(tuple(tuple(part.axis for part in dim) for dim in view or ()), box)

    def _validate_apart(self, side: Mapping[NamePattern, View | None]) -> None:
        """Check that the patterns of a side share no element."""
        whole = []
        for pattern, view in side.items():
            axes = dict.fromkeys(pattern.axes)
            place = self._place(pattern, view, [0] * len(axes))
            whole.append({**place.box, **{axis: (0, self._sizes[axis]) for axis in axes}})
        for one, other in itertools.combinations(whole, 2):
            if common_box(one, other) is not None:
                raise ConfigError(f"the tensors {_texts(side)} of a rule of the map share elements")

    def _mismatch(self, name: str, shape: Shape) -> ShapeMismatchError:
        sizes = ", ".join(f"{axis}={size}" for axis, size in sorted(self._sizes.items()))
        return ShapeMismatchError(
            f"tensor {name[:200]!r} has shape {self._shapes[name]}, expected {shape} by the map with {sizes}"
        )


def _texts(patterns: Mapping[NamePattern, View | None]) -> str:
    return capped(repr(pattern.text) for pattern in patterns)
