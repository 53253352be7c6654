"""`ReadBudget`: how many bytes of objects the parsers of untrusted files may make per byte read; pure.

A file of a few hundred bytes can describe more objects than any memory holds: a list that contains itself many times, a
text that is part of a million names, a tensor that repeats one element. So everything that is made is counted, before
it is made, against the bytes that were read::

    bytes made  <=  FLOOR_NBYTES + MULTIPLE * bytes read

Two more bounds need no counting. `dtckpt.checkpoint.reading.pieces.is_expanded_too_far` compares the elements of
tensors with the bytes that they are made of, and `dtckpt.format.hash_work` bounds the time that dicts and sets of
untrusted keys take.
"""

from __future__ import annotations

from threading import Lock

from dtckpt.errors import CheckpointCorruptError

FLOOR_NBYTES = 16 << 20
"""Bytes of objects that a file of any size may ask for."""
MULTIPLE = 64
"""Bytes of objects per byte of a file. Long lists of short numbers need most of it: a node takes `NODE_NBYTES`."""
NODE_NBYTES = 160
"""Bytes of a node of a state tree, about."""
STEP_NBYTES = 32
"""Bytes that are counted for a value without memory, as None: to look at it takes time."""
TENSOR_NBYTES = 1024
"""Bytes of the description of a tensor, or of a piece of a tensor, about."""


class ReadBudget:
    """The bytes of objects that parsers may still make of one checkpoint's files. Thread-safe.

    Args:
        where: The file or checkpoint, for messages.
    """

    __slots__ = ("_left", "_lock", "_nbytes", "_where")

    def __init__(self, where: str) -> None:
        self._where = where
        self._nbytes = 0
        self._left = FLOOR_NBYTES
        self._lock = Lock()

    @classmethod
    def of(cls, nbytes: int, where: str) -> ReadBudget:
        """Return the budget of a file of ``nbytes`` bytes."""
        budget = cls(where)
        budget.grow(nbytes)
        return budget

    def grow(self, nbytes: int) -> None:
        """Add the objects that ``nbytes`` more bytes may make; the bytes must have been read, not only claimed."""
        with self._lock:
            self._nbytes += nbytes
            self._left += MULTIPLE * nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be made.

        Raises:
            CheckpointCorruptError: They are more than is left.
        """
        with self._lock:
            self._left -= nbytes
            is_spent = self._left < 0
        if is_spent:
            raise CheckpointCorruptError(
                f"{self._where} describes too much; got objects of more than {FLOOR_NBYTES + MULTIPLE * self._nbytes} "
                f"bytes, expected at most that for the {self._nbytes} bytes that were read; does it contain itself? "
                "restore another checkpoint"
            )
