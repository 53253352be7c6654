"""The digests of blocks, which every client keeps in a file of its own: where those of a chunk stand, and their reads.

Whoever reads parts of many chunks asks for those of one after those of the other, so they are read a page at a time.
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
"""The digests of 512 MiB, and so less than a thousandth of what they verify."""
MAX_PAGES = 64
"""Pages that are kept."""


class BlockDigests:
    """The digests of a checkpoint's blocks. Thread-safe.

    Args:
        manifest: The checkpoint's.
        root: Its folder.
    """

    def __init__(self, manifest: Manifest, root: Folder) -> None:
        self._manifest = manifest
        self._root = root
        self._places: tuple[dict[str, npt.NDArray[np.int64]], dict[int, int]] | None = None
        self._page = lru_cache(maxsize=MAX_PAGES)(partial(_read, root))

    def read(self, entry: ArrayEntry, number: int, blocks: range) -> list[int]:
        """Return the digests of some blocks of a chunk, verified by that of the chunk; none, if it has one block only.

        Blocks: On storage.

        Raises:
            CheckpointCorruptError: They are not those that were written.
            StorageError: Storage refused.
        """
        index = entry.grid.index(number)
        count = entry.blocks.count(entry.grid.region(index).shape)
        if count <= 1:
            return []
        if self._places is None:
            self._places = _places(self._manifest)
        starts, ends = self._places
        writer, start = int(entry.writers[number]), 8 * int(starts[entry.name][number])
        data = self._read(writer, start, start + 8 * count, 8 * ends[writer])
        digests = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
        if digest_of_blocks(entry.name, index, digests) != int(entry.digests[number]):
            raise CheckpointCorruptError(
                f"the block digests of chunk {number} of tensor {entry.name!r} in {self._root / client_folder(writer)} "
                "are damaged; read the whole chunk, or restore another checkpoint"
            )
        found: list[int] = digests[blocks.start : blocks.stop].tolist()
        return found

    def _read(self, writer: int, start: int, stop: int, end: int) -> bytes:
        """Return some bytes of a client's file, which has ``end``; fewer, if it has fewer."""
        first, last = start // PAGE_NBYTES, (stop - 1) // PAGE_NBYTES
        bounds = ((page * PAGE_NBYTES, min((page + 1) * PAGE_NBYTES, end)) for page in range(first, last + 1))
        found: list[bytes] = []
        for begin, limit in bounds:
            found.append(self._page(writer, begin, limit))
            if len(found[-1]) < limit - begin:
                break  # the file ends here, whatever the manifest has it hold
        pages = b"".join(found)
        return pages[start - first * PAGE_NBYTES : stop - first * PAGE_NBYTES]


def _read(root: Folder, writer: int, start: int, stop: int) -> bytes:
    folder = root / client_folder(writer)
    with translate_errors("read block digests", folder, is_read=True), suppress(FileNotFoundError):
        return folder.read(BLOCKS_NAME, start, stop)
    return b""


def _places(manifest: Manifest) -> tuple[dict[str, npt.NDArray[np.int64]], dict[int, int]]:
    """Return per tensor and chunk how many digests stand before the chunk's in its writer's file, and how many in all.

    Every client wrote those of its chunks in the order of the manifest.
    """
    arrays = manifest.arrays.items()
    counts = {name: found for name, one in arrays if (found := _counts(one.grid, one.itemsize)) is not None}
    if not counts:
        return {}, {}
    lengths = np.concatenate(list(counts.values()))
    writers = np.concatenate([manifest.arrays[name].writers for name in counts])
    order = np.argsort(writers, kind="stable")
    clients, firsts = np.unique(writers[order], return_index=True)
    totals = np.add.reduceat(lengths[order], firsts)
    before = np.cumsum(lengths[order]) - lengths[order]
    before -= np.repeat(before[firsts], np.diff(firsts, append=order.size))
    starts = np.empty_like(lengths)
    starts[order] = before
    bounds = np.cumsum([found.size for found in counts.values()])[:-1]
    ends = dict(zip(clients.tolist(), totals.tolist(), strict=True))
    return dict(zip(counts, np.split(starts, bounds), strict=True)), ends


@lru_cache(maxsize=256)
def _counts(grid: ChunkGrid, itemsize: int) -> npt.NDArray[np.int64] | None:
    """Return per chunk of a tensor, row-major, how many digests its blocks have; None if all have one block only."""
    blocks = Blocks.of(grid, itemsize)
    if not grid.num_chunks or blocks.count(grid.chunk_shape) <= 1:
        return None
    step = grid.chunk_shape[blocks.dim]
    sizes = np.minimum(step, grid.shape[blocks.dim] - np.arange(grid.counts[blocks.dim], dtype=np.int64) * step)
    along = -(-sizes // blocks.rows)
    along[along == 1] = 0  # a chunk of one block has no digests but its own
    behind = [1] * (len(grid.counts) - blocks.dim - 1)
    return np.broadcast_to(along.reshape(-1, *behind), grid.counts).reshape(-1)
