"""Plain values of a state tree, such as numbers and strings, and their JSON form.

A plain value holds no tensor. Rebuilding it takes only types of Python and NumPy.

``{"value": JSON}`` is None, a bool, an int, a finite float or a str. The other kinds are ``{"float": text}`` for the
floats that JSON lacks, ``{"bytes": base64}``, ``{"complex": [text, text]}``, ``{"range": [start, stop, step]}``,
``{"torch.Size": [int, …]}``, ``{"torch.dtype": name}``, ``{"torch.device": text}``, ``{"numpy": [dtype, node]}`` for
numpy's scalars, ``{"PosixPath": text}`` and so on for the classes of paths, ``{"date": text}``,
``{"datetime": [text, fold]}``, ``{"timedelta": [days, seconds, microseconds]}``, ``{"BytesIO": [base64, position]}``,
``{"enum": [class, member]}``, and ``{"set": [node, …]}`` and
``{"frozenset": [node, …]}``, in the order of the nodes' JSON, so that all clients have the same JSON to compare.

A checkpoint runs no code, so it holds only the names of an enum's class and member. A restore looks up the member by
name, in the class of the target's member. Without a target the restore returns an `EnumMember` with the two names.
"""

from __future__ import annotations

import base64
import datetime
import enum
import functools
import io
import json
import math
import operator
import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, TreeError, capped
from dtckpt.format.hash_work import validate_hashes


@dataclass(frozen=True, slots=True)
class EnumMember:
    """A saved member of an enum whose class is not known. A save treats it as the member itself.

    Args:
        kind: Name of the class.
        name: Name of the member; of a combination of flags their names, joined by ``|``.
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if not (type(self.kind) is type(self.name) is str):
            raise TypeError(f"expected two names; got {self.kind!r} and {self.name!r}")

    def of(self, members: type[enum.Enum], where: str) -> enum.Enum:
        """Return the member of an enum by its name.

        Args:
            members: The class of the enum.
            where: Its path in the tree, for messages.

        Raises:
            TreeError: The enum has no such member.
        """
        try:
            return _by_name(members, self.name)
        except KeyError:
            raise TreeError(
                f"the checkpoint has {self.kind}.{self.name} at {where!r}; {members.__name__} of the target has no "
                f"such member, it has {capped(members.__members__)}"
            ) from None


def _by_name(members: type[enum.Enum], name: str) -> enum.Enum:
    if issubclass(members, enum.Flag):
        return functools.reduce(operator.or_, (members[part] for part in name.split("|") if part), members(0))
    return members[name]


def encode_member(member: enum.Enum, where: str) -> list[str]:
    """Return the names of a member's class and of the member.

    Raises:
        TreeError: The member cannot be found by its name, because it has flags without names.
    """
    # The flag without any bit has no name.
    name = member.name or ""
    try:
        is_found = _by_name(type(member), name) is member
    except KeyError:
        is_found = False
    if not is_found:
        raise TreeError(f"cannot save {member!r} at {where!r}: it has no name; pass its value")
    return [type(member).__name__, name]


def decode_member(content: list[str]) -> EnumMember:
    """Return the `EnumMember` of the names that `encode_member` returned."""
    return EnumMember(*content)


Node = dict[str, Any]

SCALARS = (
    "None, bool, int, float, complex, str, bytes, range, torch.Size, torch.dtype, torch.device, a scalar of numpy, a "
    "path, a date, a time span or a BytesIO"
)
MAX_INT_BITS = 8192
"""Largest int; Python's own parser refuses longer decimal numbers."""

NUMPY_TYPES = {
    name: np.dtype(name).type
    for name in (
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def is_plain(value: Any) -> bool:
    """Whether a value is plain.

    Its class must be one of the table: a subclass would come back as its base. Members of enums are plain, too.
    """
    return _encoder_of(type(value)) is not None or isinstance(value, enum.Enum)


def encode_value(value: Any, where: str) -> Node:
    """Return the node of a plain value.

    Args:
        value: The value.
        where: Its path in the tree, for messages.

    Raises:
        TreeError: The value is an integer of too many digits, or a set with other than plain values. Or it is a date
            whose time zone has rules or a name, or a member of an enum that cannot be found by its name.
    """
    return (_encoder_of(type(value)) or _encode_enum)(value, where)


def encode_hashable(value: Any, where: str) -> Node:
    """Return the node of a key, or of an element of a set: a plain value except sets and enums, or tuples of these.

    Args:
        value: The key or element.
        where: The path of the dict or set in the tree, for messages.

    Raises:
        TreeError: The value is of another kind.
    """
    if type(value) is tuple:
        return {"tuple": [encode_hashable(item, where) for item in value]}
    # No enums: without the class of a member, the key would be a stand-in, and a lookup of the member would fail.
    # No streams: two streams of the same bytes are not equal, so a lookup would fail.
    if _encoder_of(type(value)) is None or type(value) in (frozenset, EnumMember, io.BytesIO):
        cure = "pass its name" if isinstance(value, enum.Enum) else f"expected {SCALARS}, or a tuple of those"
        raise TreeError(f"cannot save {type(value).__name__} as a key or in a set at {where!r}; {cure}")
    return encode_value(value, where)


def _encode_json(value: str | bool | None, where: str) -> Node:  # noqa: ARG001  (as all encoders)  (all encoders are called alike)
    return {"value": value}


def _encode_int(value: int, where: str) -> Node:
    if value.bit_length() > MAX_INT_BITS:
        raise TreeError(
            f"int at {where!r} is too large; got {value.bit_length()} bits, expected at most {MAX_INT_BITS}"
        )
    return {"value": value}


def _encode_float(value: float, where: str) -> Node:  # noqa: ARG001  (as all encoders)
    return {"value": value} if math.isfinite(value) else {"float": repr(value)}


def _encode_scalar(value: np.generic, where: str) -> Node:
    return {"numpy": [value.dtype.name, encode_value(value.item(), where)]}


def _encode_set(value: set[Any] | frozenset[Any], where: str) -> Node:
    return {type(value).__name__: sorted((encode_hashable(item, where) for item in value), key=json.dumps)}


def _encode_datetime(value: datetime.datetime, where: str) -> Node:
    content = [value.isoformat(), value.fold]
    # A text has the offset of a time zone only, not its rules or its name.
    if repr(_decode_datetime(content)) != repr(value):
        raise TreeError(
            f"cannot save the time zone {value.tzinfo!r} at {where!r}; pass astimezone(datetime.timezone.utc)"
        )
    return {"datetime": content}


def _decode_datetime(content: Any) -> datetime.datetime:
    text, fold = content
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


def _encode_enum(value: enum.Enum, where: str) -> Node:
    return {"enum": encode_member(value, where)}


_ENCODERS: dict[type, Callable[[Any, str], Node]] = {
    **dict.fromkeys((type(None), bool, str), _encode_json),
    int: _encode_int,
    float: _encode_float,
    bytes: lambda value, _: {"bytes": base64.b64encode(value).decode()},
    complex: lambda value, _: {"complex": [repr(value.real), repr(value.imag)]},
    range: lambda value, where: {
        "range": [encode_value(bound, where)["value"] for bound in (value.start, value.stop, value.step)]
    },
    **dict.fromkeys(_PATHS, lambda value, _: {type(value).__name__: str(value)}),
    datetime.date: lambda value, _: {"date": value.isoformat()},
    datetime.datetime: _encode_datetime,
    datetime.timedelta: lambda value, _: {"timedelta": [value.days, value.seconds, value.microseconds]},
    io.BytesIO: lambda value, _: {"BytesIO": [base64.b64encode(value.getbuffer()).decode(), value.tell()]},
    EnumMember: lambda value, _: {"enum": [value.kind, value.name]},
    **dict.fromkeys(NUMPY_TYPES.values(), _encode_scalar),
    set: _encode_set,
    frozenset: _encode_set,
}
# By name: PyTorch takes seconds to import, and a process without PyTorch has no such values.
_TORCH_ENCODERS: dict[str, Callable[[Any, str], Node]] = {
    "Size": lambda value, _: {"torch.Size": list(value)},
    "dtype": lambda value, _: {"torch.dtype": str(value).removeprefix("torch.")},
    "device": lambda value, _: {"torch.device": str(value)},
}


def _encoder_of(kind: type) -> Callable[[Any, str], Node] | None:
    """Return the encoder of a class; None if its instances are not plain, or members of an enum."""
    encode = _ENCODERS.get(kind)
    if encode is None and kind.__module__ == "torch" and getattr(sys.modules.get("torch"), kind.__name__, None) is kind:
        return _TORCH_ENCODERS.get(kind.__name__)
    return encode


def decode_value(kind: str, content: Any) -> Any:
    """Return the plain value of a node ``{kind: content}``.

    Raises:
        CheckpointCorruptError: The node is malformed.
        KeyError: There is no such kind.
    """
    decode = _DECODERS[kind]
    try:
        return decode(content)
    except CheckpointVersionError:
        raise
    # A RuntimeError is PyTorch's class for the text of a device that it cannot parse.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"the manifest's state tree holds a malformed {kind}: {error}") from error


def peek_value(kind: str, content: Any) -> Any:
    """Return a plain value like `decode_value`, but a stand-in for a value of PyTorch if PyTorch is not loaded.

    So a process that only looks at a checkpoint need not load PyTorch. Raises: as `decode_value`.
    """
    if kind not in _TORCH_STAND_INS or "torch" in sys.modules:
        return decode_value(kind, content)
    try:
        return _TORCH_STAND_INS[kind](content)
    except (TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"the manifest's state tree holds a malformed {kind}: {error}") from error


class _Size(tuple[int, ...]):
    """Stands for a `torch.Size`."""

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class _Name(str):
    """Stands for a `torch.dtype` or `torch.device`: its expression."""

    __slots__ = ()
    __repr__ = str.__str__


def decode_hashable(node: Any) -> Any:
    """Return the key or element of a node that `encode_hashable` made."""
    ((kind, content),) = node.items()
    if kind in ("enum", "frozenset", "BytesIO"):
        raise ValueError(f"{kind} is no key, nor in a set")
    return tuple(map(decode_hashable, content)) if kind == "tuple" else decode_value(kind, content)


def _decode_items(nodes: Any) -> list[Any]:
    """Return the items of a set."""
    items = list(map(decode_hashable, nodes))
    validate_hashes(items)
    return items


def _decode_json(content: Any) -> Any:
    if type(content) not in (type(None), bool, int, float, str):
        raise TypeError("expected null, a boolean, a number or a string")
    if type(content) is int and content.bit_length() > MAX_INT_BITS:
        raise ValueError(f"got an int of {content.bit_length()} bits, expected at most {MAX_INT_BITS}")
    return content


def _decode_text(content: Any) -> str:
    if type(content) is not str:
        raise TypeError("expected a string")
    return content


def _decode_timedelta(content: Any) -> datetime.timedelta:
    days, seconds, microseconds = map(operator.index, content)
    return datetime.timedelta(days, seconds, microseconds)


def _decode_size(content: Any) -> Any:
    import torch  # here, because it takes seconds, and most checkpoints have no such value

    return torch.Size(content)


def _decode_device(content: Any) -> Any:
    import torch  # here, as above

    return torch.device(_decode_text(content))


def _decode_stream(content: Any) -> io.BytesIO:
    text, position = content
    stream = io.BytesIO(base64.b64decode(text, validate=True))
    stream.seek(operator.index(position))
    return stream


def _decode_dtype(content: Any) -> Any:
    import torch  # here, as above

    name = _decode_text(content)
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise CheckpointVersionError(
            f"the manifest's state tree holds torch.{name[:40]}, which PyTorch {torch.__version__} does not have; "
            "upgrade PyTorch"
        )
    return dtype


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "value": _decode_json,
    "float": lambda text: float(text.strip()),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*(float(text.strip()) for text in parts)),
    "range": lambda bounds: range(*map(_decode_json, bounds)),
    "torch.Size": _decode_size,
    "torch.dtype": _decode_dtype,
    "torch.device": _decode_device,
    **{kind.__name__: kind for kind in _PATHS},
    "date": datetime.date.fromisoformat,
    "datetime": _decode_datetime,
    "timedelta": _decode_timedelta,
    "BytesIO": _decode_stream,
    "enum": decode_member,
    "numpy": lambda pair: NUMPY_TYPES[pair[0]](decode_hashable(pair[1])),
    "set": lambda items: set(_decode_items(items)),
    "frozenset": lambda items: frozenset(_decode_items(items)),
}
_TORCH_STAND_INS: Mapping[str, Callable[[Any], Any]] = {
    "torch.Size": lambda sizes: _Size(map(operator.index, sizes)),
    "torch.dtype": lambda name: _Name(f"torch.{_decode_text(name)}"),
    "torch.device": lambda text: _Name(f"device({_decode_text(text)!r})"),
}


def refusal(value: Any, where: str, verb: str = "save") -> TreeError:
    """Return the error for an object that a tree cannot hold, with advice for common objects.

    Args:
        value: The object.
        where: Its path in the tree.
        verb: The refused action, for the message.
    """
    plain = next((base for base in (str, bytes, bool, int, float, complex) if isinstance(value, base)), None)
    container = next((base for base in (dict, list, tuple, set, frozenset) if isinstance(value, base)), None)
    if isinstance(value, np.ndarray):
        cure = "its class would be lost; pass numpy.asarray(…) of it"
    elif isinstance(value, np.generic):
        cure = "pass its item()"
    elif plain or container or isinstance(value, Mapping):
        base = plain or container or dict
        cure = f"its class would be lost; pass {base.__name__}(…) of it, or give the class a state_dict()"
    else:
        cure = (
            f"expected a tensor, an array of numpy, a plain value ({SCALARS}, a set, a member of an enum), a container "
            "(dict, list, tuple, deque, SimpleNamespace and the like, a named tuple, a dataclass), or an object with "
            "state_dict() and load_state_dict()"
        )
    return TreeError(f"cannot {verb} {type(value).__name__} at {where!r}: {cure}")
