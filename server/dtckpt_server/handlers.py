"""Wrap gRPC handlers so that a request which cannot be decoded is refused with INVALID_ARGUMENT.

gRPC itself would answer it with UNKNOWN, and write a traceback to the log for each.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dtckpt import errors

Refuse = Callable[[str, BaseException, Any], Awaitable[None]]
"""Called with the name of the method, the error, and the call's context; ends the call."""


def add_handlers(add: Callable[[Any, Any], None], servicer: Any, server: grpc.aio.Server, refuse: Refuse) -> None:
    """Add a service to a server, with wrapped handlers.

    Args:
        add: The generated function that adds the service.
        servicer: The service.
        server: The server.
        refuse: Ends a call whose request cannot be decoded.
    """
    add(servicer, _Tolerant(server, refuse))


class _Tolerant:
    """Takes the place of a server while handlers are added to it, and wraps them."""

    def __init__(self, server: grpc.aio.Server, refuse: Refuse) -> None:
        self._server, self._refuse = server, refuse

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers([_Handlers(each, self._refuse) for each in handlers])

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        """Add nothing: these are the same handlers once more."""


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of a service, each wrapped when it is first called."""

    def __init__(self, inner: grpc.GenericRpcHandler, refuse: Refuse) -> None:
        self._inner, self._refuse = inner, refuse
        self._known: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method
        if name not in self._known:
            handler = self._inner.service(handler_call_details)
            if handler is None:  # not kept: a client could send more names than there is room for
                return None
            self._known[name] = _tolerant(name.rpartition("/")[2], handler, self._refuse)
        return self._known[name]


def _tolerant(name: str, handler: Any, refuse: Refuse) -> Any:
    """Return a handler that refuses requests which the given one cannot decode, and methods that it lacks."""

    def decode(request: bytes) -> Any:
        try:
            return handler.request_deserializer(request)
        except DecodeError:
            return None

    async def serve(request: Any, context: Any) -> Any:
        try:
            answer = behavior(_CheckedRequests(request) if handler.request_streaming else _check(request), context)
            if not inspect.isasyncgen(answer):
                return await answer
            async for each in answer:
                await context.write(each)
        except errors.ConfigError as error:
            await refuse(name, error, context)
        except NotImplementedError:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no {name} here")

    behavior, make = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }[handler.request_streaming, handler.response_streaming]
    return make(serve, decode, handler.response_serializer)


def _check(request: Any) -> Any:
    if request is None:
        raise errors.ConfigError("the request cannot be decoded; expected a message of the method's kind")
    return request


class _CheckedRequests:
    """Requests of a stream, each checked.

    A class, because a generator that is dropped early would leave gRPC's own generator open.
    """

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> _CheckedRequests:
        return self

    async def __anext__(self) -> Any:
        return _check(await anext(self._requests))
