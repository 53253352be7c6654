"""Keep `torch.compile` from tracing the code of this library.

Tracing would compile the code that plans, moves and wraps components, once per operator and layout. Instead, the graph
breaks, with a reason, when a compiled function uses a DTensor, and the operator runs as without compilation.

The program, PyTorch's dispatcher and autograd call this code. So this module keeps all functions of `dtckpt.dtensor`
from tracing, not only public functions.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from dtckpt.comm import torch_private

REASON = "dtckpt runs operators on DTensors itself; torch.compile compiles the code between them"

_FOLDER = str(Path(__file__).parent)

_F = TypeVar("_F", bound=Callable[..., Any])
_IS_TRACED = "_is_traced"
"""Attribute of functions that `traced` has marked."""

_UNTRACEABLE = (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    *("__int__", "__float__", "__index__", "__contains__"),
    *("register_hook", "register_post_accumulate_grad_hook", "split"),
    "backward",
)
"""Methods of tensors that the compiler fails to trace on unknown classes: by endless recursion, KeyError, a warning.

With `backward`, it would look at each of the functions that PyTorch calls between two operators.
"""


def own_untraceable_methods(tensor_class: type[torch.Tensor]) -> None:
    """Give a class separate functions for the methods that `torch.compile` would fail to trace.

    `keep_from_tracing` then has the graph break at them.
    """
    for name in _UNTRACEABLE:
        setattr(tensor_class, name, _function_of(getattr(torch.Tensor, name)))


def _function_of(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(tensor, *args, **kwargs)

    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return call


def traced(function: _F) -> _F:
    """Exempt a function from `keep_from_tracing`.

    Such a function replaces a function of PyTorch that is compiled for plain tensors. For DTensors it calls functions
    that are not traced.
    """
    setattr(function, _IS_TRACED, True)
    return function


def keep_from_tracing(members: Iterable[Any], *, with_callees: bool = True) -> None:
    """Have `torch.compile` skip functions: the graph breaks at a call, and the function runs as without compilation.

    ``torch.compiler.disable`` does the same, but imports the compiler and adds a wrapper that costs every call.

    Args:
        members: Functions of this package, and classes, which stand for all functions that they define. Other objects
            are left alone, such as the imports of a module.
        with_callees: Whether the functions that they call are not compiled either.
    """
    dynamo = torch_private.dynamo
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if with_callees else default)
    for function in _functions_of(members):
        code = _own_code_of(function)
        if code is None or hasattr(function, _IS_TRACED):
            continue
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
        for one in _with_inner(code):
            dynamo.set_code_exec_strategy(one, strategy)


def _functions_of(members: Iterable[Any]) -> Iterator[types.FunctionType]:
    for member in members:
        if isinstance(member, type):
            yield from _functions_of(one for one in vars(member).values() if not isinstance(one, type))
        elif isinstance(member, property):
            yield from _functions_of((member.fget, member.fset, member.fdel))
        elif isinstance(member, staticmethod | classmethod):
            yield from _functions_of((member.__func__,))
        elif isinstance(member, types.FunctionType):
            yield member


def _own_code_of(function: types.FunctionType) -> types.CodeType | None:
    """Return a function's code if it is in this package; for a context manager's wrapper, the inner function's code."""
    for one in (function, inspect.unwrap(function)):
        code: types.CodeType | None = getattr(one, "__code__", None)
        if code is not None and code.co_filename.startswith(_FOLDER):
            return code
    return None


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
