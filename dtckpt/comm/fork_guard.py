"""Forks: a process that was forked from one that uses checkpoints cannot use them, and hears so at once.

The threads of the parent do not live in the child, and the locks that they held at that instant stay locked there:
those of TensorStore, of gRPC, of the store of `torch.distributed`, of a save in flight. So the first use marks a
process, and what is forked from it is refused before it takes any lock. What a child does without checkpoints is
undisturbed.
"""

from __future__ import annotations

import os

from dtckpt.errors import ForkedProcessError

_is_used = False
_parent = 0
"""The process that uses checkpoints and that this one was forked from; 0: there is none."""


def claim_process() -> None:
    """Note that this process uses checkpoints.

    Raises:
        ForkedProcessError: As `validate_process`.
    """
    global _is_used  # noqa: PLW0603  (a fact about the process)
    validate_process()
    _is_used = True


def validate_process() -> None:
    """Refuse a process that was forked from one that uses checkpoints.

    Raises:
        ForkedProcessError: It was.
    """
    if _parent:
        raise ForkedProcessError(
            f"this process was forked from process {_parent}, which uses checkpoints, and cannot use them itself: the "
            "threads that would do the work live in the parent only; start it with multiprocessing's 'spawn' or "
            "'forkserver', or before the parent first uses checkpoints"
        )


def is_forked() -> bool:
    """Whether `validate_process` refuses this process."""
    return _parent != 0


def _note_fork() -> None:
    global _parent  # noqa: PLW0603  (a fact about the process)
    if _is_used:
        _parent = _parent or os.getppid()


os.register_at_fork(after_in_child=_note_fork)
