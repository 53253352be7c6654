"""Containers of a state tree beyond dict, list and tuple, as deque or dataclass: how to save and rebuild each.

The manifest holds such a container as ``{"type": [name, argument, node]}``: a name of the table `CONTAINERS`, never of
a class; one more argument that rebuilds it, as JSON; and its items as a node of kind ``dict`` or ``list``.

Named tuples and dataclasses have classes of their own, which only code could rebuild. So the manifest has the names of
their fields, and a restore fills the fields of its target by name. Without a target they come back as a stand-in. So do
tensors of subclasses that are made of other tensors (`dtckpt.format.tensor_parts`).

A `dtckpt.PerClient` is saved as a `ClientValues`.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import operator
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from dtckpt.errors import TreeError
from dtckpt.format.client_values import ClientValues
from dtckpt.format.tensor_parts import TensorParts, has_parts

_FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}


class Container(NamedTuple):
    """One kind of container.

    Args:
        base: The type that holds its items: a dict or a list.
        make: Rebuilds it; called with its argument and its items.
        items: Returns its items; called with the container.
        argument: Returns its argument, as JSON; called with the container and its path in the tree.
        has_tree_argument: Whether the argument is a tree of plain values instead, of which the manifest has the node.
    """

    base: type[dict[Any, Any]] | type[list[Any]]
    make: Callable[[Any, Any], Any]
    items: Callable[[Any], Any] = lambda container: container
    argument: Callable[[Any, str], Any] = lambda _container, _where: None
    has_tree_argument: bool = False


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a named tuple, a dataclass or a namespace, by name."""
    if isinstance(value, tuple):
        return dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, SimpleNamespace):
        return vars(value)
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _factory_name(container: defaultdict[Any, Any], where: str) -> str | None:
    factory = container.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise TreeError(
            f"cannot save the defaultdict at {where!r}: only code could make its factory {factory!r} anew; expected "
            f"None, {', '.join(_FACTORIES)}; pass dict(…) of it"
        )
    return name


def _make_defaultdict(factory: str | None, items: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(None if factory is None else _FACTORIES[factory], items)


def _make_deque(maxlen: int | None, items: list[Any]) -> deque[Any]:
    if maxlen is not None and maxlen < len(items):
        raise ValueError(f"a deque of at most {maxlen} items cannot hold {len(items)}")
    return deque(items, maxlen)


@lru_cache(maxsize=256)
def _stand_in(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class of named tuples. Names that are no identifiers are replaced, because Python makes code of them."""
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return namedtuple(name if is_name else "namedtuple", fields, rename=True)


CONTAINERS: dict[str, Container] = {
    "OrderedDict": Container(dict, lambda _, items: OrderedDict(items)),
    "Counter": Container(dict, lambda _, items: Counter(items)),
    "defaultdict": Container(dict, _make_defaultdict, argument=_factory_name),
    "mappingproxy": Container(dict, lambda _, items: MappingProxyType(items)),
    "deque": Container(list, _make_deque, argument=lambda container, _: container.maxlen),
    "SimpleNamespace": Container(dict, lambda _, items: SimpleNamespace(**items), fields_of),
    "namedtuple": Container(
        dict,
        lambda name, items: _stand_in(name, tuple(items))(*items.values()),
        fields_of,
        lambda container, _: type(container).__name__,
    ),
    "dataclass": Container(
        dict, lambda _, items: SimpleNamespace(**items), fields_of, lambda container, _: type(container).__name__
    ),
    "PerClient": Container(
        dict,
        lambda num_clients, items: ClientValues(items, operator.index(num_clients)),
        argument=lambda values, _: values.num_clients,
    ),
    "TensorParts": Container(
        dict,
        lambda facts, items: TensorParts(items, *facts),
        TensorParts.of,
        lambda tensor, _: TensorParts.of(tensor).facts,
        has_tree_argument=True,
    ),
}
_NAMES: Mapping[type, str] = {
    **{kind: kind.__name__ for kind in (OrderedDict, Counter, defaultdict, MappingProxyType, deque, SimpleNamespace)},
    ClientValues: "PerClient",
    TensorParts: "TensorParts",
}
_BUILTIN = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)


def name_of(value: Any) -> str | None:
    """Return the name in `CONTAINERS` of a container's kind; None for other objects."""
    if (name := _NAMES.get(type(value))) is not None:
        return name
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make"):
        return "namedtuple"
    if has_parts(value):
        return "TensorParts"
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, *_BUILTIN)):
        return "dataclass"
    return None
