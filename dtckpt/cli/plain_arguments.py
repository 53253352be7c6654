"""Parse arguments of the command line that need neither NumPy nor PyTorch: sizes, and pairs of names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtckpt.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for infix, base in (("i", 1024), ("", 1000))
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Parse a size such as ``512KiB``, ``1.5GiB``, ``2GB`` or ``4096``; return it in bytes.

    Raises:
        ConfigError: The text is no size of at least one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    nbytes = (
        0 if match is None or unit is None else int(float(match[1]) * unit if "." in match[1] else int(match[1]) * unit)
    )
    if nbytes < 1:
        raise ConfigError(
            f"size cannot be used; got {text!r}, expected bytes or a number with KiB, MiB, GiB, KB, MB, GB"
        )
    return nbytes


def parse_pairs(texts: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Parse ``LEFT=RIGHT`` texts; names may hold ``=``, and the last one parts the two.

    Raises:
        ConfigError: A text is malformed, or two of them begin alike.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        left, _, right = text.rpartition("=")
        if not left or not right or left in pairs:
            raise ConfigError(f"--{option} {text!r} cannot be used; expected {form}, and each name once")
        pairs[left] = right
    return pairs
