"""The status page for people and the metrics page for Prometheus: plain HTTP, read only."""

from __future__ import annotations

import asyncio
import heapq
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice
from socketserver import TCPServer
from typing import Any, NamedTuple

from prometheus_client.exposition import choose_encoder

from dtckpt import errors
from dtckpt.coordination.feeds.state import Feed, Version
from dtckpt.coordination.feeds.transitions import told_uses
from dtckpt_server.metrics import Metrics
from dtckpt_server.rules import Rules
from dtckpt_server.state import Job
from dtckpt_server.status_html import STYLE, bar, squares
from dtckpt_server.tasks import FENCED, LEFT, LOST, REGISTERED, SUSPECT, Task

logger = logging.getLogger("dtckpt_server")

MAX_CONNECTIONS = 64
"""Beyond this the oldest is cut off. A client that asks and reads at once is done long before it is the oldest."""
RENDER_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
"""From the connection to the last byte of the page."""
MAX_PAGE_NBYTES = 1 << 20
MAX_JOBS_SHOWN, MAX_ROWS_SHOWN = 50, 50
MAX_READERS_SHOWN = 8
MAX_CELL_CHARS = 1000
_WORST_FIRST = (LOST, SUSPECT, FENCED, LEFT, REGISTERED)
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;margin:.5em 0}"
    "td,th{text-align:left;padding:.15em .8em;border-bottom:1px solid #8884}.bad{color:#c22;font-weight:bold}"
    f":root{{color-scheme:light dark}}{STYLE}"
)

Page = tuple[str, bytes]
"""Content type and content."""


def status_page(rules: Rules, now: float) -> str:
    """Return the state of all jobs as HTML: open barriers with who is missing, the tasks, worst first; then feeds."""
    return "".join(status_parts(rules, now))


def status_parts(rules: Rules, now: float) -> Iterator[str]:
    """Return the page in parts, one for each job and feed, that together are no longer than a page may be."""
    jobs = heapq.nsmallest(MAX_JOBS_SHOWN, rules.jobs.values(), key=lambda job: (-len(job.open), job.name))
    num_jobs, num_shown = len(rules.jobs), 0
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
        f"<title>dtckpt coordinator</title><style>{_STYLE}</style><h1>dtckpt coordinator</h1>\n"
        f"<p>incarnation {rules.incarnation:x}, {num_jobs} jobs, heartbeat timeout {rules.heartbeat_timeout_s:g} s\n"
    )
    yield head
    room = MAX_PAGE_NBYTES - 2 * len(head)
    for job in jobs:
        if rules.jobs.get(job.name) is not job:  # it ended while others were shown
            continue
        part = _job_html(rules, job, now)
        room -= len(part.encode("utf-8", "replace"))
        if room < 0:
            break
        num_shown += 1
        yield part
    yield _more(num_jobs, num_shown, "jobs")
    feeds = heapq.nsmallest(MAX_JOBS_SHOWN, rules.feeds.feeds.values(), key=lambda feed: feed.name)
    num_feeds, num_shown = len(rules.feeds.feeds), 0
    for feed in feeds:
        part = _feed_html(feed, now)
        room -= len(part.encode("utf-8", "replace"))
        if room < 0:
            break
        num_shown += 1
        yield part
    yield _more(num_feeds, num_shown, "feeds")


def _job_html(rules: Rules, job: Job, now: float) -> str:
    barriers = [
        (
            barrier.name,
            str(barrier.generation),
            f"{now - barrier.opened_at:.1f} s",
            _Bar(len(barrier.arrived), len(barrier.participants), ""),
            rules.waiting_for(barrier, now),
        )
        for barrier in islice(job.open.values(), MAX_ROWS_SHOWN)
    ]
    tasks = chain.from_iterable(job.tasks.by_state[state].values() for state in _WORST_FIRST)
    alive = f"{job.tasks.num_alive}/{job.num_clients} clients alive"
    return "\n".join(
        [
            f"<h2>{escape(job.name)}</h2><p>{alive}, attempt {job.attempt}",
            squares(job),
            _table(("barrier", "generation", "open for", "arrived", "missing"), barriers),
            _more(len(job.open), MAX_ROWS_SHOWN, "open barriers"),
            _table(
                ("task", "state", "heard", "phase", "step", "done", "unchanged for", "host"),
                [_task_row(task, now) for task in islice(tasks, MAX_ROWS_SHOWN)],
            ),
            _more(len(job.tasks), MAX_ROWS_SHOWN, "tasks"),
            "",
        ]
    )


def _feed_html(feed: Feed, now: float) -> str:
    versions = sorted(feed.versions.values(), key=lambda version: -version.number)
    header = ("version", "step", "state", "age", "parts", "bytes", "readers", "holders", "read by")
    ended = ", ".join(
        f"{reader}: {outcome} {number}" for reader, use in feed.latest.items() for number, outcome in told_uses(use)
    )
    return "\n".join(
        [
            f"<h2>feed {escape(feed.name)}</h2><p>published by {escape(feed.owner)}, attempt {feed.attempt}, keeps "
            f"{feed.keep}",
            _table(header, [_version_row(version, now) for version in islice(versions, MAX_ROWS_SHOWN)]),
            _more(len(versions), MAX_ROWS_SHOWN, "versions"),
            f"<p>ended last: {escape(ended[:MAX_CELL_CHARS])}" if ended else "",
            "",
        ]
    )


def _version_row(version: Version, now: float) -> Sequence[str | _Bar]:
    since = version.announced_at if version.readable_at is None else version.readable_at
    readers = [lease.reader for lease in islice(version.leases.values(), MAX_READERS_SHOWN)]
    return (
        str(version.number),
        f"{version.step}{' (goes back)' if version.is_rewound else ''}",
        version.state,
        f"{now - since:.1f} s",
        _Bar(len(version.parts), version.num_parts, ""),
        f"{version.nbytes:,}",
        str(len(version.leases)),
        str(len(version.holders)),
        errors.capped(readers, MAX_READERS_SHOWN, count=len(version.leases)),
    )


class _Bar(NamedTuple):
    """A cell with a bar, and the numbers beside it."""

    done: int
    total: int
    unit: str


def _task_row(task: Task, now: float) -> Sequence[str | _Bar]:
    progress = task.progress
    nbytes = _Bar(progress.bytes_done, progress.bytes_total, " bytes") if progress.bytes_total else ""
    heard, unchanged = f"{now - task.heard_at:.1f} s ago", f"{now - task.progressed_at:.0f} s"
    return str(task.number), task.state, heard, progress.phase, str(progress.step), nbytes, unchanged, task.host


def _table(header: Sequence[str], rows: Iterable[Sequence[str | _Bar]]) -> str:
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    heads = "".join(f"<th>{head}" for head in header)
    return f"<table><tr>{heads}</tr>\n{body}</table>" if body else ""


def _cell(text: str | _Bar) -> str:
    if isinstance(text, _Bar):
        return f"<td>{bar(text.done, text.total)}{text.done:,} / {text.total:,}{text.unit}"
    return f"<td{' class=bad' if text in ('SUSPECT', 'LOST', 'FENCED') else ''}>{escape(text[:MAX_CELL_CHARS])}"


def _more(count: int, limit: int, noun: str) -> str:
    return f" and {count - limit} more {noun}" if count > limit else ""


class Pages:
    """Serves ``/`` and ``/metrics`` from threads; the pages are rendered on the coordinator's event loop.

    So everything about one job is of one moment. The loop does its other work between any two jobs. If the loop is
    blocked, the answer is 503.

    Args:
        where: Host and port; port 0 takes any free one.
        rules: Returns the current rules.
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
            return rendering.result(RENDER_TIMEOUT_S)()
        finally:
            rendering.cancel()

    async def _render_status(self, accept: str) -> Callable[[], Page]:  # noqa: ARG002  as the other
        parts = []
        for part in status_parts(self._rules(), self._clock()):
            parts.append(part)
            await asyncio.sleep(0)
        return lambda: ("text/html; charset=utf-8", "".join(parts).encode("utf-8", "replace"))

    async def _render_metrics(self, accept: str) -> Callable[[], Page]:
        encode, content_type = choose_encoder(accept)
        snapshot = await self._metrics.snapshot()
        return lambda: (content_type, encode(snapshot))


class _HTTPServer(ThreadingHTTPServer):
    """A server of a bounded number of connections, each for a bounded time, however slowly its client writes or reads.

    A connection that is cut off ends its thread, unless that waits for the event loop; so threads are bounded apart.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, where: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self.pages = pages
        self._slots = threading.BoundedSemaphore(2 * MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # of connections, oldest first
        super().__init__(where, _StatusHandler)

    def server_bind(self) -> None:
        # Not HTTPServer's method, which asks DNS for a name that is not used.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._cut_off(max_kept=MAX_CONNECTIONS - 1)
        if self._slots.acquire(blocking=False):
            with self._lock:
                self._deadlines[request] = time.monotonic() + REQUEST_TIMEOUT_S
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Do the regular chores; `serve_forever` calls this twice a second, and after each connection."""
        self._cut_off(max_kept=MAX_CONNECTIONS)

    def _cut_off(self, max_kept: int) -> None:
        """Cut off connections that take too long, and the oldest if there are too many."""
        with self._lock:
            num_surplus = len(self._deadlines) - max_kept
            for number, (connection, deadline) in enumerate(list(self._deadlines.items())):
                if number < num_surplus or deadline < time.monotonic():
                    del self._deadlines[connection]
                    with suppress(OSError):  # the other side was quicker
                        connection.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  the base class's
        logger.debug("a page could not be sent", exc_info=True)


class _StatusHandler(BaseHTTPRequestHandler):
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
        """Log nothing: Prometheus asks every few seconds."""
