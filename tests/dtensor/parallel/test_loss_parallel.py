"""`loss_parallel` on one client of several devices; see also `test_several_clients`."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtckpt import abstract_mesh
from dtckpt.dtensor import Partial, Shard, distribute_tensor
from dtckpt.dtensor.operators import dispatch
from dtckpt.dtensor.parallel import loss_parallel
from dtckpt.errors import OperatorError

MESH = abstract_mesh({"tp": 4})


def scores_of(*shape, dtype=torch.float32):
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return tensor.clone().requires_grad_(), distribute_tensor(tensor, MESH, [Shard(1)]).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [8, 6, 3])
def test_dtypes_and_uneven_classes(dtype, classes):
    plain, scores = scores_of(5, classes, dtype=dtype)
    targets = torch.arange(5) % classes
    targets[0] = -100
    wanted = nn.CrossEntropyLoss()(plain, targets)
    wanted.backward()
    dispatch.clear()
    with loss_parallel():
        loss = nn.CrossEntropyLoss()(scores, targets)
        loss.backward()
    assert (loss.dtype, scores.grad.dtype) == (dtype, dtype)
    assert not [func for (func, route), count in dispatch.counts().items() if route == "replication" and count]
    # Sums are made in float32 here, and some of PyTorch's on a CPU in the dtype of the scores.
    tolerance = {} if dtype.itemsize > 2 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(loss.detach().full_tensor(), wanted.detach(), **tolerance)
    torch.testing.assert_close(scores.grad.full_tensor(), plain.grad, **tolerance)


def test_large_scores_do_not_overflow():
    _, scores = scores_of(5, 8)
    plain = scores.detach().full_tensor() * 1e4
    with loss_parallel():
        loss = F.cross_entropy(scores.detach() * 1e4, torch.arange(5))
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(plain, torch.arange(5)))


def test_ignored_rows_do_not_count_whatever_they_hold():
    plain, _ = scores_of(3, 8)
    plain = plain.detach()
    plain[0] = torch.nan
    targets = torch.tensor([-100, 2, 3])
    with loss_parallel():
        loss = F.cross_entropy(distribute_tensor(plain, MESH, [Shard(1)]), targets)
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(plain, targets))


def test_all_rows_ignored():
    _, scores = scores_of(3, 8)
    targets = torch.full((3,), -100)
    with loss_parallel():
        assert F.cross_entropy(scores, targets).isnan().item()
        assert F.cross_entropy(scores, targets, reduction="sum").item() == 0


@pytest.mark.parametrize("target", [8, -1])
def test_a_class_that_is_none_is_refused(target):
    _, scores = scores_of(3, 8)
    with loss_parallel(), pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        F.cross_entropy(scores, torch.tensor([0, 1, target]))


def test_shapes_that_do_not_fit_are_refused_as_for_plain_tensors():
    plain, scores = scores_of(3, 8)
    for targets in (torch.arange(4), torch.arange(6).reshape(3, 2)):
        with pytest.raises((RuntimeError, ValueError)) as wanted:
            F.cross_entropy(plain, targets)
        with loss_parallel(), pytest.raises(type(wanted.value)):
            F.cross_entropy(scores, targets)


def test_without_gradients():
    plain, scores = scores_of(3, 8)
    for context in (torch.no_grad, torch.inference_mode):
        with loss_parallel(), context():
            loss = F.cross_entropy(scores, torch.arange(3))
            torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(plain, torch.arange(3)))


def test_gradients_of_gradients_are_refused_in_the_block_and_right_outside():
    plain, scores = scores_of(3, 8)
    with loss_parallel():
        loss = F.cross_entropy(scores, torch.arange(3))
        with pytest.raises(OperatorError, match="create_graph=True, expected one without"):
            torch.autograd.grad(loss, scores, create_graph=True)
    for values in (scores, plain):
        (gradient,) = torch.autograd.grad(F.cross_entropy(values, torch.arange(3)), values, create_graph=True)
        gradient.square().sum().backward()
    torch.testing.assert_close(scores.grad.full_tensor(), plain.grad)


def test_scores_that_wait_for_a_sum_on_another_axis():
    grid = abstract_mesh({"dp": 2, "tp": 2})
    plain, _ = scores_of(3, 8)
    scores = distribute_tensor(plain.detach(), grid, [Partial(), Shard(1)]).requires_grad_()
    F.cross_entropy(plain, torch.arange(3)).backward()
    with loss_parallel():
        F.cross_entropy(scores, torch.arange(3)).backward()
    torch.testing.assert_close(scores.grad.full_tensor(), plain.grad)


def test_the_block_ends_however_it_ends():
    """Outside of it, gradients may be differentiated again."""
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError
    with loss_parallel(), loss_parallel():
        pass
    _, scores = scores_of(3, 8)
    (gradient,) = torch.autograd.grad(F.cross_entropy(scores, torch.arange(3)), scores, create_graph=True)
    gradient.sum().backward()


def test_the_block_holds_for_all_threads():
    _, scores = scores_of(3, 8)
    seen = []
    with loss_parallel():
        thread = threading.Thread(target=lambda: seen.append(F.cross_entropy(scores, torch.arange(3)).grad_fn.name()))
        thread.start()
        thread.join()
    assert "CrossEntropy" in seen[0]


def test_plain_tensors_are_not_concerned():
    plain, _ = scores_of(3, 8)
    with loss_parallel():
        assert F.cross_entropy(plain, torch.arange(3)).item() == F.cross_entropy(plain, torch.arange(3)).item()
