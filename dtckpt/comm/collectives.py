"""Messages among clients through ``torch.distributed``: one Protocol, made of pairwise messages or of native calls.

Members are clients. Devices of one client serve each other by copies, which takes no message: that is the redistribute
engine's part (`dtckpt.redistribution.execute`), as is a mesh whose clients own several devices each.

In host memory every operation is made of tagged pairwise messages (`dtckpt.comm.point_to_point`). Those are as fast as
Gloo's own collectives or faster, but for a large all-reduce between hosts, work for every dtype, and add terms in one
order on all members. Clients that do not agree what to do do not meet: Gloo would take the message that comes and end
the process if its size were wrong. NCCL has no tags and its collectives know the wiring, so there they are used.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dtckpt.comm import observers, process_groups
from dtckpt.comm.point_to_point import carrier
from dtckpt.errors import CoordinationError, capped

T = TypeVar("T")

Message = tuple[int, torch.Tensor]
"""A client, and the contiguous tensor that goes to it or comes from it."""

REDUCERS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
"""How two terms become one; a sum becomes an average when it is complete."""

_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_NATIVE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8}
)


def _as_it_is(given: Any) -> torch.Tensor:
    return given  # type: ignore[no-any-return]  # it is one, where nothing packs it


def _nothing() -> None: ...


class Work(Protocol):
    """Communication under way."""

    def arrivals(self) -> Iterator[int]:
        """Yield the numbers of an exchange's received messages, each when it is there. Raises: as `wait`."""

    def abandon(self) -> None:
        """Leave the tensors alone from now on, as far as that is possible: the call that they are for has failed."""

    def wait(self) -> None:
        """Return when this client's part is done (on CUDA: is ordered before what the current stream does next).

        Raises:
            CoordinationError: A member is gone, or the process group's timeout is over.
        """


class Collectives(Protocol):
    """Communication among some clients.

    Collective: Every method, over ``members`` (`exchange`: the first; later ones over those that have messages). Each
    starts the communication and returns; tensors are contiguous, lie on one kind of device, and must be left alone
    until the `Work` is done. Sizes and dtypes are the same for giver and taker; the methods do not check it.
    """

    members: tuple[int, ...]
    """Clients, ascending. The pieces of a collective stand in this order."""

    def meet(self, peers: Set[int]) -> None:
        """Find out how to reach some members. They do the same, and none of them waits for messages before.

        Needed where one client may wait for messages of one exchange while another begins several.

        Raises:
            CoordinationError: One is gone, or did not come in time.
        """

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _as_it_is,
    ) -> Work:
        """Exchange messages pairwise; those of one pair and tag arrive in order.

        Args:
            sends: Clients, and what ``pack`` makes the messages of.
            receives: Clients, and where their messages go.
            tag: Keeps messages apart; below `dtckpt.comm.point_to_point.END_OF_TAGS`.
            pack: Called when a message is to be sent, so that those before are under way meanwhile; by default,
                ``sends`` has the messages themselves.
        """

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        """Fill ``received`` with every member's piece; pieces may differ in size."""

    def all_to_all(self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Work:
        """Give every member its piece of ``given``; pieces may differ in size."""

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        """Fill ``reduced`` with the reduction of what all members have for this one in ``terms``."""

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        """Reduce a tensor in place, bit for bit alike on all members."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Fill everyone's tensor with client ``root``'s."""

    def scatter(self, received: torch.Tensor, given: Sequence[torch.Tensor], root: int) -> Work:
        """Give every member its piece of client ``root``'s ``given``; the others' is empty."""


class Pending:
    """Works that are one; ``then`` is called once when all are done.

    Args:
        works: What is waited for.
        what: What it is, for errors.
        members: Among whom.
        then: Called when all is done.
        receives: For an exchange, per received message what is waited for before ``works``; None where it is empty.
        abandon: Called if they fail, or nobody waits for them.
    """

    def __init__(
        self,
        works: Sequence[Any],
        what: str,
        members: Sequence[int],
        then: Callable[[], None] | None = None,
        *,
        receives: Sequence[Any] = (),
        abandon: Callable[[], None] = _nothing,
    ) -> None:
        self._works, self._what, self._members, self._then = list(works), what, members, then
        self._receives = deque(enumerate(receives))
        self._abandon = abandon

    def arrivals(self) -> Iterator[int]:
        while self._receives:
            number, work = self._receives.popleft()
            if work is not None:
                self._await(work)
            yield number

    def wait(self) -> None:
        deque(self.arrivals(), maxlen=0)
        while self._works:
            self._await(self._works.pop())
        self._abandon = _nothing  # which holds the messages
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def abandon(self) -> None:
        self._abandon()

    def _await(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._abandon()
            raise _gone(self._what, self._members, error) from error
        except BaseException:
            self._abandon()
            raise

    def __del__(self) -> None:
        if self._works or self._receives:
            self._abandon()


class Pairwise:
    """`Collectives` of tagged pairwise messages; with one member, there are none and copies remain.

    Args:
        members: Clients, in any order.
        client: This one.
    """

    def __init__(self, members: Sequence[int], client: int) -> None:
        self.members = tuple(sorted(members))
        self._client = client
        self._own = self.members.index(client) if client in self.members else -1

    def meet(self, peers: Set[int]) -> None:
        carrier(self.members, peers)

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _as_it_is,
    ) -> Work:
        if len(self.members) == 1:
            return Pending([], "exchange", self.members)
        # Not kept: groups end and are made anew, while this stays.
        carry = carrier(self.members, {peer for peer, _ in (*sends, *receives)})
        givers = {peer for peer, room in receives if room.numel()}
        try:
            coming = [carry.recv(room, peer, tag) if room.numel() else None for peer, room in receives]
            messages = ((peer, pack(given)) for peer, given in sends)
            going = [
                carry.send(message, peer, tag, is_answered=peer in givers)
                for peer, message in messages
                if message.numel()
            ]
        except RuntimeError as error:
            carry.abandon()
            raise _gone("exchange", self.members, error) from error
        except BaseException:
            carry.abandon()
            raise
        if (coming or going) and observers.is_observed():
            observers.report("exchange", sum(room.nbytes for _, room in receives), self.members)
        return Pending(going, "exchange", self.members, receives=coming, abandon=carry.abandon)

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        received[self._own].copy_(piece)
        return self.exchange([(peer, piece) for peer in self._others], self._from_others(received))

    def all_to_all(self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Work:
        received[self._own].copy_(given[self._own])
        return self.exchange(self._from_others(given), self._from_others(received))

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        arrived = [torch.empty_like(reduced) for _ in self.members]
        arrived[self._own] = terms[self._own]
        works = [self.exchange(self._from_others(terms), self._from_others(arrived))]
        number = len(self.members)
        return Pending(works, "reduce_scatter", self.members, lambda: reduce_terms(reduced, arrived, reduce_op, number))

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        flat = tensor.view(-1)
        # Chunks of one size, the last ones shorter or empty: each member reduces its own, then all are gathered.
        size = math.ceil(flat.numel() / len(self.members))
        chunks = [flat[index * size : (index + 1) * size] for index in range(len(self.members))]
        reduced = torch.empty_like(chunks[self._own])
        self.reduce_scatter(reduced, chunks, reduce_op).wait()
        return self.all_gather(chunks, reduced)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self._client == root:
            return self.exchange([(peer, tensor) for peer in self._others], [])
        return self.exchange([], [(root, tensor)])

    def scatter(self, received: torch.Tensor, given: Sequence[torch.Tensor], root: int) -> Work:
        if self._client != root:
            return self.exchange([], [(root, received)])
        received.copy_(given[self._own])
        return self.exchange(self._from_others(given), [])

    @property
    def _others(self) -> list[int]:
        return [member for member in self.members if member != self._client]

    def _from_others(self, tensors: Sequence[torch.Tensor]) -> list[Message]:
        return [pair for pair in zip(self.members, tensors, strict=True) if pair[0] != self._client]


class Native(Pairwise):
    """`Collectives` of ``torch.distributed``'s own calls: NCCL's on CUDA. What those lack is made of messages.

    What is only moved goes as bytes, since the libraries do not know all dtypes.

    Args:
        members: Clients, in any order.
        client: This one.
        device: Where this client's tensors lie.
    """

    def __init__(self, members: Sequence[int], client: int, device: torch.device) -> None:
        super().__init__(members, client)
        self._device = device

    def meet(self, peers: Set[int]) -> None:
        """Return: the first exchange connects all members."""

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _as_it_is,
    ) -> Work:
        del tag
        group = process_groups.connected_group_of(self.members, self._device)
        messages = [(peer, pack(given)) for peer, given in sends]
        operations = [dist.P2POp(dist.irecv, as_bytes(room), peer, group) for peer, room in receives if room.numel()]
        operations += [dist.P2POp(dist.isend, as_bytes(one), peer, group) for peer, one in messages if one.numel()]
        if not operations:
            return Pending([], "exchange", self.members, receives=[None] * len(receives))
        works = dist.batch_isend_irecv(operations)
        return self._started("exchange", sum(room.nbytes for _, room in receives), works, num_receives=len(receives))

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        if not _are_even(received):
            return super().all_gather(received, piece)
        work = dist.all_gather([as_bytes(room) for room in received], as_bytes(piece), self._group, async_op=True)
        return self._started("all_gather", piece.nbytes * (len(self.members) - 1), [work])

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        if reduce_op not in _NATIVE_OPS or reduced.dtype not in _NATIVE_DTYPES or not _are_even(terms):
            return super().reduce_scatter(reduced, terms, reduce_op)
        works, then = [], self._averaging(reduced, reduce_op)
        if _loses_nan(reduced, reduce_op):
            found, given = torch.empty_like(reduced, dtype=torch.uint8), [term.isnan().byte() for term in terms]
            works.append(dist.reduce_scatter(found, given, dist.ReduceOp.MAX, self._group, async_op=True))
            then = partial(_put_nan, reduced, found)
        works.append(dist.reduce_scatter(reduced, list(terms), _NATIVE_OPS[reduce_op], self._group, async_op=True))
        return self._started("reduce_scatter", reduced.nbytes * (len(self.members) - 1), works, then)

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        if reduce_op not in _NATIVE_OPS or tensor.dtype not in _NATIVE_DTYPES:
            return super().all_reduce(tensor, reduce_op)
        works, then = [], self._averaging(tensor, reduce_op)
        if _loses_nan(tensor, reduce_op):
            found = tensor.isnan().byte()
            works.append(dist.all_reduce(found, dist.ReduceOp.MAX, self._group, async_op=True))
            then = partial(_put_nan, tensor, found)
        works.append(dist.all_reduce(tensor, _NATIVE_OPS[reduce_op], self._group, async_op=True))
        return self._started("all_reduce", tensor.nbytes, works, then)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        work = dist.broadcast(as_bytes(tensor), root, self._group, async_op=True)
        return self._started("broadcast", 0 if self._client == root else tensor.nbytes, [work])

    @property
    def _group(self) -> dist.ProcessGroup:
        return process_groups.group_of(self.members, self._device.type)

    def _averaging(self, total: torch.Tensor, reduce_op: str) -> Callable[[], None] | None:
        return (lambda: average(total, len(self.members))) if reduce_op == "avg" else None

    def _started(
        self,
        kind: str,
        nbytes: int,
        works: Sequence[Any],
        then: Callable[[], None] | None = None,
        num_receives: int = 0,
    ) -> Work:
        if observers.is_observed():
            observers.report(kind, nbytes, self.members)
        # NCCL does them as one: the first message is there when all are.
        together = Pending(works, kind, self.members)
        return Pending([together], kind, self.members, then, receives=[together] * num_receives)


def _loses_nan(tensor: torch.Tensor, reduce_op: str) -> bool:
    """Whether libraries may take a number for the least or greatest where torch takes NaN."""
    return reduce_op in ("min", "max") and tensor.is_floating_point()


def _put_nan(reduced: torch.Tensor, found: torch.Tensor) -> None:
    """Write NaN where a term was NaN."""
    reduced.masked_fill_(found.bool(), math.nan)


def collectives_of(members: Sequence[int], client: int, device: torch.device) -> Collectives:
    """Return the collectives for messages that lie on this client's ``device``; no group is made before they are used.

    For tensors on a card, `dtckpt.comm.process_groups.message_memory` says whether messages may lie there, too.
    """
    return Pairwise(members, client) if device.type == "cpu" else Native(members, client, device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes.

    One of one element is contiguous whatever its strides say, and ``view`` would refuse those.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def all_gather_object(value: T, clients: Sequence[int]) -> list[T]:
    """Return every client's value, in the order of ``clients``.

    Collective: Over ``clients``, bounded by the process group's timeout.

    Raises:
        CoordinationError: There is no process group that spans the clients, a client is gone, or the process group's
            timeout is over.
    """
    received: list[T | None] = [None for _ in clients]
    group = process_groups.group_of(clients)
    try:
        dist.all_gather_object(received, value, group=group)
    except RuntimeError as error:
        raise _gone("all_gather_object", clients, error) from error
    if observers.is_observed():
        nbytes = sum(len(pickle.dumps(item)) for item in received) - len(pickle.dumps(value))
        observers.report("all_gather_object", nbytes, clients)
    return [item for item in received if item is not None]


def reduce_terms(into: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str, divisor: int = 1) -> None:
    """Write the reduction of ``terms``, in their order, into a tensor; an average is divided by ``divisor``."""
    reducer, (first, *others) = REDUCERS[reduce_op], terms
    if not others:
        into.copy_(first)
    for number, term in enumerate(others):
        reducer(first if number == 0 else into, term, out=into)
    if reduce_op == "avg":
        average(into, divisor)


def average(total: torch.Tensor, divisor: int) -> None:
    """Divide a sum in place; one of integers is rounded towards zero."""
    if divisor > 1:
        # Integers are divided as such: a float does not have all their digits.
        is_whole = not (total.is_floating_point() or total.is_complex() or total.dtype == torch.bool)
        total.copy_(torch.div(total, divisor, rounding_mode="trunc" if is_whole else None))


def _gone(what: str, members: Sequence[int], error: Exception) -> CoordinationError:
    """Return what to raise when a peer ended, or did not come in time."""
    return CoordinationError(
        f"{what} among clients {capped(members)} failed: {error}; look for clients that ended or hang"
    )


def _are_even(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1
