"""Find and read the files of FSDP1, one for each process, with shards of flat parameters.

::

    model_rank0.pt       model_rank1.pt          state dicts with ShardedTensors (``LOCAL_STATE_DICT``)
    optim_rank0.pt       optim_rank1.pt          ``optimizer.state_dict()`` of each process, if there are such files
    template.json                                names and shapes of the model's parameters, if the user adds them

Only the number in a name matters. With a template the tree has the model's parameters and their optimizer state by
name, without one the flat parameters as vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_fields import items, items_of, with_names
from dtckpt.checkpoint.foreign.file_reads import read_each
from dtckpt.checkpoint.foreign.flat_vectors import BoxCounts, FlatRange, FlatVectors, tensor_of_ranges
from dtckpt.checkpoint.foreign.fsdp_fields import (
    FLAT,
    ShardedTensor,
    is_sharded,
    parse_template,
    plain_name,
    sharded_tensor,
    starts_in_flat,
)
from dtckpt.checkpoint.foreign.pickle_syntax import TENSOR_NBYTES, Pairs, ReadBudget
from dtckpt.checkpoint.foreign.pickled_tensors import is_tensor, tensor_view
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_files import TorchStream, file_nbytes, open_stream
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, DtckptError, capped
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.layout.region import Region
from dtckpt.storage.folder import Folder

KIND = "fsdp"
TEMPLATE = "template.json"
MAX_TEMPLATE_NBYTES = 64 << 20
_OF_RANK = re.compile(r"(.*?)[-_.]?rank[-_.]?([0-9]{1,6})\.(?:pt|pth|bin)")


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a file alone is a file of torch.save)
    """Whether a file alone is such a checkpoint: never."""
    return False


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory may be such a checkpoint, by the names in it."""
    return any(map(_OF_RANK.fullmatch, names))


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the files of all processes, but for the elements. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointNotFoundError: The files hold no ``ShardedTensor``.
        CheckpointCorruptError: A file is missing or malformed, or the files contradict each other.
    """
    series: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if (match := _OF_RANK.fullmatch(name)) is not None:
            series.setdefault(match[1], {})[int(match[2])] = name
    reader = _FsdpReader(folder)
    opened = {stem: reader.open_all(files) for stem, files in series.items()}
    models = [stem for stem, streams in opened.items() if any(map(_holds_shards, streams.values()))]
    optimizers = [stem for stem, streams in opened.items() if all(map(_holds_optimizer, streams.values()))]
    if len(models) != 1:
        raise CheckpointNotFoundError(
            f"{folder} holds files of processes, and {len(models) or 'no'} sets of them with FSDP's shards: "
            f"{capped(series)}; open one file by its path, or move each set to a separate folder"
        )
    template = None
    if TEMPLATE in names:
        data = folder.read_whole(TEMPLATE, MAX_TEMPLATE_NBYTES)
        reader.budget.grow(len(data))
        template = parse_template(data, f"{folder}/{TEMPLATE}")
    optimizer = opened[optimizers[0]] if len(optimizers) == 1 else {}
    node = reader.read(opened[models[0]], optimizer, template)
    files = [each.file for each in (*opened[models[0]].values(), *optimizer.values())]
    files += [TEMPLATE] if template is not None else []
    unread = tuple(sorted(set(names).difference(files)))
    return PieceIndex(KIND, reader.tensors, node, reader.refused, tuple(files), unread, tuple(reader.notes))


def _holds_shards(stream: TorchStream) -> bool:
    try:
        return any(is_sharded(value) for _, value in items(stream.zip.value))
    except TypeError:
        return False


def _holds_optimizer(stream: TorchStream) -> bool:
    try:
        return {"state", "param_groups"} <= {name for name, _ in items(stream.zip.value) if type(name) is str}
    except TypeError:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Shards:
    """The shards of a tensor of all processes, such as of a flat parameter.

    Args:
        name: The tensor's name.
        shape: The shape of the whole.
        dtype: Its dtype.
        parts: For each shard the rank of its process, its place, and the vector that begins with it.
        inner: The parameters in it, each with its first element and its shape; empty if it stays whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[tuple[int, Region, PieceTensor]]
    inner: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the parameters in it, or its own."""
        return list(self.inner) or [self.name]

    def ranges(self, start: int, numel: int) -> list[FlatRange]:
        """Return the ranges of a parameter that begins at an element of the whole, and has so many."""
        ranges = []
        for _, region, vector in self.parts:
            first, last = max(start, region.offset[0]), min(start + numel, region.stop[0])
            if first < last:
                ranges.append(FlatRange(vector, first - region.offset[0], first - start, last - start))
        return ranges


class _FsdpReader:
    """Reads the files of one checkpoint.

    Args:
        folder: The directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # One for all: of many files, each could ask for the least that a file may.
        self.budget = ReadBudget(str(folder))
        self._counts = BoxCounts(self.budget)
        self.tensors: dict[str, PieceTensor] = {}
        self.refused: dict[str, DtckptError] = {}
        self.notes: list[str] = []

    def open_all(self, files: Mapping[int, str]) -> dict[int, TorchStream]:
        """Read files but for their elements. Blocks: on storage."""

        def opened(name: str) -> TorchStream:
            nbytes = file_nbytes(self._folder, name)
            # Pieces share no elements of a vector, so the length of the file bounds the pieces.
            self.budget.grow(nbytes)
            return open_stream(self._folder, name, 0, nbytes, budget=self.budget)

        return dict(zip(files, read_each(self._folder, opened, files.values()), strict=True))

    def read(
        self,
        models: Mapping[int, TorchStream],
        optimizers: Mapping[int, TorchStream],
        template: Mapping[str, tuple[int, ...]] | None,
    ) -> trees.Node:
        """Return the node of the tree.

        Args:
            models: The files of the model, by the number in their names.
            optimizers: The files of the optimizer, likewise.
            template: The shapes of the model's parameters; None: flat parameters stay vectors.
        """
        by_rank, sharded = self._by_rank(models)
        shards = {name: self._joined(name, own, by_rank) for name, own in sharded.items()}
        flats = {
            name: each for name, each in shards.items() if name.rpartition(".")[2] == FLAT and len(each.shape) == 1
        }
        if template is not None:
            sizes = {name: (each.shape[0], each.dtype) for name, each in flats.items()}
            for name, starts in starts_in_flat(sizes, template, len(by_rank)).items():
                inner = {each: (start, template[each]) for each, start in starts.items()}
                flats[name] = replace(flats[name], inner=inner)
        elif flats:
            self.notes.append(
                f"*{FLAT}: parameters joined by FSDP, whose names and shapes are in no file; put {TEMPLATE} beside the "
                "files, with {name: list(p.shape) for name, p in model.named_parameters()}"
            )
        nodes = [self._split(("module",), each) for each in (shards | flats).values()]
        module: list[list[Any]] = [list(item) for each in nodes for item in each.items()]
        plain = Pairs((plain_name(name), value) for name, value in _items(by_rank[0]) if not is_sharded(value))
        module += self._same_everywhere(plain, by_rank)
        parts: list[list[Any]] = [["module", {"dict": module}]]
        if optimizers:
            parts.append(["optimizer", self._optimizer(optimizers, list(flats.values()))])
        return {"dict": parts}

    def _by_rank(self, models: Mapping[int, TorchStream]) -> tuple[list[TorchStream], dict[str, list[ShardedTensor]]]:
        """Return the files in the order of the processes, and by name what each of them has of a sharded tensor."""
        found: dict[int, tuple[TorchStream, dict[str, ShardedTensor]]] = {}
        for stream in models.values():
            own = {
                plain_name(name): sharded_tensor(value, f"{stream.file}: {name}")
                for name, value in _items(stream)
                if is_sharded(value)
            }
            ranks = {each.rank for each in own.values()}
            if len(ranks) != 1 or not found.keys().isdisjoint(ranks):
                raise CheckpointCorruptError(
                    f"{self._folder}/{stream.file} is of the processes {sorted(ranks)[:8]}, expected one that no other "
                    "file is of"
                )
            found[ranks.pop()] = stream, own
        _, some = next(iter(found.values()))
        world = next(iter(some.values())).world
        for rank in range(world):
            if rank not in found:
                lost = [f"{name} {box}" for name, each in some.items() for owner, box in each.shards if owner == rank]
                raise CheckpointCorruptError(
                    f"the file of process {rank} of {world} is missing in {self._folder}; it held {capped(lost)}; "
                    "use another copy, or restore another checkpoint"
                )
        if len(found) != world or len({tuple(own) for _, own in found.values()}) != 1:
            raise CheckpointCorruptError(f"the files in {self._folder} are not of one save of {world} processes")
        ordered = [found[rank] for rank in range(world)]
        return [stream for stream, _ in ordered], {name: [own[name] for _, own in ordered] for name in some}

    def _joined(self, name: str, own: Sequence[ShardedTensor], by_rank: Sequence[TorchStream]) -> _Shards:
        """Return the shards of all processes of one tensor."""
        first = own[0]
        parts = []
        for each, stream in zip(own, by_rank, strict=True):
            if (each.shape, each.dtype, each.shards, each.world) != (
                first.shape,
                first.dtype,
                first.shards,
                first.world,
            ):
                raise CheckpointCorruptError(f"{stream.file} and {by_rank[0].file} differ about {name[:200]!r}")
            if [region for rank, region in each.shards if rank == each.rank and not region.is_empty] != [
                region for region, _ in each.own if not region.is_empty
            ]:
                raise CheckpointCorruptError(f"{stream.file} has other shards of {name[:200]!r} than it describes")
            for region, value in each.own:
                tensor = self._tensor(value, f"{stream.file}: {name}", stream)
                if (tensor.shape, tensor.dtype) != (region.shape, first.dtype):
                    raise CheckpointCorruptError(
                        f"{stream.file} has {tensor.dtype} of shape {tensor.shape} for {name[:200]!r}, expected "
                        f"{first.dtype} of shape {region.shape}"
                    )
                if not region.is_empty:
                    parts.append((each.rank, region, tensor))
        return _Shards(name, first.shape, first.dtype, parts)

    def _split(self, path: tuple[str, ...], shards: _Shards, end: tuple[str, ...] = ()) -> dict[str, trees.Node]:
        """Take a sharded tensor, or the parameters in it; return their nodes by name.

        Args:
            path: The path above the names.
            shards: The tensor.
            end: The path below the names.
        """
        if not shards.inner:
            pieces = tuple(
                replace(piece, region=region) for _, region, tensor in shards.parts for piece in tensor.pieces
            )
            whole = "/".join((*path, name_of_key(shards.name), *end))
            return {shards.name: self._take(PieceTensor(whole, shards.shape, shards.dtype, pieces))}
        vectors = FlatVectors((vector for _, _, vector in shards.parts), shards.dtype)
        nodes = {}
        for name, (start, shape) in shards.inner.items():
            own = "/".join((*path, name_of_key(name), *end))
            ranges = shards.ranges(start, math.prod(shape))
            nodes[name] = self._take(tensor_of_ranges(own, shape, ranges, vectors, self._counts))
        return nodes

    def _take(self, tensor: PieceTensor) -> trees.Node:
        if not tensor.is_whole:
            raise CheckpointCorruptError(f"the files lack elements of {tensor.name[:200]!r}, of shape {tensor.shape}")
        if tensor.name in self.tensors:
            raise CheckpointCorruptError(f"two tensors of the checkpoint would both be named {tensor.name[:200]!r}")
        self.budget.take(TENSOR_NBYTES)
        self.tensors[tensor.name] = tensor
        return {"tensor": tensor.name}

    def _tensor(self, value: Any, where: str, stream: TorchStream) -> PieceTensor:
        return stream.tensors({where: tensor_view(value, where)})[where]

    def _values(self, value: Any, path: tuple[str, ...], stream: TorchStream) -> trees.Node:
        tree = read_tree(value, path, self.budget)
        self.refused |= tree.refused
        for tensor in stream.tensors(tree.leaves).values():
            self._take(tensor)
        return tree.node

    def _same_everywhere(self, pairs: Pairs, by_rank: Sequence[TorchStream]) -> list[list[Any]]:
        """Return the items that are no shards, as buffers: one for all processes, if their files do not differ."""
        others = [{plain_name(name): value for name, value in _items(stream)} for stream in by_rank[1:]]
        result: list[list[Any]] = []
        for name, value in pairs:
            everyone = [value, *(each.get(name) for each in others)]
            if all(is_tensor(each) for each in everyone):
                tensors = [self._tensor(each, name, stream) for each, stream in zip(everyone, by_rank, strict=True)]
                if len({_content(tensor) for tensor in tensors}) == 1:
                    result += self._values(Pairs([(name, value)]), ("module",), by_rank[0])["dict"]
                    continue
            clients = [
                [rank, child]
                for rank, (each, stream) in enumerate(zip(everyone, by_rank, strict=True))
                for _, child in self._values(Pairs([(str(rank), each)]), ("module", name_of_key(name)), stream)["dict"]
            ]
            result.append([name, {"type": ["PerClient", len(by_rank), {"dict": clients}]}])
        return result

    # --- the optimizer --------------------------------------------------------------------------------------------

    def _optimizer(self, streams: Mapping[int, TorchStream], flats: Sequence[_Shards]) -> trees.Node:
        """Return the node of the optimizers of all processes, which number the flat parameters in their order."""
        ranks = {rank for flat in flats for rank, _, _ in flat.parts}
        if lost := sorted(ranks - streams.keys()):
            known = streams[min(streams)].file
            raise CheckpointCorruptError(
                f"the optimizer's file of process {capped(map(str, lost))} is missing in {self._folder}, and {known} "
                "is there; use another copy, or restore another checkpoint"
            )
        found = [(streams[rank], dict(_items(streams[rank]))) for rank in sorted(streams)]
        numbered = [(stream, dict(_by_text(fields["state"], stream))) for stream, fields in found]
        if any(each.keys() - set(map(str, range(len(flats)))) for _, each in numbered):
            raise CheckpointCorruptError(f"{found[0][0].file} has state of more than the {len(flats)} flat parameters")
        state: list[list[Any]] = []
        for number, flat in enumerate(flats):
            states = [
                (stream, items_of(each.get(str(number), Pairs()), stream.file, self.budget))
                for stream, each in numbered
            ]
            own: dict[str, list[list[Any]]] = {name: [] for name in flat.names}
            for kind in states[0][1]:
                for name, node in self._kind(kind, states, flat).items():
                    own[name].append([kind, node])
            state += [[name, {"dict": nodes}] for name, nodes in own.items() if nodes]
        stream, first = found[0]
        groups = first["param_groups"]
        options = with_names(groups if type(groups) is list else [], [flat.names for flat in flats], self.budget)
        node = self._values(options, ("optimizer", "param_groups"), stream)
        return {"dict": [["state", {"dict": state}], ["param_groups", node]]}

    def _kind(
        self, kind: str, states: Sequence[tuple[TorchStream, Mapping[str, Any]]], flat: _Shards
    ) -> dict[str, trees.Node]:
        """Return the nodes of one kind of state of a flat parameter, by parameter.

        Args:
            kind: The kind, such as ``exp_avg``.
            states: The state of each process, with its file.
            flat: The flat parameter.
        """
        path = ("optimizer", "state")
        stream, first = states[0]
        if not is_tensor(first[kind]) or not tensor_view(first[kind], kind).shape:
            scalar = Pairs([(kind, first[kind])])
            return {
                name: child
                for name in flat.names
                for _, child in self._values(scalar, (*path, name_of_key(name)), stream)["dict"]
            }
        longest = max(region.shape[0] for _, region, _ in flat.parts)
        parts = []
        for rank, region, _ in flat.parts:
            own_stream, own = states[rank] if rank < len(states) else (stream, {})
            vector = self._tensor(own.get(kind), f"{own_stream.file}: {kind} of {flat.name}", own_stream)
            # Padded, where the last shard of the flat parameter is not.
            if vector.shape != (longest,):
                raise CheckpointCorruptError(
                    f"{own_stream.file} has {kind[:80]} of shape {vector.shape} for {flat.name[:200]!r}, expected "
                    f"({longest},); is it of another model, or the number in its name not the rank?"
                )
            parts.append((rank, region, vector))
        return self._split(path, replace(flat, dtype=parts[0][2].dtype, parts=parts), (kind,))


def _items(stream: TorchStream) -> list[tuple[str, Any]]:
    return list(items_of(stream.zip.value, stream.file, stream.zip.budget).items())


def _by_text(numbered: Any, stream: TorchStream) -> Pairs:
    """Return the items of a dict by number with the numbers as text."""
    try:
        return Pairs((str(number), value) for number, value in items(numbered) if type(number) is int)
    except TypeError as error:
        raise CheckpointCorruptError(f"{stream.file} holds no state by number of the parameter") from error


def _content(tensor: PieceTensor) -> Any:
    """Return a value that is equal for two tensors of the same elements, as far as checksums tell."""
    checked = [(piece.checked and (piece.checked.nbytes, piece.checked.crc), piece.strides) for piece in tensor.pieces]
    places = [piece.offset - piece.checked.start if piece.checked else piece for piece in tensor.pieces]
    return tensor.shape, tensor.dtype, tuple(checked), tuple(places)
