"""Random programs (Hypothesis) that view, write to and reshape tensors that share memory.

Each step runs on a DTensor and on the plain tensor with the same values; after each step both must be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import Phase, given, note, seed, settings
from hypothesis import strategies as st
from support.states import cluster_mesh

import dtckpt
from dtckpt import Layout, Mesh, Partial, Placement, Replicate, Shard
from dtckpt.dtensor import DTensor, distribute_tensor, pack
from dtckpt.layout.placement import REDUCE_OPS

REDUCTIONS = [op for op in REDUCE_OPS if op in {"sum", "avg", "max", "min"}]


@dataclass(eq=False, repr=False)
class Pair:
    """A DTensor and the plain tensor that it stands for."""

    ours: Any
    plain: torch.Tensor


# --- tensors ------------------------------------------------------------------------------------------------------


def terms_of(whole: torch.Tensor, reduction: str, place: int, count: int) -> torch.Tensor:
    """Return one of the terms that reduce to ``whole``, exactly; all differ."""
    if reduction in {"sum", "avg"}:
        times = count if reduction == "avg" else 1
        return whole * times - count * (count - 1) // 2 if place == 0 else torch.full_like(whole, place)
    return whole - place if reduction == "max" else whole + place


def distributed(whole: torch.Tensor, layout: Layout, *, is_shared: bool = False) -> DTensor:
    """Return a DTensor of these values; with ``is_shared`` copies of one piece are one tensor."""
    mesh, parts, known = layout.mesh, [], {}
    for device in mesh.local_device_ids():
        place = dict(zip(mesh.dim_names, mesh.coordinate(device), strict=True))
        term = whole
        for axis, reduction in layout.partial.items():
            term = terms_of(term, reduction, place[axis], mesh.dim_size(axis))
        region = layout.region(device, tuple(whole.shape))
        part = term[region.slices()].clone()
        parts.append(known.setdefault(region, part) if is_shared and not layout.partial else part)
    return pack(parts, layout, tuple(whole.shape))


@st.composite
def placements(draw, mesh: Mesh, ndim: int, *, can_wait: bool = True) -> list[Placement]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    found = [draw(st.sampled_from(kinds)) for _ in range(mesh.ndim)]
    if can_wait and draw(st.integers(0, 3)) == 0:  # one reduction at most, as different ones do not commute
        found[draw(st.integers(0, mesh.ndim - 1))] = Partial(draw(st.sampled_from(REDUCTIONS)))
    return found


def check(pair: Pair) -> None:
    """Compare shape, dtype, strides, and the values of every device."""
    ours, plain = pair.ours, pair.plain.detach()
    assert isinstance(ours, DTensor)
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
    if plain.numel():
        assert (steps_of(ours), ours.storage_offset()) == (steps_of(plain), plain.storage_offset())
    assert ours.is_contiguous() == plain.is_contiguous()
    layout, mesh = ours.layout, ours.device_mesh
    if layout.partial:
        torch.testing.assert_close(ours.detach().full_tensor(), plain, rtol=1e-9, atol=1e-9)
        return
    for device, component in zip(mesh.local_device_ids(), ours.components, strict=True):
        part = plain[layout.region(device, tuple(plain.shape)).slices()]
        torch.testing.assert_close(component.detach(), part, rtol=1e-9, atol=1e-9)


def steps_of(tensor: torch.Tensor) -> list[int | None]:
    """Return a tensor's strides; strides of dims of size 1 do not count."""
    return [step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


# --- steps --------------------------------------------------------------------------------------------------------

Step = Callable[[Any], Any]
"""Does to a tensor what it does, whichever kind it is."""


@dataclass(frozen=True)
class Method:
    """Calls a method; unlike a function it says which."""

    name: str
    args: tuple[Any, ...]

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.name)(*self.args)


def _method(name: str, *args: Any) -> Step:
    return Method(name, args)


def _sizes(draw: Any, numel: int) -> list[int]:
    """Return sizes that hold so many elements."""
    sizes = []
    while numel > 1 and len(sizes) < 3:
        size = draw(st.sampled_from([one for one in range(1, numel + 1) if numel % one == 0]))
        sizes.append(size)
        numel //= size
    sizes.append(numel)
    return sizes


@st.composite
def views(draw, shape: tuple[int, ...]) -> Step:
    """A view, or several, of a tensor of this shape."""
    ndim, numel = len(shape), torch.Size(shape).numel()
    kinds: dict[str, Callable[[], Step]] = {
        "unsqueeze": lambda: _method("unsqueeze", draw(st.integers(-ndim - 1, ndim))),
        "squeeze": lambda: _method("squeeze"),
        "detach": lambda: _method("detach"),
        "data": lambda: lambda x: x.data,
        "alias": lambda: lambda x: x[...],
        "view_as": lambda: lambda x: x.view_as(x),
        "expand": lambda: _method("expand", draw(st.integers(1, 2)), *shape),
    }
    if numel:
        sizes = _sizes(draw, numel)
        kinds |= {"view": lambda: _method("view", sizes), "reshape": lambda: _method("reshape", sizes)}
    if ndim:
        dim = draw(st.integers(-ndim, ndim - 1))
        size, before = shape[dim], (slice(None),) * (dim % ndim)
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        order = draw(st.permutations(range(ndim)))
        kinds |= {
            "permute": lambda: _method("permute", order),
            "transpose": lambda: _method("transpose", dim, draw(st.integers(-ndim, ndim - 1))),
            "narrow": lambda: _method("narrow", dim, start, stop - start),
            "slice": lambda: _method("__getitem__", (*before, slice(start, stop, draw(st.integers(1, 3))))),
            "split": lambda: _method("split", draw(st.integers(1, max(size, 1))), dim),
            "split sizes": lambda: _method("split", [start, stop - start, size - stop], dim),
            "chunk": lambda: _method("chunk", draw(st.integers(1, 3)), dim),
            "tensor_split": lambda: _method("tensor_split", [start, stop], dim),
            "squeeze dim": lambda: _method("squeeze", dim),
            "swapaxes": lambda: _method("swapaxes", 0, -1),
            "movedim": lambda: _method("movedim", dim, 0),
            "flatten": lambda: _method("flatten", 0, -1),
        }
        if size:
            kinds["select"] = lambda: _method("select", dim, draw(st.integers(-size, size - 1)))
            kinds["unbind"] = lambda: _method("unbind", dim)
            kinds["unfold"] = lambda: _method("unfold", dim, draw(st.integers(1, size)), draw(st.integers(1, 2)))
    if ndim > 1:
        kinds["diagonal"] = lambda: _method("diagonal", draw(st.integers(-1, 1)), 0, -1)
        kinds["mT"] = lambda: lambda x: x.mT
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


@dataclass
class Values:
    """Makes operands of writes: numbers that nothing else shares, distributed anyhow."""

    draw: Any
    mesh: Mesh
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Pair:
        """Return a tensor of numbers from -4 to 4."""
        numbers = torch.Generator().manual_seed(next(self.seeds))
        plain = torch.randint(-4, 5, shape, generator=numbers).to(dtype)
        if self.draw(st.integers(0, 4)) == 0:
            return Pair(plain.clone(), plain)
        return self.distributed(plain)

    def distributed(self, plain: torch.Tensor, *, is_shared: bool = False) -> Pair:
        can_wait = plain.dtype == torch.float64
        layout = Layout.from_placements(
            self.mesh, self.draw(placements(self.mesh, plain.ndim, can_wait=can_wait)), plain.ndim
        )
        return Pair(distributed(plain, layout, is_shared=is_shared), plain)

    def broadcast(self, shape: tuple[int, ...]) -> Pair:
        """Return a tensor that is broadcast to this shape."""
        lead = self.draw(st.integers(0, len(shape)))
        return self.tensor(tuple(size if self.draw(st.booleans()) else 1 for size in shape[lead:]))

    def index(self, count: int, size: int) -> Pair:
        """Return different indices of a dim."""
        numbers = torch.Generator().manual_seed(next(self.seeds))
        return self.distributed(torch.randperm(size, generator=numbers)[:count])


Write = tuple[str, Callable[..., Any], list[Pair]]
"""Its name, what writes to its first argument, and the other arguments."""


def writes(draw: Any, values: Values, shape: tuple[int, ...]) -> Write:
    """Return a write to a tensor of this shape."""
    ndim = len(shape)
    kinds = dict(WRITES)
    if ndim:
        dim = draw(st.integers(-ndim, ndim - 1))
        size, before = shape[dim], (slice(None),) * (dim % ndim)
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        part = (*before, slice(start, stop))
        sliced = (*shape[: dim % ndim], stop - start, *shape[dim % ndim + 1 :])
        kinds |= {
            "slice": (lambda x, y: x.__setitem__(part, y), lambda _: [values.broadcast(sliced)]),
            "cumsum_": (lambda x: x.cumsum_(dim), _nothing),
            "index_fill_": (lambda x, i: x.index_fill_(dim, i, 5), lambda _: [values.index(stop - start, size)]),
        }
        indexed = {
            "index_add_": lambda x, i, y: x.index_add_(dim, i, y),
            "index_copy_": lambda x, i, y: x.index_copy_(dim, i, y),
            "indices": lambda x, i, y: x.__setitem__((*before, i), y),
        }
        if not before:
            indexed["index_put_"] = lambda x, i, y: x.index_put_((i,), y, accumulate=True)
        for name, function in indexed.items():
            kinds[name] = function, lambda _: [values.index(stop - start, size), values.tensor(sliced)]
        if size:
            at = (*before, draw(st.integers(-size, size - 1)))
            rest = (*shape[: dim % ndim], *shape[dim % ndim + 1 :])
            kinds["select"] = lambda x, y: x.__setitem__(at, y), lambda _: [values.broadcast(rest)]
            kinds["select number"] = lambda x: x.__setitem__(at, 8.0), _nothing
        if 0 not in shape:
            place = tuple(draw(st.integers(0, one - 1)) for one in shape)
            kinds["element"] = lambda x: x.__setitem__(place, 9), _nothing
    if ndim > 1:
        kinds["tril_"] = lambda x: x.tril_(), _nothing
        kinds["diagonal"] = lambda x: x.diagonal(0, 0, 1).zero_(), _nothing
    if ndim == 2:
        kinds["fill_diagonal_"] = lambda x: x.fill_diagonal_(4), _nothing
    name = draw(st.sampled_from(sorted(kinds)))
    function, others = kinds[name]
    return name, function, others((values, shape))


Given = tuple[Values, tuple[int, ...]]
"""What makes operands, and the shape of the tensor that is written to."""


def _nothing(_: Given) -> list[Pair]:
    return []


def _broadcast(given: Given) -> list[Pair]:
    values, shape = given
    return [values.broadcast(shape)]


def _alike(*dtypes: torch.dtype) -> Callable[[Given], list[Pair]]:
    return lambda given: [given[0].tensor(given[1], dtype) for dtype in dtypes]


_SAME = _alike(torch.float64)

WRITES: dict[str, tuple[Callable[..., Any], Callable[[Given], list[Pair]]]] = {
    "add_": (lambda x, y: x.add_(y, alpha=2), _broadcast),
    "add_ to itself": (lambda x: x.add_(x), _nothing),
    "addcmul_": (lambda x, y, z: x.addcmul_(y, z), _alike(torch.float64, torch.float64)),
    "all": (lambda x, y: x.__setitem__(..., y), _broadcast),
    "clamp_": (lambda x: x.clamp_(-2, 9), _nothing),
    "copy_": (lambda x, y: x.copy_(y), _broadcast),
    "copy_ of floats": (lambda x, y: x.copy_(y), _alike(torch.float32)),
    "copy_ of integers": (lambda x, y: x.copy_(y), _alike(torch.int64)),
    "data": (lambda x: x.data.add_(1), _nothing),
    "detach": (lambda x: x.detach().mul_(2), _nothing),
    "fill_": (lambda x: x.fill_(3), _nothing),
    "fill_ tensor": (lambda x, y: x.fill_(y), lambda given: [given[0].tensor(())]),
    "foreach": (lambda x, y: torch._foreach_add_([x], [y]), _SAME),
    "lerp_": (lambda x, y: x.lerp_(y, 0.5), _SAME),
    "mask": (lambda x, y: x.__setitem__(y > 0, 7), _SAME),
    "masked_fill_": (lambda x, y: x.masked_fill_(y > 0, 7), _broadcast),
    "mul_": (lambda x, y: x.mul_(y), _broadcast),
    "neg_": (lambda x: x.neg_(), _nothing),
    "out": (lambda x, y, z: torch.add(y, z, out=x), _alike(torch.float64, torch.float64)),
    "out of a sum": (lambda x, y: torch.sum(y, 0, out=x), lambda given: [given[0].tensor((2, *given[1]))]),
    "out of where": (lambda x, y: torch.where(y > 0, x, y, out=x), _SAME),
    "relu_": (lambda x: x.relu_(), _nothing),
    "sub_ number": (lambda x: x.sub_(1.5), _nothing),
    "view": (lambda x: x.view(-1).add_(1), _nothing),
    "zero_": (lambda x: x.zero_(), _nothing),
}
"""Writes to tensors of any shape, and what makes their operands."""


@st.composite
def reshapings(draw, shape: tuple[int, ...]) -> Step:
    """A change in place of how a tensor reads its memory."""
    ndim = len(shape)
    kinds: dict[str, Step] = {
        "unsqueeze_": _method("unsqueeze_", draw(st.integers(-ndim - 1, ndim))),
        "squeeze_": _method("squeeze_"),
        "detach_": _method("detach_"),
    }
    if ndim:
        dims = draw(st.integers(-ndim, ndim - 1)), draw(st.integers(-ndim, ndim - 1))
        kinds |= {"transpose_": _method("transpose_", *dims), "squeeze_ dim": _method("squeeze_", dims[0])}
    if ndim == 2:
        kinds["t_"] = _method("t_")
    return kinds[draw(st.sampled_from(sorted(kinds)))]


# --- programs -----------------------------------------------------------------------------------------------------


def tensors(made):
    return [made] if isinstance(made, torch.Tensor) else list(made)


def add_views(draw, pairs, values):
    number = draw(st.integers(0, len(pairs) - 1))
    view = draw(views(tuple(pairs[number].plain.shape)))
    note(f"view {number}: {view}")
    try:
        wanted = tensors(view(pairs[number].plain))
    except RuntimeError:  # strides that do not allow it
        return
    made = tensors(view(pairs[number].ours))
    pairs.extend(Pair(*both) for both in zip(made, wanted, strict=True))


def overlaps(tensor):
    """Whether elements of a tensor share memory."""
    places = torch.zeros(())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return len(places.unique()) < tensor.numel()


def write(draw, pairs, values):
    number = draw(st.integers(0, len(pairs) - 1))
    if overlaps(pairs[number].plain):  # which PyTorch does not let programs write to, or warns of
        return
    name, function, others = writes(draw, values, tuple(pairs[number].plain.shape))
    note(f"write to {number}: {name}, {[getattr(other.ours, 'placements', 'plain') for other in others]}")
    try:
        function(pairs[number].plain, *(other.plain for other in others))
    except RuntimeError:  # as where strides do not allow a view
        return
    function(pairs[number].ours, *(other.ours for other in others))


def reshape(draw, pairs, values):
    number = draw(st.integers(0, len(pairs) - 1))
    step = draw(reshapings(tuple(pairs[number].plain.shape)))
    note(f"reshape {number}: {step}")
    try:
        step(pairs[number].plain)
    except RuntimeError:
        return
    step(pairs[number].ours)


def take_over(draw, pairs, values):
    """Give a tensor the memory of another one, as ``Module.to`` does."""
    one, other = (draw(st.integers(0, len(pairs) - 1)) for _ in range(2))
    if not pairs[one].plain.is_inference():
        note(f"data of {other} to {one}")
        pairs[one].plain.data, pairs[one].ours.data = pairs[other].plain, pairs[other].ours


def move(draw, pairs, values):
    """Exchange a tensor for a copy that lies otherwise, or for another tensor on its memory if it lies so already."""
    number = draw(st.integers(0, len(pairs) - 1))
    wanted = draw(placements(values.mesh, pairs[number].plain.ndim))
    note(f"{number} to {wanted}")
    ours, plain = pairs[number].ours, pairs[number].plain
    moved = ours.redistribute(placements=wanted)
    pairs[number] = Pair(
        moved,
        plain.view_as(plain) if moved.layout == ours.layout else plain.clone(memory_format=torch.contiguous_format),
    )


STEPS = [add_views] * 3 + [write] * 4 + [reshape, take_over, move]


def run_program(mesh: Mesh, draw: Any) -> None:
    """Draw a program and run it, on DTensors and on plain tensors.

    Raises:
        AssertionError: Their values differ.
    """
    values = Values(draw, mesh)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    with torch.inference_mode(draw(st.integers(0, 3)) == 0):
        first = values.tensor(shape).plain
        pairs = [values.distributed(first, is_shared=draw(st.booleans()))]
        for _ in range(draw(st.integers(1, 10))):
            draw(st.sampled_from(STEPS))(draw, pairs, values)
            if draw(st.booleans()):  # what was not looked at need not be up to date
                for pair in pairs:
                    check(pair)
        for pair in pairs:
            check(pair)


def run_programs_on_clients(axes: dict[str, int], count: int, number: int) -> int:
    """Run programs, the same on every client of a mesh over all clients; return how many."""
    mesh, done = cluster_mesh(axes, dtckpt.num_clients(), dtckpt.client_id()), []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data())
    def run(data: Any) -> None:
        run_program(mesh, data.draw)
        done.append(data)

    run()
    return len(done)


def write_to_conjugate() -> torch.Tensor:
    """Write to a view that holds copies, where the last client holds nothing; return the tensor."""
    mesh = cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())
    tensor = distribute_tensor(torch.complex(torch.arange(4.0), torch.ones(4)), mesh, [Shard(0)])
    tensor.conj().mul_(2)
    return tensor.full_tensor()
