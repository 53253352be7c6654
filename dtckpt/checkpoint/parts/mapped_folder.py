"""`MappedFolder`: the transport to the parts on this host: their memory is mapped, and copied from."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.parts.transports import BoxRequest
from dtckpt.checkpoint.reading.read_chunks import convert, cut
from dtckpt.errors import CheckpointCorruptError


class MappedFolder:
    """The parts of a folder of this host, as a `PartTransport`.

    Args:
        folder: The folder.
        host: Name of this host, for messages.
    """

    kind = "mapped"

    def __init__(self, folder: HostFolder, host: str) -> None:
        self.folder, self.host = folder, host
        self._parts: dict[tuple[SaveId, int], OpenPart] = {}

    def index_file(self, save: SaveId, client: int) -> bytes:
        """As `PartTransport.index_file`."""
        try:
            return self.folder.index_file(save, client)
        except FileNotFoundError as error:
            raise self._gone(client, error) from error

    def open(self, save: SaveId, client: int, index: PartIndex | None = None) -> OpenPart:
        """Map a part: then it stays, even if its file is removed before it is read.

        Args:
            save: The save.
            client: The client whose part it is.
            index: The index, if it is known already.

        Raises:
            CheckpointCorruptError: The part is gone, or cannot be read.
        """
        part = self._parts.get((save, client))
        if part is None:
            try:
                part = OpenPart(self.folder, save, client, index)
            except FileNotFoundError as error:
                raise self._gone(client, error) from error
            self._parts[save, client] = part
        return part

    def _gone(self, client: int, error: FileNotFoundError) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"host {self.host}: the part of client {client} has gone: {error}")

    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> int:
        """As `PartTransport.read`. Strided and converted targets cost no memory."""
        part = self.open(save, client)
        for each in boxes:
            if each.seed is not None:
                part.copy(each.number, each.box, each.digest, each.target)
            else:
                convert(cut(part.elements(each.number), each.box.slices()), each.target)
        return sum(each.nbytes for each in boxes)

    def close(self) -> None:
        """As `PartTransport.close`."""
        self._parts.clear()
