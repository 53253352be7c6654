"""Find and read files of ``torch.save``, and streams within files: the tree in the pickle, and where each tensor is.

A model of transformers may be a folder: in ``pytorch_model.bin``, or in several files, which an index names:
``pytorch_model.bin.index.json``.

A stream is a part of a file, as in PyTorch's distributed checkpoints: a small zip around the elements of one tensor.
Its first and last bytes tell where they are::

    …| zip header, pickle | elements …                     … | directory |…
     |<-- HEAD_NBYTES -->|                               |<- TAIL_NBYTES ->|
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dtckpt.checkpoint.foreign.file_reads import read_each
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

T = TypeVar("T")

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
        return _read_file(folder, alone).with_rest(unread=sorted(set(names) - {alone}))
    if len(indexes) > 1:
        raise CheckpointCorruptError(f"{folder} holds several models: {', '.join(indexes)[:200]}; open one by its path")
    return _read_parts(folder, indexes[0], names)


def _read_file(folder: Folder, name: str) -> PieceIndex:
    try:
        with _held(folder, name) as (nbytes, read_file):
            stream = open_stream(folder, name, 0, nbytes, read_file)
            tree = read_tree(stream.zip.value, budget=stream.zip.budget)
            tensors = stream.tensors(tree.leaves)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{folder}/{name} is missing") from None
    return PieceIndex(KIND, tensors, tree.node, tree.refused, files=(name,))


@contextmanager
def _held(folder: Folder, name: str) -> Iterator[tuple[int, Read]]:
    """Yield the size of a file, and what reads it: a local file stays open, as each storage takes a small read."""
    if not isinstance(folder, LocalFolder):
        yield file_nbytes(folder, name), partial(folder.read, name)
        return
    descriptor, nbytes = folder.open_regular(name)
    try:
        yield nbytes, lambda start, stop: os.pread(descriptor, stop - start, start)
    finally:
        os.close(descriptor)


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
        return folder.file_nbytes(name)
    nbytes = 0
    for bit in reversed(range(_MAX_BITS)):
        if folder.find_short_file({name: nbytes | 1 << bit}) is None:
            nbytes |= 1 << bit
    return nbytes


HEAD_NBYTES = 1024
"""Bytes from the start of a stream that hold all that is in front of the elements of one tensor."""
WHOLE_NBYTES = 64 << 10
"""Streams that are read at once: to read their ends alone would take longer."""
SERIALIZATION_ID = ".data/serialization_id"
"""The record in which PyTorch hashes the CRCs of all others; it tells nothing about them."""
_KEY_NBYTES = 64
_MAX_FRAMES = 64


@dataclass(frozen=True, slots=True, eq=False)
class TorchStream:
    """A file of ``torch.save``, or a part of a file.

    Args:
        folder: The folder that the file is in.
        zip: Its records.
        file: Name of the file.
        offset: Its first byte in the file.
    """

    folder: Folder
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
        return read_each(self.folder, lambda storage: self.zip.storage(*storage), storages)

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


class _Ends:
    """Both ends of a stream, which are read at once; a small stream is read whole.

    Args:
        read: Reads the stream.
        nbytes: Its bytes.
    """

    __slots__ = ("_read", "head", "nbytes", "tail", "tail_start")

    def __init__(self, read: Read, nbytes: int) -> None:
        self._read = read
        self.nbytes = nbytes
        if nbytes <= WHOLE_NBYTES:
            self.head = self.tail = read(0, nbytes)
            self.tail_start = 0
        else:
            self.head = read(0, HEAD_NBYTES)
            self.tail_start = nbytes - TAIL_NBYTES
            self.tail = read(self.tail_start, nbytes)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes of the stream; fewer where it ends before. Blocks: on storage, between the ends."""
        if start >= self.tail_start:
            return self.tail[start - self.tail_start : stop - self.tail_start]
        return self.head[start:stop] if stop <= len(self.head) else self._read(start, stop)

    def has(self, start: int, part: bytes) -> bool:
        """Whether bytes are at a position in one of the ends."""
        if start >= self.tail_start:
            return self.tail.startswith(part, start - self.tail_start)
        return self.head.startswith(part, start)


@dataclass(frozen=True, slots=True, eq=False)
class StreamTensor:
    """A stream that holds one tensor.

    Args:
        view: The tensor.
        start: Position of its storage in the stream.
        crc: CRC of the storage; 0 if PyTorch took no CRC.
    """

    view: StorageView
    start: int
    crc: int

    def piece(self, region: Region, file: str, offset: int, *, first: int = 0) -> Piece:
        """Return the piece that the tensor, or a range of it in C order, is.

        Args:
            region: The box that it is of the whole tensor.
            file: Name of the file.
            offset: The first byte of the stream in the file.
            first: The range's first byte in the view.
        """
        return _piece(self.view, region, file, offset + self.start, self.crc, first=first)


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """All bytes of a stream that do not follow from the elements. Most streams of tensors of one shape have the same.

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
    def of(cls, ends: _Ends, zip_: TorchZip, view: StorageView, start: int, record: Record) -> _Frame | None:
        """Return the frame of a stream; None if its ends do not hold the frame."""
        if start > len(ends.head) or record.end < ends.tail_start:
            return None
        holes = [(start, record.end), (record.crc_start, record.crc_start + CRC_NBYTES)]
        if (stamp := zip_.records.get(f"{zip_.prefix}{SERIALIZATION_ID}")) is not None:
            holes.append((stamp.stop - stamp.nbytes, stamp.end))
            holes.append((stamp.crc_start, stamp.crc_start + CRC_NBYTES))
        bounds = [0, *(bound for hole in sorted(holes) for bound in hole), ends.nbytes]
        parts = tuple((first, ends.read(first, stop)) for first, stop in zip(bounds[::2], bounds[1::2], strict=True))
        return cls(view, start, record.crc_start, ends.nbytes, parts)

    def is_of(self, ends: _Ends) -> bool:
        """Whether a stream has this frame."""
        return ends.nbytes == self.nbytes and all(ends.has(first, part) for first, part in self.parts)

    def stream(self, ends: _Ends) -> StreamTensor:
        """Return the stream that has this frame."""
        crc = ends.read(self.crc_start, self.crc_start + CRC_NBYTES)
        return StreamTensor(self.view, self.start, int.from_bytes(crc, "little"))


class TensorStreams:
    """Reads streams that hold one tensor each. Thread-safe.

    To parse a stream takes ten times as long as to compare its frame with the frame of an earlier stream.

    Args:
        folder: The folder that their files are in.
        read: Reads bytes from a position to another position of a file; None: ``folder.read``.
        budget: As for `dtckpt.checkpoint.foreign.pickle_syntax.parse_pickle`.
        parse: As for `dtckpt.checkpoint.foreign.torch_zip.read_zip`.
    """

    def __init__(
        self,
        folder: Folder,
        read: Callable[[str, int, int], bytes] | None = None,
        *,
        budget: ReadBudget | None = None,
        parse: Parse = parse_pickle,
    ) -> None:
        self._folder = folder
        self._read = folder.read if read is None else read
        self._budget = budget
        self._parse = parse
        self._frames: dict[bytes, _Frame] = {}
        """By the first bytes, which have the name of the stream: DeepSpeed's differ by the kind of the tensor."""

    def read(self, file: str, offset: int, nbytes: int, view_of: Callable[[Any], StorageView | T]) -> StreamTensor | T:
        """Return the tensor of a stream. Blocks: on storage.

        Args:
            file: Name of the file.
            offset: The first byte of the stream.
            nbytes: Bytes of the stream.
            view_of: Returns the tensor in the stream's value, or something else, which is returned.

        Raises:
            CheckpointCorruptError: The stream is damaged.
            CheckpointVersionError: The stream was not written by ``torch.save``, or not by a version that is known.
        """
        ends = _Ends(lambda start, stop: self._read(file, offset + start, offset + min(stop, nbytes)), nbytes)
        key = ends.head[:_KEY_NBYTES]
        frame = self._frames.get(key)
        if frame is not None and frame.is_of(ends):
            return frame.stream(ends)
        where = _where(self._folder, file, offset)
        zip_ = read_zip(ends.read, nbytes, where, self._budget, self._parse)
        view = view_of(zip_.value)
        if not isinstance(view, StorageView):
            return view
        start, record = zip_.storage(view.key, view.storage_nbytes)
        if (frame := _Frame.of(ends, zip_, view, start, record)) is not None:
            if len(self._frames) >= _MAX_FRAMES:
                self._frames = {}  # a new one: other threads look at the old one
            self._frames[key] = frame
        return StreamTensor(view, start, record.crc)


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

    zip_ = read_zip(_Ends(read, nbytes).read, nbytes, _where(folder, file, offset), budget, parse)
    return TorchStream(folder, zip_, file, offset)


def _where(folder: Folder, file: str, offset: int) -> str:
    return f"{folder}/{file}" if offset == 0 else f"{folder}/{file}, from byte {offset}"


class PieceLocator:
    """Finds the elements of the pieces in streams. Thread-safe.

    Args:
        folder: The folder that the files are in.
        read: Reads bytes from a position to another position of a file; None: ``folder.read``.
    """

    def __init__(self, folder: Folder, read: Callable[[str, int, int], bytes] | None = None) -> None:
        self._folder = folder
        self._streams = TensorStreams(folder, read)

    def locate(self, tensor: PieceTensor, piece: Piece) -> Piece:
        """Return a piece of a tensor with the place of its elements. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The stream is damaged, or holds something else.
            CheckpointVersionError: The stream was not written by ``torch.save``, or not by a version that is known.
            TreeError: The stream holds a tensor that cannot be read, such as a sparse tensor.
        """
        if piece.stream_nbytes is None:
            return piece
        stream = self._streams.read(
            piece.file, piece.offset, piece.stream_nbytes, lambda value: tensor_view(value, tensor.name)
        )
        view = stream.view
        held = StreamRange(piece.region.shape, 0) if piece.stream_range is None else piece.stream_range
        is_flat = piece.stream_range is None or view.strides == c_strides(view.shape)
        if view.shape != held.shape or view.dtype != tensor.dtype or not is_flat:
            raise CheckpointCorruptError(
                f"{self._folder}/{piece.file} holds, from byte {piece.offset}, {view.dtype} of shape {view.shape}, "
                f"expected {tensor.dtype} of shape {held.shape} in C order for tensor {tensor.name!r}"
            )
        place = stream.piece(piece.region, piece.file, piece.offset, first=held.start * tensor.itemsize)
        tensor.validate_piece(place)
        return place
