"""Find and read the headers of safetensors files: one file, or a directory of several, with an index or without."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from dtckpt.checkpoint.foreign import safetensors_index
from dtckpt.checkpoint.foreign.safetensors_index import (
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    MAX_INDEX_NBYTES,
    SafetensorsHeader,
    parse_header,
    parse_length,
    parse_weight_map,
    validate_parts,
)
from dtckpt.checkpoint.foreign.safetensors_tree import index_of
from dtckpt.checkpoint.reading.pieces import PieceIndex
from dtckpt.errors import CheckpointCorruptError, capped
from dtckpt.storage.folder import Folder

KIND = safetensors_index.KIND
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
STEMS = {
    "model": (SUFFIX, INDEX_SUFFIX),
    "diffusion_pytorch_model": (INDEX_SUFFIX, SUFFIX),
    "adapter_model": (SUFFIX, INDEX_SUFFIX),
}
"""The names that Hugging Face's libraries give to a model's files, each with its endings in the order of the search."""
MARKERS = tuple(f"{stem}{suffix}" for stem, suffixes in STEMS.items() for suffix in suffixes)
MAX_FILES = 1 << 14
"""Bound on the files of one model."""
_FIRST_NBYTES = 64 << 10
"""Bytes that the first read of a file asks for: the headers of most files are shorter."""
_NUM_THREADS = 16


def is_file(name: str, head: bytes) -> bool:
    """Whether a file is of safetensors, by its name, or by how it begins: a length, and JSON."""
    is_length = 2 <= int.from_bytes(head[:LENGTH_NBYTES], "little") <= MAX_HEADER_NBYTES
    return name.endswith((SUFFIX, INDEX_SUFFIX)) or (is_length and head[LENGTH_NBYTES : LENGTH_NBYTES + 1] == b"{")


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory with files of these names holds a model in safetensors files."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the headers of a model's files. Blocks: on storage.

    Args:
        folder: The folder that the files are in.
        names: The one file to be read; or all files of the folder. The model's files among them are the files of an
            index, or else the one file with a name of `MARKERS`, or else all safetensors files.

    Raises:
        CheckpointCorruptError: A file is missing or malformed, or the files contradict each other.
        CheckpointIncompleteError: By the names of the files, others are missing.
    """
    name, files = _chosen(folder, names)
    index = None
    if name is None:
        validate_parts(files, str(folder))
    else:
        index = parse_weight_map(folder.read_whole(name, MAX_INDEX_NBYTES), name)
        files = sorted(set(index.weight_map.values()))
    if len(files) > MAX_FILES:
        raise CheckpointCorruptError(f"{folder} has {len(files)} safetensors files, expected at most {MAX_FILES}")
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-headers") as pool:
        headers = dict(zip(files, pool.map(lambda file: read_header(folder, file), files), strict=True))
    read = index_of(str(folder), headers, index)
    return read.with_rest(unread=sorted(set(names).difference(read.files)))


def _chosen(folder: Folder, names: Collection[str]) -> tuple[str | None, Sequence[str]]:
    """Return the index of a model, or the files of one without an index."""
    marker = next((name for name in MARKERS if name in names), None)
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if marker is None and len(indexes) > 1:
        raise CheckpointCorruptError(f"{folder} holds several models: {capped(indexes)}; open one of these by its path")
    index = marker if marker is not None and marker.endswith(INDEX_SUFFIX) else next(iter(indexes), None)
    if marker is not None and index != marker:
        return None, [marker]
    # A file that the user named may have any name.
    return index, [] if index else sorted(name for name in names if name.endswith(SUFFIX) or len(names) == 1)


def read_header(folder: Folder, file: str) -> SafetensorsHeader:
    """Read the header of one file. Blocks: on storage. Raises: as `read_index`."""
    try:
        first = folder.read(file, 0, _FIRST_NBYTES)
        stop = LENGTH_NBYTES + parse_length(first, f"{folder}/{file}")
        data = first[:stop] + (folder.read(file, len(first), stop) if len(first) == _FIRST_NBYTES < stop else b"")
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{folder}/{file} is missing") from None
    if len(data) < stop:
        raise CheckpointCorruptError(f"{folder}/{file} was cut short: its header has {stop} bytes, it has {len(data)}")
    header = parse_header(data[LENGTH_NBYTES:], file)
    # As safetensors' own reader: bytes that belong to no tensor are damage, or hide something.
    end = header.nbytes
    if first[end:] if len(first) < _FIRST_NBYTES else folder.read(file, end, end + 1):
        raise CheckpointCorruptError(
            f"{folder}/{file} is damaged: it has bytes behind its last tensor, which ends at byte {end}"
        )
    return header
