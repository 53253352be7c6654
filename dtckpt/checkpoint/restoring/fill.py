"""Fill the tensors of a restore: read into host memory directly, and copy from there to devices and to replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.leaves import Leaf, host_array, own_array
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.read_by_host import HostReads
from dtckpt.checkpoint.restoring.read_once import SharedTensor, read_shared
from dtckpt.checkpoint.restoring.shared_memory import NamedLeaf, TiedLeaf
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import host_memory
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.components import same_bits
from dtckpt.dtensor.operators.view_tracking import count_write
from dtckpt.errors import ReplicaMismatchError
from dtckpt.layout.region import Region

GC_PAUSE_NBYTES = 256 << 20
"""Reads of at most so many bytes end soon; the cycle collector pauses for them."""


def fill_tensors(
    checkpoint: Checkpoint,
    leaves: Sequence[NamedLeaf],
    tied: Sequence[TiedLeaf],
    shared: Sequence[SharedTensor],
    phases: Phases,
    *,
    handed_on: HostReads | None = None,
) -> None:
    """Read tensors into their memory. Collective: As `read_shared` and `HostReads`, if any are read together.

    Args:
        checkpoint: The checkpoint.
        leaves: The tensors to be filled.
        tied: Other names of the same memory; their stored values must equal the values that fill it.
        shared: The tensors that this client reads together with other clients.
        phases: Counts the bytes.
        handed_on: The tensors that this client reads together with other clients of its host, if they can open each
            other's rings; these are not read as ``shared`` then.

    Raises:
        ReplicaMismatchError: Tied tensors were saved with different values.
        CheckpointCorruptError: Stored bytes differ from the saved bytes.
        DtckptError: As for `Checkpoint.read_all` and `read_shared`.
    """
    read = partial(checkpoint.read_all, count=phases.count)
    # Before the first byte: a read that fails may have written, too.
    note_writes([leaf for _, leaf in leaves] + [leaf for *_, leaf in tied])
    with torch.no_grad():
        filled = set() if handed_on is None else _fill_by_host(checkpoint, handed_on, phases)
        shared = [tensor for tensor in shared if id(tensor.leaf) not in filled]
        read_shared(checkpoint, shared, phases)
        filled |= {id(tensor.leaf) for tensor in shared}
        with gc_paused():
            reads = _Reads.of([(name, leaf) for name, leaf in leaves if id(leaf) not in filled])
        with gc_paused() if reads.nbytes <= GC_PAUSE_NBYTES else nullcontext():
            read(reads.direct)
        for name, region, target in reads.staged:
            # One tensor at a time, so that the host needs memory for one only.
            host = host_memory.allocate(target.shape, target.dtype)
            read([(name, [(region, host_array(host))])])
            _move(host, [target], phases)
        for first, copies in reads.copied:
            _move(first, copies, phases)
    _validate_tied(read, tied)
    checkpoint.note_filled((tensor.name, own_buffers(tensor.leaf)) for tensor in shared)


def _fill_by_host(checkpoint: Checkpoint, handed_on: HostReads, phases: Phases) -> set[int]:
    """Fill the tensors that clients of this host read together; return the ids of their leaves, none if they cannot."""
    with handed_on.rings as rings:
        if not rings.join():
            return set()
        reads = _Reads.of([(tensor.name, tensor.leaf) for tensor in handed_on.tensors])
        handed_on.read(checkpoint, dict(reads.direct), phases.count)
    for first, copies in reads.copied:
        _move(first, copies, phases)
    return {id(tensor.leaf) for tensor in handed_on.tensors}


def note_writes(leaves: Sequence[Leaf]) -> None:
    """Tell autograd, and views that keep a copy of their values, that the memory of tensors is about to change.

    Autograd then refuses a backward pass that needs the earlier values.
    """
    # A DTensor and its components each count the writes that graphs of them must know.
    written = (tensor for leaf in leaves for tensor in (leaf.tensor, *leaf.components))
    # Tensors that were made in inference mode count no writes, and are in no graph.
    increment_version([tensor for tensor in written if not tensor.is_inference()])
    for leaf in leaves:
        if isinstance(leaf.tensor, DTensor):
            count_write(leaf.tensor)


@dataclass(slots=True, eq=False)
class _Reads:
    """The plan to fill this client's distinct regions: one read for each, then copies of the first.

    Args:
        direct: By tensor, the regions that are read straight into the memory of their tensor.
        nbytes: Bytes of those.
        staged: Regions outside of host memory: read into host memory, then copied.
        copied: Filled memory, and the further copies of its region on this client.
    """

    direct: list[tuple[str, list[tuple[Region, np.ndarray[Any, Any]]]]] = field(default_factory=list)
    nbytes: int = 0
    staged: list[tuple[str, Region, torch.Tensor]] = field(default_factory=list)
    copied: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)

    @classmethod
    def of(cls, leaves: Sequence[NamedLeaf]) -> _Reads:
        """Return the reads that fill some tensors."""
        reads = cls()
        for name, leaf in leaves:
            buffers = []
            for region, (first, *copies) in leaf.distinct_parts():
                buffer = own_array(first)
                if buffer is None:
                    reads.staged.append((name, region, first))
                else:
                    buffers.append((region, buffer))
                    reads.nbytes += buffer.nbytes
                if copies:
                    reads.copied.append((first, copies))
            reads.direct.append((name, buffers))
        return reads


def own_buffers(leaf: Leaf) -> list[tuple[Region, np.ndarray[Any, Any]]]:
    """Return the distinct regions of a leaf with their memory, as far as it is in the host's."""
    found = ((region, own_array(first)) for region, (first, *_) in leaf.distinct_parts())
    return [(region, buffer) for region, buffer in found if buffer is not None]


def has_elements(checkpoint: Checkpoint, name: str, leaf: Leaf) -> bool:
    """Whether all memory of a leaf has a tensor's elements, as their digests tell; not known of memory elsewhere."""
    parts = [(region, own_array(memory)) for region, memory in leaf.parts if not region.is_empty]
    here = [(region, array) for region, array in parts if array is not None]
    return len(here) == len(parts) and checkpoint.has_elements(name, here)


def read_nbytes(checkpoint: Checkpoint, leaves: Sequence[NamedLeaf]) -> int:
    """Return the bytes that this client reads from storage if it reads all regions of some tensors itself."""
    return sum(
        checkpoint.info(name).read_nbytes(region) for name, leaf in leaves for region, _ in leaf.distinct_parts()
    )


def _move(source: torch.Tensor, targets: Sequence[torch.Tensor], phases: Phases) -> None:
    """Copy filled memory to other memory, measured as phase ``move``."""
    with phases.measure("move"):
        for target in targets:
            target.copy_(source)
            phases.count(target.nbytes)


def _validate_tied(read: Callable[..., object], tied: Sequence[TiedLeaf]) -> None:
    """Check that tensors that share their memory were saved with equal values, bit by bit."""
    for name, other, leaf in tied:
        for region, copies in leaf.distinct_parts():
            stored = torch.empty(copies[0].shape, dtype=copies[0].dtype)
            read([(name, [(region, host_array(stored))])])
            if not same_bits(stored, copies[0]):
                raise ReplicaMismatchError(
                    f"tensors {name!r} and {other!r} share memory in the target, but were saved with different values; "
                    "give each of them its own memory"
                )
