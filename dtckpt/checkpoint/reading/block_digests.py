"""Read the digests of blocks, by which a part of a chunk is verified.

Every client that wrote chunks of several blocks left one file with the digests of these blocks, in the order of the
manifest. A chunk of one block has no entry: its digest is in the manifest. The manifest tells which client wrote which
chunk, so a reader can compute the position of any digest::

    client_3/dtckpt.blocks     | chunk 0 of "a": 4 digests | chunk 5 of "a": 4 digests | chunk 0 of "b": 2 digests | ...

The digest of a chunk, in the manifest, is made of the digests of its blocks; so it verifies them. Readers of parts of
many chunks need the digests of neighbouring chunks one after the other, so the file is read a page at a time.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import Blocks, digest_of_blocks
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import BLOCKS_NAME, ArrayEntry, Manifest
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_tensorstore import client_folder

PAGE_NBYTES = 16 << 10
"""Bytes of a page: the digests of 512 MiB, and so less than a thousandth of the bytes that they verify."""
MAX_PAGES = 64
"""Bound on the pages that are kept."""


class BlockDigests:
    """The digests of a checkpoint's blocks. Thread-safe.

    Args:
        manifest: The checkpoint's manifest.
        root: The checkpoint's folder.
    """

    def __init__(self, manifest: Manifest, root: Folder) -> None:
        self._manifest = manifest
        self._root = root
        self._positions: tuple[dict[str, npt.NDArray[np.int64]], dict[int, int]] | None = None
        self._page = lru_cache(maxsize=MAX_PAGES)(partial(_read, root))

    def read(self, entry: ArrayEntry, number: int, blocks: range) -> list[int]:
        """Return the digests of some blocks of a chunk, verified by the chunk's digest; none if it has one block only.

        Blocks: On storage.

        Raises:
            CheckpointCorruptError: The stored digests are not the digests that were written.
            StorageError: Storage refused.
        """
        index = entry.grid.index(number)
        count = entry.blocks.count(entry.grid.region(index).shape)
        if count <= 1:
            return []
        if self._positions is None:
            self._positions = _positions(self._manifest)
        starts, ends = self._positions
        writer, start = int(entry.writers[number]), 8 * int(starts[entry.name][number])
        data = self._read(writer, start, start + 8 * count, 8 * ends[writer])
        digests = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
        if digest_of_blocks(entry.name, index, digests) != int(entry.digests[number]):
            raise CheckpointCorruptError(
                f"the block digests of chunk {number} of tensor {entry.name!r} in {self._root / client_folder(writer)} "
                "are damaged; read the whole chunk, or restore another checkpoint"
            )
        some: list[int] = digests[blocks.start : blocks.stop].tolist()
        return some

    def _read(self, writer: int, start: int, stop: int, end: int) -> bytes:
        """Return bytes ``start`` to ``stop`` of a client's file; fewer if the file is shorter than ``end``.

        Args:
            writer: The client that wrote the file.
            start: First byte.
            stop: Byte behind the last.
            end: Bytes that the file has by the manifest.
        """
        first, last = start // PAGE_NBYTES, (stop - 1) // PAGE_NBYTES
        bounds = ((page * PAGE_NBYTES, min((page + 1) * PAGE_NBYTES, end)) for page in range(first, last + 1))
        pages: list[bytes] = []
        for begin, limit in bounds:
            pages.append(self._page(writer, begin, limit))
            if len(pages[-1]) < limit - begin:
                break  # the file ends here, before the end that the manifest implies
        data = b"".join(pages)
        return data[start - first * PAGE_NBYTES : stop - first * PAGE_NBYTES]


def _read(root: Folder, writer: int, start: int, stop: int) -> bytes:
    folder = root / client_folder(writer)
    with translate_errors("read block digests", folder, is_read=True), suppress(FileNotFoundError):
        return folder.read(BLOCKS_NAME, start, stop)
    return b""


def _positions(manifest: Manifest) -> tuple[dict[str, npt.NDArray[np.int64]], dict[int, int]]:
    """Compute the positions of all digests.

    Returns:
        By tensor, for each chunk, the number of digests that precede the chunk's digests in its writer's file; and,
        by client, the number of digests in its file.
    """
    arrays = manifest.arrays.items()
    counts = {name: each for name, entry in arrays if (each := _counts(entry.grid, entry.itemsize)) is not None}
    if not counts:
        return {}, {}
    lengths = np.concatenate(list(counts.values()))
    writers = np.concatenate([manifest.arrays[name].writers for name in counts])
    # Sorted by writer, chunks of one file are neighbours in the order of the manifest; a cumulative sum per file then
    # gives the positions.
    order = np.argsort(writers, kind="stable")
    clients, firsts = np.unique(writers[order], return_index=True)
    totals = np.add.reduceat(lengths[order], firsts)
    before = np.cumsum(lengths[order]) - lengths[order]
    before -= np.repeat(before[firsts], np.diff(firsts, append=order.size))
    starts = np.empty_like(lengths)
    starts[order] = before
    bounds = np.cumsum([each.size for each in counts.values()])[:-1]
    ends = dict(zip(clients.tolist(), totals.tolist(), strict=True))
    return dict(zip(counts, np.split(starts, bounds), strict=True)), ends


@lru_cache(maxsize=256)
def _counts(grid: ChunkGrid, itemsize: int) -> npt.NDArray[np.int64] | None:
    """Return for each chunk of a tensor, row-major, the number of its digests; None if all have one block only."""
    blocks = Blocks.of(grid, itemsize)
    if not grid.num_chunks or blocks.count(grid.chunk_shape) <= 1:
        return None
    step = grid.chunk_shape[blocks.dim]
    sizes = np.minimum(step, grid.shape[blocks.dim] - np.arange(grid.counts[blocks.dim], dtype=np.int64) * step)
    along = -(-sizes // blocks.rows)
    along[along == 1] = 0  # of a chunk of one block only the chunk's own digest is stored, in the manifest
    behind = [1] * (len(grid.counts) - blocks.dim - 1)
    return np.broadcast_to(along.reshape(-1, *behind), grid.counts).reshape(-1)
