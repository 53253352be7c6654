"""Describe a staged part: which boxes lie where in its file, and their digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from dtckpt.checkpoint.leaves import host_array
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.staging import written_regions
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.checkpoint.tiers.host_folder import PartFile
from dtckpt.checkpoint.tiers.near_copies import NearCopies
from dtckpt.checkpoint.tiers.open_part import piece_digest
from dtckpt.checkpoint.tiers.records import PartPiece, PartTensor
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointError
from dtckpt.layout.region import Region

_THREADED_NBYTES = 1 << 20


def described_pieces(
    staged: State, plan: SavePlan, file: PartFile, client: int, copies: NearCopies
) -> tuple[tuple[PartTensor, ...], tuple[PartPiece, ...], tuple[PartPiece, ...]]:
    """Return the tensors, pieces and near copies of a part that is staged in a file; digests are taken here.

    Args:
        staged: This client's state, with its elements in the file.
        plan: What all clients write.
        file: The file.
        client: This client.
        copies: The regions of which this client keeps near copies.
    """
    tensors = tuple(PartTensor(spec.name, spec.shape, spec.dtype, spec.layout) for spec in staged.specs)
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
    start = file.memory.data_ptr()
    pieces = tuple(
        PartPiece(
            numbers[name],
            region,
            elements.ctypes.data - start,
            tuple(step // elements.itemsize for step in elements.strides),
            digest,
        )
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
