"""Transforms of functions, forward-mode gradients and autocast: as of plain tensors, or refused."""

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import distribute_tensor
from dtckpt.errors import OperatorError

from .plain_programs import PLACES, assert_as_plain, matrices

# PyTorch's own module of forward-mode gradients
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def write_and_sum(x):
    y = x * 1
    y[0].mul_(2)
    y.view(-1)[3:9].add_(1)
    return (y * y).sum()


def call_with_weight(x, v):
    return func.functional_call(nn.Linear(6, 4, bias=False), {"weight": x}, (v,)).sum()


def pull_back(x, v):
    y, back = func.vjp(lambda a: (a * v).sin(), x)
    return y, back(v)


TRANSFORMS = {
    "grad": lambda x, v: func.grad(lambda a: (a * v).sin().sum())(x),
    "grad of writes": lambda x, _: func.grad(write_and_sum)(x),
    "grad of grad": lambda x, v: func.grad(func.grad(lambda a: a**3))(x[0, 0]),
    "grad and value": func.grad_and_value(lambda a, b: (a * b).sin().sum(), argnums=(0, 1)),
    "vjp": pull_back,
    "jvp": lambda x, v: func.jvp(lambda a: (a * a).sin(), (x,), (v,)),
    "jacrev": lambda x, v: func.jacrev(lambda a: (a * a).sum(1))(x),
    "jacfwd": lambda x, v: func.jacfwd(lambda a: (a * a).sum(1))(x),
    "hessian": lambda x, v: func.hessian(lambda a: (a**3).sum())(x[0]),
    "vmap": func.vmap(lambda a, b: (a * b).sum()),
    "vmap of columns": lambda x, v: func.vmap(lambda a: a @ v.T, in_dims=1)(x.T),
    "vmap of grad": func.vmap(func.grad(lambda a, b: (a * b).sin().sum())),
    "functional call": func.grad(call_with_weight),
    "functionalize": lambda x, v: func.functionalize(write_and_sum)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    assert_as_plain(TRANSFORMS[name])


def differentiate_forward(x, v):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        y = dual * 1
        y[0].mul_(2)
        part = y.view(-1)[3:9]
        part.add_(dual[1])
        return [list(forward_ad.unpack_dual(one)) for one in (y, part, (dual @ v.T).softmax(1))]


def differentiate_forward_over_backward(x, v):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), v)
        (gradient,) = torch.autograd.grad((dual**3).sum(), dual, create_graph=True)
        return forward_ad.unpack_dual(gradient).tangent


@pytest.mark.parametrize("program", [differentiate_forward, differentiate_forward_over_backward])
def test_forward_mode(program):
    assert_as_plain(program)


RECORDED = {
    "linearize": lambda x, v: func.linearize(lambda a: (a * a).sin(), x)[1](v),
    "make_fx": lambda x, v: make_fx(lambda a: a * v)(x)(v),
    "make_fx of a constant": lambda x, v: make_fx(lambda a: a * v)(torch.ones(4, 6)),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(("mesh", "placements"), PLACES[:2])
def test_recording_is_refused(mesh, placements, name):
    """The graph would have the components of the first call as constants, and return them at every call."""
    tensors = [distribute_tensor(one, mesh, placements) for one in matrices()]
    with pytest.raises(OperatorError, match=r"operator aten.*got a DTensor while make_fx records operators"):
        RECORDED[name](*tensors)


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def dtypes_of_results(x, v):
    with autocast():
        low = x @ v.T
        results = [
            low,
            x + v,
            low + x[:, :4],
            low.softmax(1),
            low.sum(),
            x.exp(),
            nn.functional.linear(x, v),
            nn.functional.layer_norm(low, (4,)),
            nn.functional.mse_loss(low, x[:, :4]),
            nn.functional.cross_entropy(low, torch.arange(4)),
            nn.functional.scaled_dot_product_attention(x[None, None], v[None, None], v[None, None]),
            torch.cat([low, x[:, :4]]),
            torch.einsum("ij,kj->ik", x, v),
            low.add_(1),
            low.prod(0),
        ]
        with torch.autocast("cpu", enabled=False):
            results.append(x @ v.T)
        results.append(x @ v.T)
    return [(one.dtype, one.requires_grad, tuple(one.shape)) for one in results]


def use_a_cast_weight_twice(x, v):
    weight = nn.Parameter(v.detach().clone())
    with autocast():
        with torch.no_grad():
            unrecorded = nn.functional.linear(x, weight)
        results = [unrecorded, nn.functional.linear(x, weight), checkpoint(torch.mm, x, weight.T, use_reentrant=False)]
    sum(one.float().sum() for one in results).backward()
    return [one.requires_grad for one in results], weight.grad.dtype, x.grad.dtype


@pytest.mark.parametrize("program", [dtypes_of_results, use_a_cast_weight_twice])
def test_autocast(program):
    assert_as_plain(program, requires_grad=True)
