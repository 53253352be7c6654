"""`MappedFiles`: the files of a checkpoint under the names and shapes of a map.

A read of a mapped tensor becomes reads of boxes of the stored tensors, straight into views of the caller's memory. So
a map needs no memory, and all that reads a checkpoint reads a mapped one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from dtckpt.checkpoint.mapping.map_matches import MappedTensor, match_map
from dtckpt.checkpoint.mapping.map_places import shared_boxes
from dtckpt.checkpoint.mapping.map_rules import TensorMap
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.reading.tensor_info import ChunkInfo, TensorInfo, TensorInfos
from dtckpt.errors import DTypeError, TensorNameError, capped
from dtckpt.format import tree as trees
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

PART_NBYTES = 16 << 20
"""Bytes that are verified at a time."""


class MappedFiles(CheckpointFiles):
    """The files of a checkpoint under other names and shapes.

    Args:
        files: The files as they are stored.
        rules: The map.
        sizes: As for `dtckpt.checkpoint.mapping.map_matches.match_map`.

    Raises:
        DTypeError: A tensor would be made of tensors of several dtypes.
        CheckpointError: The map does not fit, as for `match_map`.
    """

    def __init__(self, files: CheckpointFiles, rules: TensorMap, sizes: Mapping[str, int]) -> None:
        self._files = files
        match = match_map(rules, {name: info.shape for name, info in files.tensors.items()}, sizes)
        self._mapped = match.tensors
        for tensor in match.tensors.values():
            dtypes = {
                (info.dtype_name, info.stored_dtype_name) for info in map(files.tensors.__getitem__, tensor.sources)
            }
            if len(dtypes) > 1:
                raise DTypeError(
                    f"the map makes tensor {tensor.name[:200]!r} of tensors of several dtypes: "
                    f"{capped(sorted({name for pair in dtypes for name in pair}))}"
                )
        self._taken = match.taken
        # Readers of our own format ask for the manifest, which has the stored names.
        self.kind = f"{KIND}, mapped" if files.kind == KIND else files.kind
        self.refused = files.refused
        self.files = files.files
        left = [f"{name}: {count} elements that the map does not take" for name, count in match.left.items()]
        self.unread = (*files.unread, *left)
        same = [name for name in files.tensors if name not in match.taken]
        note = f"{len(same)} tensors that no rule of the map names stay as they are: {capped(same, 4)}"
        self.notes = (*files.notes, *([note] if same else ()))
        self._token = f"{bytes_digest(repr((rules, sorted(sizes.items()))).encode('utf-8', 'surrogatepass')):016x}"
        self.identity = f"{files.identity}-{self._token}"
        self._structure = _structure(files.structure, match.tensors, match.taken)
        self.tensors = TensorInfos(dict.fromkeys(trees.tensor_names(self._structure)), self._describe)

    def _describe(self, name: str) -> TensorInfo:
        tensor = self._mapped.get(name)
        if tensor is None:
            return self._files.tensors[name]
        infos = [self._files.tensors[source] for source in tensor.sources]
        if tensor.place is None:
            return replace(infos[0], name=name)
        return MappedInfo.of(tensor, infos, self)

    @property
    @override
    def structure(self) -> trees.Node:
        return self._structure

    @cached_property
    @override
    def tree(self) -> bytes:
        return trees.dump(self._structure)

    @property
    @override
    def has_digests(self) -> bool:
        return self._files.has_digests

    @override
    def fingerprint(self) -> bytes:
        return self._files.fingerprint() + self._token.encode()

    # --- reads --------------------------------------------------------------------------------------------------

    @override
    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        return self._files.read(self._stored(requests), max_in_flight, count)

    def _stored(self, requests: Iterable[tuple[str, RegionBuffers]]) -> Iterator[tuple[str, RegionBuffers]]:
        """Yield the reads of stored tensors that reads of mapped tensors need."""
        for name, buffers in requests:
            tensor = self._mapped.get(name)
            if tensor is None:
                yield name, buffers
                continue
            for source, place in tensor.sources.items():
                if tensor.place is None or place is None:
                    yield source, buffers
                    continue
                views = [
                    (box.region, box.view(buffer))
                    for region, buffer in buffers
                    for box in shared_boxes(tensor.place, place, region)
                ]
                if views:
                    yield source, views

    def stored_regions(self, name: str, region: Region) -> Iterator[tuple[str, Region]]:
        """Yield the regions of stored tensors that a region of a tensor is made of."""
        tensor = self._mapped.get(name)
        if tensor is None:
            yield name, region
            return
        for source, place in tensor.sources.items():
            if tensor.place is None or place is None:
                yield source, region
            else:
                yield from ((source, box.region) for box in shared_boxes(tensor.place, place, region))

    # --- checks -------------------------------------------------------------------------------------------------

    @override
    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        stored = (each for name, region in regions for each in self.stored_regions(name, region))
        self._files.validate_stored(stored, unchecked)

    @override
    def parts(self, name: str) -> Iterator[Region]:
        tensor = self._mapped.get(name)
        if tensor is None or tensor.place is None:
            yield from self._files.parts(name if tensor is None else next(iter(tensor.sources)))
            return
        shape = tensor.place.shape
        itemsize = DTYPES[self.tensors[name].stored_dtype_name].itemsize
        if not shape:
            yield Region((), ())
            return
        rows = max(1, PART_NBYTES // max(1, itemsize * Region.full(shape[1:]).numel))
        for start in range(0, shape[0] if Region.full(shape).numel else 0, rows):
            yield Region((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))

    @override
    def validate_part(self, name: str, region: Region) -> None:
        tensor = self._mapped.get(name)
        if tensor is None or tensor.place is None:
            self._files.validate_part(name if tensor is None else next(iter(tensor.sources)), region)

    @override
    def validate_rest(self) -> None:
        # Parts of a mapped tensor are no parts of the stored ones, which are checked here.
        for name in sorted(self._taken):
            if name not in self._renamed:
                for region in self._files.parts(name):
                    self._files.validate_part(name, region)
        self._files.validate_rest()

    @property
    def _renamed(self) -> dict[str, str]:
        """New name by name, of the tensors that have another name only."""
        pairs = ((next(iter(tensor.sources)), name) for name, tensor in self._mapped.items() if tensor.place is None)
        return dict(pairs)

    @override
    def tied(self) -> Mapping[str, str]:
        # A tensor that is made of others is stored anew.
        names = self._renamed | {name: name for name in self._files.tensors if name not in self._taken}
        tied = self._files.tied()
        return {names[name]: names[kept] for name, kept in tied.items() if name in names and kept in names}

    @override
    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True, eq=False)
class MappedInfo(TensorInfo):
    """The facts about a tensor that is made of others.

    Args:
        tensor: The tensor.
        infos: The facts about the tensors that it is made of.
        files: The files that it is read from.
    """

    tensor: MappedTensor
    infos: tuple[TensorInfo, ...]
    files: MappedFiles

    @classmethod
    def of(cls, tensor: MappedTensor, infos: Iterable[TensorInfo], files: MappedFiles) -> MappedInfo:
        """Return the facts about a tensor."""
        infos = tuple(infos)
        shape = () if tensor.place is None else tensor.place.shape
        return cls(
            name=tensor.name,
            shape=shape,
            dtype_name=infos[0].dtype_name,
            stored_dtype_name=infos[0].stored_dtype_name,
            layout=None,
            nbytes=Region.full(shape).numel * DTYPES[infos[0].stored_dtype_name].itemsize,
            content_digest=None,
            tensor=tensor,
            infos=infos,
            files=files,
        )

    @property
    @override
    def chunks(self) -> list[ChunkInfo]:
        # One, because the stored chunks are no boxes of it.
        return [ChunkInfo(Region.full(self.shape), "+".join(self.tensor.sources), digest=None, client=None)]

    @property
    @override
    def codec(self) -> str:
        return self.infos[0].codec

    @property
    @override
    def num_chunks(self) -> int:
        return 1

    @property
    @override
    def is_whole(self) -> bool:
        return all(info.is_whole for info in self.infos)

    @property
    @override
    def max_chunk_nbytes(self) -> int:
        return max(info.max_chunk_nbytes for info in self.infos)

    @property
    @override
    def chunk_shape(self) -> tuple[int, ...]:
        return tuple(max(1, size) for size in self.shape)

    @property
    @override
    def block_shape(self) -> tuple[int, ...]:
        return (1,) * len(self.shape)

    @property
    @override
    def row_dim(self) -> int:
        return 0

    @override
    def read_nbytes(self, region: Region) -> int:
        infos = dict(zip(self.tensor.sources, self.infos, strict=True))
        return sum(infos[name].read_nbytes(box) for name, box in self.files.stored_regions(self.name, region))


def _structure(structure: trees.Node, names: Iterable[str], taken: set[str]) -> trees.Node:
    """Return a state tree with other tensors in place of the taken tensors."""
    new: dict[str, Any] = {}
    for name in names:
        *above, last = name.split("/")
        level = new
        for key in above[: trees.MAX_DEPTH]:
            level = level.setdefault(key, {})
            if isinstance(level, str):
                raise _clash(name)
        if last in level or len(above) >= trees.MAX_DEPTH:
            raise _clash(name)
        level[last] = name
    return _merged(trees.select(structure, lambda name: name not in taken) or {"dict": []}, new)


def _merged(node: trees.Node, new: Mapping[str, Any]) -> trees.Node:
    """Return a dict with more items: names of tensors, or dicts of items."""
    if (top := trees.dict_of(node)) is None:
        raise _clash(next(iter(new)))
    rest = dict(new)
    items = []
    for key, child in top["dict"]:
        below = rest.pop(str(key), None)
        if isinstance(below, str):
            raise _clash(below)
        items.append([key, child if below is None else _merged(child, below)])
    items += [[key, _node(below)] for key, below in rest.items()]
    merged = {"dict": items}
    return {"type": [*node["type"][:2], merged]} if "type" in node else merged


def _node(below: Any) -> trees.Node:
    return {"tensor": below} if isinstance(below, str) else _merged({"dict": []}, below)


def _clash(name: str) -> TensorNameError:
    return TensorNameError(
        f"the map makes a tensor {name[:200]!r}, and something else of the checkpoint is in its place"
    )
