"""Write a client's part of a save into a file in memory: first copy the elements, then take digests of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from dtckpt.checkpoint.leaves import host_array
from dtckpt.checkpoint.parts.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.parts.layout_tags import tag_of
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.open_part import piece_digest
from dtckpt.checkpoint.parts.records import NO_COPIES, NearCopies, PartPiece, PartTensor
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.staging import aligned_nbytes, tied_nbytes, written_regions
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointError
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

_THREADED_NBYTES = 1 << 20


class PartInProgress:
    """The file that this client's part of a save is copied to; it goes back if the save fails.

    Args:
        folder: The parts of this host.
        client: This client.
        copies_of: Returns the regions of which the client keeps near copies beside its part of a plan.
    """

    def __init__(
        self, folder: HostFolder, client: int, copies_of: Callable[[SavePlan], NearCopies] = lambda _: NO_COPIES
    ) -> None:
        self._folder = folder
        self._client = client
        self._copies_of = copies_of
        self._plan: SavePlan | None = None
        self._file: PartFile | None = None

    def take(self, plan: SavePlan, state: State) -> PartFile:
        """Return the file for the part of a plan.

        Args:
            plan: The plan. For the same plan, each call returns the same file.
            state: This client's state.

        Raises:
            StorageFullError: The folder is full.
        """
        if self._file is None or plan is not self._plan:
            self.give_back()
            nbytes = part_nbytes(plan, self._client, self._copies_of(plan))
            self._file = self._folder.take(nbytes - tied_nbytes(state, plan, self._client))
            self._plan = plan
        return self._file

    def give_back(self) -> None:
        """Give the file back to the folder."""
        file, self._file = self._file, None
        if file is not None:
            self._folder.give_back(file)

    @contextmanager
    def given_back_on_failure(self) -> Iterator[None]:
        """Give the file back if the work inside fails."""
        try:
            yield
        except BaseException:
            self.give_back()
            raise


def part_nbytes(plan: SavePlan, client: int, copies: NearCopies) -> int:
    """Return the bytes of a client's part and its near copies, with every box aligned, if no tensors are tied."""
    itemsizes = {tensor.name: DTYPES[tensor.dtype].itemsize for tensor in plan.tensors} if copies else {}
    beside = (aligned_nbytes(region, itemsizes[name]) for name, regions in copies.items() for region in regions)
    return _own_nbytes(plan, client) + sum(beside)


@lru_cache(maxsize=4)
def _own_nbytes(plan: SavePlan, client: int) -> int:
    return sum(
        aligned_nbytes(region, DTYPES[tensor.dtype].itemsize)
        for tensor in plan.tensors
        for region in written_regions(tensor, client)
    )


def described_pieces(
    staged: State,
    plan: SavePlan,
    memory: PartFile | LentMemory,
    client: int,
    copies: NearCopies,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> tuple[tuple[PartTensor, ...], tuple[PartPiece, ...], tuple[PartPiece, ...]]:
    """Return the tensors, pieces and near copies of a part in a file, or in lent memory; digests are taken here.

    Args:
        staged: This client's state, with its elements in the file; or where they lie, if the memory is lent.
        plan: The plan of all clients.
        memory: The file, or the memory that the pieces are added to.
        client: This client.
        copies: The regions of which this client keeps near copies.
        tags: The tags of tensors, by glob on their names; the first match wins.
    """
    tensors = tuple(
        PartTensor(spec.name, spec.shape, spec.dtype, spec.layout, tag_of(spec.name, tags)) for spec in staged.specs
    )
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    own = ((tensor.name, region) for tensor in plan.tensors for region in written_regions(tensor, client))
    near = ((name, region) for name, regions in copies.items() for region in regions)
    found = list(_staged_boxes(staged, own))
    num_own = len(found)
    found += _staged_boxes(staged, near)
    with Pool(1, "dtckpt-tier-digests") as pool:
        digests: list[int | Future[int]] = [
            pool.submit(piece_digest, name, region, elements)
            if elements.nbytes >= _THREADED_NBYTES
            else piece_digest(name, region, elements)
            for name, region, elements in found
        ]
        done = [digest.result() if isinstance(digest, Future) else digest for digest in digests]
    pieces = tuple(
        PartPiece(numbers[name], region, *memory.place(elements), digest)
        for (name, region, elements), digest in zip(found, done, strict=True)
    )
    return tensors, pieces[:num_own], pieces[num_own:]


def _staged_boxes(
    staged: State, regions: Iterable[tuple[str, Region]]
) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
    """Yield regions of tensors with views of their staged elements."""
    source = staged.source
    if not isinstance(source, MemorySource):
        raise CheckpointError("a local save needs its elements in memory")
    for name, of_tensor in groupby(regions, key=itemgetter(0)):
        boxes = [(box, host_array(copies[0])) for box, copies in source.parts(name)]
        for _, region in of_tensor:
            box, elements = next((box, elements) for box, elements in boxes if box.contains(region))
            yield name, region, elements[region.relative_to(box).slices()] if region.ndim else elements
