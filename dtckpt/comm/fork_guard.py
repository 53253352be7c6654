"""Fork guard: refuse to use checkpoints in a forked process whose parent uses them.

After a fork, the child lacks the parent's threads, and the locks that these threads held stay locked in the child.
Such locks belong to TensorStore, gRPC, the store of `torch.distributed`, or a save. The child would hang. So the first
use of checkpoints marks a process, and a child of a marked process gets an error before it takes any lock. The guard
does not affect a child that does not use checkpoints.
"""

from __future__ import annotations

import os

from dtckpt.errors import ForkedProcessError

_is_used = False
_parent = 0
"""The id of the parent process that uses checkpoints, if this process was forked from it; else 0."""


def claim_process() -> None:
    """Mark this process as a user of checkpoints.

    Raises:
        ForkedProcessError: As for `validate_process`.
    """
    global _is_used  # noqa: PLW0603  (a fact about the process)
    validate_process()
    _is_used = True


def validate_process() -> None:
    """Refuse a forked process whose parent uses checkpoints.

    Raises:
        ForkedProcessError: This process was.
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
        _parent = _parent or os.getppid()  # a grandchild names the process that used checkpoints first


os.register_at_fork(after_in_child=_note_fork)
