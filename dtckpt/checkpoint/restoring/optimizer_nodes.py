"""Rewrite the saved state of an optimizer in the terms of a target: its keys, its order, its groups; pure.

A restore walks target and checkpoint side by side. So this module puts the state that
`dtckpt.checkpoint.restoring.optimizer_match` has matched into the places where the target looks for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.restoring.optimizer_match import (
    Match,
    OptimizerParameter,
    Place,
    Rule,
    SavedOptimizer,
    SavedOptimizers,
)
from dtckpt.checkpoint.restoring.pairs import Notes, Saved
from dtckpt.errors import ShapeMismatchError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import encode_value
from dtckpt.format.tree import Node

_MEMBERS = frozenset({"params", "param_names"})
_OF_SCHEDULERS = frozenset(
    {"base_momentum", "initial_lr", "initial_momentum", "max_lr", "max_momentum", "min_lr", "swa_lr"}
)
"""Options of a group that schedulers add."""
_OF_CLASSES = frozenset({"amsgrad", "momentum_decay", "weight_decay"})
"""Options that their classes have always had: a checkpoint without them has the state of another class."""
_BY_GROUP = re.compile(r".*(_lrs|_lr|_momentums|lambdas)")
"""Names of lists in a scheduler's state that have an item for each group of its optimizer."""

EMPTY: Node = {"dict": [["state", {"dict": []}], ["param_groups", {"list": []}]]}
"""The state of an optimizer for which the checkpoint has no place."""


@dataclass(frozen=True, slots=True)
class RewrittenState:
    """The saved state of an optimizer, as a target looks for it.

    Args:
        node: The state.
        notes: The names that the state has.
        kept_state: Keys of the parameters whose state in the target stays.
        kept_options: For each group, the options that keep the target's value.
    """

    node: Node
    notes: Notes
    kept_state: frozenset[Any]
    kept_options: Sequence[frozenset[str]]


def rewrite_state(
    wanted: Sequence[OptimizerParameter],
    groups: Sequence[Mapping[str, Any]],
    match: Match,
    saved: SavedOptimizers,
    path: tuple[str, ...],
) -> RewrittenState:
    """Return the saved state of an optimizer in a target's terms.

    Args:
        wanted: The parameters of the target's optimizer.
        groups: Its groups, as in its state.
        match: The saved parts that belong to this optimizer.
        saved: The saved optimizers.
        path: The keys that lead to the target's optimizer.
    """
    rewriter = _Rewriter(saved, path)
    state = [*rewriter.state(wanted, match), *rewriter.state_of_no_parameter()]
    members: list[list[tuple[OptimizerParameter, Rule]]] = [[] for _ in groups]
    for parameter, rule in zip(wanted, match.rules, strict=True):
        members[parameter.group].append((parameter, rule))
    rewritten = [
        rewriter.group(number, group, members[number], match.groups[number]) for number, group in enumerate(groups)
    ]
    node = {"dict": [["state", {"dict": state}], ["param_groups", {"list": rewritten}]]}
    kept = frozenset(each.key for each, place in zip(wanted, match.sources, strict=True) if place is None)
    return RewrittenState(node, rewriter.notes, kept, rewriter.kept_options)


class _Rewriter:
    """Makes the nodes of one optimizer of a target, and notes which names of the checkpoint they take."""

    def __init__(self, saved: SavedOptimizers, path: tuple[str, ...]) -> None:
        self._saved = saved
        self._path = path
        self._used_groups: set[Place] = set()
        self.notes = Notes()
        self.kept_options: list[frozenset[str]] = []

    def state(self, wanted: Sequence[OptimizerParameter], match: Match) -> Iterator[list[Any]]:
        """Yield the key and the node of each parameter that has state in the checkpoint."""
        for parameter, place, rule in zip(wanted, match.sources, match.rules, strict=True):
            where = "/".join((*self._path, "state", name_of_key(parameter.label)))
            if place is None:
                self.notes.missing.append(where)
                continue
            self.notes.owners[where] = rule
            source, saved = self._saved.optimizers[place[0]], self._saved.parameter(place)
            if (place[0], saved.group) not in self._used_groups:
                self._used_groups.add((place[0], saved.group))
                options = source.groups[saved.group]
                self._use(source, ("param_groups", str(saved.group)), options, options.keys())
            key = str(saved.key)
            if key not in source.state:
                continue  # it had no gradient yet
            self._use(source, ("state",), source.state, {key})
            old = "/".join((*source.path, "state", name_of_key(key)))
            if old != where:
                names = Saved(source.state[key], source.path).tensor_names
                self.notes.renamed |= {name: where + name.removeprefix(old) for name in names}
            yield [parameter.key, source.state[key]]

    def state_of_no_parameter(self) -> Iterator[list[Any]]:
        """Yield the keys and nodes of other state, which some classes of optimizers have."""
        if self._saved.own is None:
            return
        own = self._saved.optimizers[self._saved.own]
        for number, options in enumerate(own.groups):
            self._use(own, ("param_groups", str(number)), options, _MEMBERS)
        keys = {str(each.key) for each in own.parameters}
        yield from ([key, node] for key, node in own.state.items() if key not in keys)

    def group(
        self,
        number: int,
        group: Mapping[str, Any],
        members: Sequence[tuple[OptimizerParameter, Rule]],
        place: Place | None,
    ) -> Node:
        """Return the node of a group of the target: the options of a saved one, and its own parameters."""
        where = "/".join((*self._path, "param_groups", str(number)))
        options = {} if place is None else self._saved.optimizers[place[0]].groups[place[1]]
        own = group.keys() - _MEMBERS
        kept = own if place is None else lacking_options(own, options.keys())
        self.kept_options.append(frozenset(kept))
        by_name = all(rule != "position" for _, rule in members) and bool(members)
        self.notes.owners[where] = "default" if place is None else "name" if by_name else "position"
        if place is not None:
            self.notes.owners |= dict.fromkeys((f"{where}/{key}" for key in sorted(kept)), "default")
        items = [[key, node] for key, node in options.items() if key not in _MEMBERS]
        items.append(["params", {"list": [encode_value(each.key, where) for each, _ in members]}])
        if "param_names" in group:
            items.append(["param_names", {"list": [encode_value(each.own, where) for each, _ in members]}])
        return {"dict": items}

    def _use(
        self, saved: SavedOptimizer, at: tuple[str, ...], items: Mapping[Any, Node], keys: Collection[Any]
    ) -> None:
        """Note that the target takes some items."""
        for key in items.keys() & keys:
            self.notes.used.update(Saved(items[key], (*saved.path, *at, str(key))).names)


def lacking_options(wanted: Collection[str], saved: Collection[str]) -> frozenset[str]:
    """Return the options of a group that a checkpoint lacks because PyTorch did not have them yet.

    Returns none if the checkpoint has the state of another class: it has options that the target lacks, or lacks
    options that the class has always had.
    """
    lacking, own = frozenset(wanted) - frozenset(saved), {*saved} - _MEMBERS - _OF_SCHEDULERS
    return lacking if own <= {*wanted} and not lacking & _OF_CLASSES else frozenset()


@dataclass(frozen=True, slots=True)
class Regrouping:
    """How the groups of an optimizer in a target differ from the saved groups, for the state of its scheduler.

    Args:
        sources: For each group of the target, the saved group whose options it takes; None if it keeps its options.
        own: The position of the saved optimizer at the same path of the tree; None if there is none.
        sizes: How many groups each saved optimizer has.
    """

    sources: tuple[Place | None, ...]
    own: int | None
    sizes: tuple[int, ...]

    @property
    def is_same(self) -> bool:
        """Whether the groups are the saved groups, in the saved order."""
        return self.own is not None and self.sources == tuple((self.own, at) for at in range(self.sizes[self.own]))

    @property
    def optimizers(self) -> list[int]:
        """The saved optimizers of the groups: its own first, else the optimizer of most groups."""
        counts = Counter(place[0] for place in self.sources if place is not None)
        found = [number for number, _ in counts.most_common()]
        if self.own is None or (found and self.own not in found):
            return found
        return [self.own, *(number for number in found if number != self.own)]

    def scheduler(self, nodes: Mapping[int, Node], state: Mapping[str, Any], where: str) -> Node:
        """Return the saved state of a scheduler with the items of its lists in the order of the target's groups.

        Args:
            nodes: The saved states of the schedulers of `optimizers`. All parts but the lists come from the first
                state.
            state: The state of the target's scheduler.
            where: Its path, for messages.

        Raises:
            ShapeMismatchError: A list has not one item for each group that was saved.
        """
        opened = {number: _items(node) for number, node in nodes.items()}
        first = next(iter(opened))
        return {
            "dict": [
                [key, self._item(key, {at: each[key] for at, each in opened.items() if key in each}, state, where)]
                for key in opened[first]
            ]
        }

    def _item(self, key: str, nodes: Mapping[int, Node], state: Mapping[str, Any], where: str) -> Node:
        own, first = state.get(key), next(iter(nodes.values()))
        ((kind, _),) = first.items()
        if kind not in ("list", "tuple") or not isinstance(own, list | tuple):
            return first
        lists = {number: node[kind] for number, node in nodes.items() if kind in node}
        if key == "_schedulers" and all(len(each) == len(own) for each in lists.values()):
            columns = ({number: each[at] for number, each in lists.items()} for at in range(len(own)))
            return {kind: [self.scheduler(each, below, where) for each, below in zip(columns, own, strict=True)]}
        if not _BY_GROUP.fullmatch(key) or len(own) != len(self.sources):
            return first
        for number, items in lists.items():
            if len(items) != self.sizes[number] and any(each != items[0] for each in items):
                raise ShapeMismatchError(
                    f"scheduler at {where!r}: {key!r} has an item for each group of the optimizer; got {len(items)} "
                    f"items, saved with {self.sizes[number]} groups; save the scheduler where the optimizer has all of "
                    "its groups"
                )
        kept = [trees.flatten(value, lambda _: False, at=where)[1] for value in own]
        found = [lists.get(place[0], [])[: place[1] + 1] if place else [] for place in self.sources]
        return {kind: [items[-1] if items else value for items, value in zip(found, kept, strict=True)]}


def _items(node: Node) -> dict[str, Node]:
    opened = trees.items_of(node)
    return {} if opened is None else {str(key): child for key, child in opened[1]}
