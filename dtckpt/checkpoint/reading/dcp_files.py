"""Find and read PyTorch's distributed checkpoints: the metadata, and the plain values.

A checkpoint is a directory with a file ``.metadata``, and ``.distcp`` files of streams of ``torch.save``. Of the
streams that hold chunks of tensors nothing is read here; `dtckpt.checkpoint.reading.torch_streams` finds their
elements when a client wants them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dtckpt.checkpoint.reading.torch_streams import open_stream
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.dcp_metadata import METADATA_NAME, DcpMetadata, DcpTensor, StoredItem, parse_metadata
from dtckpt.format.dcp_tree import Path, structure_of
from dtckpt.format.names import name_of_key
from dtckpt.format.pickle_syntax import MAX_PICKLE_NBYTES
from dtckpt.format.pickled_tree import PickledTree, read_tree
from dtckpt.format.stored_pieces import ForeignIndex, ForeignTensor, Piece
from dtckpt.format.torch_zip import Read
from dtckpt.storage.folder import Folder

KIND = "dcp"
MARKERS = (METADATA_NAME,)
RUN_NBYTES = 1 << 20
"""Bytes of neighbouring values that are read at once."""
_NUM_THREADS = 16


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (the name is always this one)
    """Whether a file is the metadata of such a checkpoint."""
    return name == METADATA_NAME


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return METADATA_NAME in names or any(map(_is_of_one_process, names))


def _is_of_one_process(name: str) -> bool:
    return name.startswith("__") and name.endswith(METADATA_NAME)


def read_index(folder: Folder, names: Collection[str]) -> ForeignIndex:
    """Read the metadata and the plain values of a distributed checkpoint. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it, or that of the metadata.

    Raises:
        CheckpointCorruptError: The metadata is damaged.
        CheckpointVersionError: It is of a class that this version does not know, or each process wrote its own.
    """
    if METADATA_NAME not in names:
        raise CheckpointVersionError(
            f"{folder} was saved by each process for itself (use_collectives=False), so it is not one checkpoint; load "
            "it in the same processes with PyTorch, and save it again"
        )
    metadata = parse_metadata(folder.read_whole(METADATA_NAME, MAX_PICKLE_NBYTES), f"{folder}/{METADATA_NAME}")
    return _index(metadata, dict(_read_values(folder, metadata)))


@dataclass(frozen=True, slots=True)
class _Value:
    """A plain value, as a tree: some hold tensors, as tuples of tensors do."""

    tree: PickledTree
    tensors: Mapping[str, ForeignTensor]


def _index(metadata: DcpMetadata, values: Mapping[str, _Value | DtckptError]) -> ForeignIndex:
    """Return the index of a checkpoint, of its metadata and its plain values by flattened name."""
    nodes: dict[Path, trees.Node] = {}
    tensors: dict[str, ForeignTensor] = {}
    refused: dict[str, DtckptError] = {}
    for flat, path in metadata.paths.items():
        name = "/".join(_segments(path))
        value = values.get(flat, metadata.refused.get(flat))
        if isinstance(value, DtckptError):
            refused[name] = value
            continue
        added = {name: _tensor(name, metadata.tensors[flat])} if value is None else value.tensors
        if twice := added.keys() & tensors.keys():
            refused[name] = TreeError(f"two tensors of the checkpoint would both be named {min(twice)!r}")
            continue
        tensors.update(added)
        nodes[path] = {"tensor": name} if value is None else value.tree.node
        if value is not None:
            refused.update(value.tree.refused)
    return ForeignIndex(KIND, tensors, structure_of(nodes), refused)


def _segments(path: Path) -> tuple[str, ...]:
    """Return a path as in the names of tensors."""
    return tuple(name_of_key(str(key)) for key in path)


def _tensor(name: str, tensor: DcpTensor) -> ForeignTensor:
    pieces = tuple(Piece(region, item.file, item.offset, stream_nbytes=item.nbytes) for region, item in tensor.chunks)
    return ForeignTensor(name, tensor.shape, tensor.dtype, pieces)


def _read_values(folder: Folder, metadata: DcpMetadata) -> Iterator[tuple[str, _Value | DtckptError]]:
    """Yield the plain values by flattened name, or why they cannot be read. Blocks: on storage."""

    def read(run: Sequence[tuple[str, StoredItem]]) -> list[tuple[str, _Value | DtckptError]]:
        file, start, stop = run[0][1].file, run[0][1].offset, run[-1][1].stop
        try:
            data = folder.read(file, start, stop) if stop - start <= RUN_NBYTES else None
            read_file = None if data is None else (lambda first, last: data[first - start : last - start])
            return [(flat, _value(folder, metadata.paths[flat], item, read_file)) for flat, item in run]
        except FileNotFoundError:
            error = CheckpointCorruptError(f"{folder}/{file} is missing; restore another checkpoint")
            return [(flat, error) for flat, _ in run]

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-values") as pool:
        for values in pool.map(read, _runs(metadata.values)):
            yield from values


def _runs(items: Mapping[str, StoredItem]) -> Iterator[list[tuple[str, StoredItem]]]:
    """Yield the items in runs of neighbours in one file that are read at once; PyTorch writes them one by one."""
    run: list[tuple[str, StoredItem]] = []
    for name, item in sorted(items.items(), key=lambda pair: (pair[1].file, pair[1].offset)):
        if run and not (
            run[-1][1].file == item.file
            and run[-1][1].stop == item.offset
            and item.stop - run[0][1].offset <= RUN_NBYTES
        ):
            yield run
            run = []
        run.append((name, item))
    if run:
        yield run


def _value(folder: Folder, path: Path, item: StoredItem, read_file: Read | None) -> _Value | DtckptError:
    """Read a plain value, or why it cannot be read. Blocks: on storage."""
    try:
        stream = open_stream(folder, item.file, item.offset, item.nbytes, read_file)
        tree = read_tree(stream.zip.value, _segments(path))
        return _Value(tree, stream.tensors(tree.leaves))
    # Those who do not ask for the value can do without it.
    except DtckptError as error:
        return error
