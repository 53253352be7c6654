"""Parts of the status page that are looked at, not read: a square for each client, and bars. Plain HTML, no scripts."""

from __future__ import annotations

from dtckpt_server.state import Job
from dtckpt_server.tasks import FENCED, LEFT, LOST, REGISTERED, SUSPECT

MAX_SQUARES = 512
"""Of more clients, a square stands for a block of them, and shows the worst."""
MAX_CLIENTS = 16_384
"""Jobs of more clients have no squares: a client only claims how many there are."""
_ABSENT = ""
_WORST_FIRST = (LOST, SUSPECT, FENCED, _ABSENT, LEFT, REGISTERED)
_CLASSES = {REGISTERED: "r", SUSPECT: "s", LOST: "l", FENCED: "f", LEFT: "e", _ABSENT: "n"}
_SIGNS = {REGISTERED: "", SUSPECT: "?", LOST: "×", FENCED: "–", LEFT: "·", _ABSENT: ""}
_WORDS = {
    REGISTERED: "alive",
    SUSPECT: "silent for half of the timeout",
    LOST: "lost",
    FENCED: "of an earlier attempt",
    LEFT: "has left",
    _ABSENT: "never registered",
}
STYLE = (
    ".q{display:flex;flex-wrap:wrap;gap:2px;max-width:56em;margin:.5em 0}"
    ".q u,.k u{width:14px;height:14px;font:bold 12px/14px monospace;text-align:center;text-decoration:none;color:#fff;"
    "border-radius:2px;display:inline-block}"
    # Of Okabe and Ito, which people of all kinds of sight tell apart; signs say the same.
    ".r{background:#0072b2}.s{background:#b87a00}.l{background:#d55e00}.f,.e{background:#8a8a8a}"
    ".n{box-shadow:inset 0 0 0 1px #8a8a8a}.w{outline:2px solid #cc79a7}.k{color:#808080}.k u{margin:0 .3em 0 1em}"
    "progress{width:9em;vertical-align:middle}"
)


def squares(job: Job) -> str:
    """Return a square for each client, or block of them; clients that the oldest barrier waits for have an edge."""
    if not 0 < job.num_clients <= MAX_CLIENTS:
        return ""
    block = -(-job.num_clients // MAX_SQUARES)
    oldest = next(iter(job.open.values()), None)
    waited_for = frozenset(oldest.missing(MAX_CLIENTS) if oldest is not None else ())
    shown: set[str] = set()
    parts = []
    for first in range(0, job.num_clients, block):
        numbers = range(first, min(first + block, job.num_clients))
        states = {task.state if (task := job.tasks.get(number)) is not None else _ABSENT for number in numbers}
        worst = next(state for state in _WORST_FIRST if state in states)
        shown.add(worst)
        is_late = any(number in waited_for for number in numbers)
        names = f"client {first}" if block == 1 else f"clients {first} to {numbers[-1]}"
        title = f"{names}: {_WORDS[worst]}{', waited for' if is_late else ''}"
        kinds = f"{_CLASSES[worst]} w" if is_late else _CLASSES[worst]
        parts.append(f"<u class='{kinds}' title='{title}'>{_SIGNS[worst]}</u>")
    legend = "".join(
        f"<u class={_CLASSES[state]}>{_SIGNS[state]}</u>{_WORDS[state]}" for state in _WORST_FIRST if state in shown
    )
    late = "<u class=w></u>waited for" if waited_for else ""
    return f"<div class=q>{''.join(parts)}</div><p class=k>{legend}{late}"


def bar(done: int, total: int) -> str:
    """Return a bar that is full when all is done; nothing where there is nothing to do."""
    return f"<progress max={total} value={min(done, total)}></progress> " if total > 0 else ""
