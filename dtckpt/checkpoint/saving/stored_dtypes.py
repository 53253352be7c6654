"""`StoredDtypes`: the rules in which dtype each tensor is stored, and so which tensors are rounded to bfloat16.

`Casts`: the dtypes that the tensors of a live version are converted to as they are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


CAST_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The dtypes between which a live version may convert: each has a sign, infinities and NaN."""


class Casts:
    """The rules of one live version, in order: the first whose pattern matches a tensor's name decides.

    Args:
        rules: By glob on the names of tensors, a dtype of `CAST_DTYPES`, as a name or as torch spells it.

    Raises:
        ConfigError: A rule is malformed.
    """

    def __init__(self, rules: Mapping[str, object]) -> None:
        self._rules = {pattern: str(dtype).removeprefix("torch.") for pattern, dtype in rules.items()}
        for pattern, dtype in self._rules.items():
            if not isinstance(pattern, str) or not pattern or dtype not in CAST_DTYPES:
                raise ConfigError(
                    f"cast has {pattern!r}: {dtype!r}; expected globs, and one of {', '.join(CAST_DTYPES)}"
                )

    def choose(self, name: str, dtype: str) -> str:
        """Return the dtype that a tensor is published in: its own, if it has no rule or is of another kind."""
        if dtype not in CAST_DTYPES:
            return dtype
        return next((chosen for pattern, chosen in self._rules.items() if fnmatchcase(name, pattern)), dtype)

    def validate_all_used(self, tensors: Iterable[tuple[str, str]]) -> None:
        """Refuse patterns that match no tensor which can be cast.

        Args:
            tensors: Names and published dtypes.

        Raises:
            ConfigError: A pattern matches none.
        """
        names = [name for name, dtype in tensors if dtype in CAST_DTYPES]
        unused = [pattern for pattern in self._rules if not any(fnmatchcase(name, pattern) for name in names)]
        if unused:
            raise ConfigError(
                f"cast: no {' or '.join(CAST_DTYPES)} tensor matches {capped(map(repr, unused))}; expected globs over "
                "the names of the tensors that are published"
            )


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
