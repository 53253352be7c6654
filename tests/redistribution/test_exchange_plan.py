"""Plans of changes of layout: their moves by definition, and that a client looks only at boxes that touch its own."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import axis_sizes, cluster_mesh

from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region
from dtckpt.redistribution.exchange_plan import (
    Move,
    kept_axes,
    overlapping_shards,
    plan_exchange,
    reduced_axes,
    term_of,
)


@st.composite
def meshes(draw):
    """Meshes of few clients that own any devices: runs of them, or here and there, also under one and the same name."""
    axes = draw(axis_sizes(max_size=3))
    total = math.prod(axes.values())
    owners = draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    names = [f"/job:worker/task:{owner}/device:CPU:{device}" for device, owner in enumerate(owners)]
    names = draw(st.sampled_from([names, sorted(names), names[:1] * total]))
    first = draw(st.sampled_from([0, 0, 5]))
    ids = np.arange(first, first + total).reshape(tuple(axes.values()))
    return Mesh(list(axes), ids, [], [], "", names)


@st.composite
def layouts(draw, mesh, rank):
    """Layouts with axes in any order over the dims, over pending reductions and over nothing."""
    by_dim = [[] for _ in range(rank)]
    partial = {}
    for axis in draw(st.permutations(mesh.dim_names)):
        use = draw(st.integers(-2, rank - 1))
        if use == -2:
            partial[axis] = draw(st.sampled_from(["sum", "avg", "max"]))
        elif use >= 0:
            by_dim[use].append(axis)
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh, partial)


@st.composite
def changes(draw):
    """A source layout, a target layout and a global shape."""
    source = draw(meshes())
    target = source if draw(st.booleans()) else draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    return draw(layouts(source, len(shape))), draw(layouts(target, len(shape))), shape


def holders(layout, axes):
    """Return the devices of each client that hold each part, by looking at every device."""
    found = defaultdict(lambda: defaultdict(list))
    for device in layout.mesh.device_ids:
        part = layout.shard_index(device), term_of(layout, axes, device)
        found[part][layout.mesh.client_of(device)].append(device)
    return found


def some_device(clients):
    return next(iter(clients.values()))[0]


def turn_of(source, target, axes, receiver):
    """Return a receiver's position among the replicas of a part, on one mesh; else its position in its mesh."""
    mesh = target.mesh
    if source.mesh != mesh:
        return receiver - mesh.min_global_device_id()
    turn = 0
    for name, coordinate in zip(mesh.dim_names, mesh.coordinate(receiver), strict=True):
        if name not in axes and not any(name in split for split in source.split_axes):
            turn = turn * mesh.dim_size(name) + coordinate
    return turn


def by_definition(source, target, shape):
    """Return all moves as (kind, sending client, receiving client, move), and whether no client needs another."""
    kept, reduced = kept_axes(source, target), reduced_axes(source, target)
    old_parts, new_parts = holders(source, (*kept, *reduced)), holders(target, kept)
    terms = sorted({coordinates[len(kept) :] for _, coordinates in old_parts})
    names = source.mesh.portable().global_devices()
    by_name = dict(zip(names, source.mesh.device_ids, strict=True))
    name_of = dict(zip(target.mesh.device_ids, target.mesh.portable().global_devices(), strict=True))

    def local(devices, receiver):
        old = receiver if source.mesh == target.mesh else by_name.get(name_of[receiver])
        return old if old in devices else devices[receiver % len(devices)]

    boxes = {index: source.region(some_device(clients), shape) for (index, _), clients in old_parts.items()}
    moves = []
    for (_, coordinates), clients in new_parts.items():
        new_box = target.region(some_device(clients), shape)
        for (index, old_box), (client, receivers) in itertools.product(boxes.items(), clients.items()):
            box = old_box.intersect(new_box)
            if box is None:
                continue
            parts = [old_parts[index, (*coordinates, *term)] for term in terms]
            has_all = all(client in part for part in parts)
            for part, receiver in itertools.product(parts, receivers if has_all else receivers[:1]):
                if client in part:
                    kind, sender, device = "copy", client, local(part[client], receiver)
                else:
                    turn, number = divmod(turn_of(source, target, (*kept, *reduced), receiver), len(part))
                    sender = sorted(part)[number]
                    kind, device = "send", part[sender][turn % len(part[sender])]
                moves.append((kind, sender, client, Move(receiver, box.offset, box.shape, device)))
            if not has_all:
                moves += [
                    ("forward", client, client, Move(other, box.offset, box.shape, receivers[0]))
                    for other in receivers[1:]
                ]
    return moves, all(set(target.mesh.clients) <= set(clients) for clients in old_parts.values())


@given(changes())
def test_plans_are_what_a_look_at_every_pair_of_devices_gives(change):
    source, target, shape = change
    moves, is_local = by_definition(source, target, shape)
    for client in {*source.mesh.clients, *target.mesh.clients, 9}:
        plan = plan_exchange(source, target, shape, client)
        sends, receives = defaultdict(list), defaultdict(list)
        for kind, sender, receiver, move in moves:
            if kind == "send" and sender == client:
                sends[receiver].append(move)
            if kind == "send" and receiver == client:
                receives[sender].append(move)
        own = {
            what: [move for kind, _, receiver, move in moves if (kind, receiver) == (what, client)]
            for what in ("copy", "forward")
        }
        assert plan.copies == tuple(sorted(own["copy"]))
        assert plan.forwards == tuple(sorted(own["forward"]))
        assert list(plan.sends.items()) == [(peer, tuple(sorted(sends[peer]))) for peer in sorted(sends)]
        assert list(plan.receives.items()) == [(peer, tuple(sorted(receives[peer]))) for peer in sorted(receives)]
        assert plan.is_local == is_local


@given(changes(), st.data())
def test_meeting_finds_every_shard_that_shares_an_element(change, data):
    layout, _, shape = change
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    length = tuple(data.draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True))
    region = Region(start, length)
    expected = {}
    for device in layout.mesh.device_ids:
        common = layout.region(device, shape).intersect(region)
        if common is not None:
            expected[layout.shard_index(device)] = common
    assert dict(overlapping_shards(layout, shape, region)) == expected


@pytest.mark.parametrize(
    ("devices", "specs", "is_local"),
    [
        (1, [UNSHARDED], True),
        (2, [UNSHARDED], True),
        (1, ["x"], False),
        (2, ["x"], False),
        (1, ["y"], False),
        (2, ["y"], True),  # each client has one device in every column
    ],
)
def test_a_plan_is_local_where_each_client_holds_all_parts(devices, specs, is_local):
    mesh = cluster_mesh({"x": 2, "y": 2}, 4 // devices, 0)
    plan = plan_exchange(Layout(specs, mesh), Layout(["x"], mesh), (8,), 0)
    assert plan.is_local == is_local


@pytest.mark.parametrize("receiver", [0, 1])
def test_what_clients_outside_of_the_target_lack_does_not_matter(receiver):
    names = [f"/job:worker/task:{owner}/device:CPU:{device}" for device, owner in enumerate([0, 1, 0, 0])]
    source = Mesh(["x", "y"], np.arange(4).reshape(2, 2), [], [], "", names)
    target = Mesh(["x"], np.arange(1), [], [], "", [names[receiver]])
    plan = plan_exchange(Layout(["x"], source), Layout([UNSHARDED], target), (4,), 1)
    assert plan.is_local == (receiver == 0)


class Looks:
    """Counts the shards whose bounds are asked for."""

    def __init__(self, monkeypatch):
        self.count = 0
        bounds = Layout.shard_bounds

        def counted(layout, *arguments):
            self.count += 1
            return bounds(layout, *arguments)

        monkeypatch.setattr(Layout, "shard_bounds", counted)
        monkeypatch.setattr(Layout, "shards", None)  # which lists them all

    def at(self, source, target, shape, client):
        self.count = 0
        plan = plan_exchange(source, target, shape, client)
        moves = itertools.chain(plan.copies, plan.forwards, *plan.sends.values(), *plan.receives.values())
        return self.count, len(list(moves))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("position", [0.1, 0.4], ids=["in both meshes", "in the target only"])
@pytest.mark.parametrize(
    "specs", [(("tp", "dp"), UNSHARDED), ("dp", "tp"), (UNSHARDED, ("dp", "tp")), (UNSHARDED, "tp"), ("tp", UNSHARDED)]
)
def test_what_a_client_looks_at_does_not_grow_with_the_mesh(monkeypatch, devices, position, specs):
    looks = Looks(monkeypatch)
    seen = []
    for dp in (32, 512):
        clients = 4 * dp * 8 // devices
        client = int(clients * position)
        # The target is four times the source, of which it has the devices in front.
        target = cluster_mesh({"dp": 4 * dp, "tp": 8}, clients, client)
        source = Mesh(["dp", "tp"], np.arange(8 * dp).reshape(dp, 8), [], [], "", target.global_devices()[: 8 * dp])
        shape = (4 * dp * 8 + 8, 4 * dp * 8)
        seen.append(looks.at(Layout(specs, source), Layout(specs, target), shape, client))
    assert max(itertools.chain(*seen)) < 60 * devices
    (looked, moves), (later_looked, later_moves) = seen
    assert later_looked <= looked + 8 * devices
    assert later_moves <= moves + 8 * devices


def test_one_of_many_that_hold_a_tensor_looks_only_at_those_who_ask_it(monkeypatch):
    mesh = cluster_mesh({"x": 4096}, 4096, 7)
    split = abstract_mesh({"x": 4096 * 3})
    names = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(split.size())]
    target = Mesh(["x"], split.global_device_ids(), [7], names[7:8], "", names)
    looked, moves = Looks(monkeypatch).at(Layout([UNSHARDED], mesh), Layout(["x"], target), (4096 * 3,), 7)
    assert moves == 3  # its own piece, and the pieces of two clients that hold nothing
    assert looked < 20


def test_all_copies_give_as_much():
    mesh = Mesh(
        ["a", "b"], np.arange(16).reshape(4, 4), [], [], "", [f"/job:w/task:{i}/device:CPU:0" for i in range(16)]
    )
    source, target = Layout(["b"], mesh), Layout.replicated(mesh, 1)
    sent = {len(plan_exchange(source, target, (64,), client).sends) for client in mesh.clients}
    assert sent == {3}
