"""`TensorMap`: rules between the tensors of two models, such as one fused tensor and the parts of it; pure.

A rule has two sides. On each side are patterns of names, each with a view: the axes of the tensor's dims in the rule's
own words. The sides have the same axes, so a rule can be read from either side::

    {"from": {"decoder.layers.self_attention.linear_qkv.weight": "layers (groups each dim) hidden"},
     "to": {"model.layers.{layers}.self_attn.q_proj.weight": "(groups each[:-2] dim) hidden",
            "model.layers.{layers}.self_attn.k_proj.weight": "(groups each[-2:-1] dim) hidden",
            "model.layers.{layers}.self_attn.v_proj.weight": "(groups each[-1:] dim) hidden"}}

An axis in the name is a number there: the tensors of one side are stacked on the other. Axes in parentheses are joined
to one dim. A range of an axis is a slice. Another order of the axes is a transpose. ``*`` in a name is any text, the
same on both sides. A rule without views gives a tensor another name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtckpt.errors import ConfigError, capped

MAX_FILE_NBYTES = 1 << 20
_AXIS = r"[A-Za-z_][A-Za-z0-9_]*"
_BOUND = rf"-?[0-9]{{1,9}}|{_AXIS}"
_TOKEN = re.compile(rf"\s*(?:(?P<joint>[()])|(?P<axis>{_AXIS})(?:\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\])?)")
_NAME_PART = re.compile(rf"\*|\{{({_AXIS})\}}")


@dataclass(frozen=True, slots=True)
class AxisRange:
    """A range of an axis in a view.

    Args:
        axis: The axis.
        start: The first index; negative: from the end; a text: a size of this name. None: the first of all.
        stop: The index behind the last, likewise.
    """

    axis: str
    start: int | str | None = None
    stop: int | str | None = None

    def bounds(self, sizes: Mapping[str, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return start and stop, each as a factor of the axis' size and a number to be added.

        Raises:
            ConfigError: The size that a bound names is not known.
        """
        return _bound(self.start, (0, 0), sizes), _bound(self.stop, (1, 0), sizes)


def _bound(bound: int | str | None, default: tuple[int, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    if bound is None:
        return default
    if isinstance(bound, str):
        if bound not in sizes:
            raise ConfigError(f"size {bound!r} of the map is not known; pass it, as --map-size {bound}=N")
        bound = sizes[bound]
    return (1 if bound < 0 else 0), bound


View = tuple[tuple[AxisRange, ...], ...]
"""The axes of each dim of a tensor."""


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of the names of tensors.

    Args:
        text: The pattern.
    """

    text: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in it, whose indices are numbers in the names."""
        return tuple(match[1] for match in _NAME_PART.finditer(self.text) if match[1])

    @property
    def num_stars(self) -> int:
        """How many parts of it are any text."""
        return sum(match[0] == "*" for match in _NAME_PART.finditer(self.text))

    def compiled(self) -> re.Pattern[str]:
        """Return it as a regular expression; its groups are the texts of ``*`` and the indices, in their order."""
        parts, end = [], 0
        for match in _NAME_PART.finditer(self.text):
            parts += [re.escape(self.text[end : match.start()]), "(.*)" if match[0] == "*" else "(0|[1-9][0-9]{0,8})"]
            end = match.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]), re.DOTALL)

    def groups(self, match: re.Match[str]) -> tuple[tuple[str, ...], dict[str, int]] | None:
        """Return the texts of ``*``, and the index of each axis, of a name; None if an axis has two."""
        stars: list[str] = []
        indices: dict[str, int] = {}
        for part, text in zip(_NAME_PART.finditer(self.text), match.groups(), strict=True):
            if not part[1]:
                stars.append(text)
            elif indices.setdefault(part[1], int(text)) != int(text):
                return None
        return tuple(stars), indices

    def name(self, stars: Sequence[str], indices: Mapping[str, int]) -> str:
        """Return the name with some texts and indices."""
        texts = iter(stars)
        return _NAME_PART.sub(lambda match: str(indices[match[1]]) if match[1] else next(texts), self.text)


Side = Mapping[NamePattern, View | None]
"""The tensors of one side of a rule: their names, each with its view; None: as it is."""


@dataclass(frozen=True, slots=True)
class MapRule:
    """A rule between some tensors of two models.

    Args:
        source: The side that is read.
        target: The other side.
        optional: Whether a checkpoint may lack these tensors.
    """

    source: Side
    target: Side
    optional: bool = False

    @property
    def axes(self) -> frozenset[str]:
        """The axes of the rule."""
        return frozenset(axis for pattern, view in self.source.items() for axis in _axes(pattern, view))

    def inverse(self) -> MapRule:
        """Return the rule from the other side."""
        return replace(self, source=self.target, target=self.source)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Rules that give the tensors of a checkpoint the names and shapes of another model.

    `dtckpt.open_checkpoint`, `dtckpt.convert` and `dtckpt.RestoreOptions` take one (docs/convert.md).

    Args:
        rules: The rules. The first rule that matches a tensor applies to it. Other tensors stay as they are.
        sizes: Sizes of axes that shapes alone do not tell.
    """

    rules: tuple[MapRule, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, source: str | os.PathLike[str], sizes: Mapping[str, int] | None = None) -> TensorMap:
        """Return a map that dtckpt knows by name, or one in a JSON file.

        Args:
            source: ``megatron-llama``, ``megatron-gpt2`` or ``megatron-mixtral``; or the path of a file.
            sizes: Sizes of axes, in place of the file's.

        Raises:
            ConfigError: There is no such file, or it is no map.
        """
        from dtckpt.checkpoint.mapping.shipped_maps import SHIPPED

        if str(source) in SHIPPED:
            return cls.parse(SHIPPED[str(source)], str(source)).with_sizes(sizes or {})
        try:
            with Path(source).open("rb") as file:
                data = file.read(MAX_FILE_NBYTES + 1)
            content = json.loads(data)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"map {str(source)!r} cannot be read: {error}; expected a JSON file, or one of {', '.join(SHIPPED)}"
            ) from error
        return cls.parse(content, str(source)).with_sizes(sizes or {})

    @classmethod
    def parse(cls, content: Any, where: str = "the map") -> TensorMap:
        """Return the map of a JSON document: ``{"rules": [{"from": .., "to": .., "optional": false}], "sizes": {}}``.

        Raises:
            ConfigError: It is no map.
        """
        try:
            if not isinstance(content, Mapping) or not isinstance(content["rules"], Sequence):
                raise TypeError("it has no list of rules")
            if unknown := content.keys() - {"rules", "sizes"}:
                raise ValueError(f"it has the unknown key {min(map(str, unknown))!r}")
            rules = tuple(_rule(each) for each in content["rules"])
            return cls(rules).with_sizes(content.get("sizes", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where} is no map of tensors: {error}") from error

    @property
    def axes(self) -> frozenset[str]:
        """The names that sizes may have: axes, and bounds of ranges."""
        bounds = (
            bound
            for rule in self.rules
            for side in (rule.source, rule.target)
            for view in side.values()
            for dim in view or ()
            for part in dim
            for bound in (part.start, part.stop)
        )
        return frozenset(each for each in bounds if isinstance(each, str)).union(*(rule.axes for rule in self.rules))

    def with_sizes(self, sizes: Mapping[str, int]) -> TensorMap:
        """Return the map with sizes of some axes.

        Raises:
            ConfigError: A size is none, or the map has no such axis.
        """
        for axis, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ConfigError(f"size {axis!r} of a map must be a positive whole number; got {size!r}")
            if axis not in self.axes:
                raise ConfigError(f"the map has no axis {axis!r}; it has {capped(sorted(self.axes))}")
        return replace(self, sizes={**self.sizes, **sizes})

    def inverse(self) -> TensorMap:
        """Return the inverse map, from the other model to this model."""
        return replace(self, rules=tuple(rule.inverse() for rule in self.rules))


def _rule(content: Any) -> MapRule:
    if not isinstance(content, Mapping) or not {"from", "to"} <= content.keys():
        raise TypeError(f"a rule lacks from or to: {str(content)[:200]}")
    if unknown := content.keys() - {"from", "to", "optional"}:
        raise ValueError(f"a rule has the unknown key {min(map(str, unknown))!r}")
    if type(content.get("optional", False)) is not bool:
        raise TypeError(f"optional is neither true nor false: {str(content)[:200]}")
    rule = MapRule(_side(content["from"]), _side(content["to"]), content.get("optional", False))
    patterns = [*rule.source, *rule.target]
    views = [*rule.source.values(), *rule.target.values()]
    if len({pattern.num_stars for pattern in patterns}) > 1:
        raise ValueError(f"names of a rule have different numbers of *: {_texts(patterns)}")
    if None in views and (any(views) or len(patterns) != 2):
        raise ValueError(f"a rule without views gives one tensor another name; got {_texts(patterns)}")
    axes = {frozenset(_axes(pattern, view)) for pattern, view in zip(patterns, views, strict=True)}
    if len(axes) > 1:
        raise ValueError(f"the tensors of a rule have different axes: {_texts(patterns)}")
    for pattern, view in zip(patterns, views, strict=True):
        listed = [part.axis for dim in view or () for part in dim]
        if len(set(listed)) != len(listed) or not set(listed).isdisjoint(pattern.axes):
            raise ValueError(f"an axis occurs twice for {pattern.text!r}")
    return rule


def _texts(patterns: Sequence[NamePattern]) -> str:
    return capped(repr(pattern.text) for pattern in patterns)


def _side(content: Any) -> Side:
    if isinstance(content, str) and content:
        return {NamePattern(content): None}
    if not isinstance(content, Mapping) or not content:
        raise TypeError(f"a side of a rule is neither a name nor names with views: {str(content)[:200]}")
    return {NamePattern(name): parse_view(view) for name, view in content.items()}


def _axes(pattern: NamePattern, view: View | None) -> list[str]:
    return [*pattern.axes, *(part.axis for dim in view or () for part in dim)]


def parse_view(text: Any) -> View:
    """Return a view, as ``(heads dim) hidden[:-2]``.

    Raises:
        ValueError: The text is no view.
    """
    if not isinstance(text, str):
        raise ValueError(f"view {text!r} is no text")
    dims: list[tuple[AxisRange, ...]] = []
    joined: list[AxisRange] | None = None
    end = 0
    while end < len(text.rstrip()):
        match = _TOKEN.match(text, end)
        joint = match["joint"] if match else None
        if match is None or (joint is not None and (joint == "(") != (joined is None)):
            raise ValueError(f"view {text[:200]!r} cannot be read from position {end}; expected as (heads dim) in[:-2]")
        end = match.end()
        if joint == "(":
            joined = []
        elif joint:
            dims.append(tuple(joined or ()))
            joined = None
        else:
            part = _axis_range(match)
            if joined is None:
                dims.append((part,))
            else:
                joined.append(part)
    if joined is not None:
        raise ValueError(f"view {text[:200]!r} lacks )")
    return tuple(dims)


def _axis_range(match: re.Match[str]) -> AxisRange:
    def bound(text: str | None) -> int | str | None:
        return int(text) if text and text.lstrip("-").isdecimal() else text

    part = AxisRange(match["axis"], bound(match["start"]), bound(match["stop"]))
    # Such a range would be empty for some sizes, and has no use.
    if isinstance(part.start, int) and part.start < 0 and isinstance(part.stop, int) and part.stop >= 0:
        raise ValueError(f"range {match[0].strip()!r} begins from the end, and ends from the start")
    return part
