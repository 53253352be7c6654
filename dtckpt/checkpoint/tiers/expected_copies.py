"""`ExpectedCopies`: the copies that other hosts send to this one; a client that leaves waits for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dtckpt.checkpoint.tiers.host_folder import HostFolder, Stamp
from dtckpt.checkpoint.tiers.records import SaveId


class ExpectedCopies:
    """The copies of one save that come to this host.

    Args:
        folder: The parts of this host.
    """

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._stamps: dict[tuple[SaveId, int], Stamp] = {}
        self._replaced: dict[tuple[SaveId, int], Stamp] = {}

    def note_present(self, save: SaveId, clients: Iterable[int]) -> None:
        """Note which copies there are now; before any client knows that one is damaged, and replaces it."""
        self._stamps = {(save, client): self._folder.stamp(save, client) for client in clients}

    def expect(self, save: SaveId, clients: Iterable[int]) -> None:
        """Expect copies of the parts of clients: new ones, where there were others when they were noted."""
        self._replaced = {(save, client): self._stamps.get((save, client)) for client in clients}

    def have_come(self, refused: Collection[tuple[SaveId, int]]) -> bool:
        """Whether all copies have come, or were refused."""
        return all(
            part in refused or self._folder.stamp(*part) not in (None, former)
            for part, former in self._replaced.items()
        )
