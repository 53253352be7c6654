"""The saves that this run has made or loaded: a save that replaces any other checkpoint says so."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.coordination.identity import incarnation
from dtckpt.errors import CheckpointIncompleteError, CheckpointNotFoundError, DtckptError
from dtckpt.storage.commit_target import CommitTarget

logger = logging.getLogger("dtckpt")

_KEPT = 256
"""Loads and processes that are remembered."""

_known: deque[str] = deque(maxlen=_KEPT)
"""Parts of attempts' tokens, of loaded attempts and of processes that save for each other."""


def known_saves() -> tuple[str, ...]:
    """Return the tokens, or parts of them, that a process must note if it saves for this process."""
    return *_known, f"-{incarnation():x}-"


def note_saves(tokens: Iterable[str]) -> None:
    """Note tokens of saves, or parts of them."""
    _known.extend(token for token in tokens if token and token not in _known)


def warn_of_replacement(target: CommitTarget) -> None:
    """Log a warning if there is a checkpoint that this run has neither saved nor loaded. Blocks: on storage."""
    where = target.where
    try:
        target.locate()  # without a look for other libraries' checkpoints, which `check_target` refuses
        with contextlib.closing(open_checkpoint(where)) as checkpoint:
            token = checkpoint.identity
    except (CheckpointNotFoundError, CheckpointIncompleteError):
        return
    except DtckptError as error:
        logger.warning("this save replaces the checkpoint at %s, which cannot be read: %s", where, error)
        return
    if not any(known in token for known in known_saves()):
        logger.warning(
            "this save replaces the checkpoint at %s, which another run saved and this one has not loaded; to keep "
            "such checkpoints, save elsewhere, or with DtckptStorageWriter(overwrite=False)",
            where,
        )
