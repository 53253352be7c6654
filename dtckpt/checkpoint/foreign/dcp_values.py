"""Read the plain values of PyTorch's distributed checkpoints: small streams of ``torch.save``, many in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from dtckpt.checkpoint.foreign.dcp_metadata import DcpMetadata, DcpTensor, Path, StoredItem
from dtckpt.checkpoint.foreign.pickle_syntax import ReadBudget
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_files import open_stream
from dtckpt.checkpoint.foreign.torch_zip import Read
from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor
from dtckpt.errors import CheckpointCorruptError, DtckptError
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME, name_of_key
from dtckpt.storage.folder import Folder

RUN_NBYTES = 1 << 20
"""Bytes of neighbouring values that are read at once."""
_NUM_THREADS = 16


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value, as a tree: some hold tensors, as tuples of tensors do.

    Args:
        node: Its structure.
        tensors: Its tensors, by name.
        refused: By path, why something in it cannot be read.
    """

    node: trees.Node
    tensors: Mapping[str, PieceTensor]
    refused: Mapping[str, DtckptError] = field(default_factory=dict)


def segments_of(path: Path) -> tuple[str, ...]:
    """Return a path as in the names of tensors."""
    return tuple(name_of_key(str(key)) for key in path)


def tensor_of(name: str, tensor: DcpTensor) -> PieceTensor:
    """Return a tensor under a name."""
    pieces = tuple(Piece(region, item.file, item.offset, stream_nbytes=item.nbytes) for region, item in tensor.chunks)
    return PieceTensor(name, tensor.shape, tensor.dtype, pieces)


def read_values(folder: Folder, metadata: DcpMetadata) -> dict[str, Value | DtckptError]:
    """Return the plain values by flattened name, or why they cannot be read. Blocks: on storage.

    Raises:
        CheckpointCorruptError: Two of them share bytes of a file: a million values could be one large one.
    """
    for (name, item), (other, after) in pairwise(_in_files(metadata.values)):
        if item.file == after.file and after.offset < item.stop:
            raise CheckpointCorruptError(
                f"{folder}/{DCP_METADATA_NAME} contradicts itself: {name[:200]!r} and {other[:200]!r} share bytes of "
                f"{item.file}; restore another checkpoint"
            )
    # One for all: of a million values, each could ask for the least that a file may.
    budget = ReadBudget(f"{folder}/{DCP_METADATA_NAME}")

    def read(run: Sequence[tuple[str, StoredItem]]) -> list[tuple[str, Value | DtckptError]]:
        file, start, stop = run[0][1].file, run[0][1].offset, run[-1][1].stop
        try:
            data = folder.read(file, start, stop) if stop - start <= RUN_NBYTES else None
            read_file = None if data is None else (lambda first, last: data[first - start : last - start])
            return [
                (flat, read_value(folder, segments_of(metadata.paths[flat]), item, budget, read_file))
                for flat, item in run
            ]
        except FileNotFoundError:
            error = CheckpointCorruptError(f"{folder}/{file} is missing; restore another checkpoint")
            return [(flat, error) for flat, _ in run]

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-values") as pool:
        return {flat: value for values in pool.map(read, _runs(metadata.values)) for flat, value in values}


def _in_files(items: Mapping[str, StoredItem]) -> list[tuple[str, StoredItem]]:
    """Return the items in their order in the files."""
    return sorted(items.items(), key=lambda pair: (pair[1].file, pair[1].offset))


def _runs(items: Mapping[str, StoredItem]) -> Iterator[list[tuple[str, StoredItem]]]:
    """Yield the items in runs of neighbours in one file that are read at once; PyTorch writes them one by one."""
    run: list[tuple[str, StoredItem]] = []
    for name, item in _in_files(items):
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


def read_value(
    folder: Folder, segments: tuple[str, ...], item: StoredItem, budget: ReadBudget, read_file: Read | None = None
) -> Value | DtckptError:
    """Read a plain value, or why it cannot be read. Blocks: on storage.

    Args:
        folder: The checkpoint's folder.
        segments: Its path, as in the names of tensors.
        item: Where it is.
        budget: As for `parse_pickle`.
        read_file: As for `open_stream`.
    """
    try:
        stream = open_stream(folder, item.file, item.offset, item.nbytes, read_file, budget=budget)
        tree = read_tree(stream.zip.value, segments, budget)
        return Value(tree.node, stream.tensors(tree.leaves), tree.refused)
    # A caller that does not ask for the value can do without it.
    except DtckptError as error:
        return error
