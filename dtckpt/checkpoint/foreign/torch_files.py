"""Find and read files of ``torch.save``, and streams within files: the tree in the pickle, and where each tensor is.

A model of transformers may lie in a folder: in ``pytorch_model.bin``, or in several files, which an index names:
``pytorch_model.bin.index.json``.

A stream is a part of a file, as in PyTorch's distributed checkpoints: a small zip around the elements of one tensor.
Its first and last bytes tell where they are::

    …| zip header, pickle | elements …                     … | directory |…
     |<-- HEAD_NBYTES -->|                               |<- TAIL_NBYTES ->|
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dtckpt.checkpoint.foreign.pickle_syntax import ReadBudget, parse_pickle
from dtckpt.checkpoint.foreign.pickled_tensors import StorageView, tensor_view
from dtckpt.checkpoint.foreign.pickled_tree import Leaf, read_tree
from dtckpt.checkpoint.foreign.safetensors_index import MAX_INDEX_NBYTES, parse_weight_map
from dtckpt.checkpoint.foreign.torch_zip import CRC_NBYTES, TAIL_NBYTES, Parse, Read, Record, TorchZip, read_zip
from dtckpt.checkpoint.reading.pieces import (
    CheckedBytes,
    Piece,
    PieceIndex,
    PieceTensor,
    StreamRange,
    c_strides,
)
from dtckpt.errors import CheckpointCorruptError, DtckptError
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.regular_files import regular_nbytes

KIND = "torch"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
WHOLE = ("pytorch_model.bin", "adapter_model.bin")
"""Names that Hugging Face's libraries give to a model in one file."""
MARKERS = (f"pytorch_model{INDEX_SUFFIX}", *WHOLE)
_MAX_BITS = 60


def is_file(name: str, head: bytes) -> bool:
    """Whether a file is one of ``torch.save``, as its begin tells: a zip, or pickles of the old format; or an index."""
    is_old = head.startswith(b"\x80\2") and name.endswith(SUFFIXES)
    return head.startswith(b"PK\3\4") or is_old or name.endswith(INDEX_SUFFIX)


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint: if it has a model in one file, or an index of several files."""
    return any(name.endswith(INDEX_SUFFIX) or name in WHOLE for name in names)


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the tree of a file of ``torch.save``, or of the files that an index names. Blocks: on storage.

    Args:
        folder: The folder that the file is in.
        names: The name of the file or of the index; or all names in the folder, if one of them is an index or of
            `WHOLE`.

    Raises:
        CheckpointCorruptError: A file is missing, cut short or malformed; or two have a tensor of one name.
        CheckpointVersionError: A file is in the format of an old version, or no file of ``torch.save``.
        TreeError: The object in a file is neither a tensor nor a container nor a plain value.
    """
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    alone = next((name for name in WHOLE if name in names), None if indexes else next(iter(names)))
    if alone is not None:
        return replace(_read_file(folder, alone), unread=tuple(sorted(set(names) - {alone})))
    if len(indexes) > 1:
        raise CheckpointCorruptError(f"{folder} holds several models: {', '.join(indexes)[:200]}; open one by its path")
    return _read_parts(folder, indexes[0], names)


def _read_file(folder: Folder, name: str) -> PieceIndex:
    try:
        stream = open_stream(folder, name, 0, file_nbytes(folder, name))
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{folder}/{name} is missing") from None
    tree = read_tree(stream.zip.value, budget=stream.zip.budget)
    return PieceIndex(KIND, stream.tensors(tree.leaves), tree.node, tree.refused, files=(name,))


def _read_parts(folder: Folder, name: str, names: Collection[str]) -> PieceIndex:
    index = parse_weight_map(folder.read_whole(name, MAX_INDEX_NBYTES), name)
    tensors: dict[str, PieceTensor] = {}
    refused: dict[str, DtckptError] = {}
    items = []
    for file in sorted(set(index.weight_map.values())):
        part = _read_file(folder, file)
        if (structure := trees.dict_of(part.structure)) is None:
            raise CheckpointCorruptError(f"{folder}/{file} holds no dict of tensors, which a part of a model is")
        if twice := part.tensors.keys() & tensors.keys():
            raise CheckpointCorruptError(
                f"tensor {min(twice)[:200]!r} is in two files of {folder}; the first is {file}"
            )
        tensors |= part.tensors
        refused |= part.refused
        items += structure["dict"]
    refused |= index.absent(str(folder), {*tensors, *refused})
    files = (*sorted(set(index.weight_map.values())), name)
    unread = (*sorted(set(names).difference(files)), *index.unread())
    return PieceIndex(KIND, tensors, {"dict": items}, refused, files, unread)


def file_nbytes(folder: Folder, name: str) -> int:
    """Return the size of a file. An object store is asked only whether there are so many bytes, as all can tell."""
    if isinstance(folder, LocalFolder):
        return regular_nbytes(f"{folder.path}/{name}")
    nbytes = 0
    for bit in reversed(range(_MAX_BITS)):
        if folder.find_short_file({name: nbytes | 1 << bit}) is None:
            nbytes |= 1 << bit
    return nbytes


HEAD_NBYTES = 1024
"""Bytes from the start of a stream that hold all that is in front of the elements of one tensor."""
WHOLE_NBYTES = 16 << 10
"""Streams that are read at once: to read their ends alone would take longer."""
_NUM_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class TorchStream:
    """A file of ``torch.save``, or a part of a file.

    Args:
        zip: Its records.
        file: Name of the file.
        offset: Its first byte in the file.
    """

    zip: TorchZip
    file: str
    offset: int

    def tensors(self, leaves: Mapping[str, Leaf]) -> dict[str, PieceTensor]:
        """Return the tensors of its tree, by name. Blocks: on storage.

        Args:
            leaves: As `PickledTree.leaves`.

        Raises:
            CheckpointCorruptError: A storage is missing, or is not as long as the pickle says.
        """
        views = [leaf for leaf in leaves.values() if isinstance(leaf, StorageView)]
        storages = sorted({(view.key, view.storage_nbytes) for view in views if 0 not in view.shape})
        places = {
            storage: (start, record.crc)
            for storage, (start, record) in zip(storages, self._find(storages), strict=True)
        }
        return {
            name: _array(name, leaf)
            if isinstance(leaf, np.ndarray)
            else PieceTensor(name, leaf.shape, leaf.dtype, self._pieces(leaf, places))
            for name, leaf in leaves.items()
        }

    def _find(self, storages: Sequence[tuple[str, int]]) -> list[tuple[int, Record]]:
        """Return the begin and the record of each storage. Blocks: on storage."""
        if len(storages) <= 1:
            return [self.zip.storage(*storage) for storage in storages]
        # Each is one small read, which takes long elsewhere.
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-headers") as pool:
            return list(pool.map(lambda storage: self.zip.storage(*storage), storages))

    def _pieces(self, view: StorageView, places: Mapping[tuple[str, int], tuple[int, int]]) -> tuple[Piece, ...]:
        # A tensor without elements has no pieces.
        if 0 in view.shape:
            return ()
        start, crc = places[view.key, view.storage_nbytes]
        return (_piece(view, Region.full(view.shape), self.file, self.offset + start, crc),)


def _piece(view: StorageView, region: Region, file: str, start: int, crc: int, *, first: int = 0) -> Piece:
    """Return the piece that a view, or a range of a view in C order, is.

    Args:
        view: The view.
        region: The box that it is of its tensor.
        file: Name of the file.
        start: Position of the view's storage in the file.
        crc: CRC of the storage; 0 if PyTorch took no CRC.
        first: The range's first byte in the view.
    """
    checked = CheckedBytes(start, view.storage_nbytes, crc) if crc else None
    strides = None if view.strides == c_strides(view.shape) else view.strides
    return Piece(region, file, start + view.start + first, strides, checked=checked)


def _array(name: str, array: np.ndarray[Any, Any]) -> PieceTensor:
    return PieceTensor(name, array.shape, array.dtype.name, (), elements=array)


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """All bytes of a small stream but the elements and their CRC. Most chunks of a tensor have the same.

    Args:
        view: The tensor.
        start: Position of its storage in the stream.
        crc_start: Position of the storage's CRC.
        nbytes: Bytes of the stream.
        parts: The bytes, and the position of each part.
    """

    view: StorageView
    start: int
    crc_start: int
    nbytes: int
    parts: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, data: bytes, view: StorageView, start: int, record: Record) -> _Frame:
        """Return the frame of a stream."""
        parts = tuple(
            (first, data[first:stop])
            for first, stop in ((0, start), (record.end, record.crc_start), (record.crc_start + CRC_NBYTES, len(data)))
        )
        return cls(view, start, record.crc_start, len(data), parts)

    def is_of(self, data: bytes) -> bool:
        """Whether a stream has this frame."""
        return len(data) == self.nbytes and all(data.startswith(part, first) for first, part in self.parts)

    def crc(self, data: bytes) -> int:
        """Return the CRC of the storage of a stream that has this frame."""
        return int.from_bytes(data[self.crc_start : self.crc_start + CRC_NBYTES], "little")


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
    """Read a stream of ``torch.save``, but for the elements. Blocks: on storage.

    Args:
        folder: The folder that the file is in.
        file: Its name.
        offset: The first byte of the stream.
        nbytes: Bytes of the stream.
        read_file: Reads the file, if a part of it is in memory already.
        budget: As for `dtckpt.checkpoint.foreign.pickle_syntax.parse_pickle`.
        parse: As for `dtckpt.checkpoint.foreign.torch_zip.read_zip`.

    Raises:
        CheckpointCorruptError: The stream is damaged.
        CheckpointVersionError: The stream was not written by ``torch.save``, or not by a version that is known.
    """

    def read(start: int, stop: int) -> bytes:
        bounds = offset + start, offset + min(stop, nbytes)
        return folder.read(file, *bounds) if read_file is None else read_file(*bounds)

    where = f"{folder}/{file}" if offset == 0 else f"{folder}/{file}, from byte {offset}"
    return TorchStream(read_zip(_with_windows(read, nbytes), nbytes, where, budget, parse), file, offset)


def _with_windows(read: Read, nbytes: int) -> Read:
    """Return a function that reads as `read` does, but reads both ends of the file only once.

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


class PieceLocator:
    """Finds the elements of the pieces that lie in streams. Thread-safe.

    Args:
        folder: The folder that the files are in.
        read: Reads bytes from a position to another position of a file; None: ``folder.read``.
    """

    def __init__(self, folder: Folder, read: Callable[[str, int, int], bytes] | None = None) -> None:
        self._folder = folder
        self._read = folder.read if read is None else read
        # To parse a small stream takes ten times as long as to compare its frame with the latest one.
        self._latest: _Frame | None = None

    def locate(self, tensor: PieceTensor, piece: Piece) -> Piece:
        """Return a piece of a tensor with the place of its elements. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The stream is damaged, or holds something else.
            CheckpointVersionError: The stream was not written by ``torch.save``, or not by a version that is known.
            TreeError: The stream holds a tensor that cannot be read, such as a sparse tensor.
        """
        if piece.stream_nbytes is None:
            return piece
        view, start, crc = self._parse(tensor.name, piece.file, piece.offset, piece.stream_nbytes)
        held = StreamRange(piece.region.shape, 0) if piece.stream_range is None else piece.stream_range
        is_flat = piece.stream_range is None or view.strides == c_strides(view.shape)
        if view.shape != held.shape or view.dtype != tensor.dtype or not is_flat:
            raise CheckpointCorruptError(
                f"{self._folder}/{piece.file} holds, from byte {piece.offset}, {view.dtype} of shape {view.shape}, "
                f"expected {tensor.dtype} of shape {held.shape} in C order for tensor {tensor.name!r}"
            )
        first = held.start * tensor.itemsize
        place = _piece(view, piece.region, piece.file, piece.offset + start, crc, first=first)
        tensor.validate_piece(place)
        return place

    def _parse(self, name: str, file: str, offset: int, nbytes: int) -> tuple[StorageView, int, int]:
        """Return the tensor of a stream, and the position and the CRC of its storage."""
        data = self._read(file, offset, offset + nbytes) if nbytes <= WHOLE_NBYTES else None
        frame = self._latest  # once, because other threads set it
        if data is not None and frame is not None and frame.is_of(data):
            return frame.view, frame.start, frame.crc(data)
        stream = open_stream(self._folder, file, offset, nbytes, partial(self._read, file))
        view = tensor_view(stream.zip.value, name)
        start, record = stream.zip.storage(view.key, view.storage_nbytes)
        if data is not None:
            self._latest = _Frame.of(data, view, start, record)
        return view, start, record.crc
