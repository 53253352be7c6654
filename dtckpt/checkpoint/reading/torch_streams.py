"""Read what files and streams of ``torch.save`` hold beside elements, and find the elements in them.

A stream is a part of a file, as in PyTorch's distributed checkpoints: a small zip around the elements of one tensor.
Its first and last bytes tell where they are::

    …| zip header, pickle | elements …                     … | directory |…
     |<-- HEAD_NBYTES -->|                               |<- TAIL_NBYTES ->|
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.pickle_syntax import parse_pickle
from dtckpt.format.pickled_tensors import StorageView, tensor_view
from dtckpt.format.pickled_tree import Leaf
from dtckpt.format.read_budget import ReadBudget
from dtckpt.format.stored_pieces import CheckedBytes, ForeignTensor, Piece, c_strides
from dtckpt.format.torch_zip import TAIL_NBYTES, Parse, Read, TorchZip, read_zip
from dtckpt.layout.region import Region
from dtckpt.storage.folder import Folder

HEAD_NBYTES = 1024
"""Bytes from the start of a stream that hold all that is in front of the elements of one tensor."""
WHOLE_NBYTES = 16 << 10
"""Streams that are read at once: to read their ends alone would take longer."""
_NUM_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class TorchStream:
    """A file of ``torch.save``, or a part of a file.

    Args:
        zip: What it holds.
        file: Name of the file.
        offset: Its first byte in the file.
    """

    zip: TorchZip
    file: str
    offset: int

    def tensors(self, leaves: Mapping[str, Leaf]) -> dict[str, ForeignTensor]:
        """Return the tensors of its tree, by name. Blocks: on storage.

        Args:
            leaves: As `PickledTree.leaves`.

        Raises:
            CheckpointCorruptError: A storage is missing, or is not as long as the pickle says.
        """
        views = [leaf for leaf in leaves.values() if isinstance(leaf, StorageView)]
        storages = sorted({(view.key, view.storage_nbytes) for view in views if 0 not in view.shape})
        # Each is one small read, which takes long elsewhere.
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-headers") as pool:
            found = pool.map(lambda storage: self.zip.storage(*storage), storages)
            places = dict(zip(storages, found, strict=True))
        return {
            name: _array(name, leaf)
            if isinstance(leaf, np.ndarray)
            else ForeignTensor(name, leaf.shape, leaf.dtype, self._pieces(leaf, places))
            for name, leaf in leaves.items()
        }

    def _pieces(self, view: StorageView, places: Mapping[tuple[str, int], tuple[int, int]]) -> tuple[Piece, ...]:
        # A tensor without elements has no pieces.
        if 0 in view.shape:
            return ()
        return (self.piece(view, Region.full(view.shape), *places[view.key, view.storage_nbytes]),)

    def piece(self, view: StorageView, region: Region, start: int, crc: int) -> Piece:
        """Return the piece that a view is.

        Args:
            view: The view.
            region: The box that it is of its tensor.
            start: Position of its storage in the zip.
            crc: CRC of the storage; 0 if none was taken.
        """
        start += self.offset
        checked = CheckedBytes(start, view.storage_nbytes, crc) if crc else None
        strides = None if view.strides == c_strides(view.shape) else view.strides
        return Piece(region, self.file, start + view.start, strides, checked=checked)


def _array(name: str, array: np.ndarray[Any, Any]) -> ForeignTensor:
    return ForeignTensor(name, array.shape, array.dtype.name, (), elements=array)


class _LatestPickle:
    """Parses pickles, and reuses the latest value for an equal pickle: the chunks of a tensor have equal pickles.

    Its values must not be changed.
    """

    def __init__(self) -> None:
        self._latest: tuple[bytes, Any] | None = None

    def parse(self, data: bytes, where: str, budget: ReadBudget) -> Any:
        """As `parse_pickle`. Thread-safe."""
        latest = self._latest
        if latest is None or latest[0] != data:
            self._latest = latest = bytes(data), parse_pickle(data, where, budget)
        return latest[1]


_latest_pickle = _LatestPickle()


def open_stream(
    folder: Folder,
    file: str,
    offset: int,
    nbytes: int,
    read_file: Read | None = None,
    *,
    budget: ReadBudget | None = None,
    parse: Parse = parse_pickle,
) -> TorchStream:
    """Read what a stream of ``torch.save`` holds beside elements. Blocks: on storage.

    Args:
        folder: The folder that the file is in.
        file: Its name.
        offset: The first byte of the stream.
        nbytes: Bytes of the stream.
        read_file: Reads the file, if a part of it is in memory already.
        budget: As for `parse_pickle`.
        parse: Parses the pickle.

    Raises:
        CheckpointCorruptError: The stream is damaged.
        CheckpointVersionError: It was not written by ``torch.save``, or not by a version that is known.
    """

    def read(start: int, stop: int) -> bytes:
        bounds = offset + start, offset + min(stop, nbytes)
        return folder.read(file, *bounds) if read_file is None else read_file(*bounds)

    where = f"{folder}/{file}" if offset == 0 else f"{folder}/{file}, from byte {offset}"
    return TorchStream(read_zip(_with_windows(read, nbytes), nbytes, where, budget, parse), file, offset)


def _with_windows(read: Read, nbytes: int) -> Read:
    """Return a function that reads as another one does, and that reads both ends of the file only once.

    Args:
        read: Reads the file.
        nbytes: Its bytes.
    """
    if nbytes <= WHOLE_NBYTES:
        whole = read(0, nbytes)
        return lambda start, stop: whole[start:stop]
    head, tail_start = read(0, HEAD_NBYTES), nbytes - TAIL_NBYTES
    tail = read(tail_start, nbytes)

    def windowed(start: int, stop: int) -> bytes:
        if stop <= len(head):
            return head[start:stop]
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return read(start, stop)

    return windowed


def locate_piece(folder: Folder, tensor: ForeignTensor, piece: Piece) -> Piece:
    """Return a piece of a tensor with the place of its elements, given the stream that holds them. Blocks: on storage.

    Raises:
        CheckpointCorruptError: The stream is damaged, or holds something else.
        CheckpointVersionError: It was not written by ``torch.save``, or not by a version that is known.
        TreeError: It holds a tensor that cannot be read, as a sparse one.
    """
    if piece.stream_nbytes is None:
        return piece
    stream = open_stream(folder, piece.file, piece.offset, piece.stream_nbytes, parse=_latest_pickle.parse)
    view = tensor_view(stream.zip.value, tensor.name)
    if view.shape != piece.region.shape or view.dtype != tensor.dtype:
        raise CheckpointCorruptError(
            f"{stream.zip.where} holds {view.dtype} of shape {view.shape}, expected {tensor.dtype} of shape "
            f"{piece.region.shape} for tensor {tensor.name!r}"
        )
    return stream.piece(view, piece.region, *stream.zip.storage(view.key, view.storage_nbytes))
