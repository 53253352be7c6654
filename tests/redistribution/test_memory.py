"""What a change of layout takes by way of memory: results are made once, in the place where they end up."""

import pytest
import torch
from support.native_collective_cases import mesh_of

from dtckpt import UNSHARDED, Layout
from dtckpt.layout.region import Region
from dtckpt.redistribution.execute import program_of
from dtckpt.redistribution.messages import Box


def program(shape, source, target, before=None, clients=4, client=1):
    mesh = mesh_of((clients,), range(clients), client)
    return program_of(Layout(source, mesh, before), Layout(target, mesh), shape, torch.float32)


WHOLE = [UNSHARDED, UNSHARDED]


def test_a_sum_for_everyone_is_made_in_one_memory():
    found = program((512, 1024), WHOLE, WHOLE, {"a0": "sum"})
    whole, piece = found.memory(0)
    assert [hop.changes[0].target.sharding_specs for hop in found.hops] == [["a0", UNSHARDED], WHOLE]
    assert piece.made[1].data_ptr() == whole.made[1][128:].data_ptr()
    assert tuple(piece.made[1].shape) == (128, 1024)
    row = whole.made[1][0].nbytes
    assert [spare.nbytes for spare in piece.spare[1]] == [128 * row, 256 * row]


def test_terms_are_received_where_the_others_pieces_will_be():
    whole, piece = program((512, 1024), WHOLE, WHOLE, {"a0": "sum"}).memory(0)
    box = Box.cut(0, 1, Region((128, 0), (128, 1024)), Region((128, 0), (128, 1024)), torch.float32)
    taken = [piece.take(box) for _ in range(4)]
    starts = [whole.made[1][row].data_ptr() for row in (0, 256, 384)]
    assert [one.data_ptr() for one in taken[:3]] == starts
    assert taken[3] is None


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_an_empty_part_has_no_place(shape):
    found = program(shape, WHOLE, WHOLE, {"a0": "sum"}, client=3)
    assert not any(found.within)


def test_columns_leave_nothing_in_one_piece_to_spare():
    found = program((1, 4096), WHOLE, WHOLE, {"a0": "sum"})
    assert found.hops[0].changes[0].target.sharding_specs == [UNSHARDED, "a0"]
    _, piece = found.memory(0)
    assert tuple(piece.made[1].shape) == (1, 1024)
    assert piece.spare[1] == []
