"""The memory that a redistribution takes: outputs are made once, where they end up."""

import pytest
import torch

from dtckpt import UNSHARDED, Layout
from dtckpt.layout.region import Region
from dtckpt.redistribution.execute import plan_redistribution
from dtckpt.redistribution.messages import Box

from .native_collective_cases import mesh_of


def plan_of(shape, source, target, before=None, clients=4, client=1):
    mesh = mesh_of((clients,), range(clients), client)
    return plan_redistribution(Layout(source, mesh, before), Layout(target, mesh), shape, torch.float32)


WHOLE = [UNSHARDED, UNSHARDED]


def test_a_sum_for_everyone_is_made_in_one_buffer():
    plan = plan_of((512, 1024), WHOLE, WHOLE, {"a0": "sum"})
    whole, piece = plan.output_buffers(0)
    assert [exchange.changes[0].target.sharding_specs for exchange in plan.exchanges] == [["a0", UNSHARDED], WHOLE]
    assert piece.outputs[1].data_ptr() == whole.outputs[1][128:].data_ptr()
    assert tuple(piece.outputs[1].shape) == (128, 1024)
    row = whole.outputs[1][0].nbytes
    assert [spare.nbytes for spare in piece.spare[1]] == [128 * row, 256 * row]


def test_terms_are_received_where_the_others_pieces_will_be():
    whole, piece = plan_of((512, 1024), WHOLE, WHOLE, {"a0": "sum"}).output_buffers(0)
    box = Box.in_component(0, 1, Region((128, 0), (128, 1024)), Region((128, 0), (128, 1024)), torch.float32)
    spares = [piece.take_spare(box) for _ in range(4)]
    starts = [whole.outputs[1][row].data_ptr() for row in (0, 256, 384)]
    assert [one.data_ptr() for one in spares[:3]] == starts
    assert spares[3] is None


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_an_empty_part_has_no_place(shape):
    plan = plan_of(shape, WHOLE, WHOLE, {"a0": "sum"}, client=3)
    assert not any(plan.index_in_next)


def test_columns_leave_nothing_in_one_piece_to_spare():
    plan = plan_of((1, 4096), WHOLE, WHOLE, {"a0": "sum"})
    assert plan.exchanges[0].changes[0].target.sharding_specs == [UNSHARDED, "a0"]
    _, piece = plan.output_buffers(0)
    assert tuple(piece.outputs[1].shape) == (1, 1024)
    assert piece.spare[1] == []
