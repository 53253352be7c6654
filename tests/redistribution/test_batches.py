"""Tensors that change their layouts together get what each gets alone, in few messages."""

import pytest
import torch

from dtckpt import UNSHARDED, Layout, abstract_mesh, copy_to_mesh, relayout
from dtckpt.errors import LayoutError

from . import batch_cases

MESH = abstract_mesh({"x": 2})
ROWS, COLUMNS = Layout(["x", UNSHARDED], MESH), Layout([UNSHARDED, "x"], MESH)


@pytest.mark.processes
@pytest.mark.parametrize("clients", [2, 3, 4])
def test_together_as_one_by_one(pool, clients):
    assert pool.values(batch_cases.check, range(25), clients=clients, group=True) == [[]] * clients


@pytest.mark.processes
def test_strides_of_dims_of_size_one_do_not_matter(pool):
    assert pool.values(batch_cases.strides, clients=4, group=True) == [[]] * 4


@pytest.mark.processes
def test_many_small_tensors_take_one_message_each_way(pool):
    for counts, seen, wrong in pool.values(batch_cases.messages, 100, 6, clients=2, group=True):
        assert wrong == []
        assert counts == [(1, 1)]
        # Boxes are aligned in the message, so it is a little longer than what it holds.
        (communication,) = seen
        assert 100 * 9 * 8 <= communication.nbytes <= 100 * (9 * 8 + 16)
        assert communication.clients == (0, 1)


@pytest.mark.processes
def test_large_tensors_are_messages_of_their_own(pool):
    for counts, _, wrong in pool.values(batch_cases.messages, 3, 1024, clients=2, group=True):
        assert wrong == []
        assert counts == [(3, 3)]


@pytest.mark.processes
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_gradients_of_a_batch(pool, clients):
    assert pool.values(batch_cases.gradients, clients=clients, group=True) == [[]] * clients


def test_a_tree_keeps_what_is_no_tensor():
    tensor = copy_to_mesh(torch.arange(8.0).view(2, 4), ROWS)
    moved = relayout({"a": tensor, "b": [None, 3, "text"], "c": torch.ones(2, 4)}, COLUMNS)
    assert moved["b"] == [None, 3, "text"]
    assert moved["a"].layout == moved["c"].layout == COLUMNS
    assert relayout([tensor, tensor], [ROWS, COLUMNS])[0] is tensor


def test_trees_that_differ_are_refused():
    tensor = copy_to_mesh(torch.ones(2, 4), ROWS)
    with pytest.raises(LayoutError, match="different trees"):
        relayout([tensor, tensor], [ROWS])
    with pytest.raises(LayoutError, match="different trees"):
        relayout({"a": tensor}, {"b": ROWS})


@pytest.mark.processes
def test_a_tree_that_differs_on_one_client_is_an_error_on_all(pool):
    for text, is_right in pool.values(batch_cases.trees_that_differ, clients=3, group=True):
        assert "different trees" in text
        assert is_right
