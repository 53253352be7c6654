"""A pending value passes an operator only if the operator commutes with the reduction for its arguments.

Every operator of PyTorch's database, and calls whose dtypes and numbers matter, run on hard terms of every dtype and
every reduction; the results equal the results on the reduced tensors. A run tries some of them, ``DTCKPT_TESTS=all``
all.
"""

import pytest
import torch

from dtckpt import Layout, Partial, Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor, pack

from .operator_checks import GRID, LINE, P, R
from .operator_database import is_determined
from .operator_samples import operators, samples_of
from .pending_cases import ARRANGEMENTS, CALLS, DTYPES, ROUNDING, is_taken, reductions_of

ARE_FREE = {
    "_softmax_backward_data": "the sample names a dtype, which only the CPU's kernel does not look at",
    "addbmm": "on a pending tensor of integers it refuses fractions in place, which the CPU's kernel rounds",
    "cosh": "PyTorch's kernels for vectors and for single numbers overflow at different numbers",
    "gradient": "it divides by tensors with zeros, see departures.md",
    "linalg_multi_dot": "large terms make its roundings larger than the trial allows",
    "masked_std": "PyTorch's result for large integers is infinite, but not over split dims",
    "masked_var": "as masked_std",
    "nn_functional_max_unpool2d": "where indices repeat, the last thread to write decides",
    "pca_lowrank": "its vectors are free in phase",
    "sinh": "as cosh",
}
"""Operators of the database that are left out, and why."""


def terms(values, reduce_op="sum", dtype=torch.float32):
    """Return the DTensor of shape (n) whose four terms are these rows."""
    rows = [torch.tensor(row, dtype=dtype) for row in values]
    return pack(rows, Layout.from_placements(LINE, [Partial(reduce_op)], 1), tuple(rows[0].shape))


HALVES = [[0.5, 0.5]] * 4


def _can_hold(dtype, reduce_op):
    """Whether a pending tensor can hold every value: an average of integers is a sum, which wraps around."""
    return reduce_op not in ("avg", "product") or dtype.is_floating_point


@pytest.mark.slow
@pytest.mark.share(12)
@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    plain, number = torch.zeros(3, 4), sum(name.encode())
    writes = name.split()[0].endswith("_") or name.startswith("out ")
    overflows = name.endswith("float16") or (name.startswith(("prod", "cumprod")) and "float" in name)
    for dtype in DTYPES:
        for reduce_op in reductions_of(dtype):
            number += 1
            # What is beyond a dtype is infinite or NaN, in the order in which it is added up.
            is_beyond = overflows and dtype not in ROUNDING
            if not is_beyond and (not writes or _can_hold(dtype, reduce_op)):
                arrangement = ARRANGEMENTS[number % len(ARRANGEMENTS)]
                is_taken(CALLS[name], (plain, plain), dtype, reduce_op, arrangement, seed=number)


def _inexact_samples(op):
    """Return samples of an operator, and the dtype of the tensors that may get other dtypes; None if there are none."""
    samples = samples_of(op, 2)
    dtypes = [tensor.dtype for sample in samples for tensor in sample.tensors]
    return samples, next((dtype for dtype in dtypes if dtype in (torch.float32, torch.complex64)), None)


@pytest.mark.slow
@pytest.mark.share(6)
@pytest.mark.parametrize("name", sorted(set(operators()) - set(ARE_FREE)))
def test_operator(name):
    op, number = operators()[name], sum(name.encode())
    samples, replaced = _inexact_samples(op)
    if replaced is None or not is_determined(name):
        return
    forms = [(op.op, False)] + ([(op.inplace_variant, True)] if op.inplace_variant else [])
    for dtype in DTYPES:
        for reduce_op in reductions_of(dtype):
            for sample in samples:
                number += 1
                form, writes = forms[number % len(forms)]
                if writes and not _can_hold(dtype, reduce_op):
                    continue

                def call(first, args, kwargs, form=form):
                    with torch.no_grad():
                        return form(first, *args, **kwargs)

                arrangement = ARRANGEMENTS[number % len(ARRANGEMENTS)]
                is_taken(call, sample.arguments, dtype, reduce_op, arrangement, replaced=replaced, seed=number)


def test_operators_that_are_left_out_exist():
    assert set(ARE_FREE) <= set(operators())


# --- defects that there were --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.sum(dtype=torch.int64), torch.tensor(4)),
        (lambda x: x.sum(0, dtype=torch.int8), torch.tensor(4, dtype=torch.int8)),
        (lambda x: x.cumsum(0, dtype=torch.int64), torch.tensor([2, 4])),
        (lambda x: x.sum(dtype=torch.bool), torch.tensor(True)),
    ],
)
def test_halves_are_added_before_they_become_integers(function, expected):
    made = function(terms(HALVES)).full_tensor()
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


def test_factors_are_multiplied_before_they_become_integers():
    assert terms([[0.5], [0.5], [4.0], [3.0]], "product").prod(dtype=torch.int64).full_tensor() == 3


def test_a_split_contraction_is_complete_before_it_becomes_an_integer():
    x = distribute_tensor(torch.full((3, 4), 0.5), LINE, [Shard(1)])
    w = distribute_tensor(torch.full((4, 1), 2.5), LINE, [Shard(0)])
    assert (x @ w).sum(dtype=torch.int64).full_tensor() == 15


@pytest.mark.parametrize(
    ("pending", "function", "expected"),
    [
        (terms([[100], [-100], [0], [0]], "max", torch.int8), lambda x: x + 100, [-56]),
        (terms([[2**40 + 1], [-(2**40)], [0], [0]], "sum", torch.int64), lambda x: x / 2, [0.5]),
        (terms([[2**40 + 1], [-(2**40)], [0], [0]], "sum", torch.int64), lambda x: x.to(torch.float32), [1.0]),
        (terms([[100000.0], [-99999.0], [0.0], [0.0]]), lambda x: x.to(torch.float16), [1.0]),
        (terms([[1024.25], [-1024.0], [0.0], [0.0]]), lambda x: x.to(torch.bfloat16), [0.25]),
        (terms([[1e30], [1e-30], [1.0], [1.0]], "product"), lambda x: x.to(torch.float16), [1.0]),
        (terms([[-torch.inf], [5.0], [0.0], [0.0]], "max"), lambda x: x + torch.inf, [torch.inf]),
        (
            terms([[100], [100], [100], [100]], "sum", torch.int8),
            lambda x: torch.cat([x, x.to(torch.int32)])[:1],
            [-112],
        ),
    ],
    ids=[
        "int8 + 100",
        "int64 / 2",
        "int64 as float32",
        "float32 as float16",
        "float32 as bfloat16",
        "product as float16",
        "-inf + inf",
        "int8 beside int32",
    ],
)
def test_dtypes_and_numbers_decide(pending, function, expected):
    assert torch.equal(function(pending).full_tensor(), function(pending.full_tensor()))
    assert function(pending).full_tensor().tolist() == expected


def test_a_plan_is_not_reused_for_a_number_that_it_does_not_fit():
    pending = terms([[1.0], [-2.0], [0.0], [0.0]], "max")
    for number in (2.0, -2.0, 0.0, 0.5, -0.5):
        for function in (lambda x, n: x * n, lambda x, n: x + n, lambda x, n: n - x, lambda x, n: x / n):
            made, plain = function(pending, number).full_tensor(), function(pending.full_tensor(), number)
            assert torch.equal(made, plain)


def test_integers_are_pooled_and_resized_when_they_are_complete():
    ones = torch.ones(1, 1, 2, 2, dtype=torch.int64)
    pending = pack([ones] * 4, Layout.from_placements(LINE, [P], 4), (1, 1, 2, 2))
    assert torch.nn.functional.avg_pool2d(pending * torch.tensor([[1, 2], [0, 0]]), 2).full_tensor().item() == 3
    small = (ones * 3).to(torch.uint8)
    pending = pack([small] * 4, Layout.from_placements(LINE, [P], 4), (1, 1, 2, 2))
    resized = torch.nn.functional.interpolate(pending, (3, 3), mode="bilinear")
    assert torch.equal(resized.full_tensor(), torch.full((1, 1, 3, 3), 12, dtype=torch.uint8))


def test_a_replicated_tensor_does_not_become_an_average():
    """The sum of its terms would be beyond its dtype."""
    pending = terms([[1.0]] * 4, "avg", torch.float16)
    large = distribute_tensor(torch.tensor([40000.0], dtype=torch.float16), LINE, [R])
    assert torch.cat([pending, large]).full_tensor().tolist() == [1.0, 40000.0]
    assert (pending + large).full_tensor().tolist() == [40000.0]


def test_what_an_operator_fills_is_no_average():
    """The kernel of hinge_embedding_loss fills a tensor like its operand, and subtracts from it."""
    pending = terms([[1]] * 4, "avg", torch.uint8)
    loss = torch.nn.functional.hinge_embedding_loss(pending, -torch.ones(1), margin=101, reduction="none")
    assert loss.full_tensor().item() == 100


def test_an_average_of_integers_keeps_the_sum_within_it():
    """Of (1 + 2) / 2 and (0 + 0) / 2 only the first is rounded, and not 1 / 2 and 2 / 2."""
    layout = Layout.from_placements(GRID, [Partial("avg"), Partial("sum")], 1)
    pending = pack([torch.tensor([value]) for value in (1, 0, 0, 1)], layout, (1,))
    assert (pending * 5).full_tensor().item() == 5


@pytest.mark.parametrize("kept", range(2))
@pytest.mark.parametrize(("outer", "inner"), [("avg", "sum"), ("sum", "avg"), ("avg", "avg")])
def test_an_average_of_integers_is_rounded_once(outer, inner, kept):
    """The average of 1 + 0 and 0 + 1 is 1, and not the sum of 1 / 2 and 1 / 2, each rounded."""
    placements = [Partial(outer), Partial(inner)]
    terms = [torch.tensor([value, 2 * value]) for value in (1, 0, 0, 3)]
    pending = pack(terms, Layout.from_placements(GRID, placements, 1), (2,))
    for other in (R, Shard(0)):
        target = [placement if number == kept else other for number, placement in enumerate(placements)]
        moved = pending.redistribute(GRID, target)
        assert list(moved.placements) == target
        assert moved.full_tensor().tolist() == pending.full_tensor().tolist()


def test_an_average_of_integers_within_an_extreme_is_rounded_once():
    """Of (1 + 0 + 0 + 1) / 2 and zeros: the sum and the average within the extreme are one reduction."""
    grid = abstract_mesh({"x": 2, "y": 2, "z": 2})
    layout = Layout.from_placements(grid, [Partial("max"), Partial("sum"), Partial("avg")], 1)
    pending = pack([torch.tensor([value]) for value in (1, 0, 0, 1, 0, 0, 0, 0)], layout, (1,))
    assert pending.full_tensor().item() == 1
    for kept in range(3):
        target = [one if number <= kept else R for number, one in enumerate(layout.placements)]
        assert pending.redistribute(grid, target).full_tensor().item() == 1


def test_a_term_of_a_product_is_not_infinitely_often_zero():
    left, right = torch.ones(2, 4), torch.ones(4, 2)
    split = distribute_tensor(left, LINE, [Shard(1)]), distribute_tensor(right, LINE, [Shard(0)])
    term = terms([[1.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]])
    assert torch.addmm(term, *split, beta=torch.inf).full_tensor().eq(torch.inf).all()


def test_written_terms_are_complete_before_they_are_converted():
    out = terms([[0.0]] * 4, dtype=torch.float16)
    torch.neg(terms([[100000.0], [-99999.0], [0.0], [0.0]]), out=out)
    assert out.full_tensor().tolist() == [-1.0]


def test_foreach_operators_take_numbers():
    pending = terms([[1.0], [5.0], [0.0], [0.0]])
    (made,) = torch._foreach_maximum([pending], 2.0)
    assert made.full_tensor().tolist() == [6.0]


def test_what_commutes_stays_pending():
    """The predicate is no reason to communicate."""
    half = terms(HALVES, dtype=torch.float16)
    assert (half * 2.0).placements == (P,)
    assert half.to(torch.float32).placements == (P,)
    assert half.sum(dtype=torch.float64).placements == (P,)
    assert terms([[1, 2]] * 4, dtype=torch.int64).sum().placements == (P,)
    largest = terms(HALVES, "max")
    assert largest.to(torch.float16).placements == (Partial("max"),)
    assert (largest + 1.0).placements == (Partial("max"),)
    assert terms([[1, 2]] * 4, "max", torch.int8).to(torch.float32).placements == (Partial("max"),)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_parts_of_complex_numbers_are_added_by_themselves(dtype, reduce_op):
    """An infinite part is no reason for the other one to be NaN, and zeros keep their signs."""
    parts = torch.tensor([[torch.inf, 1.0], [-0.0, -0.0]])
    layout = Layout.from_placements(LINE, [Partial(reduce_op)], 1)
    whole = pack([torch.view_as_complex(parts).to(dtype)] * 4, layout, (2,)).full_tensor()
    infinite, zero = torch.view_as_real(whole.to(torch.complex64)).tolist()
    assert infinite == [torch.inf, 4.0 if reduce_op == "sum" else 1.0]
    assert torch.signbit(torch.tensor(zero)).all()


def test_kernels_that_conjugate_lazily_are_right():
    matrices = torch.randn(2, 4, 3, dtype=torch.complex64)
    for placement in (R, Shard(0)):
        made = torch.linalg.pinv(distribute_tensor(matrices, LINE, [placement]))
        torch.testing.assert_close(made.full_tensor(), torch.linalg.pinv(matrices))


def test_what_an_operator_refuses_in_place_is_refused_of_pending_values():
    pending = terms([[1 + 1j, 2.0]] * 4, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="In-place abs is not supported for complex tensors"):
        pending.abs_()
