"""The files and keys that a conversion takes from its source or leaves behind, as lines or as facts of an event."""

from __future__ import annotations

from typing import Any

from dtckpt.checkpoint.converting.report import NOT_SELECTED, SourceAccount
from dtckpt.cli.output import format_count, write_line
from dtckpt.errors import printable


def write_left(account: SourceAccount) -> None:
    """Print a line for each file and note that is left, and for each key that the caller did not leave out himself."""
    for name in account.left_files:
        write_line(printable(f"left behind: {name}: dtckpt does not read it"))
    for path, reason in account.left_keys.items():
        if reason != NOT_SELECTED:
            write_line(printable(f"left behind: {path}: {reason}"))
    if unselected := sum(reason == NOT_SELECTED for reason in account.left_keys.values()):
        write_line(f"left behind: {format_count(unselected, 'key')} that --select does not match")


def account_facts(account: SourceAccount) -> dict[str, Any]:
    """Return the facts as an event has them."""
    return {
        "files_taken": account.files,
        "files_left": account.left_files,
        "keys_taken": len(account.keys),
        "keys_renamed": account.renamed,
        "keys_left": account.left_keys,
    }
