"""Elements by their index, and embeddings, by rule and backward."""

import re

import pytest
import torch
from torch.nn import functional as nn

from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.operators import dispatch

from .operator_checks import GRID, LINE, S0, S1, S2, P, R, check, distributed

INDEX = torch.tensor([3, 0, 5, 3, 1])
GRID_INDEX = torch.tensor([[3, 0, 5], [3, 1, 4]])


def numbers(*shape):
    return torch.randn(shape)


ROWS = [
    ("index", lambda x, i: x[:, i], (numbers(5, 6), INDEX), (S0, R), S0),
    ("index, rows", lambda x, i: x[i], (numbers(6, 5), GRID_INDEX), (S1, R), S2),
    ("index by split ones", lambda x, i: x[i], (numbers(6, 5), INDEX), (R, S0), S0),
    ("index by two", lambda x, i: x[:, i, i], (numbers(5, 6, 7), INDEX), (S0, R), S0),
    ("index by two apart", lambda x, i: x[i, :, i[:, None]], (numbers(6, 4, 7), INDEX), (S1, R), S2),
    ("index of what waits", lambda x, i: x[i], (numbers(60, 5), INDEX), (P, R), P),
    ("index on a grid", lambda x, i: x[:, i], (numbers(5, 6), INDEX), ((S0, R), (R, S0)), (S0, S1)),
    ("index_put", lambda x, i, v: x.index_put((i,), v), (numbers(6, 5), INDEX, numbers(5, 5)), (S1, R, S1), S1),
    ("index_put one", lambda x, i, v: x.index_put((i,), v), (numbers(6, 5), INDEX, numbers()), (S1, R, R), S1),
    (
        "index_put more",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (numbers(6, 5), INDEX, numbers(5, 5)),
        (P, R, P),
        P,
    ),
    ("index_select", lambda x, i: x.index_select(1, i), (numbers(5, 6), INDEX), (S0, R), S0),
    ("index_select of parts", lambda x, i: x.index_select(0, i), (numbers(6, 5), INDEX), (S0, R), P),
    ("gather", lambda x, i: x.gather(1, i), (numbers(2, 6), GRID_INDEX), (S0, S0), S0),
    ("gather by split ones", lambda x, i: x.gather(1, i), (numbers(2, 6), GRID_INDEX), (R, S1), S1),
    ("gather of parts", lambda x, i: x.gather(1, i), (numbers(2, 6), GRID_INDEX), (S1, R), P),
    ("gather on a grid", lambda x, i: x.gather(1, i), (numbers(2, 6), GRID_INDEX), ((S0, S1), (S0, R)), (S0, P)),
    ("gather fewer", lambda x, i: x.gather(1, i), (numbers(3, 6), GRID_INDEX), (R, S1), S1),
    (
        "scatter",
        lambda x, i, v: x.scatter(1, i, v),
        (numbers(2, 6), torch.tensor([[3, 0, 5], [2, 1, 4]]), numbers(2, 3)),
        (S0, S0, S0),
        S0,
    ),
    ("scatter a number", lambda x, i: x.scatter(1, i, 2.0), (numbers(2, 6), GRID_INDEX), (S0, S0), S0),
    (
        "scatter_add",
        lambda x, i, v: x.scatter_add(1, i, v),
        (numbers(2, 6), GRID_INDEX, numbers(2, 3)),
        (S0, S0, S0),
        S0,
    ),
    (
        "scatter_reduce",
        lambda x, i, v: x.scatter_reduce(1, i, v, "amax"),
        (numbers(2, 6), GRID_INDEX, numbers(2, 3)),
        (S0, S0, S0),
        S0,
    ),
    ("index_add", lambda x, i, v: x.index_add(0, i, v), (numbers(6, 5), INDEX, numbers(5, 5)), (S1, R, S1), S1),
    ("index_add terms", lambda x, i, v: x.index_add(0, i, v), (numbers(6, 5), INDEX, numbers(5, 5)), (P, R, P), P),
    ("index_copy", lambda x, i, v: x.index_copy(1, i, v), (numbers(5, 6), INDEX[:3], numbers(5, 3)), (S0, R, S0), S0),
    ("index_fill", lambda x, i: x.index_fill(1, i, 2.0), (numbers(5, 6), INDEX), (S0, R), S0),
    (
        "masked_fill",
        lambda x, m, v: x.masked_fill(m > 3, v),
        (numbers(5, 6), INDEX[:, None], numbers()),
        (S1, R, R),
        S1,
    ),
    ("bucketize", torch.bucketize, (numbers(5, 6), numbers(7).sort()[0]), (S1, R), S1),
    ("searchsorted", torch.searchsorted, (numbers(5, 6).sort(-1)[0], numbers(5, 3)), (S0, S0), S0),
    ("tril, rows and columns", lambda x: x.tril(1), (numbers(7, 9),), ((S0, S1),), (S0, S1)),
    ("triu, rows", lambda x: x.triu(-1), (numbers(2, 7, 9),), (S1,), S1),
]


@pytest.mark.parametrize(
    ("function", "tensors", "placed", "expected"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_indexing(function, tensors, placed, expected):
    check(function, tensors, placed, expected, most=0)


EMBEDDED = [
    ("rows", S0, R, P),
    ("columns", S1, R, S2),
    ("batch", R, S0, S0),
    ("sequence", R, S1, S1),
    ("rows and batch", (R, S0), (S0, R), (S0, P)),
    ("columns and batch", (R, S1), (S0, R), (S0, S2)),
    ("rows twice", (S0, S0), (R, R), (P, P)),
    ("rows and columns", (S0, S1), (R, R), (P, S2)),
]


@pytest.mark.parametrize("num_rows", [8, 7, 6])
@pytest.mark.parametrize(
    ("table", "indices", "expected"), [row[1:] for row in EMBEDDED], ids=[row[0] for row in EMBEDDED]
)
def test_embeddings_leave_the_table_where_it_is(table, indices, expected, num_rows):
    tensors = (numbers(num_rows, 4), GRID_INDEX)
    check(lambda weight, index: nn.embedding(index, weight), tensors, (table, indices), expected, most=0)
    check(lambda weight, index: nn.embedding(index, weight, padding_idx=3), tensors, (table, indices), expected)
    check(lambda weight, index: nn.embedding(index, weight, scale_grad_by_freq=True), tensors, (table, indices))


def test_take():
    check(torch.take, (numbers(3, 6), GRID_INDEX), (R, S1), S1, most=0, has_gradients=False)


@pytest.mark.parametrize("index", [-1, 8])
def test_indices_outside_a_table_are_refused(index):
    weight, indices = distributed(numbers(8, 4), S0), distributed(torch.tensor([0, index]), R)
    with pytest.raises(IndexError, match="out of range"):
        nn.embedding(indices, weight)


def test_masks_pick_what_they_cover():
    whole = numbers(5, 6)
    picked = distributed(whole, S0)[distributed(whole > 0, S0)]
    assert torch.equal(picked.full_tensor(), whole[whole > 0])


def test_written_by_index_in_place():
    whole, values = numbers(6, 6), numbers(5, 6)
    ours = distributed(whole, S0)
    for one, index, value in ((whole, INDEX, values), (ours, distributed(INDEX, R), distributed(values, S0))):
        one.index_add_(0, index, value)
        one[:, index[:3]] = 7.0
        one.index_fill_(0, index[:1], -1.0)
        one.tril_(2)
    assert torch.equal(ours.full_tensor(), whole)
    assert ours.placements == (S0,)


def test_new_tensors_of_other_shapes_move_nothing():
    dispatch.clear()
    made = distributed(numbers(6, 5), P).new_zeros(3, 2)
    assert made.placements == (R,)
    assert torch.equal(made.full_tensor(), torch.zeros(3, 2))
    assert not [func for func, route in dispatch.COUNTS if route == "replication"]


# --- elements of a split dim, bit by bit --------------------------------------------------------------------------

_EVERY_DTYPE = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
_STORED = [one for one in _EVERY_DTYPE if not re.search(r"q|bit|int[1-7]$", str(one))]
"""All dtypes but quantized ones, those whose elements share a byte, and bits, which have hardly any kernels."""
_ROWS = torch.tensor([6, 0, 3, 3])

LOOKUPS = {
    "index_select": lambda x: x.index_select(0, _ROWS),
    "index_select, one dim": lambda x: x[:, 0].index_select(0, _ROWS),
    "gather": lambda x: x.gather(0, _ROWS[:, None].expand(4, 3)),
    "take_along_dim": lambda x: torch.take_along_dim(x, _ROWS[:, None], 0),
    "take": lambda x: x.take(_ROWS),
    "embedding": lambda x: torch.embedding(x, _ROWS),
    "index": lambda x: x[_ROWS],
    "select": lambda x: x[3],
    "select, last": lambda x: x[-1],
    "slice": lambda x: x[2:5],
    "slice, step": lambda x: x[1::3],
    "narrow": lambda x: x.narrow(0, 3, 2),
    "split": lambda x: x.split(4)[1],
    "unbind": lambda x: x.unbind()[6],
    "index_copy": lambda x: x.index_copy(0, _ROWS[:2], x[:2]),
    "scatter": lambda x: x.scatter(0, _ROWS[:2, None].expand(2, 3), x[:2]),
    "cat": lambda x: torch.cat([x[3:4], x[5:]]),
}


def _with_odd_bits(dtype):
    """Return a (7, 3) tensor with zeros of both signs, infinities, NaNs with payloads, and the largest integers."""
    generator = torch.Generator().manual_seed(2)
    if dtype == torch.bool:
        return torch.rand(7, 3, generator=generator) < 0.5
    values = torch.randint(0, 256, (7, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
        parts = torch.view_as_real(values) if dtype.is_complex else values
        parts[3] = -0.0
        parts[0], parts[6] = 0.0, -torch.inf
    return values


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("dtype", _STORED, ids=str)
def test_moved_elements_keep_their_bits(dtype, placement):
    plain = _with_odd_bits(dtype)
    split = distribute_tensor(plain, LINE, [placement])
    for name, lookup in LOOKUPS.items():
        try:
            expected = lookup(plain)
        except RuntimeError:  # PyTorch has no such kernel
            continue
        made = lookup(split).full_tensor()
        assert made.dtype == dtype, name
        assert torch.equal(_bits(made), _bits(expected)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_lookups_keep_their_zeros(dtype):
    plain = torch.full((7, 3), -0.0, dtype=dtype)
    for name in ("index_select", "gather", "embedding", "select", "slice"):
        whole = plain.clone().requires_grad_()
        split = distribute_tensor(plain, LINE, [S0]).requires_grad_()
        for tensor in (whole, split):
            result = LOOKUPS[name](tensor)
            result.backward(torch.ones_like(result))
        torch.testing.assert_close(split.grad.full_tensor(), whole.grad)


def test_a_replicated_tensor_that_becomes_pending_keeps_its_zeros():
    zeros = distribute_tensor(torch.tensor([-0.0, 0.0]), LINE, [R])
    assert torch.signbit(zeros.redistribute(placements=[P]).full_tensor()).tolist() == [True, False]
    unit = distribute_tensor(torch.tensor([complex(-0.0, -0.0)]), LINE, [R]).redistribute(placements=[P])
    assert torch.signbit(torch.view_as_real(unit.full_tensor())).all()


def test_lookups_within_lookups_keep_their_zeros():
    """Along the first axis the rows are split, along the second the columns: each lookup adds zeros."""
    plain = torch.full((4, 4), -0.0)
    split = distribute_tensor(plain, GRID, [S0, S1])
    picked = split.index_select(0, torch.tensor([3, 1])).index_select(1, torch.tensor([0, 2]))
    assert torch.signbit(picked.full_tensor()).all()
