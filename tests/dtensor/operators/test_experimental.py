"""`local_map`, `register_sharding`, `implicit_replication`."""

import inspect
import threading
from typing import Any

import pytest
import torch

from dtckpt import UNSHARDED, DTensor, Layout, Partial, Replicate, Shard, abstract_mesh, pack
from dtckpt.dtensor import distribute_tensor, experimental
from dtckpt.dtensor.experimental import local_map, register_sharding
from dtckpt.dtensor.operators import dispatch, registry
from dtckpt.dtensor.operators.plans import are_plain_tensors_trusted
from dtckpt.errors import (
    ComponentError,
    LayoutError,
    LayoutTypeError,
    MeshMismatchError,
    OperatorError,
    ReplicaMismatchError,
)

from . import operator_cases
from .operator_cases import numbers

LINE = abstract_mesh({"x": 4})
GRID = abstract_mesh({"x": 2, "y": 2})
ROWS, COLUMNS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


def on(mesh: Any, placements: Any, *shape: int) -> DTensor:
    return distribute_tensor(numbers(*shape), mesh, placements)


NAMES = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_pytorchs(name):
    import torch.distributed.tensor.experimental as theirs

    ours, given = (inspect.signature(getattr(one, name)).parameters for one in (experimental, theirs))
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in given.values()
    ]


# --- local_map ----------------------------------------------------------------------------------------------------


def test_sharded_products_add_up():
    product = local_map(torch.mm, [Partial()], (COLUMNS, ROWS))
    for size in (8, 10, 3):
        left, right = on(LINE, COLUMNS, 5, size).requires_grad_(), on(LINE, ROWS, size, 3).requires_grad_()
        made = product(left, right)
        assert made.placements == (Partial(),)
        torch.testing.assert_close(made.full_tensor(), numbers(5, size) @ numbers(size, 3))
        made.redistribute(placements=WHOLE).pow(2).sum().backward()
        plain = [numbers(5, size).requires_grad_(), numbers(size, 3).requires_grad_()]
        (plain[0] @ plain[1]).pow(2).sum().backward()
        for one, other in zip((left, right), plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("size", [1, 3, 10, 12])
def test_uneven_shards_of_results_are_right(size):
    twice = local_map(lambda part: torch.cat([part, part], 1), (ROWS,))
    made = twice(on(LINE, ROWS, size, 3))
    assert made.shape == (size, 6)
    torch.testing.assert_close(made.full_tensor(), numbers(size, 3).repeat(1, 2))


def test_as_a_decorator_with_trees_and_other_values():
    @local_map(
        out_placements=(ROWS, None, WHOLE),
        in_placements=(ROWS, None, None),
        in_grad_placements=(ROWS, None, None),
        redistribute_inputs=True,
    )
    def mapped(given, *, offset):
        tensor, (number, word) = given
        return {"sum": tensor * number + offset, "word": word}, torch.ones(2)

    assert mapped.__name__ == "mapped"
    tensor = on(LINE, COLUMNS, 6, 5).requires_grad_()
    made, ones = mapped([tensor, (2, "w")], offset=1)
    assert made["word"] == "w"
    assert made["sum"].placements == (Shard(0),)
    assert ones.placements == (Replicate(),)
    torch.testing.assert_close(made["sum"].full_tensor(), numbers(6, 5) * 2 + 1)
    made["sum"].sum().backward()
    assert tensor.grad.placements == (Shard(1),)
    torch.testing.assert_close(tensor.grad.full_tensor(), torch.full((6, 5), 2.0, dtype=torch.float64))


def test_gradients_lie_as_is_said():
    # What every device does with its copy is its part of the sum.
    mapped = local_map(lambda weight, part: part @ weight, [Shard(0)], (WHOLE, ROWS), ([Partial()], ROWS))
    weight, rows = on(LINE, WHOLE, 3, 2).requires_grad_(), on(LINE, ROWS, 10, 3)
    mapped(weight, rows).pow(2).sum().backward()
    plain = numbers(3, 2).requires_grad_()
    (numbers(10, 3) @ plain).pow(2).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)


def test_without_dtensors_it_is_the_function_itself():
    made = local_map(torch.sin, [Shard(0)], device_mesh=LINE)(numbers(3))
    assert type(made) is torch.Tensor


def test_results_lie_on_the_mesh_that_is_given():
    grid_sum = local_map(lambda part: part * 2, [Shard(0), Shard(1)], device_mesh=GRID)
    made = grid_sum(on(GRID, [Shard(0), Shard(1)], 5, 7))
    assert made.device_mesh == GRID
    torch.testing.assert_close(made.full_tensor(), numbers(5, 7) * 2)


TENSOR = on(LINE, ROWS, 8, 2)
APART = on(abstract_mesh({"apart": 4}), ROWS, 8, 2)
COUNTER = iter(range(100))
REFUSED = [
    (LayoutError, "2 entries, expected one", lambda: local_map(torch.sin, ROWS, (ROWS, None))(TENSOR)),
    (LayoutError, "redistribute_inputs=True", lambda: local_map(torch.sin, ROWS, (COLUMNS,))(TENSOR)),
    (LayoutError, "no placements for it", lambda: local_map(torch.sin, ROWS, (None,))(TENSOR)),
    (LayoutError, "argument 1 is int", lambda: local_map(torch.mul, ROWS, (ROWS, WHOLE))(TENSOR, 2)),
    (LayoutError, "out_placements has 2", lambda: local_map(torch.sin, (ROWS, None))(TENSOR)),
    (LayoutError, "result that is int", lambda: local_map(len, ROWS)(TENSOR)),
    (
        MeshMismatchError,
        "local_map: got DTensors on different meshes",
        lambda: local_map(torch.add, ROWS)(TENSOR, APART),
    ),
    (AssertionError, "device_mesh", lambda: local_map(torch.sin, ROWS, device_mesh=GRID)(TENSOR)),
    (LayoutTypeError, "returns a DTensor", lambda: local_map(lambda part: TENSOR, ROWS)(TENSOR)),
    (ComponentError, "return other values", lambda: local_map(lambda part: next(COUNTER), (None,))(TENSOR)),
    (ComponentError, "other structures", lambda: local_map(lambda part: [part] * next(COUNTER), ROWS)(TENSOR)),
    (ReplicaMismatchError, "differ", lambda: local_map(torch.sin)(TENSOR)),
]


@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_what_does_not_fit_is_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.processes
def test_uneven_shards_of_clients_are_right(pool):
    for shape, made, gradient in pool.values(operator_cases.uneven_over_clients, clients=3, group=True):
        assert shape == (10, 6)
        torch.testing.assert_close(made, torch.cat([numbers(10, 3), numbers(10, 3) * 2], 1))
        torch.testing.assert_close(gradient, torch.full((10, 3), 3.0, dtype=torch.float64))


@pytest.mark.processes
def test_batches_of_changing_sizes_are_right(pool):
    assert pool.values(operator_cases.batches_of_changing_sizes, clients=4, group=True) == [([], 0)] * 4


# --- register_sharding --------------------------------------------------------------------------------------------


@torch.library.custom_op("dtckpt_tests::rotate", mutates_args=())
def rotate(x: torch.Tensor, dim: int, bias: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
    made = x.roll(1, dim) * scale
    return made if bias is None else made + bias


@rotate.register_fake
def _(x, dim, bias=None, *, scale=1.0):
    return torch.empty_like(x)


@torch.library.custom_op("dtckpt_tests::accumulate", mutates_args=("total",))
def accumulate(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x)


@torch.library.custom_op("dtckpt_tests::split_sums", mutates_args=())
def split_sums(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.sum(0), x.sum(1)]


@split_sums.register_fake
def _(x):
    return [x.new_empty(x.shape[1]), x.new_empty(x.shape[0])]


@pytest.fixture
def registering():
    """Return `register_sharding`; its registrations are undone."""
    before = dict(registry.PLANNERS)
    yield register_sharding
    registry.PLANNERS.clear()
    registry.PLANNERS.update(before)
    dispatch.clear()


def routes(op):
    return {route for (func, route) in dispatch.counts() if func is op}


def test_custom_operators_with_arguments_by_name(registering):
    op = torch.ops.dtckpt_tests.rotate.default
    seen = []

    @registering(op)
    def rows(x, dim, bias=None, scale=1.0):
        seen.append((x.ndim, tuple(x.shape), x.placements, x.mesh, x.tensor_meta.dtype, bias is None, scale))
        free = [one for one in range(x.ndim) if one != dim % x.ndim]
        biased = [] if bias is None else [Replicate()]
        return [([Shard(one - x.ndim)], [Shard(one), None, *biased]) for one in free]

    tensor = on(LINE, ROWS, 7, 11)
    made = rotate(tensor, 1, scale=3.0)
    assert made.placements == (Shard(0),)
    assert seen == [(2, (7, 11), (Shard(0),), LINE, torch.float64, True, 3.0)]
    torch.testing.assert_close(made.full_tensor(), numbers(7, 11).roll(1, 1) * 3)
    assert rotate(tensor, 1, scale=2.0).full_tensor().equal(numbers(7, 11).roll(1, 1) * 2)
    biased = rotate(tensor, 0, bias=on(LINE, WHOLE, 1))
    assert biased.placements == (Shard(1),)
    torch.testing.assert_close(biased.full_tensor(), numbers(7, 11).roll(1, 0) + numbers(1))
    assert routes(op) == {"rule"}
    # No dim is left that has a row for each device.
    assert rotate(on(LINE, ROWS, 3, 8), 1).placements == (Replicate(),)


@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_custom_operators_that_write(registering, mesh):
    op = torch.ops.dtckpt_tests.accumulate.default

    @registering(op)
    def alike(x, total):
        return [([], [one, one]) for one in (Shard(0), Shard(1), Replicate(), Partial())]

    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        total = on(mesh, [placement] * mesh.ndim, 8, 7)
        memory = [component.data_ptr() for component in total.components]
        assert accumulate(on(mesh, [Shard(1)] * mesh.ndim, 8, 7), total) is None
        assert [component.data_ptr() for component in total.components] == memory
        torch.testing.assert_close(total.full_tensor(), numbers(8, 7) * 2)
    view = (whole := on(mesh, [Shard(0)] * mesh.ndim, 8, 7))[2:]
    accumulate(on(mesh, [Shard(0)] * mesh.ndim, 6, 7), view)
    expected = numbers(8, 7)
    expected[2:] += numbers(6, 7)
    torch.testing.assert_close(whole.full_tensor(), expected)
    copies = pack([numbers(8, 7)] * mesh.size(), Layout([UNSHARDED] * 2, mesh))
    accumulate(on(mesh, [Replicate()] * mesh.ndim, 8, 7), copies)
    assert all(component.equal(numbers(8, 7) * 2) for component in copies.components)


def test_lists_of_results_and_pending_reductions(registering):
    @registering([torch.ops.dtckpt_tests.split_sums.default])
    def sums(x):
        return [([Partial(), Shard(0)], [Shard(0)]), ([Shard(0), Partial()], [Shard(1)])]

    first, second = split_sums(on(GRID, [Shard(0), Shard(1)], 6, 5))
    assert (first.placements, second.placements) == ((Partial(), Shard(0)), (Shard(0), Partial()))
    torch.testing.assert_close(first.full_tensor(), numbers(6, 5).sum(0))
    torch.testing.assert_close(second.full_tensor(), numbers(6, 5).sum(1))


def test_operators_that_are_known_already_do_as_they_are_told(registering):
    aten = torch.ops.aten

    @registering([aten._softmax.default, aten.mul_.Tensor])
    def columns(x, *rest):
        others = [Shard(1) if hasattr(one, "placements") else None for one in rest]
        return [([Shard(1)], [Shard(1), *others])]

    made = on(LINE, ROWS, 8, 4).softmax(0)
    assert made.placements == (Shard(1),)
    torch.testing.assert_close(made.full_tensor(), numbers(8, 4).softmax(0))
    for placements in (ROWS, COLUMNS):
        target = on(LINE, placements, 8, 4)
        assert target.mul_(on(LINE, ROWS, 8, 4)) is target
        assert target.placements == tuple(placements)
        torch.testing.assert_close(target.full_tensor(), numbers(8, 4) ** 2)


def test_shardings_that_do_not_fit_are_refused(registering):
    op = torch.ops.dtckpt_tests.rotate.default
    tensor = on(LINE, ROWS, 8, 8)
    wrong = {
        "expected 1 and 1": [([Shard(0)], [Shard(0), None, Shard(0)])],
        "expected a placement": [([Shard(0)], ["rows"])],
        "of 2 dims": [([Shard(2)], [Shard(0)])],
        "expected .8, 8., its piece": [([Replicate()], [Shard(0)])],
    }
    for words, rows in wrong.items():
        registering(op)(lambda x, dim, rows=rows: rows)
        with pytest.raises(LayoutError, match=words):
            rotate(tensor, 1)
    with pytest.raises(OperatorError, match="register_sharding: got"):
        registering("aten.add")


# --- implicit_replication -----------------------------------------------------------------------------------------


def test_all_threads_trust():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(are_plain_tensors_trusted()))
    with experimental.implicit_replication(), experimental.implicit_replication():
        thread.start()
        thread.join()
    assert seen == [True]
    assert not are_plain_tensors_trusted()


@pytest.mark.processes
def test_plain_tensors_are_not_compared_where_they_are_trusted(pool):
    for trusted, checked, made in pool.values(operator_cases.beside_plain, clients=2, group=True):
        assert trusted == [0, 0]
        assert checked > 0
        torch.testing.assert_close(made, numbers(10, 3) + numbers(3))
