"""Make the plain values and the arrays of numpy that a pickle describes.

`dtckpt.checkpoint.foreign.pickle_names` has the names that may make a value. The functions here make the plain values
of `dtckpt.format.plain_values`, and nothing else. Their arguments are plain values too, made first.
"""

from __future__ import annotations

import datetime
import io
import pathlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dtckpt.checkpoint.foreign.pickle_names import ARRAYS, NDARRAY, TORCH_DTYPE, VALUES
from dtckpt.checkpoint.foreign.pickle_syntax import (
    NODE_NBYTES,
    STEP_NBYTES,
    Global,
    Pairs,
    Persistent,
    PickledCall,
    ReadBudget,
)
from dtckpt.errors import CheckpointVersionError, TreeError
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.plain_values import NUMPY_TYPES, decode_value

MAX_DEPTH = 16
"""Deepest nesting of a plain value, as of tuples in a set."""

Maker = Callable[[Sequence[Any], Any], Any]
"""Makes a value of the arguments of a call and the state of its result. A set's items are its last argument."""


def plain_value(value: Any, where: str, budget: ReadBudget, depth: int = 0) -> Any:
    """Return the plain value that a pickle's value stands for, or a list or tuple of such.

    Args:
        value: The value, as `dtckpt.checkpoint.foreign.pickle_syntax.parse_pickle` returns it.
        where: Its path, for messages.
        budget: Bounds the bytes of the objects made.
        depth: The level of the value.

    Raises:
        TreeError: The table of names lacks the name of the value.
        CheckpointCorruptError: The value makes more than the budget has.
    """
    kind = type(value)
    if kind in _ATOMS:
        if kind in (str, bytes):
            budget.take(len(value))
        return value
    budget.take(NODE_NBYTES)
    if depth > MAX_DEPTH:
        raise TreeError(f"the value at {where[:200]!r} is deeper than {MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        budget.take(STEP_NBYTES * len(value))
        return kind(plain_value(item, where, budget, depth + 1) for item in value)
    if kind is Global:
        return _constant(value, where)
    if kind is not PickledCall or value.name not in VALUES:
        raise refusal(value, where)
    return _made(_MAKERS[VALUES[value.name]], value, where, budget, depth)


def read_array(call: PickledCall, where: str, budget: ReadBudget) -> np.ndarray[Any, Any]:
    """Return the array of numpy that a call, one of `ARRAYS`, would make. Args and Raises: as `plain_value`."""
    array = _made(_ARRAY_MAKERS[ARRAYS[call.name]], call, where, budget, 0)
    if not isinstance(array, np.ndarray):
        raise refusal(call, where, "it has no elements")
    return array


def _made(make: Maker, call: PickledCall, where: str, budget: ReadBudget, depth: int) -> Any:
    arguments = [plain_value(argument, where, budget, depth + 1) for argument in call.arguments]
    state = plain_value(_without_empty_attributes(call.state), where, budget, depth + 1)
    if call.keywords is not None or call.pairs:
        raise refusal(call, where)
    try:
        if call.items:
            arguments.append(plain_value(call.items, where, budget, depth + 1))
        return make(arguments, state)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise refusal(call, where, f"it is malformed: {error}") from error


def _without_empty_attributes(state: Any) -> Any:
    """Return a state without the empty ``__dict__`` that an object has once its attributes were looked up."""
    has_empty = type(state) is tuple and state and type(state[-1]) is Pairs and not state[-1]
    return (*state[:-1], None) if has_empty else state


def _constant(constant: Global, where: str) -> Any:
    if constant.name == NDARRAY:
        return np.ndarray
    if (dtype := TORCH_DTYPE.fullmatch(constant.name)) is not None:
        with suppress(CheckpointVersionError):
            return decode_value("torch.dtype", dtype[1])
    raise refusal(constant, where)


def refusal(value: Any, where: str, reason: str = "") -> TreeError:
    """Return the error for a value of a pickle that cannot be read, with a cure.

    Args:
        value: The value.
        where: Its path.
        reason: Why, if not for its class.
    """
    named = value.function if type(value) is PickledCall else value
    name = named.name if type(named) is Global else ""
    if not name:
        kinds = {Pairs: "a dict", Persistent: "an object outside the pickle"}
        name = kinds.get(type(value), f"a {type(value).__name__}")
    return TreeError(
        f"cannot read {name[:200]} at {where[:200]!r}: {reason[:200] or 'only code could make it, and none is run'}; "
        "load it with PyTorch, if you trust it, and save plain values in its place"
    )


def _hashed(make: Maker) -> Maker:
    """Return the maker of a set whose items are quick to hash."""

    def checked(arguments: Sequence[Any], state: Any) -> Any:
        for items in arguments:
            validate_hashes(items)
        return make(arguments, state)

    return checked


def _decode_bytes(arguments: Sequence[Any], _: Any) -> bytes:
    """Return the bytes that protocol 2 has as text."""
    text, encoding = arguments
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"encoding {encoding!r}")
    return str.encode(text, "latin-1")


def _stream(arguments: Sequence[Any], state: Any) -> io.BytesIO:
    data, position, attributes = state
    if arguments or attributes:
        raise ValueError("it has attributes")
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _numpy_dtype(arguments: Sequence[Any], state: Any) -> np.dtype[Any]:
    order = state[1] if state else "|"
    if order not in ("<", "|", "="):
        raise ValueError("its elements are big-endian")
    if arguments[0] not in _NUMPY_DTYPES:
        raise TypeError(f"its dtype is {arguments[0]!r}, expected one of {', '.join(_NUMPY_DTYPES)}")
    return _NUMPY_DTYPES[arguments[0]]


def _numpy_scalar(arguments: Sequence[Any], _: Any) -> np.generic:
    dtype, data = arguments
    (scalar,) = _elements(data, dtype)
    make: type[np.generic] = NUMPY_TYPES[dtype.name]
    return make(scalar)


def _numpy_array(_: Sequence[Any], state: Any) -> np.ndarray[Any, Any]:
    _version, shape, dtype, is_fortran, data = state
    return _elements(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _numpy_array_of_buffer(arguments: Sequence[Any], _: Any) -> np.ndarray[Any, Any]:
    data, dtype, shape, order = arguments
    return _elements(data, dtype).reshape(shape, order=order)


def _elements(data: bytes, dtype: Any) -> np.ndarray[Any, Any]:
    # Not a text: numpy would parse it, and it may be long.
    if not isinstance(dtype, np.dtype):
        raise TypeError("its dtype is none of numpy")
    return np.frombuffer(data, dtype)


def _torch_device(arguments: Sequence[Any], _: Any) -> Any:
    kind, *index = arguments
    return decode_value("torch.device", ":".join([kind, *map(str, index)]))


def _of(function: Callable[..., Any]) -> Maker:
    def make(arguments: Sequence[Any], state: Any) -> Any:
        if state is not None:
            raise ValueError("it has a state")
        return function(*arguments)

    return make


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_NUMPY_DTYPES = {np.dtype(kind).str[1:]: np.dtype(kind) for kind in NUMPY_TYPES.values()}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)

_MAKERS: Mapping[str, Maker] = {
    "set": _hashed(_of(set)),
    "frozenset": _hashed(_of(frozenset)),
    "complex": _of(complex),
    "range": _of(range),
    # Only of bytes or of nothing: bytes(n) would take n bytes of memory.
    "bytes": lambda arguments, _: b"".join(arguments),
    "bytearray": lambda arguments, _: bytearray().join(arguments),
    "encode": _decode_bytes,
    # Made by functions that load PyTorch only then.
    "torch.Size": _of(partial(decode_value, "torch.Size")),
    "torch.device": _torch_device,
    **{kind.__name__: _of(kind) for kind in _PATHS},
    "date": _of(datetime.date),
    "datetime": _of(datetime.datetime),
    "timedelta": _of(datetime.timedelta),
    "timezone": _of(datetime.timezone),
    "dtype": _numpy_dtype,
    "BytesIO": _stream,
    "scalar": _numpy_scalar,
}
"""By kind in `VALUES`."""
_ARRAY_MAKERS: Mapping[str, Maker] = {"array": _numpy_array, "array of a buffer": _numpy_array_of_buffer}
"""By kind in `ARRAYS`."""
