"""Products of matrices, and terms added to them."""

import pytest
import torch
from torch.nn.functional import linear

from dtckpt.dtensor.operators import dispatch

from .operator_checks import S0, S1, S2, P, R, check, distributed

SHAPES = {
    "addmm": ((5,), (6, 8), (8, 5)),
    "addmm of a column": ((6, 1), (6, 8), (8, 5)),
    "baddbmm": ((3, 6, 5), (3, 6, 8), (3, 8, 5)),
    "addbmm": ((6, 5), (3, 6, 8), (3, 8, 5)),
    "addmv": ((6,), (6, 8), (8,)),
    "addr": ((6, 5), (6,), (5,)),
    "linear": ((4, 6, 8), (5, 8), (5,)),
    "outer": ((6,), (5,)),
    "matmul": ((4, 3, 6, 8), (4, 3, 8, 5)),
    "vector @ matrix": ((8,), (8, 5)),
    "vector @ matrices": ((8,), (3, 8, 5)),
    "matrices @ vector": ((4, 6, 8), (8,)),
    "matrices @ matrix": ((4, 6, 8), (8, 5)),
    "einsum": ((4, 6, 3, 8), (4, 5, 3, 8)),
}
FUNCTIONS = {"linear": linear, "einsum": lambda one, other: torch.einsum("blhd,bshd->bhls", one, other)}

TABLE = [
    ("addmm", (R, S1, S0), P),
    ("addmm", (P, P, R), P),
    ("addmm", (S0, R, S1), S1),
    ("addmm", (R, S0, R), S0),
    ("addmm", ((R, R), (S0, S1), (R, S0)), (S0, P)),
    ("addmm", ((R, S0), (S0, R), (R, S1)), (S0, S1)),
    ("addmm of a column", (S0, S0, R), S0),
    ("addmm of a column", (R, S1, S0), P),
    ("baddbmm", (S0, S0, S0), S0),
    ("baddbmm", ((R, R), (S0, S2), (S0, S1)), (S0, P)),
    ("addmv", (R, S1, S0), P),
    ("addmv", (S0, S0, R), S0),
    ("addr", (S0, S0, R), S0),
    ("addr", (R, R, P), None),
    ("linear", (S2, S1, R), None),
    ("linear", (R, S0, S0), S2),
    ("linear", (S0, R, R), S0),
    ("outer", (S0, R), S0),
    ("outer", ((S0, R), (R, S0)), (S0, S1)),
    ("matrices @ vector", (S0, R), S0),
    ("matrices @ matrix", (S0, R), S0),
    ("matrices @ matrix", (R, S1), S2),
    ("vector @ matrix", (S0, S0), None),
    ("vector @ matrix", (R, S1), S0),
    ("vector @ matrices", (R, S0), None),
    ("einsum", (S0, S0), S0),
    ("matmul", (S0, S0), S0),
    ("matmul", ((S0, R), (S0, R)), (S0, R)),
    ("addbmm", (R, S0, S0), P),
    ("addbmm", (P, S0, S0), P),
    ("addbmm", (S0, S1, R), S0),
]


def function_of(name):
    if " " in name and "@" in name:
        return torch.matmul
    return FUNCTIONS.get(name) or getattr(torch, name.partition(" ")[0])


@pytest.mark.parametrize(("name", "placed", "expected"), TABLE, ids=str)
def test_products(name, placed, expected):
    check(function_of(name), [torch.randn(shape) for shape in SHAPES[name]], placed, expected)


@pytest.mark.parametrize("beta", [0, 0.5])
def test_factors_of_sums(beta):
    tensors = [torch.randn(shape) for shape in SHAPES["addmm"]]
    check(lambda *given: torch.addmm(*given, beta=beta, alpha=3), tensors, (R, S1, S0), P)


def test_in_place_and_out():
    term, one, other = (torch.randn(shape) for shape in ((6, 5), (6, 8), (8, 5)))
    ours = distributed(term, P)
    kept = ours.addmm_(distributed(one, S1), distributed(other, S0))
    assert kept is ours
    assert ours.placements == (P,)
    torch.testing.assert_close(ours.full_tensor(), torch.addmm(term, one, other))
    out = distributed(torch.zeros(6, 5), S0)
    torch.addmm(*(distributed(tensor, R) for tensor in (term, one, other)), out=out)
    assert out.placements == (S0,)
    torch.testing.assert_close(out.full_tensor(), torch.addmm(term, one, other))


def test_in_inference_mode_operators_that_are_made_of_others_run_by_rule():
    one, other, bias = torch.randn(2, 6, 8), torch.randn(5, 8), torch.randn(5)
    with torch.inference_mode():
        ours = [distributed(tensor, placement) for tensor, placement in ((one, S1), (other, R), (bias, R))]
        dispatch.clear()
        made = linear(*ours)
        product = torch.matmul(ours[0], ours[1].t())
        assert made.placements == (S1,)
        torch.testing.assert_close(made.full_tensor(), linear(one, other, bias))
        torch.testing.assert_close(product.full_tensor(), one @ other.t())
        assert "replication" not in {route for _, route in dispatch.counts()}
