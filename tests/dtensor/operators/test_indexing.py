"""Elements by their index, and embeddings, by rule and backward."""

import pytest
import torch
from support.operator_checks import S0, S1, S2, P, R, check, distributed
from torch.nn import functional as nn

from dtckpt.dtensor.operators import dispatch

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
