"""Ring attention: attention of a sequence that is split over clients, whose keys and values go round in a ring.

    step 0    client 0: keys 0    client 1: keys 1    client 2: keys 2        each client keeps its own queries;
    step 1    client 0: keys 2    client 1: keys 0    client 2: keys 1        at each step they attend to the keys
    step 2    client 0: keys 1    client 1: keys 2    client 2: keys 0        and values that the client has then

The parts of each softmax are merged by their logarithms of sums (Liu et al., Ring Attention, arXiv:2310.01889). A
client has one or two runs of positions. In causal attention a run attends fully to an earlier run, not at all to a
later run, and causally to itself. So only the scores of a run with itself need a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dtckpt.comm.collectives import Collectives, Work, collectives_of
from dtckpt.comm.process_groups import message_memory

Run = tuple[int, int]
"""Start and stop of consecutive positions of the sequence."""

_ROWS = 1024
"""Number of queries whose scores are in memory at once."""


def runs_of(length: int, position: int, count: int, *, is_balanced: bool = True) -> list[Run]:
    """Return the runs of the sequence that one client has, in the order in which it has them.

    If balanced, the sequence is cut into ``2 * count`` chunks, as by ``torch.chunk``. A client has one chunk counted
    from the front and one counted from the back, so that causal attention is equal work for all:

        chunks    0 1 2 3 4 5
        clients   0 1 2 2 1 0

    Args:
        length: Of the sequence.
        position: Of the client in the ring.
        count: Number of clients.
        is_balanced: Otherwise, each client has one chunk of ``count``.
    """
    num_chunks = 2 * count if is_balanced else count
    size = -(-length // num_chunks)
    chunks = (position, num_chunks - 1 - position) if is_balanced else (position,)
    return [(min(length, size * chunk), min(length, size * (chunk + 1))) for chunk in chunks]


@dataclass(frozen=True)
class Ring:
    """The clients that a sequence is split over.

    Args:
        clients: In the order of the ring.
        client: This client.
        device: This client's device.
    """

    clients: tuple[int, ...]
    client: int
    device: torch.device

    @property
    def position(self) -> int:
        """This client's position in the ring."""
        return self.clients.index(self.client)

    @property
    def message_device(self) -> torch.device:
        """The device on which messages lie."""
        return self.device if message_memory(self.device.type) == self.device.type else torch.device("cpu")

    @property
    def collectives(self) -> Collectives:
        """Collectives among the clients."""
        return collectives_of(self.clients, self.client, self.message_device)

    @contextmanager
    def shifts(self) -> Iterator[Callable[..., RingShift]]:
        """Yield `shift` for a ``with`` block; if the block fails, all shifts that it began are abandoned."""
        works: list[Work] = []

        def shift(tensors: Sequence[torch.Tensor], lengths: Sequence[int], step: int, tag: int) -> RingShift:
            shifting = self.shift(tensors, lengths, step, tag)
            works.append(shifting.work)
            return shifting

        try:
            yield shift
        except BaseException:
            for work in works:
                work.abandon()
            raise

    def shift(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int], step: int, tag: int) -> RingShift:
        """Start to send tensors to the next client of the ring, and to receive the tensors of the previous client.

        Args:
            tensors: Of shape (batch, heads, length, features), from the client ``step`` positions before.
            lengths: Length of every client's part of the sequence, by position in the ring.
            step: Number of positions that the tensors have moved already.
            tag: Keeps apart messages that are in flight together.
        """
        count = len(self.clients)
        # The previous client is one position back; its tensors in this step come from ``step`` positions before it.
        length = lengths[(self.position - step - 1) % count]
        device = self.message_device
        buffers = [one.new_empty((*one.shape[:2], length, *one.shape[3:]), device=device) for one in tensors]
        sent = [one.contiguous().to(device) for one in tensors]
        after, before = self.clients[(self.position + 1) % count], self.clients[(self.position - 1) % count]
        work = self.collectives.exchange([(after, one) for one in sent], [(before, each) for each in buffers], tag)
        return RingShift(work, buffers, sent, tensors[0].device)


@dataclass(frozen=True, slots=True)
class RingShift:
    """Tensors on their way to the next client of the ring.

    Args:
        work: The exchange under way.
        buffers: Where the tensors of the client before arrive.
        sent: This client's messages, kept until they are sent.
        device: The device on which received tensors are returned.
    """

    work: Work
    buffers: list[torch.Tensor]
    sent: list[torch.Tensor]
    device: torch.device

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors of the client before when they have arrived."""
        self.work.wait()
        return [buffer.to(self.device) for buffer in self.buffers]


@dataclass(frozen=True)
class RingSchedule:
    """The positions of each client, and the runs that attend to each other at each step.

    Args:
        ring: The clients.
        queries: Runs of every client's queries, by position in the ring.
        keys: Runs of every client's keys and values, by position in the ring.
        is_causal: Whether a position attends only to those up to itself.
        scale: Factor of scores.
    """

    ring: Ring
    queries: tuple[tuple[Run, ...], ...]
    keys: tuple[tuple[Run, ...], ...]
    is_causal: bool
    scale: float

    @property
    def lengths(self) -> list[int]:
        """Number of keys of every client."""
        return [sum(stop - start for start, stop in runs) for runs in self.keys]

    def pairs(self, step: int) -> list[tuple[slice, slice, bool]]:
        """Return the pairs of this client's queries and its keys at a step that attend to each other.

        Returns:
            Rows of the queries, columns of the keys, and whether they attend causally, for every pair of runs.
        """
        position = self.ring.position
        source = (position - step) % len(self.keys)
        pairs = []
        for rows, query in zip(_slices(self.queries[position]), self.queries[position], strict=True):
            for columns, key in zip(_slices(self.keys[source]), self.keys[source], strict=True):
                # Runs of queries and keys are equal or disjoint where attention is causal, so their starts tell which
                # is later.
                is_empty = rows.start == rows.stop or columns.start == columns.stop
                if is_empty or (self.is_causal and key[0] > query[0]):
                    continue
                pairs.append((rows, columns, self.is_causal and key == query))
        return pairs


def _slices(runs: Sequence[Run]) -> list[slice]:
    """Return where each run lies in the client's part of the sequence."""
    slices, offset = [], 0
    for start, stop in runs:
        slices.append(slice(offset, offset + stop - start))
        offset += stop - start
    return slices


class RingAttention(torch.autograd.Function):
    """Attention of this client's queries to the keys of all clients.

    Query, key and value are of shape (batch, heads, length, features). In the backward pass keys and values go round
    again, and their gradients follow them. Each client adds its part to the gradients and shifts them on. The last
    shift returns them to their own clients.

    Collective: Over the ring's clients, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, schedule: RingSchedule
    ) -> torch.Tensor:
        precise = _precise(query.dtype)
        # The softmax over no keys yet: a sum of 0, whose logarithm is minus infinity. Every pair of runs has a key for
        # each query, a causal one at least the query's own, so a merge never takes minus infinity from minus infinity.
        out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=precise)
        sums = query.new_full(query.shape[:3], -math.inf, dtype=precise)
        pair, count = [key, value], len(schedule.ring.clients)
        with schedule.ring.shifts() as shift:
            for step in range(count):
                shifting = shift(pair, schedule.lengths, step, 0) if step < count - 1 else None
                for rows, columns, is_causal in schedule.pairs(step):
                    for part in _blocks(rows):
                        first = part.start - rows.start if is_causal else None
                        weights = _scores(query[:, :, part], pair[0][:, :, columns], schedule.scale, first)
                        _merge(out[:, :, part], sums[:, :, part], weights, pair[1][:, :, columns].to(precise))
                pair = shifting.wait() if shifting else pair
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.schedule = schedule
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        schedule: RingSchedule = ctx.schedule
        precise = out.dtype
        gradient = gradient.to(precise)
        # Per query, sum(weights * gradient of weights) over all keys equals sum(gradient * out) over features: so the
        # gradient of scores needs no sum over keys that have yet to come.
        delta = (gradient * out).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(query, dtype=precise)
        pair, count = [key, value], len(schedule.ring.clients)
        summed: list[torch.Tensor] = []
        gradients: RingShift | None = None
        with schedule.ring.shifts() as shift:
            for step in range(count):
                shifting = shift(pair, schedule.lengths, step, 0) if step < count - 1 else None
                own = [torch.zeros_like(one, dtype=precise) for one in pair]
                for rows, columns, is_causal in schedule.pairs(step):
                    keys, values = pair[0][:, :, columns].to(precise), pair[1][:, :, columns].to(precise)
                    for part in _blocks(rows):
                        first = part.start - rows.start if is_causal else None
                        scores = _scores(query[:, :, part], keys, schedule.scale, first)
                        # Computed again from the saved logarithms: the weights of all keys would take memory of the
                        # length squared.
                        weights = (scores - sums[:, :, part, None]).exp_()
                        upper = gradient[:, :, part]
                        own[1][:, :, columns] += weights.mT @ upper
                        inner = weights.mul_(upper @ values.mT - delta[:, :, part]).mul_(schedule.scale)
                        query_gradient[:, :, part] += inner @ keys
                        own[0][:, :, columns] += inner.mT @ query[:, :, part].to(precise)
                if gradients is not None:
                    own = [mine.add_(received) for mine, received in zip(own, gradients.wait(), strict=True)]
                summed = own
                if count > 1:
                    # One step behind the keys that they belong to, and one shift more, which brings them home:
                    #     step            0              1              2
                    #     keys 0        client 0  -->  client 1  -->  client 2
                    #     gradients 0   client 0  -->  client 1  -->  client 2  -->  client 0
                    gradients = shift(own, schedule.lengths, step, 1)
                pair = shifting.wait() if shifting else pair
            if gradients is not None:
                summed = gradients.wait()
        key_gradient, value_gradient = summed
        return query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype), None


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(rows: slice) -> list[slice]:
    """Return rows cut into blocks; the scores of one block are in memory at a time."""
    return [slice(start, min(start + _ROWS, rows.stop)) for start in range(rows.start, rows.stop, _ROWS)]


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, first: int | None) -> torch.Tensor:
    """Return the scores of queries and keys, of shape (batch, heads, queries, keys).

    Args:
        query: Queries, of shape (batch, heads, queries, features).
        key: Keys, of shape (batch, heads, keys, features).
        scale: Factor of scores.
        first: For causal attention of a run to itself, the position of the first query in the run. Scores of later
            keys are minus infinity.
    """
    precise = _precise(query.dtype)
    scores = (query.to(precise) * scale) @ key.to(precise).mT
    if first is not None:
        positions = torch.arange(first, first + query.shape[2], device=query.device)
        later = torch.arange(key.shape[2], device=query.device)[None, :] > positions[:, None]
        scores.masked_fill_(later, -math.inf)
    return scores


def _merge(out: torch.Tensor, sums: torch.Tensor, scores: torch.Tensor, value: torch.Tensor) -> None:
    """Merge the attention to more keys into outputs and logarithms of sums, in place.

    Args:
        out: Outputs so far, of shape (batch, heads, queries, features).
        sums: Logarithms of the sums of exponentials so far, of shape (batch, heads, queries).
        scores: Of the queries and the new keys; overwritten.
        value: Values of the new keys, of shape (batch, heads, keys, features).
    """
    fresh = scores.logsumexp(-1)
    # Rescale the outputs so far, as if both sums had been one from the start. Logarithms do not overflow.
    both = torch.logaddexp(sums, fresh)
    weights = scores.sub_(both[..., None]).exp_()
    out.mul_((sums - both).exp_()[..., None]).add_(weights @ value)
    sums.copy_(both)
