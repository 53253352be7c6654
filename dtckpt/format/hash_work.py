"""`validate_hashes`: bound the time that a dict or a set of untrusted keys takes to fill; pure.

Python hashes texts with a secret, but a number's hash is the number, modulo 2**61 - 1. So an attacker who chooses the
numbers chooses the slots of the table, and can make each key pass all keys before it: n keys then take n * n steps. The
hashes of the keys need not be equal; consecutive slots are enough.

So this module fills the table once on trial, like CPython but for all keys at a time, and counts the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np
import numpy.typing as npt

from dtckpt.errors import CheckpointCorruptError

MAX_STEPS = 128
"""Steps per key, on average. Most honest keys take two or three, multiples of a large power of two take some forty."""
FEW = 256
"""So many keys take no time, with any values."""
_LINEAR_PROBES = 9
_PERTURB_SHIFT = 5


def validate_hashes(keys: Collection[Hashable]) -> None:
    """Check that a dict and a set of these keys are quick to fill, in this order.

    Raises:
        CheckpointCorruptError: The keys would take too long to fill a dict.
    """
    if len(keys) <= FEW:
        return
    hashes = np.array([hash(key) for key in keys if type(key) not in (str, bytes)], np.int64)
    # A table grows as it fills, so it must be quick at each size, with as many keys as it has then.
    bits = FEW.bit_length()
    while hashes.size > FEW and (1 << bits) < 4 * hashes.size:
        fitting = hashes[: (2 << bits) // 3]
        if not all(_is_quick(fitting, bits, linear_probes) for linear_probes in (0, _LINEAR_PROBES)):
            raise CheckpointCorruptError(
                f"{hashes.size} keys of a dict or a set are chosen so that it takes for ever to fill; restore another "
                "checkpoint"
            )
        bits += 1


def _is_quick(hashes: npt.NDArray[np.int64], bits: int, linear_probes: int) -> bool:
    """Whether keys of these hashes fill a table of ``2**bits`` slots in few steps.

    Args:
        hashes: The hashes.
        bits: The size.
        linear_probes: Slots behind a full slot that a lookup tries before its next jump: none in a dict.
    """
    mask = np.uint64((1 << bits) - 1)
    owners = np.full(1 << bits, -1, np.int64)
    keys = np.arange(hashes.size)
    perturb = hashes.view(np.uint64)
    slots = perturb & mask
    steps = 0
    while True:
        for probe in range(linear_probes + 1):
            steps += keys.size
            if not keys.size or steps > MAX_STEPS * hashes.size:
                return not keys.size
            at = (slots + np.uint64(probe)) & mask
            is_free = owners[at] < 0
            owners[at[is_free]] = keys[is_free]
            is_left = owners[at] != keys
            keys, slots, perturb = keys[is_left], slots[is_left], perturb[is_left]
        perturb = perturb >> np.uint64(_PERTURB_SHIFT)
        slots = (slots * np.uint64(5) + perturb + np.uint64(1)) & mask
