"""Write planned files from the elements of a checkpoint: in bounded memory, and with the proof that nothing changed.

One thread reads a block from the source while another thread writes the block before. The writing thread then reads the
block back from the file and digests it. The digests of both sides must be equal, or nothing is committed::

    source --read--> block --write--> file --read back--> digest of the file's elements
       |                                                        ||
       +--> digest that the source tells, or else digest of the elements that were read
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.converting.export import ExportedTensor
from dtckpt.checkpoint.converting.file_plan import Block, FileDigests, FilePlan, FileSlot, Part, c_boxes, plan_blocks
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.resharding.checkpoint_source import Progress
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointCorruptError, ConfigError
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region
from dtckpt.storage import fsync
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.local_folder import LocalFolder

MAX_BLOCK_NBYTES = 32 << 20
"""Larger blocks are no faster."""
MIN_BLOCK_NBYTES = 64 << 10
_NUM_WRITTEN_OUT = 2
"""Blocks on their way to the disk; more would only take more of the page cache."""

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileBudget:
    """The shares of ``max_memory``: stored chunks that are read, and two blocks.

    Args:
        reads: Bytes of stored chunks in memory at one time.
        block: Bytes of a block.
    """

    reads: int
    block: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_memory: int) -> FileBudget:
        """Divide ``max_memory`` bytes.

        Raises:
            ConfigError: ``max_memory`` is too small for the largest stored chunk.
        """
        # The reader starts one chunk beyond its bound before it waits for the first.
        largest = max((info.max_chunk_nbytes for info in checkpoint.tensors.values()), default=0)
        block = min(MAX_BLOCK_NBYTES, (max_memory - largest) // 4)
        if block < MIN_BLOCK_NBYTES:
            raise ConfigError(
                f"max_memory is too small; got {max_memory} bytes, expected at least {largest + 4 * MIN_BLOCK_NBYTES}: "
                f"a stored chunk of {largest} bytes, and {4 * MIN_BLOCK_NBYTES}"
            )
        return cls(max_memory - largest - 2 * block, block)


class FileWriter:
    """Writes planned files.

    Args:
        checkpoint: The source.
        folder: The folder that the files are written to.
        budget: See `FileBudget`.
        progress: Called for each part that was read, with the tensor's name in the new file and the bytes of the part.
    """

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, budget: FileBudget, progress: Progress | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._budget = budget
        self._progress = progress
        self._read = _Shares()
        self._written = _Shares()
        self._checksums: dict[FileSlot, int] = {}
        self._contents: dict[str, int] = {}

    def write(self, files: Sequence[FilePlan]) -> Mapping[str, int]:
        """Write files; once all are written, sync them. Blocks: on storage.

        Returns:
            By name, the content digest of each tensor.

        Raises:
            CheckpointCorruptError: The source is damaged, or a file holds other elements than the source.
            StorageError: Storage refused.
        """
        buffers = [np.empty(self._budget.block, np.uint8) for _ in range(2)]
        with Pool(1, "dtckpt-convert") as pool:
            for plan in files:
                with translate_errors("write {}", self._folder, plan.name):
                    self._write_file(plan, buffers, pool)
        with translate_errors("sync the new files", self._folder):
            fsync.sync_all([*(self._folder / plan.name for plan in files), *fsync.walk_folders(self._folder)])
        return self._contents

    def _write_file(self, plan: FilePlan, buffers: Sequence[_Bytes], pool: Pool) -> None:
        *folders, _ = plan.name.split("/")
        for level in range(1, len(folders) + 1):
            LocalFolder(self._folder, *folders[:level]).make()
        descriptor = LocalFolder(self._folder).new_file(plan.name)
        try:
            os.ftruncate(descriptor, plan.nbytes)
            self._fill(descriptor, plan, buffers, pool)
            for tensor in dict.fromkeys(slot.tensor for slot in plan.slots):
                # A tensor that goes on in another file is compared there.
                if self._written.is_whole(tensor):
                    self._contents[tensor.name] = self._validated(tensor)
            for offset, data in plan.frame(FileDigests(self._contents, self._checksums)):
                _write_at(descriptor, memoryview(data), offset)
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, plan: FilePlan, buffers: Sequence[_Bytes], pool: Pool) -> None:
        """Fill the slots of a file: while a block is read from the source, the one before is written."""
        writing: Future[None] | None = None
        writeback = fsync.TrailingWriteback(descriptor, _NUM_WRITTEN_OUT)
        try:
            for number, block in enumerate(plan_blocks(plan.slots, self._budget.block)):
                buffer = buffers[number % 2][: block.nbytes]
                self._read_block(block, buffer)
                if writing is not None:
                    writing.result()
                writing = pool.submit(self._write_block, descriptor, plan, block, buffer, writeback)
                if self._progress is not None:
                    for part in block.parts:
                        self._progress(part.slot.tensor.name, part.nbytes)
        finally:
            # Also after a failure: the thread writes to a file that is closed then.
            if writing is not None:
                writing.exception()
        if writing is not None:
            writing.result()

    def _read_block(self, block: Block, buffer: _Bytes) -> None:
        if sum(part.nbytes for part in block.parts) < block.nbytes:
            buffer[:] = 0  # between the parts; the block before was there
        arrays = [(part, _elements(part, buffer)) for part in block.parts]
        requests = [(part.slot.tensor.info.name, [(part.region, array)]) for part, array in arrays]
        self._checkpoint.read_all(requests, max_in_flight=self._budget.reads)
        for part, array in arrays:
            if part.slot.tensor.content is None:
                self._read.add(part.slot.tensor, part.region, array)

    def _write_block(
        self,
        descriptor: int,
        plan: FilePlan,
        block: Block,
        buffer: _Bytes,
        writeback: fsync.TrailingWriteback,
    ) -> None:
        _write_at(descriptor, buffer.data, block.offset)
        # Into the same memory: the elements from the source are not needed any more.
        _read_at(descriptor, buffer.data, block.offset)
        for part in block.parts:
            self._written.add(part.slot.tensor, part.region, _elements(part, buffer))
            if plan.checksum is not None:
                data = buffer[part.start : part.start + part.nbytes]
                self._checksums[part.slot] = plan.checksum(data.data, self._checksums.get(part.slot, 0))
        writeback.add(block.offset, block.nbytes)

    def _validated(self, tensor: ExportedTensor) -> int:
        """Return the content digest of a written tensor, which must equal the digest of the source."""
        expected = self._read.digest(tensor) if tensor.content is None else tensor.content
        content = self._written.digest(tensor)
        if content != expected:
            raise CheckpointCorruptError(
                f"tensor {tensor.info.name!r} of {self._checkpoint.path} was written with other elements; got content "
                f"{content:016x}, expected {expected:016x}; nothing was committed"
            )
        return content


class _Shares:
    """The content digests of tensors whose boxes come one by one."""

    def __init__(self) -> None:
        self._shares: dict[str, int] = {}
        self._numels: dict[str, int] = {}

    def add(self, tensor: ExportedTensor, region: Region, elements: np.ndarray[Any, Any]) -> None:
        """Add a box that no box before shares an element with."""
        share = content_share(elements, tensor.shape, region)
        self._shares[tensor.name] = self._shares.get(tensor.name, 0) ^ share
        self._numels[tensor.name] = self._numels.get(tensor.name, 0) + region.numel

    def is_whole(self, tensor: ExportedTensor) -> bool:
        """Whether all elements were added."""
        return self._numels.get(tensor.name, 0) * tensor.itemsize == tensor.nbytes

    def digest(self, tensor: ExportedTensor) -> int:
        """Return the digest of all added bytes."""
        return content_digest(self._shares.get(tensor.name, 0), tensor.shape, tensor.itemsize)


def read_content(checkpoint: Checkpoint, tensor: ExportedTensor, max_nbytes: int = MAX_BLOCK_NBYTES) -> int:
    """Read a tensor, and return its content digest. Blocks: on storage."""
    shares = _Shares()
    for region in c_boxes(Region.full(tensor.shape), tensor.itemsize, max_nbytes, tensor.info.chunk_shape):
        elements = np.empty(region.shape, DTYPES[tensor.dtype])
        checkpoint.read_into(tensor.info.name, region, elements, max_in_flight=max_nbytes)
        shares.add(tensor, region, elements)
    return shares.digest(tensor)


def _elements(part: Part, buffer: _Bytes) -> np.ndarray[Any, Any]:
    """Return a view of a part's elements in the block."""
    dtype = DTYPES[part.slot.tensor.dtype]
    elements: np.ndarray[Any, Any] = np.ndarray(part.region.shape, dtype, buffer.data, part.start)
    return elements


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(descriptor, [data], offset)
        if not count:
            raise OSError("the new file is shorter than the bytes written to it")
        data, offset = data[count:], offset + count
