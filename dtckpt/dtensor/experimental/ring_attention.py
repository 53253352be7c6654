"""Attention of a sequence that is split over clients: keys and values go round in a ring.

Each client attends from its own queries to the keys and values that are passing by. Parts of a softmax are put together
by their logarithms of sums (Liu et al., Ring Attention, arXiv:2310.01889). A client has one or two runs of positions; a
pair of runs is attended to fully, causally (a run to itself) or not at all, so no masks are made.
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
"""Start and stop of positions that follow each other."""

_ROWS = 1024
"""Queries whose scores are in memory at once."""


def runs_of(length: int, place: int, count: int, *, is_balanced: bool = True) -> list[Run]:
    """Return the positions of the sequence that one of ``count`` clients has, in the order in which it has them.

    Balanced, the sequence is cut into ``2 * count`` chunks, and a client has the chunk at its place from the front and
    that from the back, so that causal attention is the same work for all. Chunks are cut as ``torch.chunk`` does.
    """
    pieces = 2 * count if is_balanced else count
    chunk = -(-length // pieces)
    places = (place, pieces - 1 - place) if is_balanced else (place,)
    return [(min(length, chunk * index), min(length, chunk * (index + 1))) for index in places]


@dataclass(frozen=True)
class Ring:
    """The clients of a sequence, in its order.

    Args:
        clients: By place.
        client: This one.
        device: This client's.
    """

    clients: tuple[int, ...]
    client: int
    device: torch.device

    @property
    def place(self) -> int:
        """This client's place."""
        return self.clients.index(self.client)

    @property
    def message_device(self) -> torch.device:
        """Where messages lie."""
        return self.device if message_memory(self.device.type) == self.device.type else torch.device("cpu")

    @property
    def collectives(self) -> Collectives:
        """What carries messages among the clients."""
        return collectives_of(self.clients, self.client, self.message_device)

    @contextmanager
    def passing(self) -> Iterator[Callable[..., Passing]]:
        """Yield `pass_on`; what it has begun is abandoned if the body fails."""
        begun: list[Work] = []

        def pass_on(tensors: Sequence[torch.Tensor], lengths: Sequence[int], step: int, tag: int) -> Passing:
            passing = self.pass_on(tensors, lengths, step, tag)
            begun.append(passing.work)
            return passing

        try:
            yield pass_on
        except BaseException:
            for work in begun:
                work.abandon()
            raise

    def pass_on(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int], step: int, tag: int) -> Passing:
        """Start to give to the next client what came from the one ``step`` places back, and take from the one before.

        Args:
            tensors: Of shape (…, length, …) with the length third from the front.
            lengths: Of the sequence on every client, by place.
            step: How many places the tensors have come.
            tag: Keeps apart what is under way together.
        """
        count = len(self.clients)
        coming = lengths[(self.place - step - 1) % count]
        where = self.message_device
        rooms = [one.new_empty((*one.shape[:2], coming, *one.shape[3:]), device=where) for one in tensors]
        given = [one.contiguous().to(where) for one in tensors]
        after, before = self.clients[(self.place + 1) % count], self.clients[(self.place - 1) % count]
        work = self.collectives.exchange([(after, one) for one in given], [(before, room) for room in rooms], tag)
        return Passing(work, rooms, given, tensors[0].device)


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensors on their way around the ring."""

    work: Work
    rooms: list[torch.Tensor]
    given: list[torch.Tensor]
    device: torch.device

    def arrived(self) -> list[torch.Tensor]:
        """Return what came, when it is there, on the device where tensors are wanted."""
        self.work.wait()
        return [room.to(self.device) for room in self.rooms]


@dataclass(frozen=True)
class Plan:
    """Who has which positions, and who attends to whom.

    Args:
        ring: The clients.
        queries: Runs of every client's queries, by place.
        keys: Runs of every client's keys and values, by place.
        is_causal: Whether a position attends to those up to itself only.
        scale: Of scores.
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
        """Return what attends to what on this client when keys have come ``step`` places: rows, columns, causally."""
        place = self.ring.place
        source = (place - step) % len(self.keys)
        found = []
        for rows, query in zip(_slices(self.queries[place]), self.queries[place], strict=True):
            for columns, key in zip(_slices(self.keys[source]), self.keys[source], strict=True):
                is_empty = rows.start == rows.stop or columns.start == columns.stop
                if is_empty or (self.is_causal and key[0] > query[0]):
                    continue
                found.append((rows, columns, self.is_causal and key == query))
        return found


def _slices(runs: Sequence[Run]) -> list[slice]:
    """Return where runs lie in what a client has."""
    found, at = [], 0
    for start, stop in runs:
        found.append(slice(at, at + stop - start))
        at += stop - start
    return found


class RingAttention(torch.autograd.Function):
    """Attention of this client's queries to all keys; tensors of shape (batch, heads, length, features).

    Collective: Over the ring's clients, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> torch.Tensor:
        precise = _precise(query.dtype)
        out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=precise)
        sums = query.new_full(query.shape[:3], -math.inf, dtype=precise)
        held, count = [key, value], len(plan.ring.clients)
        with plan.ring.passing() as pass_on:
            for step in range(count):
                passing = pass_on(held, plan.lengths, step, 0) if step < count - 1 else None
                for rows, columns, is_causal in plan.pairs(step):
                    for part in _blocks(rows):
                        first = part.start - rows.start if is_causal else None
                        weights = _scores(query[:, :, part], held[0][:, :, columns], plan.scale, first)
                        _merge(out[:, :, part], sums[:, :, part], weights, held[1][:, :, columns].to(precise))
                held = passing.arrived() if passing else held
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        plan: Plan = ctx.plan
        precise = out.dtype
        gradient = gradient.to(precise)
        delta = (gradient * out).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query, dtype=precise)
        held, count = [key, value], len(plan.ring.clients)
        summed: list[torch.Tensor] = []
        travelling: Passing | None = None
        with plan.ring.passing() as pass_on:
            for step in range(count):
                passing = pass_on(held, plan.lengths, step, 0) if step < count - 1 else None
                own = [torch.zeros_like(one, dtype=precise) for one in held]
                for rows, columns, is_causal in plan.pairs(step):
                    near, far = held[0][:, :, columns].to(precise), held[1][:, :, columns].to(precise)
                    for part in _blocks(rows):
                        first = part.start - rows.start if is_causal else None
                        scores = _scores(query[:, :, part], near, plan.scale, first)
                        weights = (scores - sums[:, :, part, None]).exp_()
                        upper = gradient[:, :, part]
                        own[1][:, :, columns] += weights.mT @ upper
                        inner = weights.mul_(upper @ far.mT - delta[:, :, part]).mul_(plan.scale)
                        of_query[:, :, part] += inner @ near
                        own[0][:, :, columns] += inner.mT @ query[:, :, part].to(precise)
                if travelling is not None:
                    own = [mine.add_(came) for mine, came in zip(own, travelling.arrived(), strict=True)]
                summed = own
                if count > 1:
                    travelling = pass_on(own, plan.lengths, step, 1)
                held = passing.arrived() if passing else held
            if travelling is not None:
                summed = travelling.arrived()
        of_key, of_value = summed
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are formed."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(rows: slice) -> list[slice]:
    """Return rows in blocks, whose scores are in memory one after the other."""
    return [slice(start, min(start + _ROWS, rows.stop)) for start in range(rows.start, rows.stop, _ROWS)]


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, first: int | None) -> torch.Tensor:
    """Return scores; where queries are the keys' positions from ``first`` on, minus infinity for later keys."""
    precise = _precise(query.dtype)
    scores = (query.to(precise) * scale) @ key.to(precise).mT
    if first is not None:
        positions = torch.arange(first, first + query.shape[2], device=query.device)
        later = torch.arange(key.shape[2], device=query.device)[None, :] > positions[:, None]
        scores.masked_fill_(later, -math.inf)
    return scores


def _merge(out: torch.Tensor, sums: torch.Tensor, scores: torch.Tensor, value: torch.Tensor) -> None:
    """Take more keys into account: update outputs, and logarithms of sums, in place."""
    fresh = scores.logsumexp(-1)
    both = torch.logaddexp(sums, fresh)
    weights = scores.sub_(both[..., None]).exp_()
    out.mul_((sums - both).exp_()[..., None]).add_(weights @ value)
    sums.copy_(both)
