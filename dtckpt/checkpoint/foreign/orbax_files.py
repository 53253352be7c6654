"""Find and read Orbax checkpoints: the items of a folder, their trees, plain values, and the documents of their arrays.

::

    <step>/                        of a CheckpointManager, or of Orbax's v1
      _CHECKPOINT_METADATA         names the items
      <item>/_METADATA             a tree of arrays, with manifest.ocdbt, or with a folder for each array
      <item>/metadata              an item of JSON
      metrics/metrics              likewise

A folder that itself has a ``_METADATA`` is one item. The items of a folder are the keys of the tree. But an item
without a given name, which Orbax returns by itself, is the tree itself: ``default``, in v1 ``state`` or ``pytree``.

Sources: docs of orbax.checkpoint, "Checkpoint format"; _src/path/{format_utils,step}.py.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dtckpt.checkpoint.foreign import orbax_metadata
from dtckpt.checkpoint.foreign.chunk_files import ChunkIndex, ChunkTensor, read_scalar
from dtckpt.checkpoint.foreign.dcp_metadata import merge, structure_of
from dtckpt.checkpoint.foreign.dcp_processes import segments_of
from dtckpt.checkpoint.foreign.file_reads import read_each
from dtckpt.checkpoint.foreign.orbax_metadata import OrbaxLeaf, OrbaxTree, Path
from dtckpt.checkpoint.foreign.zarr_arrays import ZarrArray, parse_zarr2, parse_zarr3
from dtckpt.checkpoint.reading.pieces import is_file_name
from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.storage.chunk_reader import MAX_DOCUMENT_NBYTES, ValueReader
from dtckpt.storage.failures import NOT_A_FILE, MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.zarr_tensorstore import DATABASE_NAME

KIND = "orbax"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
V1_MARK = "orbax.checkpoint"
MARKERS = (CHECKPOINT_METADATA, TREE_METADATA, V1_MARK, "commit_success.txt")
STRINGS = "_strings.json"
SHARDING = "_sharding"
ARRAY_METADATAS = "array_metadatas"
METRICS = "metrics"
MSGPACK = "checkpoint"
"""The file of Flax's older checkpoints, or the begin of its name."""
_MAPS = {bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF)}
"""The first byte of a map of MessagePack."""
MAX_METADATA_NBYTES = 64 << 20
_MAX_DEPTH = 64
_UNNAMED = ("default",)
_UNNAMED_V1 = ("state", "pytree")
OWN_NAMES = re.compile(
    r"_CHECKPOINT_METADATA|_METADATA|_sharding|_strings\.json|array_metadatas|commit_success\.txt|orbax\.checkpoint"
    r"|manifest\.ocdbt|d|ocdbt_data|ocdbt_meta|ocdbt\.process_\w+"
)
"""Names of files and folders that Orbax itself uses."""
_OWN_FOLDERS = re.compile(r"array_metadatas|d|ocdbt_data|ocdbt_meta|ocdbt\.process_\w+")
_OWN_FILES = re.compile(r"process_[0-9]+|manifest\.\w+|[0-9a-f]{32}")
"""Names of the files in them."""
_OF_TREE = re.compile(r"_sharding|_strings\.json|array_metadatas|manifest\.ocdbt|ocdbt\.process_\w+")
"""Those beside the metadata of a tree of arrays."""
_UNFINISHED = ".orbax-checkpoint-tmp"


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a checkpoint is always a folder)
    """Whether a file is such a checkpoint: never."""
    return False


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return CHECKPOINT_METADATA in names or TREE_METADATA in names


def is_msgpack(path: pathlib.Path) -> bool:
    """Whether a path leads to a file of Flax, or to a folder with one: a map of MessagePack, named ``checkpoint``."""
    file = path / MSGPACK if path.is_dir() else path
    if not file.name.startswith(MSGPACK) or not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(1) in _MAPS


def is_step(path: pathlib.Path) -> bool:
    """Whether a path leads to a checkpoint of a ``CheckpointManager``."""
    return (path / CHECKPOINT_METADATA).is_file()


def read_index(folder: Folder, names: Collection[str]) -> ChunkIndex:
    """Read the trees, the plain values and the documents of all arrays. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it, as far as they are known.

    Raises:
        CheckpointCorruptError: The metadata is damaged.
        CheckpointIncompleteError: Orbax did not complete the save.
        CheckpointVersionError: The metadata has something that this version does not know.
    """
    if _UNFINISHED in str(folder).rsplit("/", 1)[-1]:
        raise CheckpointIncompleteError(f"{folder} is a save that Orbax did not complete; restore another step")
    if TREE_METADATA in names:
        item = _read_tree(folder, "", names)
        return ChunkIndex(
            KIND,
            item.tensors,
            item.node,
            item.stores,
            item.refused,
            tuple(sorted(item.files)),
            tuple(item.unread),
            tuple(item.notes),
        )
    _validate_item(folder, names)
    return _read_items(folder, names)


def _validate_item(folder: Folder, names: Collection[str]) -> None:
    """Raise `CheckpointCorruptError` if a folder has the files of a tree, by the names in it, but for their index."""
    if TREE_METADATA not in names and any(map(_OF_TREE.fullmatch, names)):
        raise CheckpointCorruptError(
            f"{folder}/{TREE_METADATA} is missing, and files of a tree are there; use another copy, or restore another "
            "checkpoint"
        )


@dataclass(frozen=True, slots=True)
class _Item:
    """The content of an item: the node of its tree, and the rest as in `ChunkIndex`."""

    node: trees.Node
    tensors: Mapping[str, ChunkTensor] = field(default_factory=dict)
    stores: Mapping[str, ValueReader] = field(default_factory=dict)
    refused: Mapping[str, DtckptError] = field(default_factory=dict)
    files: Sequence[str] = ()
    unread: Sequence[str] = ()
    notes: Sequence[str] = ()


def _read_items(folder: Folder, names: Collection[str]) -> ChunkIndex:
    data = folder.read_whole(CHECKPOINT_METADATA, MAX_METADATA_NBYTES)
    named, has_custom = orbax_metadata.parse_items(data, f"{folder}/{CHECKPOINT_METADATA}")
    others = [name for name in names if not OWN_NAMES.fullmatch(name)]
    unnamed = _UNNAMED_V1 if V1_MARK in names else _UNNAMED
    structure: trees.Node = {"dict": []}
    tensors: dict[str, ChunkTensor] = {}
    stores: dict[str, ValueReader] = {}
    refused: dict[str, DtckptError] = {}
    files = [name for name in names if OWN_NAMES.fullmatch(name)]
    unread = [f"{CHECKPOINT_METADATA}: custom_metadata"] if has_custom else []
    notes: list[str] = []
    # The item without a name first: what the others have in common with it is refused.
    for name in sorted({*named, *others, METRICS}, key=lambda name: (name not in unnamed, name)):
        if not is_file_name(name) or "/" in name:
            raise CheckpointCorruptError(f"{folder}/{CHECKPOINT_METADATA} is damaged: it has an item {name[:200]!r}")
        item = _read_item(folder, name, () if name in unnamed else (name,))
        if item is None:
            unread += [name] if name in named or name in others else []
            if (lost := _lost(folder / name)) is not None:
                refused[name] = lost
            continue
        structure, clashes = merge(structure, item.node)
        refused |= item.refused
        refused |= {path: TreeError(f"{path[:200]!r} is in two items of the checkpoint") for path in clashes}
        kept = set(trees.tensor_names(structure))
        tensors |= {each: tensor for each, tensor in item.tensors.items() if each in kept and each not in tensors}
        stores |= item.stores
        files += item.files
        unread += item.unread
        notes += item.notes
    return ChunkIndex(KIND, tensors, structure, stores, refused, tuple(sorted(files)), tuple(unread), tuple(notes))


def _read_item(folder: Folder, name: str, at: Path) -> _Item | None:
    """Read an item; None if it is of a kind that is not known, or not there."""
    for document in (METRICS,) if name == METRICS else (TREE_METADATA, "metadata"):
        where = folder / name
        try:
            data = where.read_whole(document, MAX_METADATA_NBYTES)
        except (FileNotFoundError, NotADirectoryError, MalformedError):
            continue
        except OSError as error:
            if error.errno in NOT_A_FILE:
                continue
            raise
        names = where.names() if isinstance(where, LocalFolder) else [document]
        if document == TREE_METADATA:
            return _read_tree(folder, name, names, at)
        value = orbax_metadata.parse_json(data, f"{where}/{document}")
        prefix = "/".join(segments_of(at))
        try:
            node = trees.flatten(value, lambda _: False, at=prefix)[1]
        except DtckptError as error:
            return _Item({"dict": []}, refused={prefix: error}, files=[name])
        rest = [f"{name}/{each}" for each in names if each != document and not OWN_NAMES.fullmatch(each)]
        if not at and "dict" not in node:
            return None
        return _Item({"dict": [[name, node]]} if at else node, files=[name], unread=rest)
    return None


def _lost(folder: Folder) -> DtckptError | None:
    """Return why the folder of an item cannot be read, if a file of it is missing."""
    if not isinstance(folder, LocalFolder):
        return None
    try:
        names = folder.names()
        _validate_item(folder, names)
        if all(map(OWN_NAMES.fullmatch, names)):
            return CheckpointCorruptError(f"{folder}/metadata is missing; use another copy, or restore another step")
    except CheckpointCorruptError as error:
        return error
    except OSError:
        return None
    return None


# --- trees of arrays ----------------------------------------------------------------------------------------------


def _read_tree(folder: Folder, store: str, names: Collection[str], at: Path = ()) -> _Item:
    """Read an item that is a tree of arrays.

    Args:
        folder: The checkpoint's folder.
        store: The item's folder below it.
        names: The names in the item's folder, as far as they are known.
        at: Where the item is in the tree of the checkpoint.
    """
    where = folder / store if store else folder
    data = where.read_whole(TREE_METADATA, MAX_METADATA_NBYTES)
    tree = orbax_metadata.parse_tree(data, f"{where}/{TREE_METADATA}")
    reader = ValueReader(where, has_database=_has_database(where, tree))
    strings = _optional(where, STRINGS)
    layouts = orbax_metadata.parse_layouts(sharding) if (sharding := _optional(where, SHARDING)) is not None else {}
    texts = {} if strings is None else orbax_metadata.parse_object(strings, f"{where}/{STRINGS}")
    nodes: dict[Path, trees.Node] = {}
    tensors: dict[str, ChunkTensor] = {}
    refused: dict[str, DtckptError] = {}
    arrays = _read_arrays(reader, where, tree)
    random_keys = _random_keys(where, names)
    notes = []
    for leaf in tree.leaves:
        name = "/".join(segments_of((*at, *leaf.path))) or "value"
        found = arrays.get(leaf.name)
        try:
            if leaf.is_empty:
                nodes[*at, *leaf.path] = leaf.empty_node
            elif leaf.value_type == "string":
                nodes[*at, *leaf.path] = {"value": _text(texts, leaf.name)}
            elif not isinstance(found, ZarrArray):
                raise found if found is not None else CheckpointCorruptError(f"array {leaf.name[:200]!r} is missing")
            elif leaf.value_type == "scalar":
                nodes[*at, *leaf.path] = _scalar(found, reader, where)
            elif name in tensors:
                raise TreeError(f"two arrays of the checkpoint would both be named {name!r}")
            else:
                layout = orbax_metadata.layout_of(layouts.get(leaf.name), found.grid.shape)
                tensors[name] = ChunkTensor(name, found, store, layout)
                nodes[*at, *leaf.path] = {"tensor": name}
                if leaf.name in random_keys:
                    notes.append(f"{name}: the data of random keys of JAX ({random_keys[leaf.name]})")
        except DtckptError as error:
            refused[name] = error
    folders = {leaf.name.split("/")[0] for leaf in tree.leaves}
    prefix = f"{store}/" if store else ""
    unread = [f"{prefix}{name}" for name in sorted(names) if not OWN_NAMES.fullmatch(name) and name not in folders]
    if isinstance(where, LocalFolder):
        own = [name for name in sorted(names) if _OWN_FOLDERS.fullmatch(name)]
        unread += [f"{prefix}{each}" for name in own for each in _strangers(where, name, _is_own_file)]
        is_of_array = partial(_is_of_array, arrays, "zarr.json" if tree.is_zarr3 else ".zarray")
        plain = [] if reader.has_database else sorted(folders.intersection(names))
        unread += [f"{prefix}{each}" for name in plain for each in _strangers(where, name, is_of_array)]
    if tree.custom:
        unread.append(f"{prefix}{TREE_METADATA}: custom_metadata")
    files = [f"{prefix}{name}" for name in names if f"{prefix}{name}" not in unread]
    return _Item(structure_of(nodes), tensors, {store: reader}, refused, files, unread, notes)


def _strangers(where: LocalFolder, below: str, is_known: Callable[[str], bool]) -> Iterator[str]:
    """Yield the files in a folder that are not known; links are not followed. Blocks: on storage."""
    pending = [below]
    while pending:  # not by recursion: a stranger's directories may be deeper than Python's stack
        folder = pending.pop()
        try:
            names = sorted(os.listdir(f"{where.path}/{folder}"))
        except NotADirectoryError:
            yield folder
            continue
        for place in (f"{folder}/{name}" for name in names):
            # First what needs no look at the file: there may be very many.
            if is_known(place):
                continue
            path = f"{where.path}/{place}"
            if place.count("/") < _MAX_DEPTH and os.path.isdir(path) and not os.path.islink(path):
                pending.append(place)
            else:
                yield place


def _is_own_file(place: str) -> bool:
    return _OWN_FILES.fullmatch(place.rpartition("/")[2]) is not None


def _is_of_array(arrays: Mapping[str, ZarrArray | DtckptError], document: str, place: str) -> bool:
    """Whether a file is the document or a chunk of an array, or is in the folder of an array that is refused."""
    folder = place
    while folder := folder.rpartition("/")[0]:  # the parts of a key may be folders
        if (array := arrays.get(folder)) is not None:
            return isinstance(array, DtckptError) or place == f"{folder}/{document}" or array.has_key(place)
    return False


def _random_keys(where: Folder, names: Collection[str]) -> dict[str, str]:
    """Return the implementation of each array of random keys, by the array's name. Blocks: on storage."""
    below = where / ARRAY_METADATAS
    # Each process has a file, of the arrays that it wrote; where folders are not listed, the first.
    files = below.names() if isinstance(below, LocalFolder) and ARRAY_METADATAS in names else ["process_0"]
    found: dict[str, str] = {}
    for name in files:
        with suppress(OSError, MalformedError):
            found |= orbax_metadata.parse_random_keys(below.read_whole(name, MAX_METADATA_NBYTES))
    return found


def _has_database(where: Folder, tree: OrbaxTree) -> bool:
    if tree.has_database is not None:
        return tree.has_database
    return where.find_short_file({DATABASE_NAME: 1}) is None


def _optional(where: Folder, name: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return where.read_whole(name, MAX_METADATA_NBYTES)
    return None


def _text(texts: Mapping[str, Any], name: str) -> str:
    if not isinstance(text := texts.get(name), str):
        raise CheckpointCorruptError(f"string {name[:200]!r} is missing in {STRINGS}")
    return text


def _read_arrays(reader: ValueReader, where: Folder, tree: OrbaxTree) -> dict[str, ZarrArray | DtckptError]:
    """Read the documents of all arrays; return each array by its name, or why it cannot be read."""
    document, parse = ("zarr.json", parse_zarr3) if tree.is_zarr3 else (".zarray", parse_zarr2)

    # Most documents are alike, as layers are.
    parsed: dict[bytes, ZarrArray] = {}

    def read(leaf: OrbaxLeaf) -> ZarrArray | DtckptError:
        if not is_file_name(leaf.name):
            return CheckpointCorruptError(f"array {leaf.name[:200]!r} has a name that leads out of its folder")
        try:
            data = reader.read(f"{leaf.name}/{document}", MAX_DOCUMENT_NBYTES)
            if data not in parsed:
                parsed[data] = parse(leaf.name, data, is_filled=tree.is_filled)
            return replace(parsed[data], path=leaf.name)
        except (FileNotFoundError, MalformedError) as error:
            return CheckpointCorruptError(f"array {leaf.name[:200]!r} of {where} has no document: {error}")
        except DtckptError as error:
            return error

    wanted = [leaf for leaf in tree.leaves if not leaf.is_empty and leaf.value_type != "string"]
    if reader.has_database:
        return {leaf.name: read(leaf) for leaf in wanted}
    return dict(zip((leaf.name for leaf in wanted), read_each(where, read, wanted), strict=True))


def _scalar(array: ZarrArray, reader: ValueReader, where: Folder) -> trees.Node:
    """Return the node of a number that is stored as an array."""
    with translate_errors("read value {!r}", where, array.path, is_read=True):
        try:
            value = read_scalar(array, reader).item()
        except FileNotFoundError:
            raise MalformedError("it is missing") from None
        return trees.flatten(value, lambda _: False, at=array.path)[1]
