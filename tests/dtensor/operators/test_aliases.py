"""Whatever shares memory with plain tensors shares values with DTensors, however these lie."""

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import SEED, examples

from dtckpt import UNSHARDED, Layout, Partial, Replicate, Shard, abstract_mesh, pack
from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.experimental import local_map

from .alias_programs import run_program, run_programs_on_clients, write_to_conjugate
from .operator_checks import record_redistributions

EXAMPLES = examples(60)
LINE = abstract_mesh({"x": 4})
MESHES = (abstract_mesh({"x": 3}), LINE, abstract_mesh({"x": 2, "y": 2}), abstract_mesh({"x": 1}))


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(MESHES), st.data())
def test_programs_of_views_and_writes(mesh, data):
    run_program(mesh, data.draw)


@pytest.mark.processes
@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 2, "y": 2}])
def test_programs_on_clients(pool, axes):
    clients = torch.Size(axes.values()).numel()
    counts = pool.values(run_programs_on_clients, axes, EXAMPLES // 6, SEED, clients=clients, group=True, timeout_s=200)
    assert len(set(counts)) == 1
    assert counts[0] > EXAMPLES // 12


def test_writes_to_data_reach_views_whose_values_had_to_move():
    whole = torch.arange(12.0).reshape(4, 3)
    ours = distribute_tensor(whole, LINE, [Shard(0)])
    for one in (whole, ours):
        one.rows = one[1], one[1]
        one.data.add_(1)
        one.rows[0].data.mul_(2)
    for row, other in zip(ours.rows, whole.rows, strict=True):
        assert torch.equal(row.full_tensor(), other)
    assert torch.equal(ours.full_tensor(), whole)


def test_writes_to_a_view_of_an_expanded_tensor_reach_its_memory():
    """The values of the diagonal had to move, and all indices along the expanded dim are one element in memory."""
    mesh = MESHES[0]
    plain = torch.arange(12.0).reshape(1, 3, 4)
    tensor = distribute_tensor(plain.clone(), mesh, [Shard(2)])
    for each in (plain, tensor):
        each.expand(2, 1, 3, 4).diagonal(0, 0, -1).add_(100)
    assert torch.equal(tensor.full_tensor(), plain)


def test_two_tensors_with_the_same_data_follow_it_both():
    whole = torch.arange(12.0).reshape(4, 3)
    ours = distribute_tensor(whole, LINE, [Shard(0)])
    other = distribute_tensor(torch.zeros(3), LINE, [Replicate()])
    row = ours[1]
    other.data = row
    ours.add_(1)
    assert torch.equal(other.full_tensor(), whole[1] + 1)
    assert torch.equal(row.full_tensor(), whole[1] + 1)


def test_copies_that_were_packed_as_one_tensor_share_it_with_their_views():
    shared = torch.arange(4.0)
    ours = pack([shared] * 4, Layout([UNSHARDED], LINE))
    view = ours.view(2, 2)
    view.add_(1)
    ours.mul_(2)
    expected = (torch.arange(4.0) + 1) * 2
    assert [component.flatten().tolist() for component in view.components] == [expected.tolist()] * 4


def unscale(tensors):
    found, factor = tensors[0].new_zeros(()), tensors[0].new_full((), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, factor)


UPDATES = {
    "foreach": lambda *tensors: torch._foreach_add_(list(tensors), 1),
    "foreach of lists": lambda *tensors: torch._foreach_mul_(list(tensors), list(tensors)),
    "amp": lambda *tensors: unscale(tensors),
    "batch norm": lambda mean, var: functional.batch_norm(torch.arange(8.0).view(2, 4), mean, var, training=True),
    "out": lambda one, other: torch.add(one, other, out=one),
    "fused step": lambda one, other: torch._fused_sgd_(
        [one], [other], [], weight_decay=0, momentum=0, lr=0.5, dampening=0, nesterov=False, maximize=False,
        is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_copies_that_were_packed_as_one_tensor_are_updated_once(name):
    plain = [torch.arange(4.0), torch.ones(4)]
    ours = [pack([one.clone()] * 4, Layout([UNSHARDED], LINE)) for one in plain]
    UPDATES[name](*plain)
    UPDATES[name](*ours)
    for one, expected in zip(ours, plain, strict=True):
        assert [component.tolist() for component in one.components] == [expected.tolist()] * 4


def test_shards_that_were_packed_as_one_tensor_get_numbers_of_their_own():
    ours = pack([torch.zeros(4)] * 4, Layout(["x"], LINE)).uniform_()
    assert ours.full_tensor().unique().numel() == 16
    whole = pack([torch.zeros(4)] * 4, Layout([UNSHARDED], LINE))
    assert local_map(lambda x: x.add_(1), [Replicate()])(whole).full_tensor().tolist() == [1] * 4


@pytest.mark.parametrize("name", ["foreach", "amp"])
def test_writes_to_two_views_of_one_tensor_reach_it_both(name):
    plain = torch.arange(8.0)
    ours = pack(list(plain.clone().chunk(4)), Layout(["x"], LINE))
    for whole in (plain, ours):
        UPDATES[name](whole[:3], whole[3:])
    assert ours.full_tensor().tolist() == plain.tolist()


def test_statistics_that_are_split_are_updated():
    values = torch.arange(8.0).view(2, 4)
    plain = [torch.zeros(4), torch.ones(4)]
    split = [pack(list(one.clone().chunk(4)), Layout(["x"], LINE)) for one in plain]
    rows = pack([values] * 4, Layout([UNSHARDED] * 2, LINE))
    functional.batch_norm(values, *plain, training=True)
    functional.batch_norm(rows, *split, training=True)
    whole = [pack([one.clone()] * 4, Layout([UNSHARDED], LINE)) for one in (torch.zeros(6), torch.ones(6))]
    functional.batch_norm(rows, *(one[1:5] for one in whole), training=True)
    for one, other, expected in zip(split, whole, plain, strict=True):
        torch.testing.assert_close(one.full_tensor(), expected)
        torch.testing.assert_close(other.full_tensor()[1:5], expected)


def test_the_scale_of_gradients_is_updated():
    plain = [torch.tensor(8.0), torch.tensor(0, dtype=torch.int32), torch.tensor(1.0)]
    ours = [pack([one.clone()] * 4, Layout([], LINE)) for one in plain]
    made = torch._amp_update_scale_(*ours, 2.0, 0.5, 3)
    torch._amp_update_scale_(*plain, 2.0, 0.5, 3)
    assert made is ours[0]
    assert [one.full_tensor().item() for one in ours[:2]] == [one.item() for one in plain[:2]]


ASSIGNED = {
    "row": lambda x: x.__setitem__(1, 5.0),
    "row of numbers": lambda x: x.__setitem__(-2, torch.arange(300.0)),
    "rows": lambda x: x.__setitem__(slice(1, 6, 2), 5.0),
    "element": lambda x: x.__setitem__((4, 7), 5.0),
    "part of a view": lambda x: x.t()[:, 2].add_(1),
}


@pytest.mark.parametrize("name", ASSIGNED)
@pytest.mark.parametrize("placements", [[Shard(0)], [Partial()]])
def test_writes_to_some_rows_move_no_others(name, placements):
    whole = torch.arange(600 * 300.0).reshape(600, 300)
    ours = distribute_tensor(whole, LINE, placements)
    with record_redistributions() as found:
        ASSIGNED[name](ours)
    assert max((numel for numel, _, _ in found), default=0) <= 3 * 300
    ASSIGNED[name](whole)
    assert torch.equal(ours.full_tensor(), whole)
    assert ours.placements == tuple(placements)


@pytest.mark.processes
def test_writes_to_conjugates_wait_for_no_client_whose_piece_is_empty(pool):
    expected = torch.complex(torch.arange(4.0), torch.ones(4)).conj() * 2
    for made in pool.values(write_to_conjugate, clients=3, group=True):
        assert torch.equal(made, expected.conj().resolve_conj())
