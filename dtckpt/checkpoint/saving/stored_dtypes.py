"""`StoredDtypes`: the rules in which dtype each tensor is stored, and so which tensors are rounded to bfloat16."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.errors import ConfigError, capped
from dtckpt.format.dtypes import STORED_AS


class StoredDtypes:
    """The rules of one save, in order: the first whose pattern matches a tensor's name decides.

    It remembers which patterns matched a tensor that could be rounded, also those for which an earlier one won.

    Args:
        options: Their ``stored_dtypes`` and, for tensors that no pattern matches, ``save_as_bf16``.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._rules = tuple(options.stored_dtypes)
        self._rounds_all = options.save_as_bf16
        self._unused = {pattern for pattern, _ in self._rules}

    def choose(self, name: str, dtype: str, *, save_as_bf16: bool) -> str:
        """Return the dtype in which a tensor is stored.

        Args:
            name: The tensor's name.
            dtype: The tensor's dtype.
            save_as_bf16: Whether the tensor itself asks for bfloat16.
        """
        if dtype not in STORED_AS:
            return dtype
        matching = [(pattern, dtype) for pattern, dtype in self._rules if fnmatchcase(name, pattern)]
        self._unused.difference_update(pattern for pattern, _ in matching)
        if matching:
            return matching[0][1]
        return "bfloat16" if self._rounds_all or save_as_bf16 else dtype

    def validate_all_used(self) -> None:
        """Refuse patterns that matched no tensor, which most likely are typos.

        Raises:
            ConfigError: A pattern matched no tensor.
        """
        if self._unused:
            unused = [pattern for pattern, _ in self._rules if pattern in self._unused]
            raise ConfigError(
                f"option stored_dtypes: no {' or '.join(STORED_AS)} tensor matches {capped(map(repr, unused))}; "
                "expected globs over the names of the tensors that are saved"
            )
