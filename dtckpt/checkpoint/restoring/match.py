"""Match a restore's target with the saved structure, walking both side by side, without changes.

The match assigns a saved part to each place of the target. `dtckpt.checkpoint.restoring.memory` then plans the memory
for these parts. So a restore finds a misfit before it allocates memory.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.foreign import dcp_files
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.parameter_names import memory_of
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.memory import PlannedMemory, plan_memory
from dtckpt.checkpoint.restoring.optimizer_match import rename_optimizers
from dtckpt.checkpoint.restoring.optimizer_states import OptimizerStates
from dtckpt.checkpoint.restoring.pairs import CLOSED, Notes, Pair, Saved
from dtckpt.checkpoint.restoring.plan import RestorePlan, new_names
from dtckpt.checkpoint.restoring.state_layouts import StateLayouts
from dtckpt.checkpoint.restoring.target import (
    ContainerSlot,
    ObjectSlot,
    PerClientSlot,
    PlainSlot,
    Slot,
    TargetState,
    TensorSlot,
)
from dtckpt.checkpoint.restoring.wrapper_prefixes import match_unwrapped
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.checkpoint.shards import Shards
from dtckpt.errors import ShapeMismatchError, TensorNotFoundError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import ClientValues, TensorParts
from dtckpt.format.plain_values import EnumMember, refusal


def saved_names(checkpoint: Checkpoint, options: RestoreOptions) -> set[str]:
    """Return the names of the tensors and plain values that a checkpoint holds, as ``options`` rename them."""
    names = new_names(checkpoint, options)
    return {names.get(name, name) for name in (*checkpoint.tensors, *checkpoint.values)}


def plan_target(
    checkpoint: Checkpoint, target: TargetState, options: RestoreOptions, client: ClientNumber, at: tuple[str, ...] = ()
) -> RestorePlan:
    """Match a target tree with a checkpoint, and plan to fill it.

    Args:
        checkpoint: The checkpoint.
        target: The target.
        options: See `RestoreOptions`.
        client: This client's number among the clients of the restore.
        at: Keys that lead to the part of the checkpoint that fills the target; by default the whole checkpoint.

    Raises:
        TensorNotFoundError: Target and checkpoint have different kinds of values at one place, or the checkpoint has
            nothing ``at`` the place.
        ShapeMismatchError: Sequences differ in length.
        TreeError: The target holds a value that cannot be filled.
    """
    names = new_names(checkpoint, options)
    moved, of_parameters = rename_optimizers(checkpoint.structure, names)
    structure = _part_at(trees.rename(checkpoint.structure, moved) if moved else checkpoint.structure, at)
    # Neither a new name nor a distributed checkpoint of PyTorch tells the type of a key: 0 or "0".
    has_text_keys = bool(names) or checkpoint.format == dcp_files.KIND
    notes = Notes()
    optimizers = OptimizerStates(target, of_parameters, lambda name: checkpoint.info(name).shape, notes)
    matcher = _Matcher(checkpoint, client, optimizers, notes, has_text_keys=has_text_keys)
    renewed = matcher.visit(Pair(structure, at, target.root, CLOSED))
    matcher.visit_late()
    matcher.find_tied()
    layouts = StateLayouts(target.tensors, target.shard_marks, checkpoint.tensors)
    memory = plan_memory(checkpoint, layouts, matcher.taken, matcher.objects)

    def finish() -> Any:
        # Modules first: an optimizer moves its state to the devices of its parameters.
        memory.modules.give_memory()
        # Then the tree, then the objects: `load_state_dict` copies out of memory that the restore has filled by then.
        result = renewed(memory)
        for load in (*matcher.loads, *matcher.last_loads):
            load(memory)
        return result

    tensors = trees.tensor_names(structure) if at else checkpoint.tensors
    values = ("/".join((*at, path) if path else at) for path, _ in trees.value_nodes(structure))
    if not options.allow_missing:
        for path in (*notes.missing, *notes.defaulted):
            checkpoint.validate_readable(path)
    refused = (path for path in checkpoint.refused if path.startswith("/".join((*at, ""))))
    unused = {*tensors, *values, *refused} - notes.used - memory.used
    unexpected = sorted(moved.get(name, name) if name in checkpoint.tensors else name for name in unused)
    renamed = {**moved, **notes.renamed}
    return RestorePlan(
        memory.leaves,
        finish,
        renamed,
        sorted(notes.missing),
        sorted(notes.defaulted),
        unexpected,
        notes.owners,
    )


def _part_at(node: trees.Node, at: tuple[str, ...]) -> trees.Node:
    """Return the part of a structure to which keys lead."""
    for key in at:
        opened = trees.items_of(node)
        below = {} if opened is None else {str(each): child for each, child in opened[1]}
        if key not in below:
            raise TensorNotFoundError(f"the checkpoint has nothing at {'/'.join(at)!r}")
        node = below[key]
    return node


Renewal = Callable[[PlannedMemory], Any]
"""Gives a place of the target its new value after the memory is filled; returns the value."""


class _Matcher:
    """Walks the target and the saved structure side by side.

    The walk changes nothing: it collects the pairs that need memory, and returns for every pair a function that gives
    the place its new value once the memory is filled. So a mismatch anywhere leaves the whole target as it was.

    Args:
        checkpoint: The checkpoint.
        client: Which of the clients that restore this one is.
        optimizers: Finds the state of the target's optimizers.
        notes: Gets the names that the walk meets.
        has_text_keys: Whether the keys of the structure's dicts may have had other types.

    Attributes:
        taken: The pairs that take saved tensors and values, and so need memory.
        objects: The pairs of objects whose state is matched.
        loads: Give the stateful objects of the target their state, inner ones first.
        last_loads: The same for random states: the other objects may draw numbers when they load.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        client: ClientNumber,
        optimizers: OptimizerStates,
        notes: Notes,
        *,
        has_text_keys: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._client = client
        self._optimizers = optimizers
        self._has_text_keys = has_text_keys
        self._notes = notes
        self.taken: list[Pair[Any]] = []
        self.objects: list[Pair[ObjectSlot]] = []
        self.loads: list[Renewal] = []
        self.last_loads: list[Renewal] = []
        self._late: list[Pair[ObjectSlot]] = []
        self._filled: list[torch.Tensor] = []
        self._lacking: dict[str, torch.Tensor] = {}

    def visit_late(self) -> None:
        """Match the objects that come last: schedulers, whose state depends on the state of their optimizer."""
        for pair in self._late:
            self._visit_state(pair)

    def find_tied(self) -> None:
        """Remove tensors from the list of missing ones if they share the memory of a tensor that is filled."""
        if self._lacking:
            filled = {memory_of(tensor) for tensor in self._filled} - {()}
            tied = {path for path, tensor in self._lacking.items() if memory_of(tensor) in filled}
            self._notes.missing = [path for path in self._notes.missing if path not in tied]

    def visit(self, pair: Pair[Any]) -> Renewal:
        """Match one pair; return a function that gives the place its new value after the reads."""
        if pair.scope.drops and self._is_replaced(pair):
            pair = replace(pair, slot=None)
        match pair.slot:
            case TensorSlot():
                return self._visit_tensor(pair)
            case ObjectSlot(value=target):
                if pair.slot.is_scheduler:
                    self._late.append(pair)
                else:
                    self._visit_state(pair)
                return lambda _: target
            case PerClientSlot():
                return self._visit_per_client(pair)
            case ContainerSlot():
                return self._visit_container(pair)
            case Slot(enum.Enum() as value) if "enum" in pair.node:
                self._notes.used.add(pair.where)
                member = EnumMember(*pair.node["enum"]).of(type(value), pair.where)
                return lambda _: member
            case PlainSlot() | None:
                return self._take(pair)
        raise refusal(pair.slot.value, pair.where, "restore into")

    def _is_replaced(self, pair: Pair[Any]) -> bool:
        """Tell whether to replace a part of an object's state as a whole, because the saved kind or shape differs."""
        match pair.slot:
            case TensorSlot(value):
                name = pair.tensor_name
                if name is None or pair.scope.is_fixed(value):
                    return name is None
                return tuple(value.shape) != self._checkpoint.info(name).shape
            case ContainerSlot(items=items):
                return self._opened(pair, "dict" if isinstance(items, Mapping) else "sequence") is None
        return False

    def _visit_tensor(self, pair: Pair[TensorSlot]) -> Renewal:
        target = pair.slot.value
        if isinstance(target, Shards):
            part = TensorSlot(target.tensor, pair.slot.path, target.shard_mark)
            memory_of_part = self._visit_tensor(replace(pair, slot=part))
            return lambda memory: target.assign(memory_of_part(memory))
        if pair.tensor_name is None:
            raise _misfit(pair, "tensor")
        if isinstance(target, torch.Tensor):
            self._filled.append(target)
        return self._take(pair)

    def _take(self, pair: Pair[Any]) -> Renewal:
        """Take the saved tensors and values as they are."""
        self.taken.append(pair)
        return lambda memory: memory.value_of(pair)

    def _visit_state(self, pair: Pair[ObjectSlot]) -> None:
        """Match the state of an object."""
        slot, where = pair.slot, pair.where
        renewed = self.visit(self._optimizers.of_object(pair))
        self.objects.append(pair)
        loads = self.last_loads if isinstance(slot.value, RngState) else self.loads
        loads.append(lambda memory: slot.fill(renewed(memory), where))

    def _visit_per_client(self, pair: Pair[PerClientSlot]) -> Renewal:
        """Match a target that differs by client with this client's saved value."""
        slot, target = pair.slot, pair.slot.value
        if pair.type_name != "PerClient":
            raise _misfit(pair, "PerClient")
        # All clients' values count as used: a value that this client does not take is not unexpected.
        self._notes.used.update(pair.names)
        saved = dict(self._saved_items(pair, "dict"))
        source = target.source(saved, pair.node["type"][1], self._client, pair.where)
        if source is not None:
            self._optimizers.note_client(pair.path, source)
            renewed = self.visit(Pair(saved[source], (*pair.path, str(source)), slot.inner, pair.scope))
            return lambda memory: slot.fill(renewed(memory))
        if not callable(target.on_resize):
            return lambda _: target
        choose, values = target.on_resize, self._take(pair)
        if isinstance(slot.inner, ObjectSlot):
            loads = self.last_loads if isinstance(target.value, RngState) else self.loads
            loads.append(lambda memory: target.value.load_state_dict(choose(values(memory), *self._client)))
            return lambda _: target
        return lambda memory: slot.fill(choose(values(memory), *self._client))

    def _visit_container(self, pair: Pair[ContainerSlot]) -> Renewal:
        target = pair.slot.value
        if isinstance(pair.slot.items, TensorParts):
            _validate_parts(pair, pair.slot.items)
        elif pair.type_name == "PerClient" and not isinstance(target, ClientValues):
            raise _misfit(pair, type(target).__name__)
        if isinstance(target, tuple) and "tuple" in pair.node:  # older versions saved named tuples so
            pair = replace(pair, slot=pair.slot.by_position)
        pair = self._optimizers.of_container(pair)
        is_dict = isinstance(pair.slot.items, Mapping)
        renewals = self._visit_dict(pair) if is_dict else self._visit_sequence(pair)
        slot, drops = pair.slot, pair.scope.drops
        return lambda memory: slot.fill({key: renew(memory) for key, renew in renewals.items()}, drops=drops)

    def _visit_dict(self, pair: Pair[ContainerSlot]) -> dict[Any, Renewal]:
        """Match the items of a dict, whose scope is the pair's."""
        slots, scope, nodes = pair.slot.slots, pair.scope, dict(self._saved_items(pair, "dict"))
        if self._has_text_keys:
            known = {str(key): key for key in (*scope.by_key, *slots)}
            nodes = {known.get(str(key), key): node for key, node in nodes.items()}
        saved_keys, inner = match_unwrapped(slots, nodes), scope.inner
        renewals: dict[Any, Renewal] = {}
        for key, child in slots.items():
            saved_key = saved_keys.get(key, key)
            if saved_key in nodes:
                below = Pair(nodes[saved_key], (*pair.path, str(saved_key)), child, scope.by_key.get(key, inner))
                renewals[key] = self.visit(below)
                self._note_renamed(below, "/".join((*pair.path, str(key))))
            elif key in scope.keeps:
                renewals[key] = partial(_kept, child.value)
            elif not scope.drops:
                self._note_lacking(child, "/".join((*pair.path, str(key))))
        # An empty dict takes the saved items, as in the state of a fresh optimizer.
        if scope.adds or (scope.fills and not slots and isinstance(pair.slot.value, Mapping | SimpleNamespace)):
            taken = {*slots, *saved_keys.values()}
            # A client passes over the keys of other ranks. Saved keys that no client asks for are unexpected.
            taken |= set() if scope.drops else _keys_of_other_ranks(slots, nodes)
            renewals |= {
                key: self._take(Pair(node, (*pair.path, str(key)), None, scope.below(key)))
                for key, node in nodes.items()
                if key not in taken
            }
        # In the order that was saved.
        return {key: renewals[key] for key in (*nodes, *renewals) if key in renewals} if scope.drops else renewals

    def _note_renamed(self, pair: Pair[Any], new: str) -> None:
        if pair.where != new:
            self._notes.renamed |= {name: new + name.removeprefix(pair.where) for name in pair.tensor_names}

    def _note_lacking(self, slot: Slot, where: str) -> None:
        (self._notes.defaulted if isinstance(slot, PlainSlot) else self._notes.missing).append(where)
        if isinstance(slot, TensorSlot) and not isinstance(slot.value, np.ndarray):
            self._lacking[where] = slot.value

    def _visit_sequence(self, pair: Pair[ContainerSlot]) -> dict[Any, Renewal]:
        """Match the items of a sequence, whose scope is the pair's."""
        target, slots, saved = pair.slot.value, [*pair.slot.slots.values()], self._saved_items(pair, "sequence")
        # An empty list takes the saved items, too.
        is_filled = pair.scope.drops or (not target and isinstance(target, MutableSequence))
        if not is_filled and len(target) != len(saved):
            raise ShapeMismatchError(
                f"the sequence at {pair.where!r} has another length; got {len(target)} in the target, expected "
                f"{len(saved)}"
            )
        maxlen = getattr(target, "maxlen", None)
        if maxlen is not None and maxlen < len(saved):
            raise ShapeMismatchError(
                f"the deque at {pair.where!r} is too short; got maxlen {maxlen} in the target, expected at least "
                f"{len(saved)}"
            )
        some = [*slots, *(None for _ in saved)]
        return {
            at: self.visit(Pair(node, (*pair.path, str(at)), some[at], pair.scope.below(at)))
            for at, (_, node) in enumerate(saved)
        }

    def _saved_items(self, pair: Pair[Any], kind: str) -> list[tuple[Any, trees.Node]]:
        """Return the items of a saved container, which fill a target of a kind: ``dict`` or ``sequence``."""
        items = self._opened(pair, kind)
        if items is None:
            raise _misfit(pair, kind)
        return items

    def _opened(self, pair: Pair[Any], kind: str) -> list[tuple[Any, trees.Node]] | None:
        """Return the items of a saved container of a kind; None for any other node."""
        opened = pair.saved_items
        if opened is None:
            return None
        base, items = opened
        if (base == "dict") == (kind == "dict"):
            return items
        # A new name, as "a/0", does not tell whether "a" is a dict or a sequence.
        by_key = {str(key): child for key, child in items}
        positions = [str(position) for position in range(len(by_key))]
        if not self._has_text_keys or (kind == "sequence" and set(by_key) != set(positions)):
            return None
        return items if kind == "dict" else [(position, by_key[position]) for position in positions]


def _kept(value: Any, _: PlannedMemory) -> Any:
    return value


_OF_RANK = re.compile(r"(.*rank[^0-9a-zA-Z]?)\d+")
"""Keys by the number of a rank, as ``dp_rank_3`` of torchtitan's loaders."""


def _keys_of_other_ranks(own: Iterable[Any], saved: Iterable[Any]) -> set[Any]:
    """Return the saved keys of other ranks that correspond to a key of an object's own state."""

    def start(key: Any) -> str | None:
        match = _OF_RANK.fullmatch(key) if isinstance(key, str) else None
        return match and match[1]

    own = set(own)
    starts = {start(key) for key in own} - {None}
    return {key for key in saved if key not in own and start(key) in starts}


def _misfit(saved: Saved, kind: str) -> TensorNotFoundError:
    """Return the error for a saved part that cannot fill a place of a kind."""
    ((tag, content),) = saved.node.items()
    found = content[0] if tag == "type" else tag
    return TensorNotFoundError(f"the checkpoint has a {found} at {saved.where!r}; the target wants a {kind}")


def _validate_parts(pair: Pair[ContainerSlot], parts: TensorParts) -> None:
    """Check that the saved parts belong to a tensor of the same class, shape and context."""
    target = pair.slot.value
    # If a tensor makes new memory for its parts at each request, filling that memory would have no effect.
    if parts is not target and any(getattr(target, name) is not part for name, part in parts.items()):
        raise TreeError(
            f"cannot restore into the {type(target).__name__} at {pair.where!r}: it does not keep its parts as "
            "attributes; restore it without a target, and make it of its parts"
        )
    if pair.node.get("type", ())[:2] != pair.slot.node["type"][:2]:
        saved = trees.build(pair.node, lambda name: name)
        got = (
            (saved.kind, tuple(saved.shape), saved.context) if isinstance(saved, TensorParts) else next(iter(pair.node))
        )
        kind, shape, context = parts.facts
        raise TreeError(
            f"the tensor at {pair.where!r} was saved as {got}, which the parts of the target's {kind} "
            f"{tuple(shape), context} cannot take; restore it without a target, and convert it"
        )
