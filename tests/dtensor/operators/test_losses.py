"""Statistics, losses and normalisation: right however operands lie, and nothing large is moved for split dims."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from dtckpt import abstract_mesh
from dtckpt.dtensor import Partial, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.operators import dispatch

from .operator_checks import (
    GRID,
    LINE,
    check,
    distributed,
    record_redistributions,
    replicated_operators,
    sample_placements,
)

_aten = torch.ops.aten
_seed = torch.Generator().manual_seed(7)


def _n(*shape):
    return torch.randn(*shape, generator=_seed)


def _u(*shape):
    return torch.rand(*shape, generator=_seed) * 0.8 + 0.1


_CUBE, _FLAT = _n(5, 6, 3), _n(3, 5)
_SCORES, _TARGETS, _WEIGHTS = _n(5, 5), torch.tensor([0, 4, 2, 1, -100]), _u(5)
_IMAGES, _PIXELS = _n(3, 5, 2, 2), torch.randint(0, 5, (3, 2, 2), generator=_seed)


def _row(name, call, *operands):
    return pytest.param(call, operands, id=name)


def _batch_norm(x, weight, bias, mean, variance):
    mean, variance = mean.detach().clone(), variance.detach().clone()
    made = F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
    return made, mean, variance


ROWS = [
    _row("var", lambda t: t.var(), _CUBE),
    _row("var of dims, kept", lambda t: t.var((0, 2), correction=0, keepdim=True), _CUBE),
    _row("std", lambda t: t.std(1), _FLAT),
    _row("var_mean", lambda t: torch.var_mean(t, 1), _FLAT),
    _row("std_mean", lambda t: torch.std_mean(t, 0, keepdim=True), _FLAT),
    *(
        _row(f"norm {order}", lambda t, order=order: torch.linalg.vector_norm(t, order, dim=(0, 1)), _CUBE)
        for order in (2, 1, 0, math.inf, -math.inf, 3.5, -1)
    ),
    _row("norm of a dim", lambda t: torch.linalg.vector_norm(t, dim=1, keepdim=True), _FLAT),
    _row("norm, the old one", lambda t: _aten.norm.ScalarOpt_dim(t, 3, [1]), _CUBE),
    _row("dist", torch.dist, _FLAT, _n(3, 5)),
    _row("normalize", lambda t: F.normalize(t, dim=0), _FLAT),
    *(
        _row(f"{loss} {by}", lambda t, u, loss=loss, by=by: getattr(F, loss)(t, u, reduction=by), _n(5, 6), _n(5, 6))
        for loss in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for by in ("mean", "sum", "none")
    ),
    _row("loss of few", F.mse_loss, _n(2), _n(2)),
    *(
        _row(
            f"binary_cross_entropy {by}",
            lambda t, u, w, by=by: F.binary_cross_entropy(t, u, w.detach(), reduction=by),
            _u(5, 6),
            _u(5, 6),
            _u(6),
        )
        for by in ("mean", "sum", "none")
    ),
    _row(
        "binary_cross_entropy_with_logits",
        lambda t, u, w, p: F.binary_cross_entropy_with_logits(t, u.detach(), w.detach(), pos_weight=p.detach()),
        *(_n(5, 6), _u(5, 6), _u(6), _u(6)),
    ),
    _row("soft_margin_loss", lambda t, u: F.soft_margin_loss(t, u.detach()), _n(5, 6), _n(5, 6).sign()),
    _row("kl_div", lambda t, u: F.kl_div(t.log_softmax(1), u, reduction="batchmean"), _n(5, 6), _u(5, 6)),
    _row("cosine_similarity", lambda t, u: F.cosine_similarity(t, u, dim=1), _n(5, 6), _n(5, 6)),
    *(
        _row(f"cross_entropy {by}", lambda t, u, by=by: F.cross_entropy(t, u, reduction=by), _SCORES, _TARGETS)
        for by in ("mean", "sum", "none")
    ),
    *(
        _row(
            f"cross_entropy smoothed {by}",
            lambda t, u, w, by=by: F.cross_entropy(t, u, w.detach(), reduction=by, label_smoothing=0.1),
            *(_SCORES, _TARGETS, _WEIGHTS),
        )
        for by in ("mean", "sum", "none")
    ),
    _row("cross_entropy of images", lambda t, u, w: F.cross_entropy(t, u, w.detach()), _IMAGES, _PIXELS, _WEIGHTS),
    _row("cross_entropy, ignoring", lambda t, u: F.cross_entropy(t, u, ignore_index=1), _IMAGES, _PIXELS),
    _row("cross_entropy of one", F.cross_entropy, _n(5), torch.tensor(3)),
    _row("cross_entropy of shares", lambda t, u: F.cross_entropy(t, u.softmax(1)), _SCORES, _n(5, 5)),
    _row("layer_norm", lambda t, w, b: F.layer_norm(t, (3,), w, b), _CUBE, _n(3), _n(3)),
    _row("layer_norm of two dims", lambda t, w, b: F.layer_norm(t, (6, 3), w, b), _CUBE, _n(6, 3), _n(6, 3)),
    _row("layer_norm without weights", lambda t: F.layer_norm(t, (3,)), _CUBE),
    _row("layer_norm, weights frozen", lambda t, w, b: F.layer_norm(t, (3,), w.detach(), b), _CUBE, _n(3), _n(3)),
    _row("layer_norm, input frozen", lambda t, w, b: F.layer_norm(t.detach(), (3,), w, b), _CUBE, _n(3), _n(3)),
    _row("layer_norm of few", lambda t: F.layer_norm(t, (2,)), _n(2)),
    _row("layer_norm of all dims", lambda t, w: F.layer_norm(t, (5, 6, 3), w), _CUBE, _n(5, 6, 3)),
    _row("rms_norm", lambda t, w: F.rms_norm(t, (3,), w), _CUBE, _n(3)),
    _row("group_norm", lambda t, w, b: F.group_norm(t, 2, w, b), _n(3, 8, 5), _n(8), _n(8)),
    _row("group_norm of many", lambda t: F.group_norm(t, 4), _n(3, 8, 2, 2)),
    _row("batch_norm", _batch_norm, _CUBE, _n(6), _n(6), _n(6), _u(6)),
    _row("batch_norm of rows", _batch_norm, _n(7, 3), _n(3), _n(3), _n(3), _u(3)),
    _row(
        "batch_norm, not training",
        lambda t, w, b, m, v: F.batch_norm(t, m.detach(), v.detach(), w, b),
        *(_CUBE, _n(6), _n(6), _n(6), _u(6)),
    ),
    _row("instance_norm", F.instance_norm, _n(3, 5, 4)),
    _row("local_response_norm", lambda t: F.local_response_norm(t, 2), _n(3, 5, 4)),
]


@pytest.mark.share(12)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize(("call", "operands"), ROWS)
def test_like_plain_tensors(call, operands, mesh):
    for placements in sample_placements(operands, mesh, 5):
        check(call, operands, placements, may_replicate=True, tolerance=2e-5)


_X = _n(8, 64)
_CLASSES = torch.randint(0, 64, (8,), generator=_seed)
_S0, _S1, _R = (Shard(0),), (Shard(1),), (Replicate(),)

STILL = [
    ("var", lambda t: t.var(1), [_X], [_S1]),
    ("norm", torch.linalg.vector_norm, [_X], [_S1]),
    ("mse_loss", F.mse_loss, [_X, _n(8, 64)], [_S1, _S1]),
    ("layer_norm by rule", lambda t, w: F.layer_norm(t, (64,), w), [_X, _n(64)], [_S0, _R]),
    ("layer_norm by statistics", lambda t, w: F.layer_norm(t, (64,), w), [_X, _n(64)], [_S1, _S0]),
    ("group_norm", lambda t: F.group_norm(t.view(4, 2, 64), 2), [_X], [_S0]),
    ("batch_norm", lambda t: F.batch_norm(t, None, None, training=True), [_X], [_S0]),
    ("cross_entropy of split rows", F.cross_entropy, [_X, _CLASSES], [_S0, _S0]),
    ("cross_entropy of split classes", F.cross_entropy, [_X, _CLASSES], [_S1, _R]),
    ("smoothed", lambda t, u: F.cross_entropy(t, u, label_smoothing=0.1), [_X, _CLASSES], [_S1, _R]),
]


@pytest.mark.parametrize(("call", "operands", "placements"), [row[1:] for row in STILL], ids=[row[0] for row in STILL])
def test_nothing_large_is_moved(call, operands, placements):
    check(call, operands, placements, most=64)


def test_loss_parallel_on_a_grid_of_data_and_model():
    """Rows over one axis and classes over the other: scores and their gradient stay where they are."""
    scores = distributed(_X, (Shard(0), Shard(1))).requires_grad_()
    targets = distributed(_CLASSES, (Shard(0), Replicate()))
    dispatch.clear()
    with record_redistributions() as moved:
        loss = F.cross_entropy(scores, targets)
        loss.backward()
        gradient = scores.grad
    assert gradient.placements == (Shard(0), Shard(1))
    assert max(numel for numel, _, _ in moved) <= len(_X)
    assert not replicated_operators()
    plain = _X.clone().requires_grad_()
    F.cross_entropy(plain, _CLASSES).backward()
    torch.testing.assert_close(gradient.full_tensor(), plain.grad)


def test_gradients_of_weights_wait_for_a_sum():
    x = distributed(_X, _S0)
    weight = distributed(_n(64), _R)
    mean, rstd = (distributed(_n(8, 1), _S0) for _ in range(2))
    made = _aten.native_layer_norm_backward(x, x, [64], mean, rstd, weight, weight, [True, True, False])
    assert [one.placements for one in made[:2]] == [(Shard(0),), (Partial("sum"),)]
    assert made[2] is None


@pytest.mark.parametrize("placements", [_S0, _S1, _R], ids=["rows", "classes", "whole"])
@pytest.mark.parametrize("target", [64, -1, -2])
def test_a_class_that_is_none_is_refused(placements, target):
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        F.cross_entropy(distributed(_X, placements), distributed(torch.full((8,), target), _R))


@pytest.mark.parametrize("placements", [_S0, _S1, _R], ids=["rows", "classes", "whole"])
def test_minus_one_may_be_the_index_to_ignore(placements):
    targets = _CLASSES.clone()
    targets[::3] = -1
    loss = F.cross_entropy(distributed(_X, placements), distributed(targets, _R), ignore_index=-1)
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(_X, targets, ignore_index=-1))


def test_other_numbers_of_bins_after_the_same_call():
    x = distributed(_X, _S0)
    assert [len(torch.histc(x, bins, -1.0, 1.0)) for bins in (100, 5)] == [100, 5]


def test_plans_do_not_keep_tensors():
    import gc
    import weakref

    x = distributed(_X, _S0)
    for call in (torch.mean, torch.amax, torch.var, lambda t: F.mse_loss(t, t), lambda t: F.group_norm(t, 2)):
        call(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("shape", [(2, 2, 0, 1), (0, 2, 3, 1)], ids=str)
def test_gradients_of_group_norm_of_no_elements(shape):
    images, weight = torch.ones(shape, requires_grad=True), torch.ones(2, requires_grad=True)
    F.group_norm(images, 1, weight).sum().backward()
    ours, own = (
        distribute_tensor(each.detach(), abstract_mesh({"x": 2}), [Replicate()]).requires_grad_()
        for each in (images, weight)
    )
    F.group_norm(ours, 1, own).sum().backward()
    assert ours.grad.shape == images.grad.shape
    torch.testing.assert_close(own.grad.full_tensor(), weight.grad, equal_nan=True)
