"""Keep `torch.compile` from tracing the code of this library.

Tracing it would compile the code that plans, moves and wraps components, once per operator and layout. Instead, the
graph breaks where a compiled function uses a DTensor, with a reason, and the operator runs as without compilation.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

REASON = "dtckpt runs operators on DTensors itself; torch.compile compiles what is between them"


def keep_from_tracing(functions: Iterable[Any]) -> None:
    """Have `torch.compile` skip functions, and all that they call.

    ``torch.compiler.disable`` does the same, but imports the compiler and adds a wrapper that costs every call.

    Args:
        functions: Functions, and classes, which stand for all functions that they define.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for function in _functions_of(functions):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def _functions_of(members: Iterable[Any]) -> Iterator[types.FunctionType]:
    for member in members:
        if isinstance(member, type):
            yield from _functions_of(vars(member).values())
        elif isinstance(member, property):
            yield from _functions_of((member.fget, member.fset, member.fdel))
        elif isinstance(member, staticmethod | classmethod):
            yield from _functions_of((member.__func__,))
        elif isinstance(member, types.FunctionType):
            yield member
