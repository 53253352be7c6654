"""Collectives among clients: one Protocol with two implementations, pairwise messages and the library's own calls.

Members are clients. Several devices of one client exchange data by copies, without messages;
`dtckpt.redistribution.execute` makes these copies.

* `PairwiseCollectives`, for host memory, makes every operation from tagged messages (`dtckpt.comm.point_to_point`).
  Such an operation is as fast as Gloo's own collectives or faster, except for a large all-reduce between hosts. The
  class works for every dtype and adds terms in the same order on all members. Clients that disagree about the next
  operation use different tags, so neither receives the other's message. Gloo's collectives would receive it, and would
  end the process if its size were wrong.
* `NativeCollectives`, for CUDA memory, calls ``torch.distributed``: NCCL has no tags, and its collectives know how the
  GPUs are wired.
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
from dtckpt.comm.point_to_point import open_transport
from dtckpt.errors import CoordinationError, capped

T = TypeVar("T")

Message = tuple[int, torch.Tensor]
"""A client, and the contiguous tensor that is sent to it or the contiguous buffer for its tensor."""

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
"""Elementwise functions of two terms. An average adds, like a sum, and divides when the sum is complete."""

# PyTorch has hardly any arithmetic of wide unsigned integers, and on GPUs none. In two's complement these reductions
# give the same bits for signed integers; a minimum, a maximum and a quotient do not.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The signed dtype of each wide unsigned dtype."""
_SIGNLESS_OPS = frozenset({"sum", "product", "band", "bor", "bxor"})

_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Dtypes that the library reduces; tensors of others are reduced from pairwise messages.
_NATIVE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8}
)


def _identity(message: Any) -> torch.Tensor:
    return message  # type: ignore[no-any-return]  # without a ``pack`` function the messages are tensors


def _no_op() -> None: ...


class Work(Protocol):
    """Communication that has started. The caller must wait for it."""

    def arrivals(self) -> Iterator[int]:
        """Yield the position of each message in an exchange's ``receives`` when it has arrived. Raises: as `wait`."""

    def abandon(self) -> None:
        """Stop access to the tensors from now on, as far as possible, because the communicating call has failed."""

    def wait(self) -> None:
        """Return when this client's part is done; on CUDA, order it before the next work of the current stream.

        Raises:
            CoordinationError: A member is gone, or the process group's timeout is over.
        """


class Collectives(Protocol):
    """Communication among some clients.

    Every method but `connect` starts the communication and returns its `Work`. Do not touch the tensors until the work
    is done. All tensors are contiguous and lie on one kind of device. Sender and receiver pass messages of the same
    size and dtype; the methods do not check that.

    Collective: Every method, over ``members``. For `exchange` only the first call is collective; later calls concern
    the clients that have messages for each other.
    """

    members: tuple[int, ...]
    """Clients, ascending. Sequences with one tensor per member are in this order."""

    def connect(self, peers: Set[int]) -> None:
        """Connect to some members before the first `exchange` with them; they connect to this client, too.

        Needed if one client may wait for the messages of one exchange while another client starts several. The first
        exchange with a peer blocks until that peer connects, too, but a peer that waits for messages does not connect.

        Raises:
            CoordinationError: A peer is gone, or did not come in time.
        """

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _identity,
    ) -> Work:
        """Exchange messages pairwise; messages of one pair and tag arrive in the order of their sends.

        Args:
            sends: Receivers, and for each the argument from which ``pack`` makes its message.
            receives: Senders, and the buffers for their messages.
            tag: Keeps messages of different exchanges apart; below `dtckpt.comm.point_to_point.END_OF_TAGS`.
            pack: Makes a message just before it is sent, so that packing overlaps with sending the messages before it.
                By default ``sends`` holds the messages themselves.
        """

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        """Copy every member's ``piece`` to ``received``, which has one buffer per member; sizes may differ."""

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Work:
        """Send every member its piece of ``pieces``; ``received`` has one buffer per member; sizes may differ."""

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        """Reduce all members' terms for this member into ``reduced``; ``terms`` has one term per member."""

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        """Reduce a tensor in place, with the same bits on all members."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Copy client ``root``'s tensor to the tensors of all members."""

    def scatter(self, received: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> Work:
        """Send every member its piece of client ``root``'s ``pieces``; on other clients ``pieces`` is not used."""


class PendingWork:
    """Several works as one `Work`.

    Args:
        works: Objects with a method ``wait``.
        operation: Name of the operation, for errors.
        members: The clients that take part.
        on_done: Called once, when all works are done.
        receives: For an exchange, one object with a method ``wait`` per received message, waited for before ``works``;
            None for a message without elements.
        on_abandon: Called if a work fails, or if the caller does not wait for all works.
    """

    def __init__(
        self,
        works: Sequence[Any],
        operation: str,
        members: Sequence[int],
        on_done: Callable[[], None] | None = None,
        *,
        receives: Sequence[Any] = (),
        on_abandon: Callable[[], None] = _no_op,
    ) -> None:
        self._works, self._operation, self._members, self._on_done = list(works), operation, members, on_done
        self._receives = deque(enumerate(receives))
        self._on_abandon = on_abandon

    def arrivals(self) -> Iterator[int]:
        while self._receives:
            # In the order of their posts, because both transports only offer `wait`. A message that overtakes others
            # stays in its buffer until its turn.
            position, work = self._receives.popleft()
            if work is not None:
                self._wait_for(work)
            yield position

    def wait(self) -> None:
        deque(self.arrivals(), maxlen=0)
        while self._works:
            self._wait_for(self._works.pop())
        self._on_abandon = _no_op  # the old callback holds the messages
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done()

    def abandon(self) -> None:
        self._on_abandon()

    def _wait_for(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._on_abandon()
            raise _peer_error(self._operation, self._members, error) from error
        except BaseException:
            self._on_abandon()
            raise

    def __del__(self) -> None:
        # The wait is over: the caller has failed, and its tensors may be freed next.
        if self._works or self._receives:
            self._on_abandon()


class PairwiseCollectives:
    """`Collectives` made of tagged pairwise messages; a single member only copies.

    Args:
        members: Clients, in any order.
        client: This client.
    """

    def __init__(self, members: Sequence[int], client: int) -> None:
        self.members = tuple(sorted(members))
        self._client = client
        self._own = self.members.index(client) if client in self.members else -1

    def connect(self, peers: Set[int]) -> None:
        open_transport(self.members, peers)

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _identity,
    ) -> Work:
        if len(self.members) == 1:
            return PendingWork([], "exchange", self.members)
        # A new transport each time: process groups may be destroyed and made anew while this object lives.
        transport = open_transport(self.members, {peer for peer, _ in (*sends, *receives)})
        senders = {peer for peer, buffer in receives if buffer.numel()}
        try:
            # Post all receives before the sends are packed: messages that arrive meanwhile find their buffers. Both
            # sides leave out messages without elements.
            receiving = [transport.recv(buffer, peer, tag) if buffer.numel() else None for peer, buffer in receives]
            messages = ((peer, pack(item)) for peer, item in sends)
            sending = [
                transport.send(message, peer, tag, is_answered=peer in senders)
                for peer, message in messages
                if message.numel()
            ]
        except RuntimeError as error:
            transport.abandon()
            raise _peer_error("exchange", self.members, error) from error
        except BaseException:
            transport.abandon()
            raise
        if (receiving or sending) and observers.is_observed():
            observers.report("exchange", sum(buffer.nbytes for _, buffer in receives), self.members)
        return PendingWork(sending, "exchange", self.members, receives=receiving, on_abandon=transport.abandon)

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        received[self._own].copy_(piece)
        return self.exchange([(peer, piece) for peer in self._others], self._of_others(received))

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Work:
        received[self._own].copy_(pieces[self._own])
        return self.exchange(self._of_others(pieces), self._of_others(received))

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        received = [torch.empty_like(reduced) for _ in self.members]
        received[self._own] = terms[self._own]
        works = [self.exchange(self._of_others(terms), self._of_others(received))]
        # Keep all terms until the last arrives, then reduce them in the order of the members: rounding must not depend
        # on the order of arrival.
        on_done = partial(reduce_terms, reduced, received, reduce_op, len(self.members))
        return PendingWork(works, "reduce_scatter", self.members, on_done)

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        # In two steps a member receives less than twice the tensor's size. In one step, with all terms sent to all, a
        # member would receive the size once per member. Both steps use tag 0: messages of one pair keep their order.
        flat = tensor.view(-1)
        # Chunks of one size, the last ones shorter or empty. Each member reduces its own chunk, then all gather them.
        size = math.ceil(flat.numel() / len(self.members))
        chunks = [flat[index * size : (index + 1) * size] for index in range(len(self.members))]
        reduced = torch.empty_like(chunks[self._own])
        self.reduce_scatter(reduced, chunks, reduce_op).wait()
        return self.all_gather(chunks, reduced)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self._client == root:
            return self.exchange([(peer, tensor) for peer in self._others], [])
        return self.exchange([], [(root, tensor)])

    def scatter(self, received: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> Work:
        if self._client != root:
            return self.exchange([], [(root, received)])
        received.copy_(pieces[self._own])
        return self.exchange(self._of_others(pieces), [])

    @property
    def _others(self) -> list[int]:
        return [member for member in self.members if member != self._client]

    def _of_others(self, tensors: Sequence[torch.Tensor]) -> list[Message]:
        return [pair for pair in zip(self.members, tensors, strict=True) if pair[0] != self._client]


class NativeCollectives(PairwiseCollectives):
    """`Collectives` made of ``torch.distributed``'s own calls: NCCL's on CUDA.

    Operations that the library lacks are made of pairwise messages, as in the base class. Operations that only move
    tensors pass them as bytes, because the library does not know all dtypes.

    Args:
        members: Clients, in any order.
        client: This client.
        device: Where this client's tensors lie.
    """

    def __init__(self, members: Sequence[int], client: int, device: torch.device) -> None:
        super().__init__(members, client)
        self._device = device

    def connect(self, peers: Set[int]) -> None:
        """Do nothing: the first exchange connects all members."""

    def exchange(
        self,
        sends: Sequence[tuple[int, T]],
        receives: Sequence[Message],
        tag: int = 0,
        pack: Callable[[T], torch.Tensor] = _identity,
    ) -> Work:
        del tag
        group = process_groups.connected_process_group(self.members, self._device)
        messages = [(peer, pack(item)) for peer, item in sends]
        operations = [dist.P2POp(dist.irecv, byte_view(item), peer, group) for peer, item in receives if item.numel()]
        operations += [dist.P2POp(dist.isend, byte_view(item), peer, group) for peer, item in messages if item.numel()]
        if not operations:
            return PendingWork([], "exchange", self.members, receives=[None] * len(receives))
        # One batch, because messages that NCCL ran one after the other would wait for each other: two clients that both
        # send first never come to receive.
        works = dist.batch_isend_irecv(operations)
        nbytes = sum(buffer.nbytes for _, buffer in receives)
        return self._pending("exchange", nbytes, works, num_receives=len(receives))

    def all_gather(self, received: Sequence[torch.Tensor], piece: torch.Tensor) -> Work:
        if not _are_equal_in_size(received):
            return super().all_gather(received, piece)
        work = dist.all_gather([byte_view(buffer) for buffer in received], byte_view(piece), self._group, async_op=True)
        return self._pending("all_gather", piece.nbytes * (len(self.members) - 1), [work])

    def reduce_scatter(self, reduced: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str) -> Work:
        if reduce_op not in _NATIVE_OPS or reduced.dtype not in _NATIVE_DTYPES or not _are_equal_in_size(terms):
            return super().reduce_scatter(reduced, terms, reduce_op)
        works, on_done = [], self._averaging(reduced, reduce_op)
        if _may_lose_nan(reduced, reduce_op):
            is_nan, flags = torch.empty_like(reduced, dtype=torch.uint8), [term.isnan().byte() for term in terms]
            works.append(dist.reduce_scatter(is_nan, flags, dist.ReduceOp.MAX, self._group, async_op=True))
            on_done = partial(_put_nan, reduced, is_nan)
        works.append(dist.reduce_scatter(reduced, list(terms), _NATIVE_OPS[reduce_op], self._group, async_op=True))
        return self._pending("reduce_scatter", reduced.nbytes * (len(self.members) - 1), works, on_done)

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str) -> Work:
        if reduce_op not in _NATIVE_OPS or tensor.dtype not in _NATIVE_DTYPES:
            return super().all_reduce(tensor, reduce_op)
        works, on_done = [], self._averaging(tensor, reduce_op)
        if _may_lose_nan(tensor, reduce_op):
            is_nan = tensor.isnan().byte()
            works.append(dist.all_reduce(is_nan, dist.ReduceOp.MAX, self._group, async_op=True))
            on_done = partial(_put_nan, tensor, is_nan)
        works.append(dist.all_reduce(tensor, _NATIVE_OPS[reduce_op], self._group, async_op=True))
        return self._pending("all_reduce", tensor.nbytes, works, on_done)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        work = dist.broadcast(byte_view(tensor), root, self._group, async_op=True)
        return self._pending("broadcast", 0 if self._client == root else tensor.nbytes, [work])

    @property
    def _group(self) -> dist.ProcessGroup:
        return process_groups.process_group_of(self.members, self._device.type)

    def _averaging(self, total: torch.Tensor, reduce_op: str) -> Callable[[], None] | None:
        return (lambda: average(total, len(self.members))) if reduce_op == "avg" else None

    def _pending(
        self,
        kind: str,
        nbytes: int,
        works: Sequence[Any],
        on_done: Callable[[], None] | None = None,
        num_receives: int = 0,
    ) -> Work:
        """Report a communication that has started, and return its work."""
        if observers.is_observed():
            observers.report(kind, nbytes, self.members)
        # NCCL runs all messages of an exchange as one operation, so each arrives when all have arrived.
        batch = PendingWork(works, kind, self.members)
        return PendingWork([batch], kind, self.members, on_done, receives=[batch] * num_receives)


def _may_lose_nan(tensor: torch.Tensor, reduce_op: str) -> bool:
    """Tell whether the library's minimum or maximum may ignore a NaN, which torch's own functions propagate."""
    return reduce_op in ("min", "max") and tensor.is_floating_point()


def _put_nan(reduced: torch.Tensor, is_nan: torch.Tensor) -> None:
    """Write NaN where any term was NaN."""
    reduced.masked_fill_(is_nan.bool(), math.nan)


def collectives_of(members: Sequence[int], client: int, device: torch.device) -> Collectives:
    """Return the collectives for tensors on this client's ``device``; their first use makes the process group.

    Gloo cannot carry tensors on a GPU; see `dtckpt.comm.process_groups.message_memory`.
    """
    return PairwiseCollectives(members, client) if device.type == "cpu" else NativeCollectives(members, client, device)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a 1-d view of dtype uint8.

    A tensor of one element is contiguous with any strides, but ``view`` refuses odd ones; hence ``as_strided``.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def all_gather_object(value: T, clients: Sequence[int]) -> list[T]:
    """Return every client's value, in the order of ``clients``; under a fake process group, copies of this client's.

    Collective: Over ``clients``, bounded by the process group's timeout.

    Raises:
        CoordinationError: There is no process group that spans the clients, a client is gone, or the process group's
            timeout is over.
    """
    if process_groups.is_fake():
        return [value] * len(clients)  # the other clients do not exist, and have sent neither values nor their lengths
    received: list[T | None] = [None for _ in clients]
    group = process_groups.process_group_of(clients)
    try:
        dist.all_gather_object(received, value, group=group)
    except RuntimeError as error:
        raise _peer_error("all_gather_object", clients, error) from error
    if observers.is_observed():
        nbytes = sum(len(pickle.dumps(item)) for item in received) - len(pickle.dumps(value))
        observers.report("all_gather_object", nbytes, clients)
    return [item for item in received if item is not None]


def reduce_terms(result: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str, divisor: int = 1) -> None:
    """Write the reduction of ``terms``, in their order, to ``result``; divide an average by ``divisor``."""
    # Either of the first two terms may be ``result`` itself, received in place: the first step reads both terms,
    # element by element, before it writes. A later term must not be ``result``, which is overwritten by then.
    reducer, (first, *others) = REDUCERS[reduce_op], terms
    if result.is_complex() and reduce_op in ("sum", "avg"):
        # PyTorch adds complex numbers times one, which is NaN if a part is infinite, and changes signs of zeros.
        result, first, *others = (torch.view_as_real(each.resolve_conj()) for each in (result, first, *others))
    if reduce_op in _SIGNLESS_OPS and (signed := SIGNED.get(result.dtype)):
        result, first, others = result.view(signed), first.view(signed), [term.view(signed) for term in others]
    if not others:
        result.copy_(first)
    for position, term in enumerate(others):
        reducer(first if position == 0 else result, term, out=result)
    if reduce_op == "avg":
        average(result, divisor)


def neutral_term(dtype: torch.dtype) -> float | complex:
    """Return the neutral number of a sum: -0.0, because -0.0 + 0.0 is 0.0."""
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0


def average(total: torch.Tensor, divisor: int) -> None:
    """Divide a sum in place; round integers towards zero."""
    if divisor > 1:
        total = torch.view_as_real(total) if total.is_complex() else total  # as above
        # Integers are divided without conversion to float, which cannot hold all digits of a large one.
        is_whole = not (total.is_floating_point() or total.dtype == torch.bool)
        total.copy_(torch.div(total, divisor, rounding_mode="trunc" if is_whole else None))


def _peer_error(operation: str, members: Sequence[int], error: Exception) -> CoordinationError:
    """Return the error of an operation in which a peer ended or did not come in time."""
    return CoordinationError(
        f"{operation} among clients {capped(members)} failed: {error}; look for clients that ended or hang"
    )


def _are_equal_in_size(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1
