"""Find and read Megatron-Core's checkpoints of the kind ``zarr``, which Megatron wrote until 2024.

::

    metadata.json                     names the kind
    common.pt                         values that are the same on all processes
    <name>/.zarray, <name>/0.1        a tensor: an array of Zarr v2 without compression, and its chunks
    <name>/shard_0_1.pt               a sharded object, one file for each shard
    <name>.sync                       locks

A chunk is a file of raw elements. So a tensor is made of pieces, as in other checkpoints of Megatron. Tensors of the
distributed optimizer have the shape of the parameter.

Source: megatron.core.dist_checkpointing.strategies.zarr, and .serialization, of before 2026.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from dtckpt.checkpoint.foreign import megatron
from dtckpt.checkpoint.foreign.dcp_files import COMMON, FORMAT_NAME, ITEMS_SUFFIX, MAX_FORMAT_NBYTES, with_companions
from dtckpt.checkpoint.foreign.dcp_metadata import StoredItem, merge
from dtckpt.checkpoint.foreign.dcp_processes import Value, read_value
from dtckpt.checkpoint.foreign.pickle_syntax import ReadBudget
from dtckpt.checkpoint.foreign.torch_files import file_nbytes
from dtckpt.checkpoint.foreign.zarr_arrays import ZarrArray, parse_zarr2
from dtckpt.checkpoint.reading.pieces import MAX_SHOWN, Piece, PieceIndex, PieceTensor, RulePieces, c_strides
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.names import DCP_METADATA_NAME, name_of_key
from dtckpt.storage.chunk_reader import MAX_DOCUMENT_NBYTES
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder

KIND = "megatron"
BACKEND = "zarr"
_DOCUMENT = ".zarray"
_LOCKS = ".sync"
_SHARD = re.compile(r"shard_[0-9._]+\.pt")


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a checkpoint is always a folder)
    """Whether a file is such a checkpoint: never."""
    return False


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return FORMAT_NAME in names and COMMON in names and DCP_METADATA_NAME not in names


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the documents of the arrays, the sharded objects and the common state. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointCorruptError: A file is missing or malformed.
        CheckpointVersionError: The format is of another name or version.
    """
    data = folder.read_whole(FORMAT_NAME, MAX_FORMAT_NBYTES)
    if any(name.endswith(ITEMS_SUFFIX) for name in names):
        raise CheckpointCorruptError(
            f"{folder}/{DCP_METADATA_NAME} is missing, without which {ITEMS_SUFFIX} files cannot be read; use another "
            "copy, or restore another checkpoint"
        )
    if not megatron.is_format(data, f"{folder}/{FORMAT_NAME}", BACKEND):
        raise CheckpointVersionError(f"{folder}/{FORMAT_NAME} names no format, expected a format of Megatron")
    below = _below(folder, set(names))
    reader = _TensorFolders(folder)
    unread = [
        f"{key}/{name}" for key, files in below.items() for name in sorted(files.difference(reader.read(key, files)))
    ]
    rest = [name for name in names if name not in below and name != FORMAT_NAME and not name.endswith(_LOCKS)]
    beside = with_companions(PieceIndex(KIND, {}, {"dict": []}), folder, rest)
    structure, clashes = merge({"dict": reader.items}, beside.structure)
    kept = set(trees.tensor_names(structure))
    tensors = reader.tensors | {name: each for name, each in beside.tensors.items() if name in kept}
    twice = {path: TreeError(f"{path[:200]!r} is in {COMMON}, and in a folder beside it") for path in clashes}
    refused = {**reader.refused, **beside.refused, **twice}
    files = (*reader.files, *beside.files, FORMAT_NAME)
    notes = tuple(megatron.notes_of(tensors, structure))
    return PieceIndex(KIND, tensors, structure, refused, files, (*beside.unread, *unread), notes)


def _below(folder: Folder, names: Collection[str]) -> Mapping[str, set[str]]:
    """Return the names of the files in each folder of the checkpoint, without lock files."""
    if isinstance(folder, LocalFolder):
        with os.scandir(folder.path) as entries:
            folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.endswith(_LOCKS))
        return {name: set(os.listdir(f"{folder.path}/{name}")) for name in folders if name in names}
    found: dict[str, set[str]] = {}
    for name in folder.names():
        key, _, file = name.partition("/")
        if file and not key.endswith(_LOCKS):
            found.setdefault(key, set()).add(file)
    return found


class _GridPieces(RulePieces):
    """The chunks of an array as pieces.

    Args:
        array: The array.
        keys: The names of the chunks' files, in row-major order.
    """

    def __init__(self, array: ZarrArray, keys: Sequence[str]) -> None:
        self._array = array
        self.extents = [(key, 0, array.chunk_nbytes) for key in keys]
        self.key = array.path, array.grid
        self.largest_shape = tuple(map(min, array.grid.shape, array.grid.chunk_shape))

    @override
    def __len__(self) -> int:
        return len(self.extents)

    @override
    def __iter__(self) -> Iterator[Piece]:
        chunk = self._array.grid.chunk_shape
        for region, file, _ in self._array.plain_places():
            # A chunk at the edge is stored whole, and only a part of it belongs to the tensor.
            yield Piece(region, file, 0, None if region.shape == chunk else c_strides(chunk))


class _TensorFolders:
    """Reads the folders of a checkpoint.

    Args:
        folder: The checkpoint's folder.

    Attributes:
        items: Keys and nodes of the tree.
        tensors: The tensors, by name.
        refused: Why some things cannot be read, by name.
        files: Names of the files that were read.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._budget = ReadBudget(str(folder))
        self._parsed: dict[bytes, ZarrArray] = {}
        self.items: list[list[object]] = []
        self.tensors: dict[str, PieceTensor] = {}
        self.refused: dict[str, DtckptError] = {}
        self.files: list[str] = []

    def read(self, key: str, files: Collection[str]) -> set[str]:
        """Read the files of one folder; return the names of the files that were read."""
        name = name_of_key(key)
        used = {each for each in files if _SHARD.fullmatch(each)}
        for each in sorted(used):
            self._add_shard(key, each)
        if _DOCUMENT not in files:
            return used
        used.add(_DOCUMENT)
        try:
            array = self._array(key)
            pieces = self._pieces(array, key, files)
            self.tensors[name] = PieceTensor(name, array.grid.shape, array.dtype, pieces)
            self.items.append([key, {"tensor": name}])
            used.update(file.rpartition("/")[2] for file, _, _ in pieces.extents)
        except CheckpointVersionError as error:
            self.refused[name] = error
            used.update(files)
        self.files += [f"{key}/{each}" for each in sorted(used)]
        return used

    def _array(self, key: str) -> ZarrArray:
        data = self._folder.read_whole(f"{key}/{_DOCUMENT}", MAX_DOCUMENT_NBYTES)
        # Most documents are alike, as layers are.
        if data not in self._parsed:
            self._parsed[data] = parse_zarr2(key, data, is_filled=False)
        array = replace(self._parsed[data], path=key)
        if array.codec != NO_CODEC or array.separator != ".":
            raise CheckpointVersionError(
                f"array {key[:200]!r} has codec {array.codec} and separator {array.separator!r}, expected none and '.' "
                "as Megatron writes them; convert it with the library that wrote it"
            )
        return array

    def _pieces(self, array: ZarrArray, key: str, files: Collection[str]) -> _GridPieces:
        """Return a piece for each chunk.

        Raises:
            CheckpointCorruptError: A chunk's file is missing.
        """
        prefix = f"{key}/"
        # No more of them than could be there: the document may claim any number.
        count = min(array.grid.num_chunks, len(files) + MAX_SHOWN)
        keys = [array.key(array.grid.index(number)) for number in range(count)]
        lost = [number for number, each in enumerate(keys) if each.removeprefix(prefix) not in files]
        if lost:
            regions = (array.grid.region(array.grid.index(number)) for number in lost)
            shown = [f"{keys[number]} with {region}" for number, region in zip(lost[:MAX_SHOWN], regions, strict=False)]
            raise CheckpointCorruptError(
                f"{self._folder}: chunks of {key[:200]!r} are missing: {', '.join(shown)}; use another copy, or "
                "restore another checkpoint"
            )
        return _GridPieces(array, keys)

    def _add_shard(self, key: str, file: str) -> None:
        """Add a sharded object under the name that it has in newer checkpoints."""
        path = f"{key}/{file.removesuffix('.pt')}"
        name = name_of_key(path)
        place = f"{key}/{file}"
        item = StoredItem(place, 0, file_nbytes(self._folder, place))
        value = read_value(self._folder, (name,), item, self._budget)
        self.files.append(place)
        if not isinstance(value, Value):
            self.refused[name] = value
            return
        self.tensors |= value.tensors
        self.refused |= value.refused
        self.items.append([path, value.node])
