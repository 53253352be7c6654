"""Merge the checkpoints that processes saved separately (``use_collectives=False``) into one.

The processes did not compare their values. If several processes have an equal value, the checkpoint holds it once;
tensors are compared by the checksums in the files. A value that differs, such as a random state, becomes a value that
differs by client (`dtckpt.PerClient`), as in a checkpoint of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from dtckpt.checkpoint.foreign.dcp_metadata import DcpMetadata, DcpTensor, Path, StoredItem
from dtckpt.checkpoint.foreign.pickle_syntax import ReadBudget
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_files import PieceLocator, open_stream
from dtckpt.checkpoint.foreign.torch_zip import Read
from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor
from dtckpt.errors import CheckpointCorruptError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME, name_of_key
from dtckpt.layout.region import Region
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
    pieces = tuple(
        Piece(region, item.file, item.offset, stream_nbytes=item.nbytes, stream_range=item.range)
        for region, item in tensor.chunks
    )
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
    folder: Folder,
    segments: tuple[str, ...],
    item: StoredItem,
    budget: ReadBudget,
    read_file: Read | None = None,
    *,
    find: Callable[[Any], Any] = lambda value: value,
) -> Value | DtckptError:
    """Read a plain value, or why it cannot be read. Blocks: on storage.

    Args:
        folder: The checkpoint's folder.
        segments: Its path, as in the names of tensors.
        item: Where it is.
        budget: As for `parse_pickle`.
        read_file: As for `open_stream`.
        find: Returns the value to be read, given the pickled value.
    """
    try:
        stream = open_stream(folder, item.file, item.offset, item.nbytes, read_file, budget=budget)
        tree = read_tree(find(stream.zip.value), segments, budget)
        return Value(tree.node, stream.tensors(tree.leaves), tree.refused)
    # A caller that does not ask for the value can do without it.
    except DtckptError as error:
        return error


Values = dict[str, Value | DtckptError]


def merge_processes(folder: Folder, processes: Mapping[int, DcpMetadata]) -> tuple[DcpMetadata, Values]:
    """Return the metadata and the plain values of the checkpoint that some processes saved. Blocks: on storage.

    Args:
        folder: The checkpoint's folder.
        processes: The metadata of each, by rank.
    """
    values = {rank: read_values(folder, metadata) for rank, metadata in processes.items()}
    budget = ReadBudget(str(folder))
    tensors: dict[str, DcpTensor] = {}
    merged: Values = {}
    paths = {flat: path for metadata in processes.values() for flat, path in metadata.paths.items()}
    for flat, path in paths.items():
        holders = {rank: metadata for rank, metadata in processes.items() if flat in metadata.paths}
        merging = _Merging(folder, segments_of(path), max(processes) + 1, budget)
        found = {rank: values[rank].get(flat, metadata.refused.get(flat)) for rank, metadata in holders.items()}
        if errors := [value for value in found.values() if isinstance(value, DtckptError)]:
            merged[flat] = errors[0]
        elif all(value is None for value in found.values()):
            result = merging.tensors({rank: metadata.tensors[flat] for rank, metadata in holders.items()})
            if isinstance(result, DcpTensor):
                tensors[flat] = result
            else:
                merged[flat] = result
        elif None in found.values():
            merged[flat] = TreeError(f"{'/'.join(segments_of(path))!r} is a tensor on some processes only")
        else:
            items = {rank: metadata.values[flat] for rank, metadata in holders.items()}
            merged[flat] = merging.values(
                {rank: value for rank, value in found.items() if isinstance(value, Value)}, items
            )
    files = frozenset().union(*(metadata.files for metadata in processes.values()))
    return DcpMetadata(tensors, {}, paths, files=files), merged


class _Merging:
    """Merges one tensor or value of several processes.

    Args:
        folder: The checkpoint's folder.
        segments: The path, as in the names of tensors.
        num_clients: The number of the processes.
        budget: Bounds the bytes of the objects made from values that are read again.
    """

    def __init__(self, folder: Folder, segments: tuple[str, ...], num_clients: int, budget: ReadBudget) -> None:
        self._folder = folder
        self._segments = segments
        self._name = "/".join(segments)
        self._num_clients = num_clients
        self._budget = budget

    def values(self, values: Mapping[int, Value], items: Mapping[int, StoredItem]) -> Value | DtckptError:
        """Return the one value of all processes, or a value for each."""
        first, *others = values.values()
        if not first.tensors and all(not each.tensors and _is_same(first.node, each.node) for each in others):
            return first
        if not others:
            return first
        # Read again, now under a name for each process.
        by_rank = {
            rank: read_value(self._folder, (*self._segments, str(rank)), items[rank], self._budget) for rank in values
        }
        if errors := [each for each in by_rank.values() if isinstance(each, DtckptError)]:
            return errors[0]
        return self._per_client({rank: value for rank, value in by_rank.items() if isinstance(value, Value)})

    def tensors(self, tensors: Mapping[int, DcpTensor]) -> DcpTensor | Value | DtckptError:
        """Return one tensor for all processes if theirs are equal, else a tensor for each; then each must be whole."""
        first = next(iter(tensors.values()))
        chunks: dict[Region, list[StoredItem]] = {}
        for tensor in tensors.values():
            for region, item in tensor.chunks:
                chunks.setdefault(region, []).append(item)
        is_alike = all((each.dtype, each.shape) == (first.dtype, first.shape) for each in tensors.values())
        if is_alike and all(self._is_same_chunk(first, region, items) for region, items in chunks.items()):
            merged = replace(first, chunks=tuple((region, items[0]) for region, items in chunks.items()))
            try:
                tensor_of(self._name, merged)
            except CheckpointCorruptError as error:  # boxes overlap that are not the same
                return error
            return merged
        own = {rank: tensor_of(f"{self._name}/{rank}", tensor) for rank, tensor in tensors.items()}
        if not all(tensor.is_whole for tensor in own.values()):
            return CheckpointCorruptError(f"processes saved different elements of tensor {self._name!r}")
        return self._per_client({rank: Value({"tensor": each.name}, {each.name: each}) for rank, each in own.items()})

    def _is_same_chunk(self, tensor: DcpTensor, region: Region, items: Iterable[StoredItem]) -> bool:
        """Whether the files of several processes hold the same elements of a box, as far as their checksums tell."""
        first, *others = items
        return not others or (
            self._checksum(tensor, region, first) is not None
            and {self._checksum(tensor, region, item) for item in others} == {self._checksum(tensor, region, first)}
        )

    def _checksum(self, tensor: DcpTensor, region: Region, item: StoredItem) -> tuple[int, int] | None:
        one = tensor_of(self._name, replace(tensor, chunks=((region, item),)))
        place = PieceLocator(self._folder).locate(one, next(iter(one.pieces)))
        # Of elements in another order the checksum says nothing.
        return None if place.checked is None or place.strides else (place.checked.nbytes, place.checked.crc)

    def _per_client(self, values: Mapping[int, Value]) -> Value:
        items = [[rank, value.node] for rank, value in values.items()]
        node: trees.Node = {"type": ["PerClient", self._num_clients, {"dict": items}]}
        tensors: dict[str, PieceTensor] = {}
        refused: dict[str, DtckptError] = {}
        for value in values.values():
            tensors |= value.tensors
            refused |= value.refused
        return Value(node, tensors, refused)


def _is_same(one: trees.Node, other: trees.Node) -> bool:
    return trees.dump(one) == trees.dump(other)
