"""`LendingFolder`: the parts of one process, some of them in the tensors of their owner."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.lent_memory import ENDED, LentMemory
from dtckpt.checkpoint.parts.records import HostParts, PartIndex, SaveId


class LendingFolder(HostFolder):
    """A folder of parts, and parts that this process lends. Other processes of the host do not find these here."""

    def __init__(
        self, folder: Path, root: str, *, host: str, title: str = "the live versions", max_nbytes: int | None = None
    ) -> None:
        super().__init__(folder, root, host=host, title=title, max_nbytes=max_nbytes)
        self._lent: dict[tuple[SaveId, int], tuple[bytes, LentMemory]] = {}
        self._ended: tuple[SaveId, int] | None = None

    def lend(self, memory: LentMemory, index: PartIndex, data: bytes) -> None:
        """Add a part.

        Args:
            memory: Its elements.
            index: Its index.
            data: The index file.
        """
        self._lent[index.save, index.client] = data, memory

    @override
    def remove(self, save: SaveId, client: int) -> None:
        if (lent := self._lent.pop((save, client), None)) is None:
            super().remove(save, client)
            return
        self._ended = save, client
        lent[1].end()

    @override
    def has(self, save: SaveId, client: int) -> bool:
        return (save, client) in self._lent or super().has(save, client)

    @override
    def index_file(self, save: SaveId, client: int) -> bytes:
        if (lent := self._lent.get((save, client))) is not None:
            return lent[0]
        if (save, client) == self._ended:
            raise FileNotFoundError(ENDED)
        return super().index_file(save, client)

    @override
    def open_memory(self, save: SaveId, client: int) -> memoryview | LentMemory:
        lent = self._lent.get((save, client))
        return super().open_memory(save, client) if lent is None else lent[1]

    @override
    def parts(self) -> HostParts:
        parts = super().parts()
        return HostParts(
            {**parts.voted, **{save: frozenset({client}) for save, client in list(self._lent)}}, parts.written
        )
