"""Views of parts and with other dims, and operators that arrange elements anew, by rule and backward."""

import pytest
import torch
from torch.nn import functional as nn

from dtckpt.dtensor import DTensor

from .operator_checks import S0, S1, S2, S3, P, R, check, distributed

VIEWS = [
    ("squeeze", lambda x: x.squeeze(), (4, 1, 3), S0, S0),
    ("squeeze, pieces of one", lambda x: x.squeeze(), (4, 1, 1), S0, S0),
    ("squeeze, some empty", lambda x: x.squeeze(), (1, 2, 3), S1, S0),
    ("squeeze dim", lambda x: x.squeeze(-2), (5, 1, 3), S2, S1),
    ("squeeze no dim", lambda x: x.squeeze(0), (4, 1, 3), S0, S0),
    ("squeeze dims", lambda x: x.squeeze((1, 2)), (4, 1, 3), P, P),
    ("squeeze a split one", lambda x: x.squeeze(0), (1, 8, 3), S0, None),
    ("unsqueeze", lambda x: x.unsqueeze(-2), (5, 6), S1, S2),
    ("expand", lambda x: x.expand(2, 5, 3, -1), (5, 1, 6), S2, S3),
    ("expand, uneven", lambda x: x.expand(2, -1, 3), (5, 1), S0, S1),
    ("expand what waits", lambda x: x.expand(3, 4), (4,), P, S1),
    ("expand on a grid", lambda x: x.expand(7, 5, 6), (5, 6), (S1, S0), (S2, S1)),
    ("select", lambda x: x[:, -2], (5, 4, 6), S0, S0),
    ("select, after", lambda x: x[1], (5, 4, 6), S2, S1),
    ("select on a grid", lambda x: x[:, 1], (5, 4, 6), (S0, S2), (S0, S1)),
    ("select of a split dim", lambda x: x[2], (4, 8, 2), S0, S0),
    ("select of what waits", lambda x: x[2], (4, 3), P, P),
    ("slice", lambda x: x[:, 1:4], (6, 5), S0, S0),
    ("slice, steps", lambda x: x[:, ::2], (5, 7), S0, S0),
    ("slice, all", lambda x: x[:, -9:9], (5, 7), S1, S1),
    ("slice of a split dim", lambda x: x[1:4], (6, 8), S0, S1),
    ("slice, twice split", lambda x: x[..., :3], (7, 8), (S0, S0), (S0, S0)),
    ("narrow", lambda x: x.narrow(1, 1, 2), (6, 5), S0, S0),
    ("split", lambda x: x.split(2, -1), (6, 5), S0, [S0] * 3),
    ("split in one", lambda x: x.split(9), (6, 5), S0, [S0]),
    ("split by sizes", lambda x: x.split([1, 0, 4], 1), (6, 5), P, [P] * 3),
    ("split by one size", lambda x: x.split([6]), (6, 5), S0, [S0]),
    ("chunk", lambda x: x.chunk(3, 1), (6, 5), (S0, R), [(S0, R)] * 3),
    ("unbind", lambda x: x.unbind(1), (6, 2, 5), S2, [S1] * 2),
    ("diagonal", lambda x: x.diagonal(1, 0, 2), (4, 6, 5), S1, S0),
    ("unfold", lambda x: x.unfold(1, 3, 2), (6, 8, 2), S0, S0),
    ("movedim", lambda x: x.movedim(0, -1), (5, 4, 6), S0, S2),
    ("as complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j), (5, 2), S0, S0),
    ("view", lambda x: x.view(8, 3), (4, 2, 3), S0, S0),
    ("view of pairs", lambda x: x.unflatten(1, (4, 2)), (5, 8), S1, S1),
    ("view, a split one", lambda x: x.view(1, 8), (1, 2, 4), S0, S0),
    ("view, a split one at the end", lambda x: x.view(1, 6, 1), (1, 2, 3, 1), S3, S2),
    ("view, a split one between", lambda x: x.view(2, 2, 1, 3), (4, 1, 3), S1, S2),
    ("view, ones elsewhere", lambda x: x.view(6, 1), (1, 6), S1, S0),
    ("flatten, uneven", lambda x: x.flatten(1), (5, 2, 3), S0, S0),
]

ARRANGED = [
    ("repeat", lambda x: x.repeat(2, 1, 3), (5, 6), S0, S1),
    ("tile", lambda x: x.tile(2), (5, 6), S0, S0),
    ("roll", lambda x: x.roll(2, 1), (5, 6), S0, S0),
    ("roll of what waits", lambda x: x.roll(2), (5, 6), P, P),
    ("flip", lambda x: x.flip(-1), (5, 6), S0, S0),
    ("rot90", lambda x: x.rot90(1, (1, 2)), (5, 6, 3), S0, S0),
    ("tril", lambda x: x.tril(-1), (5, 6, 3), S0, S0),
    ("triu", lambda x: x.triu(), (5, 6), P, P),
    ("diag_embed", lambda x: x.diag_embed(1, 0, -1), (5, 6), S0, S1),
    ("pad", lambda x: nn.pad(x, (1, -2, 0, 0), value=2.0), (5, 6, 4), S1, S1),
]


@pytest.mark.parametrize(
    ("function", "shape", "placed", "expected"), [row[1:] for row in VIEWS], ids=[r[0] for r in VIEWS]
)
def test_views(function, shape, placed, expected):
    check(function, [torch.randn(shape)], [placed], expected)


@pytest.mark.parametrize(
    ("function", "shape", "placed", "expected"), [row[1:] for row in ARRANGED], ids=[row[0] for row in ARRANGED]
)
def test_arrangements(function, shape, placed, expected):
    check(function, [torch.randn(shape)], [placed], expected, most=0)


JOINED = [
    ("cat", torch.cat, ((5, 4), (2, 4), (1, 4)), (S1, S1, S1), S1, True),
    ("cat, last", lambda *x: torch.cat(x, -1), ((5, 4), (5, 2)), (S0, S0), S0, True),
    ("cat of mixed", lambda *x: torch.cat(x, -1), ((8, 4), (8, 2)), (S0, R), S0, False),
    ("cat of what waits", lambda *x: torch.cat(x), ((5, 4), (3, 4)), (P, P), P, True),
    ("cat of what waits in part", lambda *x: torch.cat(x), ((5, 4), (3, 4)), (P, R), S1, False),
    ("cat on a grid", lambda *x: torch.cat(x, 1), ((5, 4, 6), (5, 1, 6)), ((S0, S2), (S0, S2)), (S0, S2), True),
    ("stack", lambda *x: torch.stack(x, 1), ((5, 4), (5, 4)), (S1, S1), S2, True),
    ("stack, last", lambda *x: torch.stack(x, -1), ((5, 4), (5, 4)), ((S0, P), (S0, P)), (S0, P), True),
    ("select_scatter", lambda x, y: x.select_scatter(y, 1, 2), ((5, 4), (5,)), (S0, S0), S0, True),
    ("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 2, 4), ((5, 4), (5, 2)), (P, P), P, True),
    ("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, 0, 1, 2), ((5, 4, 4), (5, 4)), (S0, S0), S0, True),
]


@pytest.mark.parametrize(
    ("function", "shapes", "placed", "expected", "is_still"),
    [row[1:] for row in JOINED],
    ids=[row[0] for row in JOINED],
)
def test_joined(function, shapes, placed, expected, is_still):
    call = (lambda *tensors: torch.cat(tensors)) if function is torch.cat else function
    check(call, [torch.randn(shape) for shape in shapes], placed, expected, most=0 if is_still else None)


def test_tensors_of_nothing_beside_others():
    tensors = [torch.randn(5, 4), torch.empty(0)]
    check(lambda *x: torch.cat(x, 1), tensors, (S0, R), S0, most=0, has_gradients=False)


COPIES = [
    (torch.squeeze_copy, (), (5, 1, 4)),
    (torch.expand_copy, ((3, 5, -1, 4),), (5, 1, 4)),
    (torch.select_copy, (1, 0), (5, 1, 4)),
    (torch.split_with_sizes_copy, ([1, 3], 2), (5, 1, 4)),
    (torch.unbind_copy, (1,), (5, 2, 4)),
    (torch.transpose_copy, (0, 2), (5, 2, 4)),
    (torch.slice_copy, (), (5, 4)),
]


@pytest.mark.parametrize(("function", "args", "shape"), COPIES, ids=[row[0].__name__ for row in COPIES])
def test_copies_of_views_share_nothing(function, args, shape):
    whole = torch.randn(shape)
    ours = distributed(whole, S0)
    made = function(ours, *args)
    each = [made] if isinstance(made, DTensor) else made
    for one in each:
        one.zero_()
    assert torch.equal(ours.full_tensor(), whole)
    check(lambda x: function(x, *args), [whole], [S0])


def test_views_as_other_dtypes():
    whole = torch.arange(24, dtype=torch.int32).reshape(6, 4)
    ours = distributed(whole, S0)
    for dtype in (torch.float32, torch.int16, torch.int64):
        viewed = ours.view(dtype)
        assert viewed.placements == (S0,)
        assert torch.equal(viewed.full_tensor(), whole.view(dtype))


def test_what_is_written_to_out_reaches_it_wherever_it_lies():
    one, other = torch.randn(5, 4), torch.randn(3, 6)
    out = distributed(torch.zeros(15, 24), (S0, S1))
    torch.kron(distributed(one, (S0, S1)), distributed(other, (S0, S1)), out=out)
    assert torch.equal(out.full_tensor(), torch.kron(one, other))
    out = distributed(torch.zeros(5, 4), S1)
    assert torch.add(distributed(one, S0), distributed(one, S0), out=out) is out
    assert torch.equal(out.full_tensor(), one + one)
    assert out.placements == (S1,)


def test_lists_of_outs():
    whole = torch.randn(6, 4)
    outs = [distributed(torch.zeros(6, size), S1) for size in (1, 3)]
    assert torch.split_with_sizes_copy(distributed(whole, S0), [1, 3], 1, out=outs) is None
    for out, part in zip(outs, whole.split([1, 3], 1), strict=True):
        assert torch.equal(out.full_tensor(), part)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.select(0, 9),
        lambda x: x.squeeze(5),
        lambda x: x.expand(3, 3),
        lambda x: x.split([1, 1], 1),
        lambda x: torch.cat([x, x[:, :1]]),
        lambda x: x.unfold(0, 99, 1),
        lambda x: nn.pad(x, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(wrong):
    whole = torch.randn(6, 4)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        wrong(whole)
    with pytest.raises(type(theirs.value)) as ours:
        wrong(distributed(whole, S0))
    assert str(ours.value).split()[:4] == str(theirs.value).split()[:4]
