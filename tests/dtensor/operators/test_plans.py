"""Plans beside rules: shared memory, axes of one device, counted routes, kept plans."""

import pytest
import torch

import dtckpt
from dtckpt import Layout, Partial, Replicate, Shard
from dtckpt.dtensor import distribute_tensor, pack
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.operators import dispatch, registry, strategy
from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.plans import RulePlan
from dtckpt.dtensor.tensor import spec_of
from dtckpt.errors import OperatorError

MESH = dtckpt.abstract_mesh({"x": 4})
SMALL = dtckpt.abstract_mesh({"x": 1, "y": 4})


def placed(value, *placements, mesh=MESH):
    return distribute_tensor(value, mesh, list(placements))


@pytest.fixture(autouse=True)
def _no_plans():
    dispatch.clear()
    yield
    dispatch.clear()


# --- memory ---


@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: x.cumsum_(0), lambda x: torch.add(x, 1, out=x), lambda x: x[1:].mul_(3)],
    ids=["rule", "scan", "out", "view"],
)
def test_copies_packed_from_one_tensor_are_each_written_once(write):
    packed, plain = pack([torch.ones(4)] * 4, Layout.replicated(MESH, 1)), torch.ones(4)
    write(packed)
    write(plain)
    assert [part.tolist() for part in packed.components] == [plain.tolist()] * 4


def test_terms_made_of_copies_do_not_write_to_them():
    whole = placed(torch.ones(4), Replicate())
    terms = whole.redistribute(placements=[Partial()])
    terms.add_(1)
    assert [part.tolist() for part in whole.components] == [[1.0] * 4] * 4
    assert terms.full_tensor().tolist() == [2.0] * 4
    assert terms.placements == (Partial(),)


# --- reductions of numbers that are not exact ---


def waiting(values, reduction, dtype):
    return pack([torch.full((2,), one, dtype=dtype) for one in values], Layout(["unsharded"], MESH, {"x": reduction}))


@pytest.mark.parametrize(
    "compute", [lambda x: x * 3, lambda x: x + x, torch.sum, lambda x: torch._foreach_mul([x], 3)[0], lambda x: x * 2.0]
)
@pytest.mark.parametrize(
    ("reduction", "dtype", "values"),
    [
        ("avg", torch.int64, (1, 2, 3, 5)),
        ("sum", torch.uint8, (254, 3, 0, 0)),
        ("sum", torch.int32, (2**31 - 1, 1, 1, 0)),
    ],
)
def test_rounded_averages_and_sums_that_wrap_around_are_computed_with_when_they_are_known(
    compute, reduction, dtype, values
):
    tensor = waiting(values, reduction, dtype)
    assert torch.equal(compute(tensor).full_tensor(), compute(tensor.full_tensor()))
    assert tensor.view(1, 2).placements == tensor.placements


def test_halves_are_not_rounded_before_they_are_added():
    target, halves = waiting([0] * 4, "sum", torch.int64), waiting([0.5] * 4, "sum", torch.float32)
    target.copy_(halves)
    assert target.full_tensor().tolist() == [2, 2]
    assert target.placements == (Partial(),)


# --- axes of one device ---


def test_what_an_axis_of_one_device_does_changes_without_a_copy():
    rows = placed(torch.arange(8.0).reshape(4, 2), Shard(0), Shard(1), mesh=SMALL)
    columns = placed(torch.arange(8.0).reshape(4, 2), Shard(1), Shard(1), mesh=SMALL)
    with CommDebugMode() as counted:
        total = rows + columns
    assert torch.equal(total.full_tensor(), 2 * torch.arange(8.0).reshape(4, 2))
    assert counted.get_total_counts() == 0


# --- counting and keeping ---


def test_routes_are_counted():
    tensor = placed(torch.ones(4, 4), Shard(0))
    for _ in range(3):
        tensor.exp()
    tensor.nonzero()
    found = dispatch.counts()
    assert found[torch.ops.aten.exp.default, "rule"] == 3
    assert found[torch.ops.aten.nonzero.default, "replication"] == 1


def test_floats_make_no_new_plans():
    tensor = placed(torch.ones(4), Shard(0))
    for number in range(5):
        tensor.mul_(0.5 + number)
    assert len(dispatch._PLANS) == 1
    assert tensor.full_tensor().tolist() == [0.5 * 1.5 * 2.5 * 3.5 * 4.5] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: placed(torch.ones(8, 2), Shard(0)),
        lambda: pack([torch.ones(2, 2)] * 4, Layout(["x", "unsharded"], MESH)),
        lambda: placed(torch.ones(8, 2), Replicate()).redistribute(placements=[Shard(0)]),
        lambda: placed(torch.ones(8, 2), Replicate()) * placed(torch.ones(8, 2), Shard(0)),
    ],
    ids=["distribute", "pack", "redistribute", "operator"],
)
def test_alike_tensors_share_plans(make):
    first, second = placed(torch.ones(8, 2), Shard(0)), make()
    dispatch.clear()
    torch.relu(first)
    torch.relu(second)
    assert len(dispatch._PLANS) == 1
    assert first.layout is second.layout


@pytest.mark.parametrize("specs", [("x", "y"), ("y", "unsharded"), (("y", "x"), "unsharded"), ("unsharded",) * 2])
@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2}, {"x": 1, "y": 3}])
def test_operands_that_lie_alike_stay_as_the_search_would_leave_them(specs, sizes, monkeypatch):
    aten, layout = torch.ops.aten, Layout(list(specs), dtckpt.abstract_mesh(sizes))
    one, two, three = (distribute_tensor(torch.rand(5, 4), layout.mesh, layout.placements) for _ in range(3))
    calls = (
        (aten.relu.default, (one,)),
        (aten.mul_.Tensor, (one, 2.0)),
        (aten.addcmul_.default, (one, two, three)),
        (aten.zeros_like.default, (one,)),
        (aten.softmax.int, (one, 1)),
        (aten.sum.default, (one,)),
    )

    def choices():
        for tensor in (one, two, three):
            spec_of(tensor)
        plans = [dispatch.plan_of(Call(func, args, {})) for func, args in calls]
        return [(plan._operands, plan._results) for plan in plans if isinstance(plan, RulePlan)]

    quick = choices()
    monkeypatch.setattr(strategy, "_is_elementwise", lambda *_: False)
    assert quick == choices()
    assert len(quick) >= len(calls) - 1


def test_tensors_on_equal_meshes_share_no_plans():
    # One process may see a mesh as several clients do.
    for mesh in (dtckpt.abstract_mesh({"x": 4}), dtckpt.abstract_mesh({"x": 4})):
        torch.relu(placed(torch.ones(8, 2), Shard(0), mesh=mesh))
    assert len([key for key in dispatch._PLANS if key[0] == id(torch.ops.aten.relu.default)]) == 2


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_BOUND", 4)
    tensor = placed(torch.arange(6.0), Shard(0))
    for number in range(10):
        assert tensor.roll(number).full_tensor().tolist() == torch.arange(6.0).roll(number).tolist()
        assert len(dispatch._PLANS) <= 4
    assert sum(dispatch.counts().values()) >= 10


def test_the_default_dtype_is_not_part_of_a_plan():
    tensor = placed(torch.arange(4), Shard(0))
    assert (tensor / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (tensor / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_error_of_a_rule_is_no_want_of_one(monkeypatch):
    def refuse(call):
        raise OperatorError("no such thing")

    monkeypatch.setitem(registry.RULES, torch.ops.aten.exp.default, refuse)
    with pytest.raises(OperatorError, match="no such thing"):
        placed(torch.ones(4), Shard(0)).exp()
