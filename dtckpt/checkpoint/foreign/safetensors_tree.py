"""The state tree of safetensors files, from their headers and from the notes that dtckpt leaves in them.

By the notes a restore gives the same tree as the save had, and verifies the tensors. Other readers ignore them. Notes
are texts in a file's metadata. For a model in several files, the metadata of the index has the tree::

    dtckpt.tree       the state tree (`dtckpt.format.tree`), where it is more than a dict of tensors by name
    dtckpt.content    by name, the content digests of the file's tensors (`dtckpt.format.content`)
    lm_head.weight    the name of a stored tensor: this one is tied to it, and is not stored itself

``safetensors.torch.save_model`` has the last rule, too. In a file that dtckpt did not write, a text may equal a
tensor's name by chance. In such a file a text is a tie only between names that look like a module's parameters: with
dots, and one last part. All other texts are listed as unread.

Names: keys of a tree are joined by ``/`` here, and by ``.`` in a file. The tree tells which is which on the way back;
without it names stay as they are in the file.

The Hugging Face writer of ``torch.distributed.checkpoint`` leaves a note, too. Each client writes a file with shards of
tensors. Its metadata say where the boxes in it begin; nothing notes the shapes of the tensors::

    shard-00001-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    shard-00002-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4, 0]}}'}

Source: torch.distributed.checkpoint.hf_storage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.foreign.safetensors_index import KIND, MAX_PARTS, METADATA, SHARD, SafetensorsHeader, WeightIndex
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, DtckptError, TensorNameError, capped
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region

TREE = "dtckpt.tree"
CONTENT = "dtckpt.content"
FORMAT = "format"
"""A note of every file that transformers reads: for which framework it is; dtckpt writes ``pt``."""
SHARDS = "DCP_SHARDING_INFO"
VERSION = "DCP_VERSION"
_OF_FILES = frozenset({FORMAT, CONTENT, SHARDS, VERSION})
"""Notes that are read, beside the tree."""
_DIGEST = re.compile(r"[0-9a-f]{16}")


def file_name_of(name: str) -> str:
    """Return the name that a tensor has in a file."""
    return name.replace("/", ".")


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return, by tensor name, the name in a file.

    Raises:
        TensorNameError: Two tensors would have the same name there, or a tensor's name would be reserved.
    """
    owners: dict[str, str] = {}
    for name in names:
        there = file_name_of(name)
        if there == METADATA:
            raise TensorNameError(f"a tensor of a safetensors file cannot be named {there!r}; rename it")
        if there in owners:
            raise TensorNameError(
                f"tensors {owners[there]!r} and {name!r} would both be {there!r} in a safetensors file, where keys are "
                "joined by '.'; rename one of them"
            )
        owners[there] = name
    return {name: there for there, name in owners.items()}


def needs_tree(structure: trees.Node) -> bool:
    """Whether a state tree is more than a dict of tensors by name, with no ``/`` in it."""
    if "dict" not in structure:
        return True
    return not all(
        isinstance(key, str) and "/" not in key and node == {"tensor": key} for key, node in structure["dict"]
    )


def content_text(digests: Mapping[str, int]) -> str:
    """Return the note of the content digests; its length depends on the names only."""
    return json.dumps({name: f"{digest:016x}" for name, digest in digests.items()}, separators=(",", ":"))


def index_of(where: str, headers: Mapping[str, SafetensorsHeader], index: WeightIndex | None = None) -> PieceIndex:
    """Return the index of a model.

    Args:
        where: The file or directory, for messages.
        headers: The headers of its files, by file name.
        index: Its index, if it has one.

    Raises:
        CheckpointCorruptError: A tensor is in two files.
    """
    stored, refused = join_shards({file: header for file, header in headers.items() if is_sharded(header)})
    for file, header in headers.items():
        refused |= header.refused
        if is_sharded(header):
            continue
        digests = _content(header.metadata)
        for name, tensor in header.tensors.items():
            if name in stored:
                other = next((piece.file for piece in stored[name].pieces), "another file")
                raise CheckpointCorruptError(
                    f"tensor {name[:200]!r} is in {other} and in {file} of {where}; open the file that you mean, by "
                    "its own path"
                )
            stored[name] = replace(tensor, content=digests[name]) if name in digests else tensor
    ties = {file: _ties(header) for file, header in headers.items()}
    for tied in ties.values():
        for name, kept in tied.items():
            if name not in stored and kept in stored:
                stored[name] = replace(stored[kept], name=name)
    files, notes, unread = [*headers], [header.metadata for header in headers.values()], []
    differences: tuple[str, ...] = ()
    if index is not None:
        differences = tuple(index.differences({name: file for file in headers for name in headers[file].tensors}))
        refused |= index.absent(where, stored.keys() | refused.keys())
        files.append(index.name)
        notes.insert(0, index.metadata)
    tree = _tree_of(notes, stored)
    read = frozenset() if tree is None else frozenset({TREE})
    if index is not None:
        unread += index.unread(read)
    for file, header in headers.items():
        known = read.union(_OF_FILES, ties[file])
        unread += (f"{file}: {METADATA}/{key}" for key in header.metadata if key not in known)
    unread += (f"{name} (no such file)" for name in absent_shards(headers))
    if tree is None:
        plain = {"dict": [[name, {"tensor": name}] for name in stored]}
        return PieceIndex(KIND, stored, plain, refused, tuple(files), tuple(unread), differences)
    names = file_names(trees.tensor_names(tree))
    tensors = {name: replace(stored[there], name=name) for name, there in names.items()}
    return PieceIndex(KIND, tensors, tree, refused, tuple(files), tuple(unread), differences)


def _ties(header: SafetensorsHeader) -> dict[str, str]:
    """Return the tied tensors that a file notes: by name, the name of the stored one."""

    def is_tie(name: str, kept: str) -> bool:
        if name in _OF_FILES or name == TREE or name in header.tensors or kept not in header.tensors:
            return False
        return CONTENT in header.metadata or ("." in name and name.rpartition(".")[2] == kept.rpartition(".")[2])

    return {name: kept for name, kept in header.metadata.items() if is_tie(name, kept)}


def _tree_of(notes: Iterable[Mapping[str, Any]], stored: Collection[str]) -> trees.Node | None:
    """Return the tree in the notes of files; None if there is none, or if it does not fit their tensors."""
    tree = _tree(next((note[TREE] for note in notes if TREE in note), None))
    if tree is None:
        return None
    try:
        names = file_names(trees.tensor_names(tree))
    except TensorNameError:
        return None
    # Another program may have changed the tensors and kept the notes; then the tree does not fit.
    return tree if sorted(names.values()) == sorted(stored) else None


def _tree(text: Any) -> trees.Node | None:
    """Return the tree of a note; None if the note is missing, or if this version cannot read it."""
    if not isinstance(text, str):
        return None
    try:
        return trees.load(text.encode())
    except (DtckptError, UnicodeEncodeError):
        return None


def _content(metadata: Mapping[str, str]) -> dict[str, int]:
    """Return the content digests that a file notes."""
    try:
        digests = json.loads(metadata.get(CONTENT, "{}"))
        return {name: int(text, 16) for name, text in digests.items() if _DIGEST.fullmatch(text)}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"the note {CONTENT} of a safetensors file cannot be read: {error}") from error


def absent_shards(files: Collection[str]) -> list[str]:
    """Return the names of missing shards, of clients before the last client that has a file.

    A client that held no tensor has no file either; the files do not tell the two cases apart.
    """
    numbers = {int(match["number"]) for file in files if (match := SHARD.fullmatch(file)) is not None}
    last = min(max(numbers, default=0), MAX_PARTS)
    return [f"shard-{number:05}-*" for number in range(1, last) if number not in numbers]


def is_sharded(header: SafetensorsHeader) -> bool:
    """Whether the tensors of a file are shards of larger ones."""
    return SHARDS in header.metadata


def join_shards(headers: Mapping[str, SafetensorsHeader]) -> tuple[dict[str, PieceTensor], dict[str, DtckptError]]:
    """Return the tensors whose shards are in several files, and by name why some cannot be read.

    Args:
        headers: The headers of the files with shards, by file name.

    Raises:
        CheckpointCorruptError: A note of the shards is malformed.
        CheckpointIncompleteError: There is one file, and its name does not tell that it is the first.
    """
    if len(headers) == 1 and not any(map(SHARD.fullmatch, headers)):
        raise CheckpointIncompleteError(
            f"{next(iter(headers))} holds shards of tensors; give the directory of all files that the job wrote, under "
            "the names that it gave them"
        )
    shards: dict[str, list[tuple[PieceTensor, tuple[int, ...]]]] = {}
    for file, header in headers.items():
        offsets = _offsets(header, file)
        for name, tensor in header.tensors.items():
            if len(offsets.get(name, ())) != len(tensor.shape):
                raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} does not say where {name[:200]!r} begins")
            shards.setdefault(name, []).append((tensor, offsets[name]))
    tensors: dict[str, PieceTensor] = {}
    refused: dict[str, DtckptError] = {}
    for name, boxes in shards.items():
        try:
            tensors[name] = _joined(name, boxes, headers)
        except (CheckpointCorruptError, CheckpointIncompleteError) as error:
            refused[name] = error
    return tensors, refused


def _joined(name: str, boxes: Iterable[tuple[PieceTensor, tuple[int, ...]]], files: Collection[str]) -> PieceTensor:
    first, *others = (tensor for tensor, _ in boxes)
    if any((each.dtype, len(each.shape)) != (first.dtype, len(first.shape)) for each in others):
        raise CheckpointCorruptError(f"the shards of tensor {name[:200]!r} differ in dtype or rank")
    stops = [[start + size for start, size in zip(offset, tensor.shape, strict=True)] for tensor, offset in boxes]
    shape = tuple(map(max, zip(*stops, strict=True)))
    pieces = tuple(
        replace(piece, region=Region(offset, tensor.shape)) for tensor, offset in boxes for piece in tensor.pieces
    )
    joined = PieceTensor(name, shape, first.dtype, pieces)
    if not joined.is_whole:
        raise CheckpointIncompleteError(
            f"elements of tensor {name[:200]!r} are in none of the files; missing: "
            f"{capped(absent_shards(files)) or 'a file'}"
        )
    return joined


def _offsets(header: SafetensorsHeader, file: str) -> dict[str, tuple[int, ...]]:
    """Return, by name, where the box of a tensor begins."""
    try:
        notes = json.loads(header.metadata[SHARDS])
        offsets = {name: tuple(notes[name]["saved_offsets"]) for name in header.tensors if name in notes}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} cannot be read: {error}") from error
    for offset in offsets.values():
        if any(type(start) is not int or not 0 <= start < 1 << 62 for start in offset):
            raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} has the offset {str(offset)[:80]}")
    return offsets
