"""Parse arguments of the command line: meshes, dtypes, and rules that give tensors their layouts."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.layout_choice import kept_layout
from dtckpt.errors import ConfigError, LayoutError, MeshError, capped, did_you_mean
from dtckpt.format.dtypes import DTYPES, is_floating
from dtckpt.layout import text_format
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import MATCH, UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh

if TYPE_CHECKING:
    import torch

MAX_DEVICES = 1 << 18
"""Largest number of devices in a mesh; planning for it takes seconds per tensor."""
MAX_LAYOUT_FILE_NBYTES = 16 << 20
_COUNT = re.compile(r"[1-9]\d{0,17}", re.ASCII)
_COMMENT = re.compile(r"(^|\s)#.*")


def parse_mesh(text: str, devices_per_client: int | None = None) -> Mesh:
    """Parse a mesh such as ``data=2,model=4``: axes with sizes, major first. Its devices need not exist.

    Args:
        text: The mesh.
        devices_per_client: As for `dtckpt.abstract_mesh`.

    Raises:
        MeshError: The text is malformed, an axis cannot have such a name, the mesh is too large, or its devices cannot
            be divided evenly among clients.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.strip().rpartition("=")
        if not axis or not _COUNT.fullmatch(size) or axis in axes:
            reason = "the axis is there twice" if axis in axes else "expected AXIS=SIZE with a size of 1 or more"
            raise MeshError(f"mesh {text!r} cannot be used; got {item!r}, {reason}, as in data=2,model=4")
        axes[axis] = int(size)
    if math.prod(axes.values()) > MAX_DEVICES:
        raise MeshError(
            f"mesh {text!r} is too large; got {math.prod(axes.values())} devices, expected at most {MAX_DEVICES}"
        )
    return abstract_mesh(axes, devices_per_client=devices_per_client)


def parse_dtype(text: str) -> torch.dtype:
    """Parse the name of a floating-point dtype.

    Raises:
        ConfigError: There is no floating-point dtype of this name.
    """
    if not is_floating(text):
        known = list(filter(is_floating, DTYPES))
        raise ConfigError(
            f"dtype cannot be used; got {text!r}, expected one of {', '.join(known)}{did_you_mean(text, known)}"
        )
    import torch  # here, because it takes seconds, and few commands are about dtypes

    return getattr(torch, text)  # type: ignore[no-any-return]


def read_rules(path: Path) -> Iterator[str]:
    """Yield the rules of a layout file: one PATTERN=SPEC per line.

    A ``#`` at the start of a line or after a blank starts a comment.

    Raises:
        ConfigError: The file cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_LAYOUT_FILE_NBYTES + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"layout file {path} cannot be read: {error}") from error
    if len(data) > MAX_LAYOUT_FILE_NBYTES:
        raise ConfigError(f"layout file {path} is too large; expected at most {MAX_LAYOUT_FILE_NBYTES} bytes")
    for line in text.splitlines():
        if rule := _COMMENT.sub("", line).strip():
            yield rule


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """A layout for the tensors whose names match a glob; ``text`` is the rule as the user wrote it."""

    text: str
    pattern: str
    layout: Layout

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> LayoutRule:
        """Parse ``PATTERN=SPEC``. Names may contain ``=`` and specs cannot, so the last ``=`` separates the two.

        Raises:
            LayoutError: The text is malformed or does not fit the mesh.
        """
        pattern, equals, spec_text = text.rpartition("=")
        if not equals or not pattern.strip():
            raise LayoutError(f"layout {text!r} cannot be used; expected PATTERN=SPEC, as in '*/weight=data,unsharded'")
        specs = (
            [text_format.spec_from_text(entry.strip()) for entry in spec_text.split(",")] if spec_text.strip() else []
        )
        if MATCH in specs:
            raise LayoutError(f"layout {text!r} cannot be used; got {MATCH!r}, expected an axis or 'unsharded'")
        try:
            return cls(text, pattern.strip(), Layout(specs, mesh))
        except LayoutError as error:
            axes = [axis for spec in specs for axis in ([spec] if isinstance(spec, str) else spec)]
            known = [*mesh.axis_sizes, UNSHARDED]
            hint = next((did_you_mean(axis, known) for axis in axes if axis not in known), "")
            raise LayoutError(f"layout {text!r} cannot be used: {error.message}{hint}") from error


class LayoutRules:
    """Layout rules in order: the first rule whose pattern matches a tensor's name gives the tensor's layout.

    A tensor that no rule matches keeps its saved sharding specs, as far as the mesh has their axes. The object notes
    which rules have matched a tensor, even if an earlier rule gave the layout.
    """

    def __init__(self, texts: Sequence[str], mesh: Mesh) -> None:
        self._mesh = mesh
        self._rules = [LayoutRule.parse(text, mesh) for text in texts]
        self._used: set[str] = set()
        self._names: list[str] = []

    def __call__(self, name: str, info: TensorInfo) -> Layout:
        """Return the layout of one tensor.

        Raises:
            LayoutError: The rule's layout has another rank than the tensor.
        """
        self._names.append(name)
        matching = [rule for rule in self._rules if fnmatch.fnmatchcase(name, rule.pattern)]
        self._used.update(rule.pattern for rule in matching)
        if not matching:
            return kept_layout(info, self._mesh)
        rule = matching[0]
        if rule.layout.rank != len(info.shape):
            raise LayoutError(
                f"layout {rule.text!r} does not fit tensor {name!r} of shape {info.shape}; "
                f"got {rule.layout.rank} specs, expected {len(info.shape)}, one per dim"
            )
        return rule.layout

    def validate_all_used(self) -> None:
        """Refuse rules that have matched no tensor, because they are most likely typos.

        Raises:
            LayoutError: There is such a rule.
        """
        unused = [rule for rule in self._rules if rule.pattern not in self._used]
        if unused:
            raise LayoutError(
                f"no tensor matches the pattern of layout {capped(repr(rule.text) for rule in unused)}; expected a "
                f"glob over names{did_you_mean(unused[0].pattern, self._names)}"
            )


def parse_rules(texts: Sequence[str], file: Path | None, mesh: Mesh) -> LayoutRules:
    """Parse the rules of ``--layout``, then the rules of ``--layout-file``.

    Raises:
        ConfigError: The file cannot be read.
        LayoutError: A rule is malformed or does not fit the mesh.
    """
    return LayoutRules([*texts, *(read_rules(file) if file else ())], mesh)
