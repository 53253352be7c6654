"""Sizes of a map's axes that shapes do not tell: from Megatron's arguments, or from a model's configuration; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = "config.json"
MAX_CONFIG_NBYTES = 1 << 20


def known_sizes(values: Mapping[str, Any], config: Any) -> dict[str, int]:
    """Return the sizes of the axes ``groups`` (query groups, or heads) and ``dim`` (of a head).

    Args:
        values: The plain values of a checkpoint, by path.
        config: The content of a ``config.json`` of transformers; anything else has no sizes.
    """
    fields = {name.removeprefix("args/"): value for name, value in values.items() if name.startswith("args/")}
    if fields:
        heads = _number(fields, "num_attention_heads")
        # The number of groups has a default, which counts only with grouped queries.
        groups = _number(fields, "num_query_groups") if fields.get("group_query_attention") is True else heads
        dim = _number(fields, "kv_channels")
    else:
        fields = config if isinstance(config, dict) else {}
        heads = _number(fields, "num_attention_heads", "n_head")
        groups = _number(fields, "num_key_value_heads") or heads
        dim = _number(fields, "head_dim")
    hidden = _number(fields, "hidden_size", "n_embd")
    if not dim and heads and hidden and hidden % heads == 0:
        dim = hidden // heads
    return {axis: size for axis, size in (("groups", groups), ("dim", dim)) if size}


def _number(fields: Mapping[str, Any], *names: str) -> int | None:
    """Return the first field that is a positive whole number."""
    return next((each for name in names if type(each := fields.get(name)) is int and each > 0), None)
