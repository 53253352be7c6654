"""`StoredDtypes`: the rules in which dtype each tensor is stored, and so which tensors are rounded to bfloat16."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan
from dtckpt.errors import ConfigError, capped
from dtckpt.format.dtypes import STORED_AS


class StoredDtypes:
    """The rules of one save, in order: the first whose pattern matches a tensor's name decides.

    Args:
        options: Their ``stored_dtypes`` and, for tensors that no pattern matches, ``save_as_bf16``.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._rules = tuple(options.stored_dtypes)
        self._rounds_all = options.save_as_bf16

    def choose(self, name: str, dtype: str, *, save_as_bf16: bool) -> str:
        """Return the dtype in which a tensor is stored.

        Args:
            name: The tensor's name.
            dtype: The tensor's dtype.
            save_as_bf16: Whether the tensor itself asks for bfloat16.
        """
        if dtype not in STORED_AS:
            return dtype
        chosen = next((stored for pattern, stored in self._rules if fnmatchcase(name, pattern)), None)
        if chosen is not None:
            return chosen
        return "bfloat16" if self._rounds_all or save_as_bf16 else dtype


@lru_cache(maxsize=KEPT_STRUCTURES)
def validate_all_used(patterns: tuple[str, ...], plan: SavePlan) -> None:
    """Refuse patterns that match no tensor of any client, which most likely are typos.

    A pattern also counts as used if an earlier pattern wins wherever it matches.

    Args:
        patterns: The patterns of the rules.
        plan: The plan of the save.

    Raises:
        ConfigError: A pattern matches no tensor that could be rounded.
    """
    names = [tensor.spec.name for tensor in plan.tensors if tensor.spec.dtype in STORED_AS]
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ConfigError(
            f"option stored_dtypes: no {' or '.join(STORED_AS)} tensor matches {capped(map(repr, unused))}; "
            "expected globs over the names of the tensors that are saved"
        )
