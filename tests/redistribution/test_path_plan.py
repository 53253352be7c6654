"""Paths between layouts: they lead there, alike on all clients, through no large pieces and with few messages."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import cluster_mesh

from dtckpt import UNSHARDED, Layout, abstract_mesh
from dtckpt.layout.placement import REDUCE_OPS
from dtckpt.redistribution.exchange_plan import kept_axes, plan_exchange, reduced_axes, reduction_kind
from dtckpt.redistribution.path_plan import plan_path

SIZES = ((4,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (3, 1, 2))


def layout_of(rng, mesh, rank, ops=()):
    by_dim = [[] for _ in range(rank)]
    partial = {}
    for axis in rng.sample(mesh.dim_names, mesh.ndim):
        kind = rng.random()
        if kind < 0.6 and rank:
            by_dim[rng.randrange(rank)].append(axis)
        elif kind < 0.8 and ops:
            partial[axis] = rng.choice(ops)
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh, partial)


def drawn(seed, ops=(), client=0):
    """Return two layouts on one mesh of a device per client, and a shape that all their cuts divide."""
    rng = random.Random(seed)
    sizes = rng.choice(SIZES)
    axes = dict(zip("abc", sizes, strict=False))
    mesh = cluster_mesh(axes, math.prod(sizes), client)
    rank = rng.randint(1, 3)
    source, target = layout_of(rng, mesh, rank, ops), layout_of(rng, mesh, rank, ops)
    return source, target, tuple(math.prod(sizes) * rng.randint(1, 3) for _ in range(rank))


def piece(layout, shape):
    return math.prod(size // shards for size, shards in zip(shape, layout.shard_grid, strict=True))


def seen_by(layout, client):
    mesh = layout.mesh
    return Layout(layout.sharding_specs, cluster_mesh(mesh.axis_sizes, mesh.size(), client), layout.partial)


def received(source, path, shape, client):
    """Return the elements that a client gets from others on a path."""
    layouts = [seen_by(each, client) for each in (source, *path)]
    return sum(plan_exchange(here, there, shape, client).num_received for here, there in itertools.pairwise(layouts))


def missing(source, target, shape, client):
    """Return the elements of a client's new box that its old one lacks: what any way has to bring."""
    device = source.mesh.device_ids[client]
    old, new = source.region(device, shape), target.region(device, shape)
    common = new.intersect(old)
    return new.numel - (common.numel if common else 0)


def gathered_and_sliced(source, target, shape):
    """Return the elements that a device gets where axis after axis is gathered, the last one first, down to a slice.

    PyTorch's redistribution takes this path where no axis has a separate exchange.
    """
    total, numel = 0, piece(source, shape)
    for have, want in zip(source.split_axes, target.split_axes, strict=True):
        same = len([1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(have, want, strict=False))])
        for axis in reversed(have[same:]):
            size = source.mesh.dim_size(axis)
            total, numel = total + numel * (size - 1), numel * size
    return total


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150))
def test_a_path_leads_to_the_target_through_no_larger_pieces(seed):
    source, target, shape = drawn(seed, REDUCE_OPS)
    path = plan_path(source, target, shape)
    end = path[-1] if path else source
    assert end.sharding_specs == target.sharding_specs
    assert end.mesh == target.mesh
    assert end.partial.items() <= target.partial.items()
    bound = max(piece(source, shape), piece(target, shape))
    for here, there in itertools.pairwise((source, *path)):
        assert here != there
        assert piece(there, shape) <= bound
        # One exchange reduces terms of one kind and starts no new ones.
        assert there.partial.items() <= here.partial.items()
        assert len({reduction_kind(here.partial[axis]) for axis in reduced_axes(here, there)}) <= 1
        assert set(kept_axes(here, there)) == set(there.partial)


@given(st.integers(0, 2**32), st.booleans())
def test_every_client_finds_the_same_path(seed, is_native):
    source, target, shape = drawn(seed, REDUCE_OPS)
    paths = []
    for client in range(source.mesh.size()):
        theirs = plan_path(seen_by(source, client), seen_by(target, client), shape, is_native=is_native)
        paths.append([(each.sharding_specs, each.partial) for each in theirs])
    assert all(path == paths[0] for path in paths)


@given(st.integers(0, 2**32))
def test_a_move_brings_no_more_than_gathering_and_slicing(seed):
    source, target, shape = drawn(seed)
    path = plan_path(source, target, shape)
    bound = gathered_and_sliced(source, target, shape)
    for client in range(source.mesh.size()):
        got = received(source, path, shape, client)
        assert got <= bound
        if len(path) == 1:
            assert got == missing(source, target, shape, client)
        else:
            assert got >= missing(source, target, shape, client)


@given(st.integers(0, 2**32))
def test_a_reduction_brings_no_term_twice(seed):
    source, target, shape = drawn(seed, ("sum",))
    target = Layout(target.sharding_specs, target.mesh)
    direct = [target] if source != target else []
    worst = [
        max(received(source, path, shape, client) for client in range(source.mesh.size()))
        for path in (plan_path(source, target, shape), direct)
    ]
    assert worst[0] <= worst[1]


def test_nothing_to_do_is_no_hop():
    mesh = abstract_mesh({"x": 2, "y": 2})
    rows = Layout(["x", UNSHARDED], mesh)
    assert plan_path(rows, rows, (4, 4)) == ()
    # Terms are made of the result, so nothing has to travel for them.
    assert plan_path(rows, Layout(["x", UNSHARDED], mesh, {"y": "sum"}), (4, 4)) == ()


CUBE = {"a": 16, "b": 16, "c": 16}


@pytest.fixture(scope="module")
def cube():
    return cluster_mesh(CUBE, 16**3, 0)


def takers_and_givers(source, path, shape):
    """Return how many messages this client sends and receives on a path."""
    plans = [plan_exchange(here, there, shape, 0) for here, there in itertools.pairwise((source, *path))]
    return sum(len(plan.sends) for plan in plans), sum(len(plan.receives) for plan in plans)


@pytest.mark.parametrize(
    "specs",
    [[("a", "b", "c"), UNSHARDED, UNSHARDED], ["a", "b", "c"], [("c", "a"), "b", UNSHARDED]],
)
def test_gathers_over_several_axes_of_many_devices_go_axis_by_axis(cube, specs):
    shape = (4096, 64, 64)
    source, target = Layout(specs, cube), Layout.replicated(cube, 3)
    path = plan_path(source, target, shape)
    assert len(path) == 3
    assert takers_and_givers(source, path, shape)[1] == 45
    # Still no byte comes twice.
    assert sum(
        plan_exchange(*pair, shape, 0).num_received for pair in itertools.pairwise((source, *path))
    ) == math.prod(shape) - piece(source, shape)


def test_a_gather_along_one_axis_is_one_hop(cube):
    source, target = Layout([("a", "b"), "c"], cube), Layout([("a", "b"), UNSHARDED], cube)
    assert plan_path(source, target, (256, 64)) == (target,)


def test_an_exchange_along_one_axis_is_direct(cube):
    source, target = Layout(["a", UNSHARDED], cube), Layout([UNSHARDED, "a"], cube)
    assert plan_path(source, target, (64, 64)) == (target,)


def test_a_slice_is_direct_and_takes_no_message(cube):
    source, target = Layout(["a", UNSHARDED], cube), Layout([("a", "b"), "c"], cube)
    path = plan_path(source, target, (256, 64))
    assert path == (target,)
    assert takers_and_givers(source, path, (256, 64)) == (0, 0)


def test_a_sum_for_everyone_is_scattered_first():
    mesh = cluster_mesh({"x": 4}, 4, 0)
    source, target = Layout([UNSHARDED, UNSHARDED], mesh, {"x": "sum"}), Layout.replicated(mesh, 2)
    scattered, gathered = plan_path(source, target, (8, 8))
    assert scattered.partial == gathered.partial == {}
    assert math.prod(scattered.shard_grid) == 4
    assert gathered == target
    assert plan_path(source, target, (8, 8), is_native=True) == (target,)


def test_terms_of_different_kinds_are_reduced_one_axis_at_a_time():
    mesh = cluster_mesh({"x": 2, "y": 2}, 4, 0)
    source = Layout([UNSHARDED], mesh, {"x": "sum", "y": "max"})
    path = plan_path(source, Layout.replicated(mesh, 1), (8,))
    assert path[0].partial == {"x": "sum"}
    assert path[-1].partial == {}


def test_another_mesh_is_reached_at_once():
    one, other = cluster_mesh({"x": 4}, 4, 0), cluster_mesh({"x": 2, "y": 2}, 4, 0)
    target = Layout([("x", "y")], other)
    assert plan_path(Layout(["x"], one), target, (8,)) == (target,)
