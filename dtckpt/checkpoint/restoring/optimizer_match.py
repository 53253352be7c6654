"""Match the parameters of an optimizer in a restore's target with the parameters in a checkpoint, by name; pure.

The order of parameters, their division into groups, and the number of optimizers may all differ::

    saved     groups [[model/a, model/b], [model/c]]
    target    groups [[model/c, model/b], [model/a]]     parameter 0 <- model/c, 1 <- model/b, 2 <- model/a

A parameter of the target may have several names, if it is tied. A saved parameter has the name of its tensor in the
tree, or the name that the optimizer got with it, or only a number. The match runs in rounds, the most reliable name
first. The order is: the name in the tree; this name without wrappers; the name that the optimizer got; the name within
the module. The last two rounds apply only if one side has no name in the tree, because different names in the tree are
different parameters. If a side has no names, numbers match by position.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from dtckpt.checkpoint.optimizer_groups import own_names_of
from dtckpt.checkpoint.restoring.wrapper_prefixes import unwrapped
from dtckpt.errors import CheckpointCorruptError, ShapeMismatchError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.format.tree import Node

Rule = Literal["name", "position", "default"]
"""The rule that matched a part of the state with its owner; ``default``: not saved, and unchanged in the target."""


@dataclass(frozen=True, slots=True)
class OptimizerParameter:
    """A parameter of an optimizer, in a target or in a checkpoint.

    Args:
        key: Its key in the optimizer's state: a name or a number.
        names: Its names in the state tree.
        own: The name that the optimizer got with it.
        group: Its group's position.
    """

    key: int | str
    names: tuple[str, ...] = ()
    own: str | None = None
    group: int = 0

    @property
    def has_name(self) -> bool:
        """Whether it can be found by a name."""
        return bool(self.names or self.own)

    @property
    def label(self) -> str:
        """The name of the parameter in messages, and of its state in the tree."""
        return self.names[0] if self.names else self.own or str(self.key)


def parameters_of_groups(groups: Any, names: Sequence[tuple[str, ...]] | None = None) -> list[OptimizerParameter]:
    """Return the parameters of an optimizer's groups.

    Args:
        groups: ``param_groups`` of its state.
        names: For each parameter, in the order of the groups, its names in the state tree. Default: its key, if the key
            is a string and not the name that the optimizer got with the parameter; else none.
    """
    keys = [(key, number) for number, group in enumerate(groups) for key in group["params"]]
    own = own_names_of(groups)
    # A save uses the optimizer's own name as the key if there is no name in the tree.
    found = names or [
        (key,) if isinstance(key, str) and key != given else () for (key, _), given in zip(keys, own, strict=True)
    ]
    return [
        OptimizerParameter(key, in_tree, given, number)
        for (key, number), in_tree, given in zip(keys, found, own, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The state of an optimizer in a checkpoint.

    Args:
        parameters: Its parameters.
        state: The nodes of ``state``, by the text of the key: new names do not tell whether it was 0 or "0".
        groups: The items of each of ``param_groups``, by key.
        path: The keys that lead to it.
    """

    parameters: tuple[OptimizerParameter, ...]
    state: Mapping[str, Node]
    groups: tuple[Mapping[str, Node], ...]
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: Node, path: tuple[str, ...]) -> SavedOptimizer | None:
        """Return the optimizer in a node; None if the node is not the state of an optimizer from ``state_dict()``."""
        items = _items(node, "dict")
        if not {"state", "param_groups"} <= items.keys():
            return None
        state, groups = _items(items["state"], "dict"), _items(items["param_groups"], next(iter(items["param_groups"])))
        if "dict" not in items["state"] or [*map(str, groups)] != [*map(str, range(len(groups)))]:
            return None
        opened = [_items(group, "dict") for group in groups.values()]
        try:
            plain = [
                {key: trees.build(group[key], str) for key in ("params", "param_names") if key in group}
                for group in opened
            ]
            keys = [key for group in plain for key in group["params"]]
        except (CheckpointCorruptError, KeyError, TypeError):
            return None
        if not all(type(key) in (int, str) for key in keys) or len({*keys}) != len(keys):
            return None
        by_text = {str(key): child for key, child in state.items()}
        return cls(tuple(parameters_of_groups(plain)), by_text, tuple(opened), path)

    def renamed(self, names: Mapping[Any, str]) -> SavedOptimizer:
        """Return the optimizer with new names of its parameters.

        Args:
            names: The new name in the tree, by the parameter's key in the checkpoint.
        """
        new = [replace(each, names=(names[each.key],)) if each.key in names else each for each in self.parameters]
        return replace(self, parameters=tuple(new))


def _items(node: Node, kind: str) -> dict[Any, Node]:
    opened = trees.items_of(node) if kind in node else None
    return {} if opened is None else dict(opened[1])


def rename_optimizers(structure: Node, names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Separate the new names of parameters from the new names that move the whole state of an optimizer.

    Rules for names reach the names of parameters, which are keys in the state of an optimizer, too. These stay as they
    are in the structure, as its groups have the same names.

    Args:
        structure: The structure of the checkpoint.
        names: New name by name.

    Returns:
        New names by name for the structure, and new names by name of parameters.
    """
    moved, parameters = dict(names), dict(names)
    for saved in _optimizers_in(structure, ()) if names else ():
        old = "/".join(saved.path)
        options = (f"/param_groups/{at}/{key}" for at, group in enumerate(saved.groups) for key in group)
        ends = [(end, names[old + end]) for end in options if old + end in names]
        new = next((name.removesuffix(end) for end, name in ends if name.endswith(end)), old)
        for key, node in saved.state.items():
            for name in trees.tensor_names(node):
                renamed, end = moved.pop(name, name), name.removeprefix(f"{old}/state/{name_of_key(key)}")
                if renamed.startswith(f"{new}/state/") and renamed.endswith(end):
                    parameters.setdefault(key, renamed.removeprefix(f"{new}/state/").removesuffix(end))
                if new != old:
                    moved[name] = new + name.removeprefix(old)
    return moved, parameters


def _optimizers_in(node: Node, path: tuple[str, ...]) -> Iterator[SavedOptimizer]:
    """Yield the states of optimizers, with names of parameters, at and below a node."""
    opened = trees.items_of(node)
    if opened is None:
        return
    saved = SavedOptimizer.of(node, path)
    if saved is None:
        for key, child in opened[1]:
            yield from _optimizers_in(child, (*path, str(key)))
    elif any(each.has_name for each in saved.parameters):
        yield saved


Place = tuple[int, int]
"""The position of an optimizer among several, and of one of its parameters or groups."""


@dataclass(frozen=True, slots=True)
class SavedOptimizers:
    """The saved optimizers whose parameters an optimizer of a target may have.

    Args:
        optimizers: The saved optimizers.
        own: The position of the optimizer at the same path of the tree; None if there is none.
    """

    optimizers: tuple[SavedOptimizer, ...]
    own: int | None

    def parameter(self, place: Place) -> OptimizerParameter:
        """Return the parameter at a place."""
        return self.optimizers[place[0]].parameters[place[1]]


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of saved optimizers that belong to an optimizer of a target.

    Args:
        sources: For each of its parameters, the place of the saved one; None if there is none.
        rules: For each of its parameters, the rule that found it.
        groups: For each of its groups, the place of the group whose options it takes; None if it keeps its options.
    """

    sources: tuple[Place | None, ...]
    rules: tuple[Rule, ...]
    groups: tuple[Place | None, ...]


def match_optimizer(wanted: Sequence[OptimizerParameter], num_groups: int, saved: SavedOptimizers) -> Match:
    """Match an optimizer of a target with saved ones.

    Args:
        wanted: The parameters of the target's optimizer.
        num_groups: How many groups it has.
        saved: The saved optimizers.

    Raises:
        ShapeMismatchError: Parameters without names differ in number, or are divided into groups of other sizes.
    """
    found: dict[int, Place] = {}
    rules: dict[int, Rule] = {}
    own, every = saved.own, range(len(saved.optimizers))
    # Its own place first: two optimizers may have the same parameters.
    in_order = ([] if own is None else [own], [number for number in every if number != own])
    for labels, some in product(_ROUNDS, in_order):
        if len(found) == len(wanted):
            break  # the usual case; some jobs have an optimizer for each parameter
        places = [(number, at) for number in some for at in range(len(saved.optimizers[number].parameters))]
        new = _match_names(labels, wanted, found, {place: saved.parameter(place) for place in places})
        found |= new
        rules |= dict.fromkeys(new, "name")
    if own is not None:
        home = saved.optimizers[own]
        positions = _match_positions(wanted, found, home.parameters, "/".join(home.path))
        found |= {at: (own, position) for at, position in positions.items()}
        rules |= dict.fromkeys(positions, "position")
    members: list[list[Place]] = [[] for _ in range(num_groups)]
    for at, place in sorted(found.items()):
        members[wanted[at].group].append((place[0], saved.parameter(place).group))
    # Of equally frequent groups, the first.
    groups = [Counter(each).most_common(1)[0][0] if each else None for each in members]
    if own is not None:
        filled = {each.group for each in wanted}
        empty = {*range(len(home.groups))} - {each.group for each in home.parameters} - filled
        groups = [(own, at) if at in empty else place for at, place in enumerate(groups)]
    numbers = range(len(wanted))
    return Match(tuple(map(found.get, numbers)), tuple(rules.get(at, "default") for at in numbers), tuple(groups))


_Labels = Callable[[OptimizerParameter], Collection[str]]


def _in_tree(parameter: OptimizerParameter) -> Collection[str]:
    return parameter.names


def _in_tree_unwrapped(parameter: OptimizerParameter) -> Collection[str]:
    return {"/".join(map(unwrapped, name.split("/"))) for name in parameter.names}


def _given(parameter: OptimizerParameter) -> Collection[str]:
    return {unwrapped(parameter.own)} if parameter.own else ()


def _anywhere(parameter: OptimizerParameter) -> Collection[str]:
    """Return the names of a parameter within its module, as the optimizer would get them with it."""
    names = (*parameter.names, parameter.own) if parameter.own else parameter.names
    return {unwrapped(name.rpartition("/")[2]) for name in names}


_ROUNDS: tuple[_Labels, ...] = (_in_tree, _in_tree_unwrapped, _given, _anywhere)
_OF_THE_TREE = (_in_tree, _in_tree_unwrapped)


def _match_names(
    labels: _Labels,
    wanted: Sequence[OptimizerParameter],
    found: Mapping[int, Place],
    saved: Mapping[Place, OptimizerParameter],
) -> dict[int, Place]:
    """Return the places of saved parameters that a name identifies, for the parameters that are not found yet."""
    taken = {*found.values()}
    by_label: dict[str, set[Place]] = defaultdict(set)
    for place, parameter in saved.items():
        if place not in taken:
            for label in labels(parameter):
                by_label[label].add(place)
    choices: dict[int, set[Place]] = {}
    for at, parameter in enumerate(wanted):
        if at not in found:
            places = set().union(*(by_label.get(label, set()) for label in labels(parameter)))
            is_sure = labels in _OF_THE_TREE or not parameter.names
            choices[at] = places if is_sure else {place for place in places if not saved[place].names}
    # A name of several parameters identifies none.
    claims = Counter(place for places in choices.values() for place in places)
    return {at: min(places) for at, places in choices.items() if len(places) == 1 and claims[min(places)] == 1}


def _match_positions(
    wanted: Sequence[OptimizerParameter], found: Collection[int], saved: Sequence[OptimizerParameter], where: str
) -> dict[int, int]:
    """Return the position of the saved parameter for each parameter that no name and no missing name decides."""
    if found:
        # Some have names: parameters without names match in order, if both sides have equally many.
        nameless = [at for at, each in enumerate(wanted) if not each.has_name]
        others = [at for at, each in enumerate(saved) if not each.has_name]
        return dict(zip(nameless, others, strict=True)) if len(nameless) == len(others) else {}
    if any(each.has_name for each in wanted) and any(each.has_name for each in saved):
        return {}
    sizes, saved_sizes = (list(Counter(each.group for each in some).values()) for some in (wanted, saved))
    if sizes != saved_sizes:
        raise ShapeMismatchError(
            f"optimizer at {where!r}: its parameters and the saved ones have no names in common, so they "
            f"match by position; got groups of {sizes} parameters in the target, expected {saved_sizes}; restore it "
            "together with its module"
        )
    return {at: at for at in range(len(wanted))}
