"""`context_parallel`: sequences that are split over clients, with ring attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtckpt.comm.collectives import all_gather_object
from dtckpt.comm.process_groups import rank
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.experimental.ring_attention import Ring, RingAttention, RingSchedule, runs_of
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, OperatorError
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.mesh import Mesh

_ATTENTION = torch.nn.functional.scaled_dot_product_attention


@contextmanager
def context_parallel(
    mesh: MeshLike,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Split sequences over the clients of a mesh in a ``with`` block, in which attention reaches the whole sequence.

    Each client has two chunks of a sequence, one from the front and one from the back, so that causal attention is
    equal work for all clients. In the block, ``scaled_dot_product_attention`` treats plain tensors as such parts of a
    sequence, of shape (batch, heads, length, features). Other functions work on this client's part alone.

    Collective: Over the mesh's clients, with buffers of the same shapes in the same order, for attention, its backward
    pass, and at the end. If the block raises, clients exchange nothing, and buffers return to their state at the start.

    Args:
        mesh: A mesh of one axis, with one device per client.
        buffers: Plain tensors, equal on every client. In the block each holds this client's part of the sequence.
        buffer_seq_dims: The sequence dim of every buffer.
        no_restore_buffers: Buffers that stay parts at the end; the other buffers become whole again.

    Raises:
        MeshError: The mesh has several axes, or clients with several devices, or this client has none.
        LayoutError: Buffers and dims do not fit, or a buffer requires grad.
        OperatorError: By attention: with a mask, with dropout, or causal between sequences of different lengths.
    """
    ring = _ring_of(require_mesh(mesh))
    tensors = list(buffers or [])
    dims = _sequence_dims(tensors, list(buffer_seq_dims or []))
    stay = {id(one) for one in no_restore_buffers or ()}
    if not stay <= {id(one) for one in tensors}:
        raise LayoutError("no_restore_buffers: got a tensor that is not among the buffers")
    lengths = [one.shape[dim] for one, dim in zip(tensors, dims, strict=True)]
    # Parts of one size determine the length of the sequence; otherwise, clients exchange lengths at every attention.
    is_even = all(length % (2 * len(ring.clients)) == 0 for length in lengths)
    # Other tensors with the same memory: they keep it while each buffer itself becomes the part.
    whole = [one.detach() for one in tensors]
    with torch.no_grad():
        for one, before, dim in zip(tensors, whole, dims, strict=True):
            one.set_(_part(before, dim, ring))  # type: ignore[call-overload]
    try:
        with _RingAttentionMode(ring, is_even):
            yield
    # Without an exchange: a client that fails cannot know whether the others do.
    except BaseException:
        with torch.no_grad():
            for one, before in zip(tensors, whole, strict=True):
                one.set_(before)  # type: ignore[call-overload]
        raise
    with torch.no_grad():
        for one, before, dim in zip(tensors, whole, dims, strict=True):
            if id(one) not in stay:
                before.copy_(_unsharded(one, dim, before.shape[dim], ring))
                one.set_(before)  # type: ignore[call-overload]


def context_parallel_unshard(
    mesh: MeshLike, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return whole sequences, in their order, from the parts that clients have in a `context_parallel` block.

    Collective: Over the mesh's clients.

    Args:
        mesh: As there.
        buffers: This client's parts.
        seq_dims: The sequence dim of every part.
    """
    ring = _ring_of(require_mesh(mesh))
    dims = _sequence_dims(buffers, seq_dims, may_require_grad=True)
    own = [one.shape[dim] for one, dim in zip(buffers, dims, strict=True)]
    totals = [sum(column) for column in zip(*_gather_by_position(ring, own), strict=True)]
    with torch.no_grad():
        return [_unsharded(*each, ring) for each in zip(buffers, dims, totals, strict=True)]


def _ring_of(mesh: Mesh) -> Ring:
    if mesh.ndim != 1:
        raise MeshError(f"context_parallel: got a mesh of axes {mesh.axis_sizes}, expected one axis; slice the mesh")
    clients = tuple(mesh.client_of(device) for device in mesh.device_ids)
    if len(set(clients)) != len(clients):
        raise MeshError(f"context_parallel: got a mesh whose clients are {clients}, expected one device per client")
    client = clients[0] if len(clients) == 1 else rank()
    if client is None or client not in clients:
        raise MeshError(f"context_parallel: got a mesh of clients {clients}, expected this one, {client}, among them")
    return Ring(clients, client, device_of(mesh.local_devices()[0]))


def _sequence_dims(
    tensors: Sequence[torch.Tensor], dims: Sequence[int], *, may_require_grad: bool = False
) -> list[int]:
    if len(tensors) != len(dims):
        raise LayoutError(f"context_parallel: got {len(tensors)} buffers and {len(dims)} dims, expected one for each")
    for one, dim in zip(tensors, dims, strict=True):
        if not isinstance(one, torch.Tensor) or isinstance(one, DTensor):
            raise LayoutTypeError(
                f"context_parallel: got a buffer that is {type(one).__name__}, expected a plain tensor"
            )
        if not -one.ndim <= dim < one.ndim:
            raise LayoutError(f"context_parallel: got dim {dim} for a buffer of shape {tuple(one.shape)}")
        if one.requires_grad and not may_require_grad:
            raise LayoutError("context_parallel: got a buffer that requires grad, expected a buffer without grad")
    return [dim % one.ndim for one, dim in zip(tensors, dims, strict=True)]


def _part(whole: torch.Tensor, dim: int, ring: Ring) -> torch.Tensor:
    """Return this client's part of a tensor."""
    runs = runs_of(whole.shape[dim], ring.position, len(ring.clients))
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)


def _unsharded(part: torch.Tensor, dim: int, length: int, ring: Ring) -> torch.Tensor:
    """Gather a whole sequence of this length along ``dim`` from all parts. Collective: over the ring's clients."""
    count = len(ring.clients)
    whole = part.new_empty((*part.shape[:dim], length, *part.shape[dim + 1 :]))
    runs = [runs_of(length, position, count) for position in range(count)]
    sizes = [sum(stop - start for start, stop in client_runs) for client_runs in runs]
    device = ring.message_device
    parts = [part.new_empty((*part.shape[:dim], size, *part.shape[dim + 1 :]), device=device) for size in sizes]
    # Collectives take buffers in the order of client ids; the ring may have another.
    by_client = [parts[ring.clients.index(client)] for client in sorted(ring.clients)]
    if count > 1:
        ring.collectives.all_gather(by_client, part.contiguous().to(device)).wait()
    else:
        parts = [part]
    for client_runs, client_part in zip(runs, parts, strict=True):
        offset = 0
        for start, stop in client_runs:
            whole.narrow(dim, start, stop - start).copy_(client_part.narrow(dim, offset, stop - start))
            offset += stop - start
    return whole


def _gather_by_position(ring: Ring, own: list[int]) -> list[list[int]]:
    """Return the numbers of every client, by position in the ring. Collective: over the ring's clients."""
    if len(ring.clients) == 1:
        return [own]
    gathered = all_gather_object(own, sorted(ring.clients))
    return [gathered[sorted(ring.clients).index(client)] for client in ring.clients]


class _RingAttentionMode(TorchFunctionMode):
    """Runs attention of plain tensors as ring attention."""

    def __init__(self, ring: Ring, is_even: bool) -> None:
        super().__init__()
        self._ring = ring
        self._is_even = is_even

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        # Attention of DTensors has a separate sharding rule.
        if func is not _ATTENTION or any(isinstance(one, DTensor) for one in (*args, *named.values())):
            return func(*args, **named)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return self._attend(**dict(zip(names, args, strict=False)), **named)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p > 0.0:
            raise OperatorError("attention in context_parallel: got a mask or dropout, expected neither")
        if query.ndim != 4:
            raise OperatorError(
                f"attention in context_parallel: got queries of shape {tuple(query.shape)}, expected (batch, heads, "
                "length, features)"
            )
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        key, value = (one.expand(*query.shape[:2], -1, -1) for one in (key, value))
        queries, keys = self._runs([query.shape[2], key.shape[2]])
        if is_causal and queries != keys:
            raise OperatorError("causal attention in context_parallel: got queries and keys of different lengths")
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        schedule = RingSchedule(self._ring, queries, keys, is_causal, factor)
        result: torch.Tensor = RingAttention.apply(query, key, value, schedule)  # type: ignore[no-untyped-call]
        return result

    def _runs(self, own: list[int]) -> list[tuple[tuple[tuple[int, int], ...], ...]]:
        """Return every client's runs of sequences, given the lengths of this client's parts.

        Raises:
            OperatorError: The lengths do not belong to the parts of one sequence.
        """
        count = len(self._ring.clients)
        lengths = [own] * count if self._is_even else _gather_by_position(self._ring, own)
        result = []
        for column in zip(*lengths, strict=True):
            runs = tuple(tuple(runs_of(sum(column), position, count)) for position in range(count))
            # Messages have the sizes of the runs, so parts of other lengths would not fit the buffers.
            if tuple(sum(stop - start for start, stop in one) for one in runs) != column:
                raise OperatorError(
                    f"attention in context_parallel: got parts of lengths {column}, expected the parts of a sequence "
                    f"in {2 * count} chunks"
                )
            result.append(runs)
        return result
