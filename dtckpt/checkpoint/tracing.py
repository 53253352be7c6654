"""OpenTelemetry spans, if its API is installed (extra ``otel``); nothing otherwise.

The program decides where spans go, by configuring a tracer provider or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

TRACER_NAME = "dtckpt"
_MAX_ERROR_CHARS = 500


@lru_cache(maxsize=1)
def _api() -> Any:
    """Return the module ``opentelemetry.trace``; None if it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def open_span(name: str, attributes: Mapping[str, Any], parent: Any = None) -> Any:
    """Open a span below ``parent``; by default below the current span of the caller's context."""
    api = _api()
    if api is None:
        return None
    context = None if parent is None else api.set_span_in_context(parent)
    return api.get_tracer(TRACER_NAME).start_span(name, context=context, attributes=attributes)


def close_span(span: Any, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
    """End a span, also in another thread than it was opened in, and record the error, if there is one."""
    if span is None:
        return
    span.set_attributes(attributes)
    if error is not None:
        span.record_exception(error)
        span.set_status(_api().StatusCode.ERROR, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])
    span.end()
