import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import axis_sizes, cluster_mesh, dtype_names, layouts, shapes

from dtckpt.checkpoint.saving.plan import NO_CLIENT, Holding, TensorSpec, holdings_of, kept_plan, plan_save
from dtckpt.errors import DTypeError, LayoutError, SliceError, TensorNameError
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.region import Region


@st.composite
def cluster_states(draw):
    """Axis sizes, number of clients, chunk bound, and tensors as (shape, dtype, sharding specs)."""
    axes = draw(axis_sizes())
    total = math.prod(axes.values())
    clients = draw(st.sampled_from([count for count in range(1, total + 1) if total % count == 0]))
    mesh = abstract_mesh(axes)
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes | st.integers(1, 200).map(lambda size: (size,)))
        tensors.append((shape, draw(dtype_names), draw(layouts(mesh, len(shape))).sharding_specs))
    return axes, clients, draw(st.sampled_from([16, 100, 1 << 20])), tensors


def specs_on(mesh, tensors):
    specs = []
    for position, (shape, dtype, sharding) in enumerate(tensors):
        layout = Layout(sharding, mesh)
        specs.append(TensorSpec(f"t{position}", shape, dtype, dtype, holdings_of(layout, shape), layout))
    return specs


def holds(spec, client, region):
    return any(client in holding.clients and holding.region.contains(region) for holding in spec.holdings)


def chunk_nbytes(item, number):
    return item.grid.region(item.grid.index(number)).numel * DTYPES[item.spec.stored_dtype].itemsize


def nbytes_of(plan, client):
    return sum(chunk_nbytes(item, number) for item in plan.tensors for number in item.owned_by(client))


@given(cluster_states())
def test_the_plan_knows_the_place_of_every_chunk(drawn):
    axes, clients, bound, tensors = drawn
    plan = plan_save(specs_on(cluster_mesh(axes, clients, 0), tensors), bound)
    chunks = [
        (position, number) for position, item in enumerate(plan.tensors) for number in range(item.grid.num_chunks)
    ]
    assert plan.owners.tolist() == [plan.tensors[position].owners[number] for position, number in chunks]
    for client in range(clients):
        owned = [
            (position, number) for position, item, number in plan.owned_by(client) if item is plan.tensors[position]
        ]
        assert owned == [chunks[place] for place in plan.chunks_of(client)]
        assert owned == [(at, number) for at, item in enumerate(plan.tensors) for number in item.owned_by(client)]


def test_the_plan_of_the_same_specs_is_kept_and_cannot_be_changed():
    specs = tuple(specs_on(cluster_mesh({"x": 2}, 2, 0), [((4, 4), "float32", ["x", UNSHARDED])]))
    plan = kept_plan(specs, 1 << 20)
    assert kept_plan(specs, 1 << 20) is plan
    assert kept_plan(specs, 16) is not plan
    with pytest.raises(ValueError, match="read-only"):
        plan.tensors[0].owners[0] = 1


@given(cluster_states())
def test_every_element_is_written_once_by_who_has_it(drawn):
    axes, clients, bound, tensors = drawn
    plan = plan_save(specs_on(cluster_mesh(axes, clients, 0), tensors), bound)
    moves = {(source, owner): set(plan.moves(source, owner)) for source in range(clients) for owner in range(clients)}
    for position, tensor in enumerate(plan.tensors):
        assert tensor.missing == ()
        written = np.zeros(tensor.spec.shape, int)
        for client in range(clients):
            for number in tensor.owned_by(client):
                chunk = tensor.grid.region(tensor.grid.index(number))
                pieces = tensor.pieces.get(number)
                if pieces is None:
                    assert holds(tensor.spec, client, chunk)
                    written[chunk.slices()] += 1
                    continue
                for piece in pieces:
                    assert chunk.contains(piece.region)
                    assert holds(tensor.spec, piece.client, piece.region)
                    written[piece.region.slices()] += 1
                    moved = (position, number, piece.region) in moves[piece.client, client]
                    assert moved == (piece.client != client)
        assert (written == 1).all()


@given(cluster_states())
def test_all_clients_plan_alike(drawn):
    axes, clients, bound, tensors = drawn
    plans = [plan_save(specs_on(cluster_mesh(axes, clients, client), tensors), bound) for client in range(clients)]
    for plan in plans:
        assert plan.topic == plans[0].topic
        for mine, first in zip(plan.tensors, plans[0].tensors, strict=True):
            assert (mine.path, mine.grid, dict(mine.pieces)) == (first.path, first.grid, dict(first.pieces))
            assert mine.owners.tolist() == first.owners.tolist()


@given(cluster_states())
def test_bytes_are_counted_once(drawn):
    axes, clients, bound, tensors = drawn
    plan = plan_save(specs_on(cluster_mesh(axes, clients, 0), tensors), bound)
    assert sum(nbytes_of(plan, client) for client in range(clients)) == sum(
        math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype, _ in tensors
    )


@given(st.integers(1, 8), st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.sampled_from([64, 1000, 10**6]))
def test_copies_are_spread_evenly(clients, sizes, bound):
    mesh = cluster_mesh({"x": clients}, clients, 0)
    plan = plan_save(specs_on(mesh, [((size,), "float32", [UNSHARDED]) for size in sizes]), bound)
    loads = [nbytes_of(plan, client) for client in range(clients)]
    chunks = [chunk_nbytes(item, number) for item in plan.tensors for number in range(item.grid.num_chunks)]
    assert max(loads) <= Fraction(sum(loads), clients) + max(chunks, default=0)


@given(st.integers(1, 6), st.integers(1, 3000), st.integers(1, 3000))
def test_copies_fill_up_what_shards_leave_uneven(clients, sharded, copied):
    mesh = cluster_mesh({"x": clients}, clients, 0)
    plan = plan_save(specs_on(mesh, [((sharded,), "int8", ["x"]), ((copied,), "int8", [UNSHARDED])]), 16)
    loads = [nbytes_of(plan, client) for client in range(clients)]
    own = -(-sharded // clients)
    assert max(loads) <= max(own, Fraction(sharded + copied, clients) + 16)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple), st.integers(64, 4096), dtype_names)
def test_chunks_keep_the_bound_where_shards_do_not_forbid_it(shape, bound, dtype):
    itemsize = DTYPES[dtype].itemsize
    plan = plan_save([TensorSpec("w", shape, dtype, dtype, (Holding(Region.full(shape), (0,)),))], max(bound, itemsize))
    (tensor,) = plan.tensors
    assert math.prod(tensor.grid.chunk_shape) * itemsize <= max(bound, itemsize)
    elements = math.prod(shape)
    # Bounded chunks need not be tiny ones: each cut dim may leave at most half of the bound unused.
    assert tensor.grid.num_chunks <= max(1, 2 ** len(shape) * 2 * elements * itemsize // bound + 1)


@pytest.mark.parametrize(("rows", "shards"), [(4096, 4), (1024, 8), (6000, 6)])
def test_chunks_of_even_shards_keep_the_bound(rows, shards):
    plan = plan_save(
        specs_on(cluster_mesh({"x": shards}, shards, 0), [((rows, 64), "float32", ["x", UNSHARDED])]), 8192
    )
    (tensor,) = plan.tensors
    assert max(chunk_nbytes(tensor, number) for number in range(tensor.grid.num_chunks)) <= 8192
    assert not tensor.pieces


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_a_nested_uneven_vocabulary_makes_few_chunks_and_small_moves(order):
    mesh = cluster_mesh({"x": 2, "y": 2}, 4, 0)
    plan = plan_save(specs_on(mesh, [((50257, 768), "float32", [order, UNSHARDED])]), 1 << 30)
    (tensor,) = plan.tensors
    assert tensor.grid.num_chunks <= 8
    moved = sum(
        region.shape[0] for source in range(4) for owner in range(4) for _, _, region in plan.moves(source, owner)
    )
    assert 0 < moved <= 4


def test_even_shards_move_nothing():
    mesh = cluster_mesh({"x": 2, "y": 2}, 4, 0)
    plan = plan_save(specs_on(mesh, [((50256, 8), "float32", [("x", "y"), UNSHARDED])]), 1 << 30)
    assert not plan.has_moves
    assert plan.tensors[0].grid.num_chunks == 4


@given(st.data())
def test_slices_leave_out_what_was_not_saved(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    length = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True))
    region = Region(start, length)
    (tensor,) = plan_save([TensorSpec("w", shape, "int8", "int8", (Holding(region, (0,)),))], 1 << 20).tensors
    for number in range(tensor.grid.num_chunks):
        chunk = tensor.grid.region(tensor.grid.index(number))
        overlap = chunk.intersect(region)
        assert overlap in (None, chunk)
        assert tensor.owners[number] == (NO_CLIENT if overlap is None else 0)


def spec_of(name, region, shape=(4, 4), dtype="int8"):
    return TensorSpec(name, shape, dtype, dtype, (Holding(region, (0,)),))


def test_slices_of_one_tensor_are_put_together():
    upper, lower = Region((0, 0), (2, 4)), Region((2, 0), (2, 4))
    (tensor,) = plan_save([spec_of("w", upper), spec_of("w", lower)], 1 << 20).tensors
    assert {holding.region for holding in tensor.spec.holdings} == {upper, lower}
    assert tensor.missing == ()


@pytest.mark.parametrize(
    ("specs", "error", "reason"),
    [
        ([spec_of("w", Region((0, 0), (3, 4))), spec_of("w", Region((2, 0), (2, 4)))], SliceError, "overlap; got"),
        ([spec_of("w", Region((0, 0), (2, 4))), spec_of("w", Region((0, 0), (2, 4)))], SliceError, "overlap; got"),
        ([spec_of("w", Region((0,), (2,)), (4,)), spec_of("w", Region((2,), (2,)), (5,))], SliceError, "disagree"),
        ([spec_of("w", Region((0,), (2,)), (4,)), spec_of("w", Region((2,), (2,)), (4,), "bool")], SliceError, "bool"),
        ([spec_of("../w", Region((0, 0), (2, 4)))], TensorNameError, "cannot be stored"),
        ([spec_of("w", Region((0, 0), (2, 4)), dtype="int4")], DTypeError, "cannot be stored; got int4"),
    ],
)
def test_what_cannot_be_planned(specs, error, reason):
    with pytest.raises(error, match=reason):
        plan_save(specs, 1 << 20)


def test_pending_reductions_have_no_values_to_save():
    layout = Layout([UNSHARDED], abstract_mesh({"x": 2}), partial={"x": "sum"})
    with pytest.raises(LayoutError, match="pending reductions cannot be saved"):
        holdings_of(layout, (4,))


def test_the_topic_tells_states_apart():
    def topic(shape=(8,), dtype="float32", sharding=("x",), salt=b"", bound=1 << 20):
        return plan_save(specs_on(cluster_mesh({"x": 2}, 2, 0), [(shape, dtype, list(sharding))]), bound, salt).topic

    topics = {
        topic(),
        topic(shape=(6,)),
        topic(dtype="int32"),
        topic(sharding=[UNSHARDED]),
        topic(salt=b"tree"),
        topic(bound=4),
    }
    assert len(topics) == 6
    assert topic() == topic()
