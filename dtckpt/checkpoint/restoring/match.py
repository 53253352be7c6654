"""Match a restore's target with the saved structure, walking both side by side; changes nothing in either."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.foreign import dcp_files
from dtckpt.checkpoint.leaves import (
    Leaf,
    as_leaf,
    is_fillable,
    is_tensor,
    new_memory,
    with_arrays,
)
from dtckpt.checkpoint.low_bit_state import own_parts, restorer_of
from dtckpt.checkpoint.open import Checkpoint
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.parameter_names import memory_of, parameters_of
from dtckpt.checkpoint.per_client import ClientNumber, PerClient
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.meta_tensors import MetaTensors
from dtckpt.checkpoint.restoring.optimizer_match import Rule, rename_optimizers
from dtckpt.checkpoint.restoring.optimizer_nodes import RewrittenState
from dtckpt.checkpoint.restoring.optimizer_states import OptimizerStates, is_scheduler
from dtckpt.checkpoint.restoring.plan import RestorePlan, new_names
from dtckpt.checkpoint.restoring.state_layouts import StateLayouts
from dtckpt.checkpoint.restoring.target import (
    CLOSED,
    ContainerSlot,
    ObjectSlot,
    PerClientSlot,
    Scope,
    Slot,
    TargetState,
    TensorSlot,
    is_meta,
    is_optimizer_state,
    keep_defaults,
    keys_of_other_ranks,
    scope_of_dict,
    visit_target,
)
from dtckpt.checkpoint.restoring.wrapper_prefixes import match_unwrapped
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.checkpoint.shards import ShardMark, Shards, named_tensors
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.torch_interop import KeptLayouts
from dtckpt.errors import DTypeError, LayoutError, ShapeMismatchError, TensorNotFoundError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import ClientValues, TensorParts, name_of
from dtckpt.format.plain_values import EnumMember, is_plain, refusal
from dtckpt.layout.region import Region


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
        client: Which of the clients that restore this one is.
        at: Keys that lead to the part of the checkpoint that fills the target; by default all of it does.

    Raises:
        TensorNotFoundError: Target and checkpoint have different kinds of things at one place, or there is nothing
            ``at`` the place.
        ShapeMismatchError: Sequences differ in length.
        TreeError: The target holds something that cannot be filled.
    """
    names = new_names(checkpoint, options)
    moved, of_parameters = rename_optimizers(checkpoint.structure, names)
    structure = _part_at(trees.rename(checkpoint.structure, moved) if moved else checkpoint.structure, at)
    # Neither a new name nor a distributed checkpoint of PyTorch tells the type of a key: 0 or "0".
    has_text_keys = bool(names) or checkpoint.format == dcp_files.KIND
    layouts = StateLayouts(target.tensors, checkpoint.tensors)
    matcher = _Matcher(checkpoint, client, target, layouts, of_parameters, has_text_keys=has_text_keys)
    renewed = matcher.visit(target.root, structure, at, CLOSED)
    matcher.visit_late()
    matcher.find_tied()
    matcher.modules.validate_parameters()

    def finish() -> Any:
        # Modules first: an optimizer moves its state to the devices of its parameters.
        matcher.modules.give_memory()
        # Then the tree, then the objects: `load_state_dict` copies out of memory that is filled by then.
        result = renewed()
        for load in (*matcher.loads, *matcher.last_loads):
            load()
        return result

    tensors = trees.tensor_names(structure) if at else checkpoint.tensors
    values = ("/".join((*at, path) if path else at) for path, _ in trees.value_nodes(structure))
    if not options.allow_missing:
        for path in (*matcher.missing, *matcher.defaulted):
            checkpoint.validate_readable(path)
    refused = (path for path in checkpoint.refused if path.startswith("/".join((*at, ""))))
    unused = {*tensors, *values, *refused} - matcher.used
    unexpected = sorted(moved.get(name, name) if name in checkpoint.tensors else name for name in unused)
    renamed = {**moved, **matcher.renamed}
    return RestorePlan(
        matcher.leaves,
        finish,
        renamed,
        sorted(matcher.missing),
        sorted(matcher.defaulted),
        unexpected,
        matcher.owners,
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


class _Matcher:
    """Walks the target and the saved structure side by side.

    The walk changes nothing: it collects the memory to be filled, and returns for every node a function that gives the
    node's new value once the memory is filled. So a mismatch anywhere leaves the whole target as it was.

    Args:
        checkpoint: The checkpoint.
        client: Which of the clients that restore this one is.
        target: The whole target.
        layouts: Allocates the tensors that the target lacks.
        of_parameters: New name by name in the checkpoint, of parameters that are renamed.
        has_text_keys: Whether the keys of the structure's dicts may have had other types.

    Attributes:
        used: Names of tensors, and paths of plain values, of the checkpoint that the target takes.
        renamed: The name in the target by that in the checkpoint, where only wrappers of modules tell them apart.
        missing: Paths of the target, but for plain values, that the checkpoint lacks.
        defaulted: Paths of plain values of the target that the checkpoint lacks.
        leaves: The memory to be filled, each with its tensor's name in the checkpoint.
        modules: The memory for tensors of modules that have none.
        owners: How parts of the states of optimizers were found.
        loads: Give the stateful objects of the target their state, inner ones first.
        last_loads: The same for random states: the other objects may draw numbers when they load.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        client: ClientNumber,
        target: TargetState,
        layouts: StateLayouts,
        of_parameters: Mapping[str, str],
        *,
        has_text_keys: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._client = client
        self._target = target
        self._layouts = layouts
        self._optimizers = OptimizerStates(target, of_parameters, lambda name: checkpoint.info(name).shape)
        self._has_text_keys = has_text_keys
        self.used: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.missing: list[str] = []
        self.defaulted: list[str] = []
        self.leaves: list[tuple[str, Leaf]] = []
        self._kept: KeptLayouts = {}
        self.modules = MetaTensors()
        self.owners: dict[str, Rule] = {}
        self.loads: list[Callable[[], object]] = []
        self.last_loads: list[Callable[[], object]] = []
        self._late: list[Callable[[], object]] = []
        self._filled: list[torch.Tensor] = []
        self._lacking: dict[str, torch.Tensor] = {}

    def visit_late(self) -> None:
        """Plan the objects that come after the others: schedulers, whose state depends on their optimizer's."""
        for visit in self._late:
            visit()

    def find_tied(self) -> None:
        """Remove tensors from the list of missing ones if they share the memory of a tensor that is filled."""
        if self._lacking:
            filled = {memory_of(tensor) for tensor in self._filled} - {()}
            tied = {path for path, tensor in self._lacking.items() if memory_of(tensor) in filled}
            self.missing = [path for path in self.missing if path not in tied]

    def visit(self, slot: Slot, node: trees.Node, path: tuple[str, ...], scope: Scope) -> Callable[[], Any]:
        """Plan one node; return a function that gives the node's new value after the reads.

        Args:
            slot: The place in the target.
            node: The node of the checkpoint.
            path: The keys that lead to the node in the checkpoint.
            scope: The differences that are allowed.
        """
        if scope.drops and self._is_replaced(slot, node, scope):
            return self._take(node, path, scope)
        match slot:
            case TensorSlot(value):
                return self._visit_tensor(value, node, path, self._target.mark_of(value))
            case ObjectSlot():
                return self._visit_object(slot, node, path)
            case PerClientSlot():
                return self._visit_per_client(slot, node, path, scope)
            case ContainerSlot():
                return self._visit_container(slot, node, path, scope)
            case Slot(enum.Enum() as value) if "enum" in node:
                self.used.add("/".join(path))
                member = EnumMember(*node["enum"]).of(type(value), "/".join(path))
                return lambda: member
        if not is_plain(slot.value):
            raise refusal(slot.value, "/".join(path), "restore into")
        return self._take(node, path, scope)

    def _is_replaced(self, slot: Slot, node: trees.Node, scope: Scope) -> bool:
        """Whether a part of an object's state is replaced as a whole: the saved part has another kind or shape."""
        match slot:
            case TensorSlot(value):
                name = trees.name_of_tensor(node)
                if name is None or scope.is_fixed(value):
                    return name is None
                return tuple(value.shape) != self._checkpoint.info(name).shape
            case ContainerSlot(items=items):
                return self._opened(node, "dict" if isinstance(items, Mapping) else "sequence") is None
        return False

    def _visit_container(
        self, slot: ContainerSlot, node: trees.Node, path: tuple[str, ...], scope: Scope
    ) -> Callable[[], Any]:
        target = slot.value
        if name_of(target) == "TensorParts":
            _validate_parts(target, node, path)
        elif _type_of(node) == "PerClient" and not isinstance(target, ClientValues):
            raise self._misfit(node, type(target).__name__, path)
        if isinstance(target, tuple) and "tuple" in node:  # older versions saved named tuples so
            slot = slot.by_position()
        node, items = self._optimizers.pool(slot, node, path), slot.items
        if isinstance(items, Mapping):
            inner = scope_of_dict(items, scope if isinstance(target, MutableMapping) else scope.closed())
            if is_optimizer_state(items) and not scope.by_key:
                node, inner = self._match_optimizer(self._optimizers.match_dict(items, node, path), node, inner)
            return self._visit_dict(slot, dict(self._saved_items(node, "dict", path)), path, inner)
        nodes = [child for _, child in self._saved_items(node, "sequence", path)]
        return self._visit_sequence(slot, nodes, path, scope.of_items(items))

    def _visit_tensor(
        self,
        target: torch.Tensor | np.ndarray[Any, Any] | Shards,
        node: trees.Node,
        path: tuple[str, ...],
        mark: ShardMark | None,
    ) -> Callable[[], Any]:
        if isinstance(target, Shards):
            memory_of_part = self._visit_tensor(target.tensor, node, path, target.shard_mark)
            return lambda: target.assign(memory_of_part())
        name = trees.name_of_tensor(node)
        if name is None:
            raise self._misfit(node, "tensor", path)
        if isinstance(target, np.ndarray) and not is_fillable(target):
            raise TreeError(
                f"cannot restore into the array at {'/'.join(path)!r}: it is read-only, or PyTorch cannot address "
                "its elements; pass a copy() of it"
            )
        if isinstance(target, DTensor) and target._view is not None:
            raise LayoutError(
                f"tensor {name!r} is a view whose values are not in the memory of its source; restore into the source"
            )
        self.used.add(name)
        # The target keeps its own tensor: an optimizer, a tied layer or a graph may hold it, too.
        memory = target
        if isinstance(target, torch.Tensor):
            self._filled.append(target)
            memory = self.modules.memory_of(target, name)
        self._fill(name, memory, mark)
        return lambda: memory

    def _visit_object(
        self, slot: ObjectSlot, node: trees.Node, path: tuple[str, ...], *, is_late: bool = False
    ) -> Callable[[], Any]:
        target = slot.value
        if is_scheduler(target) and not is_late:
            self._late.append(lambda: self._visit_object(slot, node, path, is_late=True))
            return lambda: target
        scope = slot.scope
        if isinstance(target, Optimizer):
            node, scope = self._match_optimizer(self._optimizers.match_object(slot, node, path), node, scope)
        else:
            node, parts = self._optimizers.regroup(slot, node, path)
            for at, part in parts:
                self._use(part, at)
        renewed = self.visit(slot.state, node, path, scope)
        has_meta = slot.state.has_meta
        self.modules.validate(slot, "/".join(path))
        self.modules.note_parameters(parameters_of(target), "/".join(path))

        def load() -> None:
            slot.load(renewed())
            # A copy to a tensor on the meta device does nothing; PyTorch only warns.
            if has_meta and _keeps_meta(target):
                raise DTypeError(
                    f"{type(target).__name__} at {'/'.join(path)!r} keeps tensors on the meta device; restore its "
                    "module itself, or let its load_state_dict assign the tensors"
                )

        (self.last_loads if isinstance(target, RngState) else self.loads).append(load)
        return lambda: target

    def _match_optimizer(
        self, found: RewrittenState | None, node: trees.Node, scope: Scope
    ) -> tuple[trees.Node, Scope]:
        """Return the saved state of an optimizer in the target's terms, and its scope; note the names that it uses."""
        if found is None:
            return node, scope
        self.used |= found.used
        self.renamed |= found.renamed
        self.missing += found.missing
        self.owners |= found.owners
        return found.node, keep_defaults(scope, found.kept_state, found.kept_options)

    def _take(self, node: trees.Node, path: tuple[str, ...], scope: Scope) -> Callable[[], Any]:
        """Plan a node for which the target holds no tensors: take its plain values, and allocate its tensors."""
        restore = None
        if scope.is_optimizer and (names := trees.tensor_names(node)):
            restore = restorer_of(node, scope.parameter, scope.optimizer, names[0])
            node = node if restore is None else own_parts(node, scope.parameter)
        names = self._use(node, path)
        infos = {name: self._checkpoint.info(name) for name in names}
        # Before memory is taken: the shapes are claims of the manifest.
        self._checkpoint.validate_stored((name, Region.full(info.shape)) for name, info in infos.items())
        arrays = set(trees.array_names(node))
        new: dict[str, torch.Tensor] = {}
        for name, info in infos.items():
            mark = None
            if name in arrays:
                new[name] = new_memory(name, info.shape, info.dtype)
            else:
                new[name], mark = self._allocate(name, info, scope)
            self._fill(name, new[name], mark)
        made = with_arrays(new, arrays)
        if restore is not None:
            return lambda: restore(trees.build(node, made.__getitem__))
        return lambda: trees.build(node, made.__getitem__)

    def _fill(self, name: str, memory: torch.Tensor | np.ndarray[Any, Any], mark: ShardMark | None) -> None:
        """Note memory that is to be filled with a tensor, or with the part of it that a mark says."""
        leaf = Shards.of(memory, mark) if mark is not None and isinstance(memory, torch.Tensor) else memory
        self.leaves.append((name, as_leaf(leaf, name, self._kept)))

    def _allocate(self, name: str, info: TensorInfo, scope: Scope) -> tuple[torch.Tensor, ShardMark | None]:
        """Allocate a tensor that the target lacks; of the state of a marked parameter, this client's part."""
        if (parameter := scope.parameter) is not None:
            mark = self._target.shard_marks.get(id(parameter))
            shape = None if mark is None else mark.shape_of_part(info.shape, parameter, name)
            if shape is not None:
                return self._layouts.allocate(name, replace(info, shape=shape), scope), mark
        return self._layouts.allocate(name, info, scope), None

    def _use(self, node: trees.Node, path: tuple[str, ...]) -> list[str]:
        """Note that the target takes all that is below a node; return the names of its tensors."""
        names = trees.tensor_names(node)
        self.used.update("/".join((*path, below) if below else path) for below, _ in trees.value_nodes(node))
        self.used.update(names)
        return names

    def _visit_per_client(
        self, slot: PerClientSlot, node: trees.Node, path: tuple[str, ...], scope: Scope
    ) -> Callable[[], Any]:
        """Plan to give a target that differs by client its own of the saved values."""
        target: PerClient = slot.value
        if _type_of(node) != "PerClient":
            raise self._misfit(node, "PerClient", path)
        # All clients' values count as used: a value that this client does not take is not unexpected.
        self._use(node, path)
        saved = dict(self._saved_items(node, "dict", path))
        source = target.source(saved, node["type"][1], self._client, "/".join(path))
        if source is not None:
            self._optimizers.note_client(path, source)
            renewed = self.visit(slot.inner, saved[source], (*path, str(source)), scope)
            return lambda: target.assign(renewed())
        if not callable(target.on_resize):
            return lambda: target
        choose, values = target.on_resize, self._take(node, path, scope)
        if isinstance(slot.inner, ObjectSlot):
            loads = self.last_loads if isinstance(target.value, RngState) else self.loads
            loads.append(lambda: target.value.load_state_dict(choose(values(), *self._client)))
            return lambda: target
        return lambda: target.assign(choose(values(), *self._client))

    def _saved_items(self, node: trees.Node, kind: str, path: tuple[str, ...]) -> list[tuple[Any, trees.Node]]:
        """Return the items of a saved container, which fill a target of a kind: ``dict`` or ``sequence``."""
        items = self._opened(node, kind)
        if items is None:
            raise self._misfit(node, kind, path)
        return items

    def _opened(self, node: trees.Node, kind: str) -> list[tuple[Any, trees.Node]] | None:
        """Return the items of a saved container of a kind; None for a node that is none."""
        opened = trees.items_of(node)
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

    @staticmethod
    def _misfit(node: trees.Node, kind: str, path: tuple[str, ...]) -> TensorNotFoundError:
        ((tag, content),) = node.items()
        saved = content[0] if tag == "type" else tag
        return TensorNotFoundError(f"the checkpoint has a {saved} at {'/'.join(path)!r}; the target wants a {kind}")

    def _visit_dict(
        self, slot: ContainerSlot, nodes: dict[Any, trees.Node], path: tuple[str, ...], scope: Scope
    ) -> Callable[[], Any]:
        target, items = slot.value, slot.slots
        if self._has_text_keys:
            known = {str(key): key for key in (*scope.by_key, *items)}
            nodes = {known.get(str(key), key): node for key, node in nodes.items()}
        saved_keys = match_unwrapped(items, nodes)
        plans: dict[Any, Callable[[], Any]] = {}
        for key, child in items.items():
            saved_key = saved_keys.get(key, key)
            if saved_key in nodes:
                below = (*path, str(saved_key))
                plans[key] = self.visit(child, nodes[saved_key], below, scope.below(key))
                self._note_renamed(nodes[saved_key], below, (*path, str(key)))
            elif key in scope.keeps:
                plans[key] = partial(_same, child.value)
            elif not scope.drops:
                where = "/".join((*path, str(key)))
                (self.defaulted if is_plain(child.value) else self.missing).append(where)
                if is_tensor(child.value):
                    self._lacking[where] = child.value
        # An empty dict takes the saved items, as in the state of a fresh optimizer.
        if scope.adds or (scope.fills and not items and isinstance(target, Mapping | SimpleNamespace)):
            taken = {*items, *saved_keys.values()}
            # A client passes over the keys of other ranks. Saved keys that no client asks for are unexpected.
            taken |= set() if scope.drops else keys_of_other_ranks(items, nodes)
            plans |= {
                key: self._take(child, (*path, str(key)), scope.below(key))
                for key, child in nodes.items()
                if key not in taken
            }
        if scope.drops:
            plans = {key: plans[key] for key in nodes if key in plans} | plans  # in the order that was saved
        return lambda: _update_dict(slot, {key: renew() for key, renew in plans.items()}, drops=scope.drops)

    def _note_renamed(self, node: trees.Node, saved: tuple[str, ...], path: tuple[str, ...]) -> None:
        if saved != path:
            old, new = "/".join(saved), "/".join(path)
            self.renamed |= {name: new + name.removeprefix(old) for name in trees.tensor_names(node)}

    def _visit_sequence(
        self, slot: ContainerSlot, saved: Sequence[trees.Node], path: tuple[str, ...], scope: Scope
    ) -> Callable[[], Any]:
        target, slots = slot.value, list(slot.slots.values())
        # An empty list takes the saved items, too.
        is_filled = scope.drops or (not target and isinstance(target, MutableSequence))
        if not is_filled and len(target) != len(saved):
            raise ShapeMismatchError(
                f"the sequence at {'/'.join(path)!r} has another length; got {len(target)} in the target, expected "
                f"{len(saved)}"
            )
        maxlen = getattr(target, "maxlen", None)
        if maxlen is not None and maxlen < len(saved):
            raise ShapeMismatchError(
                f"the deque at {'/'.join(path)!r} is too short; got maxlen {maxlen} in the target, expected at least "
                f"{len(saved)}"
            )
        plans = [
            self.visit(slots[position], node, (*path, str(position)), scope.below(position))
            if position < len(slots)
            else self._take(node, (*path, str(position)), scope.below(position))
            for position, node in enumerate(saved)
        ]
        return lambda: _update_sequence(target, [renew() for renew in plans])


def _keeps_meta(target: Any) -> bool:
    """Whether an object that has loaded its state has tensors on the meta device; it is asked again unless a module."""
    if isinstance(target, nn.Module):
        return any(is_meta(tensor) for _, tensor in named_tensors(target))
    return visit_target(target.state_dict()).root.has_meta


def _same(value: Any) -> Any:
    return value


def _type_of(node: trees.Node) -> str | None:
    """Return the name of a container in `CONTAINERS`; None for other nodes."""
    return node["type"][0] if "type" in node else None


def _validate_parts(target: Any, node: trees.Node, path: tuple[str, ...]) -> None:
    """Check that the saved parts belong to a tensor of the same class, shape and context."""
    # Memory that the tensor makes when it is asked for its parts would be filled for nothing.
    parts = TensorParts.of(target)
    if parts is not target and any(getattr(target, name) is not part for name, part in parts.items()):
        raise TreeError(
            f"cannot restore into the {type(target).__name__} at {'/'.join(path)!r}: it does not keep its parts as "
            "attributes; restore it without a target, and make it of its parts"
        )
    wanted = trees.flatten(target, is_tensor)[1]["type"]
    if _type_of(node) != wanted[0] or node["type"][1] != wanted[1]:
        saved = trees.build(node, lambda name: name)
        got = (saved.kind, tuple(saved.shape), saved.context) if isinstance(saved, TensorParts) else next(iter(node))
        kind, shape, context = parts.facts
        raise TreeError(
            f"the tensor at {'/'.join(path)!r} was saved as {got}, which the parts of the target's {kind} "
            f"{tuple(shape), context} cannot take; restore it without a target, and convert it"
        )


def _update_dict(slot: ContainerSlot, renewed: Mapping[Any, Any], *, drops: bool) -> Any:
    # The items as they are now: an item may have been replaced since the visit, or is made anew at each look.
    target, items = slot.value, slot.items
    if drops and isinstance(target, MutableMapping):
        target.clear()
        target.update(renewed)
        return target
    changed = {key: value for key, value in renewed.items() if key not in items or items[key] is not value}
    if isinstance(target, MutableMapping):
        target.update(changed)
        return target
    if isinstance(target, MappingProxyType):
        return MappingProxyType({**target, **changed})
    if isinstance(target, tuple):
        return target._replace(**changed)  # type: ignore[attr-defined]
    for name, value in changed.items():
        object.__setattr__(target, name, value)  # frozen dataclasses are filled, too
    return target


def _update_sequence(target: Any, renewed: list[Any]) -> Any:
    if isinstance(target, MutableSequence):
        target.clear()
        target.extend(renewed)
        return target
    return type(target)._make(renewed) if hasattr(target, "_make") else tuple(renewed)
