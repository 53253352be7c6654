"""Containers of a state tree beyond dict, list and tuple, as deque or dataclass: how to save and rebuild each.

The manifest holds such a container as ``{"type": [name, argument, node]}``. The name is from the table `CONTAINERS`,
never of a class. The argument helps to rebuild the container, as JSON. The node, of kind ``dict`` or ``list``, has the
items.

Named tuples and dataclasses have classes that only code could rebuild. So the manifest has the names of their fields,
and a restore fills the fields of its target by name. Without a target a restore returns stand-ins, also for tensors of
wrapper subclasses (`TensorParts`).

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


class ClientValues(dict[int, Any]):
    """The values of one piece of state that differs by client, such as a random state, by number of the client.

    A restore returns a `ClientValues` if it has no target, or if the target holds a plain value such as None. A save
    takes it as the values of all clients, so every client must pass the same. A client that knows only its own value
    passes a `dtckpt.PerClient`.

    Args:
        values: By number of the client, from 0, its value. Clients that passed no value are left out.
        num_clients: The number of clients of the save; default: of the values.

    Raises:
        TreeError: A key is no number of a client.

    >>> ClientValues({0: "a", 1: "b"})
    ClientValues({0: 'a', 1: 'b'}, num_clients=2)
    """

    __slots__ = ("num_clients",)

    def __init__(self, values: Mapping[int, Any], num_clients: int | None = None) -> None:
        num_clients = len(values) if num_clients is None else num_clients
        if type(num_clients) is not int:
            raise TreeError(f"the number of clients must be an int; got {num_clients!r}")
        for client in values:
            if type(client) is not int or not 0 <= client < num_clients:
                raise TreeError(f"values of clients need keys from 0 to {num_clients - 1}; got {client!r}")
        super().__init__(values)
        self.num_clients = num_clients

    def __repr__(self) -> str:
        return f"ClientValues({super().__repr__()}, num_clients={self.num_clients})"


def has_parts(value: object) -> bool:
    """Tell whether a value is a tensor of a subclass that PyTorch can flatten into inner tensors and rebuild."""
    if not all(hasattr(type(value), name) for name in ("__tensor_flatten__", "__tensor_unflatten__")):
        return False
    import torch  # here, because it takes seconds, and other values than tensors are recognised without it

    return isinstance(value, torch.Tensor)


class TensorParts(dict[str, Any]):
    """The parts of a tensor of a wrapper subclass, by name; a stand-in for the tensor without its class.

    Such a subclass, for example one of torchao's, holds no elements itself. PyTorch's `__tensor_flatten__` returns
    the names of its inner tensors and a context. A checkpoint stores the inner tensors, named ``tensor/inner``, and the
    context, which must be a tree of plain values.

    ``Subclass.__tensor_unflatten__(dict(parts), parts.context, parts.shape, stride)`` makes the tensor anew. A save
    treats the parts like the tensor.

    Args:
        parts: The inner tensors, by name.
        kind: Name of the subclass.
        shape: The shape of the tensor.
        context: The context that `__tensor_flatten__` returned beside the names.
    """

    __slots__ = ("context", "kind", "shape")

    def __init__(self, parts: Mapping[str, Any], kind: str, shape: tuple[int, ...], context: Any) -> None:
        if not (type(kind) is str and isinstance(shape, tuple) and all(type(name) is str for name in parts)):
            raise TreeError(f"parts of a tensor need names, a class name and a shape; got {[*parts, kind, shape]!r}")
        super().__init__(parts)
        self.kind = kind
        self.shape = shape
        self.context = context

    @classmethod
    def of(cls, value: Any) -> TensorParts:
        """Return the parts of a tensor that `has_parts`; `TensorParts` unchanged."""
        if isinstance(value, cls):
            return value
        names, context = value.__tensor_flatten__()
        return cls({name: getattr(value, name) for name in names}, type(value).__name__, value.shape, context)

    @property
    def facts(self) -> tuple[str, tuple[int, ...], Any]:
        """All but the tensors."""
        return self.kind, self.shape, self.context

    def __repr__(self) -> str:
        return f"TensorParts({super().__repr__()}, kind={self.kind!r}, shape={self.shape}, context={self.context!r})"


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
        has_tree_argument: Whether the argument is a tree of plain values instead; the manifest has the node of this
            tree.
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
