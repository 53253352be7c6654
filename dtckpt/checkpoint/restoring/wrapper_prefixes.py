"""Match keys that differ only by the names that wrappers of modules put before them.

`torch.compile`, activation checkpointing, FSDP1 and DistributedDataParallel each keep the module that they wrap in an
attribute, whose name comes into the keys of the state: ``_orig_mod.layers.0._checkpoint_wrapped_module.weight`` is
``layers.0.weight``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes that only wrappers use; ignored anywhere in a key."""
_LEADING = "module"
"""The attribute of DistributedDataParallel is a common name, so it is ignored only at the beginning."""
_STATE_HEADS = frozenset({"state", "param_groups"})
"""Keys that precede the names of parameters in flat optimizer states."""


def unwrapped(key: str) -> str:
    """Return a key without the names of wrappers."""
    head, *parts = [part for part in key.split(".") if part not in _WRAPPERS] or [key]
    heads = [head] if head in _STATE_HEADS else []
    parts = parts if heads else [head, *parts]
    while len(parts) > 1 and parts[0] == _LEADING:
        parts = parts[1:]
    return ".".join([*heads, *parts])


def match_unwrapped(wanted: Iterable[Hashable], saved: Iterable[Hashable]) -> dict[Any, Any]:
    """Return the saved key for each wanted key that differs from it only by wrappers.

    A wanted key that was saved unchanged is left out. Several keys, wanted or saved, that are equal without the names
    of wrappers are left out, too: they are ambiguous.
    """
    # In linear time: flat state dicts have tens of thousands of keys.
    known = dict.fromkeys(saved)
    lacking = [key for key in wanted if isinstance(key, str) and key not in known] if known else []
    if not lacking:
        return {}
    by_name: dict[str, list[str]] = defaultdict(list)
    for key in known:
        if isinstance(key, str):
            by_name[unwrapped(key)].append(key)
    names = [unwrapped(key) for key in lacking]
    counts = Counter(names)
    return {
        key: by_name[name][0]
        for key, name in zip(lacking, names, strict=True)
        if len(by_name.get(name, ())) == 1 and counts[name] == 1
    }
