"""The contract of `Collectives`, checked against plain arithmetic; runs in client processes, and in one alone.

Every member makes the tensors of all members from their ids, so each knows what should arrive.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from support.states import bits_of

import dtckpt
from dtckpt.comm.collectives import REDUCERS, Collectives, NativeCollectives, PairwiseCollectives, all_gather_object

from .point_to_point_cases import transports_in_use

SIZES = (0, 1, 3, 7, 1000)
"""Lengths of tensors: none, fewer than members, not divisible by them, many."""
BITWISE = ("band", "bor", "bxor")
INTEGERS = (torch.int64, torch.uint8)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Bench:
    """One member's collectives to check, and the tensors that all members have.

    Args:
        collectives: The implementation.
        client: This client.
        device: Where tensors lie.
    """

    def __init__(self, collectives: Collectives, client: int, device: torch.device) -> None:
        self.collectives, self.client, self.device = collectives, client, device
        self.members = collectives.members
        self.own = self.members.index(client)
        self.wrong: list[str] = []
        self.results: list[bytes] = []

    def of(self, member: int, size: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
        """Return a member's tensor: small integers, whose sum has the same bits in any order."""
        generator = torch.Generator().manual_seed(1000 * salt + member)
        lowest = 0 if dtype in (torch.uint8, torch.bool, *WIDE_UNSIGNED) else -3
        whole = torch.randint(lowest, 4, (size,), generator=generator)
        return whole.to(dtype).to(self.device)

    def buffer(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a buffer filled with 77."""
        return torch.full((size,), 77, dtype=torch.int64).to(dtype).to(self.device)

    def expect(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        self.results.append(bits_of(got))
        if bits_of(got) != bits_of(expected):
            self.wrong.append(f"{what}: got {got}, expected {expected}")

    def reduced(self, terms: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
        dtype = terms[0].dtype
        if dtype in WIDE_UNSIGNED:  # PyTorch hardly computes with them
            terms = [term.to(torch.int64) for term in terms]
        total = functools.reduce(REDUCERS[reduce_op], terms).to(dtype)
        return (total / len(terms)).to(total.dtype) if reduce_op == "avg" else total


def exchange(bench: Bench) -> None:
    others = [member for member in bench.members if member != bench.client]
    # Two messages of different length to all clients, which arrive in order, with an empty message between them.
    sends = [(peer, bench.of(bench.client, size, salt=peer)) for peer in others for size in (5, 0, 9)]
    receives = [(peer, bench.buffer(size)) for peer in others for size in (5, 0, 9)]
    bench.collectives.exchange(sends, receives).wait()
    for peer, buffer in receives:
        bench.expect(buffer, bench.of(peer, buffer.numel(), salt=bench.client), f"from {peer}")
    # One side only: the first member sends, the others receive.
    first, *rest = bench.members
    message = bench.buffer(4) if bench.client != first else bench.of(first, 4)
    is_first = bench.client == first
    bench.collectives.exchange(
        [(peer, message) for peer in rest] if is_first else [], [] if is_first else [(first, message)]
    ).wait()
    bench.expect(message, bench.of(first, 4), "one-sided")
    bench.collectives.exchange([], []).wait()
    # Several under way, each its own message although none was waited for.
    buffers = [[(peer, bench.buffer(3)) for peer in others] for _ in range(3)]
    works = [
        bench.collectives.exchange([(peer, bench.of(bench.client, 3, salt=turn)) for peer in others], buffers[turn])
        for turn in range(3)
    ]
    for work in reversed(works):
        work.wait()
        work.wait()
    for turn, received in enumerate(buffers):
        for peer, buffer in received:
            bench.expect(buffer, bench.of(peer, 3, salt=turn), f"turn {turn} from {peer}")


def tags(bench: Bench) -> None:
    others = [member for member in bench.members if member != bench.client]
    order = (7, 3, 5) if bench.own % 2 else (3, 5, 7)
    buffers = {tag: [(peer, bench.buffer(tag)) for peer in others] for tag in order}
    works = [
        bench.collectives.exchange(
            [(peer, bench.of(bench.client, tag, salt=tag)) for peer in others], buffers[tag], tag
        )
        for tag in order
    ]
    for work in works:
        work.wait()
    for tag in sorted(order):
        for peer, buffer in buffers[tag]:
            bench.expect(buffer, bench.of(peer, tag, salt=tag), f"tag {tag} from {peer}")


def all_gather(bench: Bench) -> None:
    sizes: list[Callable[[int], int]] = [lambda _: 6, lambda _: 0, lambda at: at + 1, lambda at: 3 * (at % 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for number, size in enumerate(sizes):
            received = [bench.buffer(size(at), dtype) for at in range(len(bench.members))]
            work = bench.collectives.all_gather(received, bench.of(bench.client, size(bench.own), dtype))
            work.wait()
            work.wait()
            for at, member in enumerate(bench.members):
                bench.expect(received[at], bench.of(member, size(at), dtype), f"{dtype} sizes {number} of {member}")


def all_to_all(bench: Bench) -> None:
    sizes: list[Callable[[int, int], int]] = [
        lambda *_: 4,
        lambda *_: 0,
        lambda a, b: a + 2 * b,
        lambda a, b: a % 2 * b,
    ]
    count = len(bench.members)
    for number, size in enumerate(sizes):
        pieces = [bench.of(bench.client, size(bench.own, at), salt=at) for at in range(count)]
        received = [bench.buffer(size(at, bench.own)) for at in range(count)]
        bench.collectives.all_to_all(received, pieces).wait()
        for at, member in enumerate(bench.members):
            expected = bench.of(member, size(at, bench.own), salt=bench.own)
            bench.expect(received[at], expected, f"sizes {number} from {member}")


def _reductions() -> list[tuple[str, torch.dtype]]:
    numbers = [(op, dtype) for op in ("sum", "avg") for dtype in (*FLOATS, *INTEGERS)]
    numbers += [(op, dtype) for op in ("min", "max", "product") for dtype in (torch.float32, torch.int64)]
    bits = [(op, dtype) for op in BITWISE for dtype in (*INTEGERS, torch.bool)]
    unsigned = [(op, dtype) for op in ("sum", "product", *BITWISE) for dtype in WIDE_UNSIGNED]
    bools = [(op, torch.bool) for op in ("sum", "min", "max", "product")]
    return [*numbers, *bits, *unsigned, *bools, ("sum", torch.complex64)]


def reduce_scatter(bench: Bench) -> None:
    for reduce_op, dtype in _reductions():
        for size in (0, 1, 5):
            terms = [bench.of(bench.client, size, dtype, salt=at) for at in range(len(bench.members))]
            before = [term.clone() for term in terms]
            reduced = bench.buffer(size, dtype)
            bench.collectives.reduce_scatter(reduced, terms, reduce_op).wait()
            expected = bench.reduced([bench.of(m, size, dtype, salt=bench.own) for m in bench.members], reduce_op)
            bench.expect(reduced, expected, f"{reduce_op} of {dtype}, {size}")
            if any(bits_of(one) != bits_of(other) for one, other in zip(before, terms, strict=True)):
                bench.wrong.append(f"{reduce_op} of {dtype}, {size}: the terms were written to")


def uneven_reduce_scatter(bench: Bench) -> None:
    terms = [bench.of(bench.client, at + 1, salt=at) for at in range(len(bench.members))]
    reduced = bench.buffer(bench.own + 1)
    bench.collectives.reduce_scatter(reduced, terms, "sum").wait()
    bench.expect(reduced, bench.reduced([bench.of(m, bench.own + 1, salt=bench.own) for m in bench.members], "sum"), "")


def all_reduce(bench: Bench) -> None:
    for reduce_op, dtype in _reductions():
        for size in SIZES:
            tensor = bench.of(bench.client, size, dtype)
            work = bench.collectives.all_reduce(tensor, reduce_op)
            work.wait()
            work.wait()
            expected = bench.reduced([bench.of(member, size, dtype) for member in bench.members], reduce_op)
            bench.expect(tensor, expected, f"{reduce_op} of {dtype}, {size}")
    for shape in ((), (2, 3), (3, 0)):
        tensor = bench.of(bench.client, torch.Size(shape).numel()).view(shape)
        bench.collectives.all_reduce(tensor, "sum").wait()
        expected = bench.reduced([bench.of(m, torch.Size(shape).numel()).view(shape) for m in bench.members], "sum")
        bench.expect(tensor, expected, f"sum of shape {shape}")


def all_reduce_rounds_alike(bench: Bench) -> None:
    """Sums whose bits depend on the order: near what they should be, and the test compares the members' bits."""
    for dtype in FLOATS:
        terms = [torch.rand(37, generator=torch.Generator().manual_seed(m)).to(dtype) for m in bench.members]
        tensor = terms[bench.own].to(bench.device, copy=True)
        bench.collectives.all_reduce(tensor, "sum").wait()
        bench.results.append(bits_of(tensor))
        torch.testing.assert_close(tensor.cpu().double(), torch.stack(terms).double().sum(0), rtol=0.02, atol=1e-6)


def large_integers_keep_their_digits(bench: Bench) -> None:
    """An average of integers is one of integers: nothing is rounded to the precision of a float on the way."""
    odd = 2**40 + 2 * bench.own
    tensor = torch.tensor([odd, -odd], device=bench.device)
    bench.collectives.all_reduce(tensor, "avg").wait()
    total = sum(2**40 + 2 * at for at in range(len(bench.members)))
    mean = total // len(bench.members)
    bench.expect(tensor, torch.tensor([mean, -mean], device=bench.device), "avg of int64")


def nan_is_minimum_and_maximum(bench: Bench) -> None:
    for reduce_op in ("min", "max"):
        for at in range(len(bench.members)):
            tensor = torch.tensor([float(bench.own), math.nan if at == bench.own else 1.0], device=bench.device)
            bench.collectives.all_reduce(tensor, reduce_op).wait()
            if tensor.isnan().tolist() != [False, True]:
                bench.wrong.append(f"{reduce_op} with NaN of {at}: {tensor}")


def broadcast(bench: Bench) -> None:
    for root in bench.members:
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                expected = bench.of(root, size, dtype)
                tensor = expected.clone() if bench.client == root else bench.buffer(size, dtype)
                bench.collectives.broadcast(tensor, root).wait()
                bench.expect(tensor, expected, f"{size} {dtype} from {root}")


def scatter(bench: Bench) -> None:
    sizes: list[Callable[[int], int]] = [lambda _: 3, lambda at: at, lambda _: 0]
    for root in bench.members:
        for size in sizes:
            pieces = [bench.of(root, size(at), salt=at) for at in range(len(bench.members))]
            received = bench.buffer(size(bench.own))
            work = bench.collectives.scatter(received, pieces if bench.client == root else [], root)
            work.wait()
            work.wait()
            bench.expect(received, pieces[bench.own], f"from {root}")


CHECKS: dict[str, Callable[[Bench], None]] = {
    check.__name__: check
    for check in (
        exchange,
        tags,
        all_gather,
        all_to_all,
        reduce_scatter,
        uneven_reduce_scatter,
        all_reduce,
        all_reduce_rounds_alike,
        large_integers_keep_their_digits,
        nan_is_minimum_and_maximum,
        broadcast,
        scatter,
    )
}
EQUAL_BITS = ("all_reduce", "all_reduce_rounds_alike", "all_gather", "broadcast")
"""Checks after which all members hold the same bits."""
TAGGED = frozenset({"tags"})
"""Checks that native calls cannot pass: they have no tags, only their order counts."""


def run(native: str | None, members: Sequence[int] | None = None) -> dict[str, tuple[list[str], list[bytes]]]:
    """Run all checks with one implementation over some clients; return the faults, and the bits of all results.

    Args:
        native: Device type of `NativeCollectives`; None for `PairwiseCollectives`, "gloo" for `PairwiseCollectives`
            without same-host transport.
        members: The clients that take part; default all.
    """
    client = dtckpt.client_id()
    participants = tuple(range(dtckpt.num_clients())) if members is None else tuple(members)
    if client not in participants:
        return {}
    is_native = native in ("cpu", "cuda")
    if native == "gloo":
        os.environ["DTCKPT_HOST_TRANSPORT"] = "0"
    device = torch.device("cuda", client) if native == "cuda" else torch.device("cpu")
    collectives: Collectives = (
        NativeCollectives(participants, client, device) if is_native else PairwiseCollectives(participants, client)
    )
    results = {}
    for name in sorted(CHECKS.keys() - TAGGED) if is_native else CHECKS:
        bench = Bench(collectives, client, device)
        CHECKS[name](bench)
        results[name] = bench.wrong[:5], bench.results
    if len(participants) > 1 and not is_native:
        assert transports_in_use() == {native or "host"}
    return results


def gather_object_from(client: int) -> None:
    """Have only one client gather objects; the others' process groups end."""
    if dist.get_rank() == client:
        all_gather_object(client, range(dist.get_world_size()))


def fail_to_connect() -> None:
    """Exchange messages natively while the library cannot connect any clients."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no route")

    original, dist.all_reduce = dist.all_reduce, fail
    try:
        NativeCollectives(range(dtckpt.num_clients()), dtckpt.client_id(), torch.device("cpu")).exchange([], [])
    finally:
        dist.all_reduce = original
