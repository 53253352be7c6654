"""`Export`: the tensors and values of a checkpoint that a conversion writes, under which names and dtypes; pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtckpt.checkpoint.converting.optimizer_states import with_new_names, with_numbers
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.optimizer_match import rename_optimizers
from dtckpt.checkpoint.restoring.rename_rules import Rename, renamed, validate_rename
from dtckpt.errors import ConfigError, TensorNameError, TensorNotFoundError, capped
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import DTYPES, is_floating
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """One tensor of a conversion.

    Args:
        name: Its new name.
        info: The facts about it in the source, under its old name.
        dtype: Its new dtype.
    """

    name: str
    info: TensorInfo
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.info.shape

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        numel = self.info.nbytes // DTYPES[self.info.stored_dtype_name].itemsize
        return numel * self.itemsize

    @property
    def content(self) -> int | None:
        """The content digest that the source tells, if the elements keep their dtype."""
        return self.info.content_digest if self.info.stored_dtype_name == self.dtype else None


@dataclass(frozen=True, slots=True)
class Export:
    """The tensors and values that a conversion writes.

    Args:
        tensors: The tensors, in the order of the state tree.
        structure: The state tree, with the new names.
        tied: By new name, the name of the tensor whose elements a tensor shares.
        values: Path by path in the source, of the plain values; new where the rules of the caller rename it.
        read_array: Reads all elements of a tensor or an array, by its new name. Blocks: on storage.
    """

    tensors: tuple[ExportedTensor, ...]
    structure: trees.Node
    tied: Mapping[str, str]
    values: Mapping[str, str]
    read_array: Callable[[str], np.ndarray[Any, Any]] = field(compare=False, repr=False)

    @property
    def stored(self) -> tuple[ExportedTensor, ...]:
        """The tensors that are not tied to another tensor."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.tied)

    @property
    def taken(self) -> dict[str, str]:
        """New name by old one, of all tensors and values."""
        return {tensor.info.name: tensor.name for tensor in self.tensors} | dict(self.values)


def plan_export(
    checkpoint: Checkpoint,
    *,
    select: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: str | None = None,
    tied: Mapping[str, str] | None = None,
    is_numbered: bool = False,
) -> Export:
    """Choose which readable tensors and values of a checkpoint to write, and name them.

    Args:
        checkpoint: The checkpoint.
        select: Globs over names of tensors and paths of values; none: everything.
        rename: New names; see `dtckpt.checkpoint.restoring.rename_rules.Rename`.
        dtype: New dtype of the floating-point tensors.
        tied: By new name of a tensor, the new name of the tensor that it is tied to, besides the ties that the files
            tell. Whether the elements of tied tensors are equal is not checked here.
        is_numbered: Whether optimizers number their parameters, as ``Optimizer.load_state_dict`` asks for it.

    Raises:
        TensorNotFoundError: A glob matches nothing, or a tensor to be tied is not there.
        TensorNameError: Two tensors would have one name, or a tensor is tied to a tensor that is tied itself.
        ConfigError: The dtype is no floating-point type, or tied tensors differ in shape or dtype.
    """
    if dtype is not None and not is_floating(dtype):
        raise ConfigError(f"dtype for floating-point tensors must be a floating-point type; got {dtype}")
    validate_rename({} if rename is None else rename)
    structure = _selected(checkpoint, select)
    old_names = trees.tensor_names(structure)
    # Only of the selected paths: a path that is left out needs no new name.
    paths = [path for path, _ in trees.value_nodes(structure)]
    names = renamed(rename, [*old_names, *paths])
    if names:
        names, of_parameters = rename_optimizers(structure, names)
        structure = trees.relabel(trees.rename(structure, names), names)
        structure, moved = with_new_names(structure, of_parameters)
        names |= _following(old_names, names, moved)
    values = {path: names.get(path, path) for path in paths}
    if is_numbered:
        structure, moved = with_numbers(structure)
        names |= _following(old_names, names, moved)
    if names:
        new_names = {names.get(old, old): old for old in old_names}
        old_names = [new_names[name] for name in trees.tensor_names(structure)]
    infos = [checkpoint.info(old) for old in old_names]
    tensors = tuple(ExportedTensor(names.get(info.name, info.name), info, _dtype(info, dtype)) for info in infos)
    told = {names.get(name, name): names.get(kept, kept) for name, kept in checkpoint.tied().items()}
    by_name = {tensor.name: tensor for tensor in tensors}

    def read_array(name: str) -> np.ndarray[Any, Any]:
        tensor = by_name[name]
        region = Region.full(tensor.shape)
        checkpoint.validate_stored([(tensor.info.name, region)])
        elements = np.empty(tensor.shape, DTYPES[tensor.dtype])
        checkpoint.read_into(tensor.info.name, region, elements)
        return elements

    return Export(tensors, structure, _tied(tensors, told, tied or {}), values, read_array)


def _following(old_names: Iterable[str], names: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
    """Return, by old name, the names that tensors get in a further rename."""
    return {old: moved[new] for old in old_names if (new := names.get(old, old)) in moved}


def _selected(checkpoint: Checkpoint, select: Sequence[str]) -> trees.Node:
    """Return the part of the state tree that some globs choose."""
    structure = checkpoint.structure
    if not select:
        return structure
    unused = set(select)

    def is_wanted(name: str) -> bool:
        matching = {pattern for pattern in select if fnmatch.fnmatchcase(name, pattern)}
        unused.difference_update(matching)
        return bool(matching)

    chosen = trees.select(structure, is_wanted)
    if unused or chosen is None:
        raise TensorNotFoundError(
            f"nothing in {checkpoint.path} is named {capped(sorted(map(repr, unused)))}; it has "
            f"{capped(map(repr, checkpoint.tensors))}"
        )
    return chosen


def _dtype(info: TensorInfo, dtype: str | None) -> str:
    """Return the new dtype of a tensor. A tensor that is rounded on storage gets the dtype that a restore gives it."""
    return info.dtype_name if dtype is None or not is_floating(info.dtype_name) else dtype


def _tied(tensors: Iterable[ExportedTensor], told: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the tied tensors that the files tell or the caller names."""
    by_name = {tensor.name: tensor for tensor in tensors}
    tied: dict[str, str] = {}
    for name, kept in told.items():
        # Of the group the first in the tree that is written: an output layer comes after the embedding it is tied to.
        if name in by_name:
            first = next(each for each in by_name if each == kept or told.get(each) == kept)
            tied |= {} if first == name else {name: first}
    for name, kept in wanted.items():
        if absent := [each for each in (name, kept) if each not in by_name]:
            raise TensorNotFoundError(f"there is no tensor {absent[0]!r} to be tied; there is {capped(by_name)}")
        if name == kept or kept in tied or kept in wanted:
            raise TensorNameError(f"{name!r} cannot be tied to {kept!r}, which is tied itself")
        one, other = by_name[name], by_name[kept]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ConfigError(
                f"tensors {name!r} and {kept!r} cannot be tied; got {one.shape} of {one.dtype} and {other.shape} of "
                f"{other.dtype}"
            )
        tied[name] = kept
    return tied
