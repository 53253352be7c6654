"""Finds the stored chunks of a checkpoint as ranges of its files, so that a later checkpoint shares the files.

::

    kind zarr:   a chunk is a file of its own name; the file is shared
    kind ocdbt:  a chunk is a range of a data file client_<i>/d/<random name>; the file is shared under the same name,
                 and the merge makes the new root database refer to the same range

To merge such ranges, TensorStore opens the base's root database in the new folder. So the nodes of that database are
shared, too, and its first file is in `BASE_FOLDER` until the merge is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dtckpt.errors import CheckpointCorruptError, capped
from dtckpt.format.codecs import chunk_bounds
from dtckpt.storage.chunk_reader import chunk_nbytes
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.ocdbt_database import FileRange, OcdbtDatabase
from dtckpt.storage.zarr_tensorstore import BASE_FOLDER, DATA_FOLDER, DATABASE_NAME, StoredArray, key_of

_DATA_FILE = re.compile(rf"client_\d+/{DATA_FOLDER}/[^/]+")
_NODE_FILE = re.compile(rf"{DATA_FOLDER}/[^/]+")

Chunk = tuple[StoredArray, Sequence[int]]
"""An array, and the position of one of its chunks."""


class StoredChunks:
    """The chunks of a checkpoint, or of one under construction.

    Args:
        kind: Key-value store.
        folder: The checkpoint's folder.
    """

    def __init__(self, kind: str, folder: Folder) -> None:
        self._folder = folder
        self._database = OcdbtDatabase(folder) if kind == "ocdbt" else None

    def find(self, array: StoredArray, index: Sequence[int]) -> FileRange | None:
        """Return the range of a file that holds a chunk. Blocks: on storage.

        None if the chunk is missing, has a size that no such chunk has, or is in no data file of a client.

        Raises:
            MalformedError: The database is damaged.
        """
        key = key_of(array.path, index)
        least, most = chunk_bounds(array.codec, chunk_nbytes(array))
        if self._database is None:
            return FileRange(key, 0, least)
        try:
            stored = self._database.find(key)
        except FileNotFoundError:
            return None
        if isinstance(stored, bytes) or not least <= (stored.nbytes or 0) <= most:
            return None
        # No save puts chunks elsewhere. The new checkpoint itself may write a file of another name.
        return stored if _DATA_FILE.fullmatch(stored.file) else None

    def is_mostly_used(self, file: str, nbytes: int) -> bool:
        """Whether so many bytes are at least half of a file; also if there is no such file."""
        return self._folder.find_short_file({file: 2 * nbytes + 1}) is not None

    def share_nodes(self, target: Folder) -> bool:
        """Share the nodes of the database with a folder under construction, for `merge`; return whether it can be done.

        Raises:
            FileNotFoundError: A node is missing.
            MalformedError: The database is damaged.
        """
        if self._database is None:
            return True
        inner = target / BASE_FOLDER
        inner.make()
        nodes = dict.fromkeys(self._database.node_files(), 1)
        if not all(map(_NODE_FILE.fullmatch, nodes)):
            raise MalformedError(f"nodes of the database are in {capped(sorted(nodes))}")
        return target.share(self._folder, nodes) and inner.share(self._folder, {DATABASE_NAME: 1})


def validate_reused(kind: str, root: Folder, base: Folder, chunks: Iterable[Chunk]) -> None:
    """Check that every reused chunk is in a merged checkpoint, and remove the base's nodes, which it does not need.

    Args:
        kind: Key-value store.
        root: The folder under construction, after the merge.
        base: The folder of the base.
        chunks: The chunks that were not written, because the base has them.

    Raises:
        CheckpointCorruptError: A chunk, or a file that holds chunks, is missing or too short.
        StorageError: Storage refused.
    """
    merged, ranges = StoredChunks(kind, root), list[FileRange]()
    with translate_errors("look for reused chunks", root, is_read=True):
        for array, index in chunks:
            found = merged.find(array, index)
            if found is None:
                raise CheckpointCorruptError(
                    f"{key_of(array.path, index)} of the base {base} did not get into {root}; nothing was committed, "
                    "save again"
                )
            ranges.append(found)
        sizes = last_uses(ranges)
        if (short := root.find_short_file(sizes)) is not None:
            raise CheckpointCorruptError(
                f"{short} of the base {base} did not get into {root} whole; nothing was committed, save again"
            )
    if kind == "ocdbt":
        with translate_errors("remove the base's nodes", root):
            needed = {*sizes, *OcdbtDatabase(root).node_files()}
            nodes = OcdbtDatabase(root, first=root / BASE_FOLDER).node_files()
            root.remove(nodes - needed)
            root.remove_tree(BASE_FOLDER)


def drop_nodes(root: Folder) -> None:
    """Remove the files of `StoredChunks.share_nodes`, before anything is merged, if the base is not used after all.

    Raises:
        StorageError: Storage refused.
    """
    with translate_errors("remove the base's nodes", root):
        root.remove_tree(BASE_FOLDER)
        root.remove_tree(DATA_FOLDER)


def last_uses(ranges: Iterable[FileRange]) -> Mapping[str, int]:
    """Return, for each file, the byte behind the last range in it."""
    sizes: dict[str, int] = {}
    for each in ranges:
        sizes[each.file] = max(sizes.get(each.file, 0), each.start + (each.nbytes or 0))
    return sizes
