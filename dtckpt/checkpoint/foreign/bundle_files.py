"""Find and read TensorFlow V2 checkpoints: files ``<prefix>.index`` and ``<prefix>.data-00000-of-00001``.

The path of such a checkpoint is its prefix. The index, or a folder with one checkpoint, will do, too; of several in a
folder, the file ``checkpoint`` names the newest.

A checkpoint of ``tf.train.Checkpoint`` has a graph of objects. Then the state tree is the tree of the objects, by their
paths, and the value of an object is at its path. Slots of optimizers of Keras 2, whose names lead through a variable,
keep their whole names. Any other checkpoint is a flat dict of names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from dtckpt.checkpoint.foreign.dcp_metadata import structure_of
from dtckpt.checkpoint.foreign.dcp_processes import segments_of
from dtckpt.checkpoint.foreign.sstable import read_table
from dtckpt.checkpoint.foreign.tensor_bundle import OBJECT_GRAPH, STRING, Bundle, BundleEntry, parse_strings, path_of
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, DtckptError, TreeError, capped
from dtckpt.format import tree as trees
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder

KIND = "tensorflow"
SUFFIX = ".index"
STATE_FILE = "checkpoint"
MAX_INDEX_NBYTES = 64 << 20
MAX_STRINGS_NBYTES = 16 << 20
"""Bytes of all strings of a checkpoint, which become plain values."""
_MAX_STATE_NBYTES = 1 << 20
_DATA = re.compile(r"(.+)\.data-[0-9]{5}-of-[0-9]{5}")
_NEWEST = re.compile(r'^model_checkpoint_path: "([^"\\]*)"', re.MULTILINE)


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a table has its mark at its end)
    """Whether a file is the index of such a checkpoint, by its name."""
    return name.endswith(SUFFIX)


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory holds such checkpoints, by the names in it."""
    return bool(_stems(names))


def _stems(names: Collection[str]) -> list[str]:
    with_data = {match[1] for name in names if (match := _DATA.fullmatch(name)) is not None}
    return sorted(stem for stem in with_data if f"{stem}{SUFFIX}" in names)


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the index and the strings of a checkpoint. Blocks: on storage.

    Args:
        folder: The folder that the files are in.
        names: The one index to be read, or all files of the folder.

    Raises:
        CheckpointCorruptError: The index is damaged.
        CheckpointNotFoundError: The folder holds several checkpoints, and none is named as the newest.
        CheckpointVersionError: The index has something that this version does not know.
    """
    indexes = [name for name in names if name.endswith(SUFFIX)]
    is_alone = len(names) == len(indexes) == 1
    stem = (indexes[0].removesuffix(SUFFIX)) if is_alone else _newest(folder, names)
    where = f"{folder}/{stem}{SUFFIX}"
    bundle = Bundle.parse(read_table(folder.read_whole(f"{stem}{SUFFIX}", MAX_INDEX_NBYTES), where), stem, where)
    reader = _BundleReader(folder, bundle)
    reader.read()
    files = {f"{stem}{SUFFIX}", *(bundle.file(shard) for shard in range(bundle.num_shards))}
    unread = () if is_alone else sorted(set(names) - files - {STATE_FILE})
    kept = files | ({STATE_FILE} & set(names))
    return PieceIndex(
        KIND, reader.tensors, structure_of(reader.nodes), reader.refused, tuple(sorted(kept)), tuple(unread)
    )


def _newest(folder: Folder, names: Collection[str]) -> str:
    """Return the prefix of the newest checkpoint of a folder, without the folder."""
    stems = _stems(names)
    if STATE_FILE in names:
        text = folder.read_whole(STATE_FILE, _MAX_STATE_NBYTES).decode("utf-8", "replace")
        match = _NEWEST.search(text)
        # The path may be of another place: only its end counts.
        if match is not None and (stem := match[1].rpartition("/")[2]) in stems:
            return stem
    if len(stems) != 1:
        raise CheckpointNotFoundError(
            f"{folder} holds several checkpoints of TensorFlow: {capped(stems)}; open one of these by its prefix"
        )
    return stems[0]


class _BundleReader:
    """Reads the tensors and strings of an index.

    Attributes:
        nodes: By path in the state tree, each leaf.
        tensors: The tensors, by name.
        refused: Why some cannot be read, by name.
    """

    def __init__(self, folder: Folder, bundle: Bundle) -> None:
        self._folder = folder
        self._bundle = bundle
        self._left = MAX_STRINGS_NBYTES
        self.nodes: dict[tuple[str | int, ...], trees.Node] = {}
        self.tensors: dict[str, PieceTensor] = {}
        self.refused: dict[str, DtckptError] = {}

    def read(self) -> None:
        """Read all. Blocks: on storage."""
        keys = {key: key.decode("utf-8", "surrogateescape") for key in self._bundle.names()}
        has_graph = keys.get(OBJECT_GRAPH.encode()) is not None
        paths = {key: (path_of(name) if has_graph else None) or (name,) for key, name in keys.items()}
        objects = set(paths.values())
        for key, name in keys.items():
            if name == OBJECT_GRAPH:
                continue
            path = paths[key]
            # A value of an object whose parent has a value, too, is no item of a dict.
            if any(path[:end] in objects for end in range(1, len(path))):
                path = (name,)
            full = "/".join(segments_of(path))
            try:
                if not name.isprintable():
                    raise CheckpointCorruptError(f"the name of tensor {name[:200]!r} is no text")
                if full in self.tensors:
                    raise TreeError(f"two tensors of the checkpoint would both be named {full!r}")
                entry = self._bundle.entries[key]
                if entry.dtype == STRING:
                    self.nodes[path] = self._strings(entry, full)
                else:
                    self.tensors[full] = self._bundle.tensor(key, full)
                    self.nodes[path] = {"tensor": full}
            except DtckptError as error:
                self.refused[full] = error

    def _strings(self, entry: BundleEntry, name: str) -> trees.Node:
        """Return the node of a tensor of strings: bytes, or lists of them."""
        count = 1
        for size in entry.shape:
            count *= size
        self._left -= entry.nbytes + 64 * max(0, count)
        if self._left < 0 or entry.slices or count < 0:
            raise TreeError(
                f"the strings {name[:200]!r} are not read: they are in slices, or all have more than "
                f"{MAX_STRINGS_NBYTES} bytes"
            )
        file = self._bundle.file(entry.shard)
        try:
            data = self._folder.read(file, entry.offset, entry.offset + entry.nbytes)
            from awscrt.checksums import crc32c  # here, because most checkpoints are of other formats

            strings = parse_strings(data, count, entry.crc, crc32c)
        except (FileNotFoundError, MalformedError, IndexError, ValueError) as error:
            raise CheckpointCorruptError(f"the strings {name[:200]!r} in {file} are damaged: {error}") from None
        return trees.flatten(_nested(strings, entry.shape), lambda _: False, at=name)[1]


def _nested(strings: list[bytes], shape: tuple[int, ...]) -> Any:
    if not shape:
        return strings[0]
    step = len(strings) // shape[0] if shape[0] else 0
    return [_nested(strings[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]
