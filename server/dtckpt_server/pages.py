"""Pages for people and Prometheus: plain HTTP, read only."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from socketserver import TCPServer
from typing import Any

from prometheus_client.exposition import choose_encoder

from dtckpt_server.metrics import Metrics
from dtckpt_server.rules import ALIVE, REGISTERED, Job, Rules, Task

logger = logging.getLogger("dtckpt_server")

MAX_CONNECTIONS = 16
RENDER_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
MAX_JOBS_SHOWN, MAX_ROWS_SHOWN = 50, 50
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;margin:.5em 0}"
    "td,th{text-align:left;padding:.15em .8em;border-bottom:1px solid #8884}.bad{color:#c22;font-weight:bold}"
    ":root{color-scheme:light dark}"
)

Page = tuple[str, bytes]
"""Content type and content."""


def status_page(rules: Rules, now: float) -> str:
    """Return the state of all jobs as HTML: open barriers with who is missing, then the tasks, worst first."""
    jobs = sorted(rules.jobs.values(), key=lambda job: (-len(job.open), job.name))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>",
        f"<title>dtckpt coordinator</title><style>{_STYLE}</style><h1>dtckpt coordinator</h1>",
        f"<p>incarnation {rules.incarnation:x}, {len(jobs)} jobs, heartbeat timeout {rules.heartbeat_timeout_s:g} s",
        *(_job_html(rules, job, now) for job in jobs[:MAX_JOBS_SHOWN]),
        _more(len(jobs), MAX_JOBS_SHOWN, "jobs"),
    ]
    return "\n".join(parts)


def _job_html(rules: Rules, job: Job, now: float) -> str:
    alive = sum(task.state in ALIVE for task in job.tasks.values())
    barriers = [
        (
            barrier.name,
            str(barrier.generation),
            f"{now - barrier.opened_at:.1f} s",
            f"{len(barrier.arrived)}/{len(barrier.participants)}",
            rules.waiting_text(barrier, now),
        )
        for barrier in islice(job.open.values(), MAX_ROWS_SHOWN)
    ]
    tasks = sorted(job.tasks.values(), key=lambda task: (task.state == REGISTERED, task.heard_at))
    return "\n".join(
        [
            f"<h2>{escape(job.name)}</h2><p>{alive}/{job.num_clients} clients alive, attempt {job.attempt}",
            _table(("barrier", "generation", "open for", "arrived", "missing"), barriers),
            _more(len(job.open), MAX_ROWS_SHOWN, "open barriers"),
            _table(
                ("task", "state", "heard", "phase", "step", "bytes", "unchanged for", "host"),
                [_task_row(task, now) for task in tasks[:MAX_ROWS_SHOWN]],
            ),
            _more(len(tasks), MAX_ROWS_SHOWN, "tasks"),
        ]
    )


def _task_row(task: Task, now: float) -> Sequence[str]:
    progress = task.progress
    nbytes = f"{progress.bytes_done:,} / {progress.bytes_total:,}" if progress.bytes_total else ""
    heard, unchanged = f"{now - task.heard_at:.1f} s ago", f"{now - task.progressed_at:.0f} s"
    return str(task.number), task.state, heard, progress.phase, str(progress.step), nbytes, unchanged, task.host


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    heads = "".join(f"<th>{head}" for head in header)
    return f"<table><tr>{heads}</tr>\n{body}</table>" if body else ""


def _cell(text: str) -> str:
    return f"<td{' class=bad' if text in ('SUSPECT', 'LOST', 'FENCED') else ''}>{escape(text)}"


def _more(count: int, limit: int, noun: str) -> str:
    return f" and {count - limit} more {noun}" if count > limit else ""


class Pages:
    """Serves ``/`` and ``/metrics`` from threads; what they show is rendered on the coordinator's event loop.

    So a page is never a mixture of two states, and a loop that is blocked is answered with 503.

    Args:
        where: Host and port; port 0 takes any free one.
        rules: Returns the rules as they are.
        loop: The coordinator's.
        clock: Monotonic seconds, as the rules are given.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        where: tuple[str, int],
        rules: Callable[[], Rules],
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._rules, self._metrics, self._loop, self._clock = rules, metrics, loop, clock
        try:
            self._server = _HTTPServer(where, self)
        except OSError as error:
            raise OSError(f"cannot listen on {where[0]}:{where[1]}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="dtckpt-pages")
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self, path: str, accept: str) -> Page | None:
        """Return a page, or None if there is none at the path. For threads other than the loop's.

        Raises:
            TimeoutError: The event loop did not come to it.
        """
        render = {"/": self._render_status, "/metrics": self._render_metrics}.get(path.partition("?")[0])
        if render is None:
            return None
        rendering = asyncio.run_coroutine_threadsafe(render(accept), self._loop)
        try:
            return rendering.result(RENDER_TIMEOUT_S)
        finally:
            rendering.cancel()

    async def _render_status(self, accept: str) -> Page:  # noqa: ARG002  as the other
        return "text/html; charset=utf-8", status_page(self._rules(), self._clock()).encode("utf-8", "replace")

    async def _render_metrics(self, accept: str) -> Page:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._metrics.registry)


class _HTTPServer(ThreadingHTTPServer):
    """A server of a bounded number of threads."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, where: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self.pages = pages
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks DNS for a name that nobody uses.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  the base class's
        logger.debug("a page could not be sent", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; everything else is refused by the base class."""

    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "dtckpt-coordinator", ""
    server: _HTTPServer

    def do_GET(self) -> None:
        try:
            page = self.server.pages.page(self.path, self.headers.get("Accept", ""))
        except TimeoutError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the event loop is blocked")
            return
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", page[0])
        self.send_header("Content-Length", str(len(page[1])))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(page[1])

    def log_message(self, *_: Any) -> None:
        """Say nothing: someone asks every few seconds."""
