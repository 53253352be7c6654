"""Version counters, hooks and saved tensors are as on plain tensors, in every layout."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import distribute_tensor

from .plain_programs import PLACES, assert_as_plain, matrices

# --- version counters ---------------------------------------------------------------------------------------------


def write_through_views(x, v):
    x = x * 1
    views = x[1:], x.view(-1), x.T, x.detach(), x.data
    versions = []
    with torch.no_grad():
        for write in (
            lambda: x.add_(1),
            lambda: views[0].mul_(2),
            views[1][2:4].zero_,
            lambda: views[3].add_(1),
            lambda: views[4].add_(1),
            lambda: x.copy_(v),
            lambda: x.__setitem__(0, 1.0),
        ):
            write()
            versions.append([one._version for one in (x, *views)])
    return versions, x


def write_lists(x, v):
    x, v = x.detach().clone(), v.detach().clone()
    row = x[0]
    torch._foreach_add_([x, v], 1)
    torch._foreach_mul_([row, v[1]], 2)
    torch._foreach_add_([x, x], 1)
    torch._foreach_copy_([x], [v.double()])
    torch._foreach_zero_([x.view(-1)])
    return x, row, v


def write_lists_of_plain_tensors(x, v):
    x, plain = x.detach().clone(), torch.ones(4, 6)
    torch._foreach_add_([plain], [v.detach()])
    torch._foreach_mul_([x, plain], 2)
    return x, plain


def write_by_optimizers(x, v):
    parameter = nn.Parameter(x.detach().clone())
    versions = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        for foreach in (False, True):
            optimizer = kind([parameter], lr=0.1, foreach=foreach)
            (parameter * v.detach()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            versions.append((parameter._version, parameter.grad._version))
    return versions


def write_by_clipping(x, v):
    parameter = nn.Parameter(x.detach().clone())
    (parameter * v.detach()).sum().backward()
    before = parameter.grad._version
    nn.utils.clip_grad_norm_([parameter], 0.5)
    nn.utils.clip_grad_value_([parameter], 0.05)
    return parameter.grad._version - before


@pytest.mark.parametrize(
    "program",
    [write_through_views, write_lists, write_lists_of_plain_tensors, write_by_optimizers, write_by_clipping],
)
def test_version_counters(program):
    assert_as_plain(program, versions=True)


FUNCTIONS = {
    "product": lambda y: y * y,
    "exp": torch.exp,
    "sum": torch.sum,
    "matmul": lambda y: y @ y.T,
    "softmax": lambda y: y.softmax(1),
    "layer norm": lambda y: nn.functional.layer_norm(y, (6,)),
}
WRITES = {
    "operand": lambda y, result: y.add_(1),
    "result": lambda y, result: result.add_(1),
    "view": lambda y, result: y.view(-1)[3:5].zero_(),
    "detached": lambda y, result: y.detach().add_(1),
    "data": lambda y, result: y.data.add_(0),
    "list": lambda y, result: torch.no_grad()(torch._foreach_mul_)([y, result], 2),
    "list of views": lambda y, result: torch._foreach_add_([y.detach()[1]], 1),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_writes_to_saved_tensors_are_found(name, write):
    """Autograd refuses where it refuses for plain tensors, and takes the same gradient elsewhere."""

    def program(x, _):
        y = x * 1
        result = FUNCTIONS[name](y)
        WRITES[write](y, result)
        result.sum().backward()
        return x.grad * 1

    assert_as_plain(program, requires_grad=True)


# --- hooks --------------------------------------------------------------------------------------------------------


def hook_tensors(x, v):
    seen = []
    y = x * v
    y.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    y.mul_(v.detach())
    y.register_hook(lambda gradient: seen.append(gradient.clone()))
    part = y.view(-1)[3:9]
    part.retain_grad()
    (part * part).sum().backward()
    return seen, x.grad * 1, part.grad * 1


def hook_nodes(x, v):
    seen = []
    y = x * v
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append(outputs[0].clone()))
    y.grad_fn.register_prehook(lambda outputs: tuple(one * 3 for one in outputs))
    torch.autograd.graph.register_multi_grad_hook([x, v], lambda found: seen.append(found[0].clone()))
    y.sum().backward()
    return seen, x.grad * 1


def hook_modules(x, _):
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    module[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    module[0].register_forward_hook(lambda module, inputs, output: output + 1)
    module[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    module[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    module(x).sum().backward()
    return x.grad * 1


def hook_saved(x, v):
    shapes = []
    with saved_tensors_hooks(
        lambda saved: (shapes.append(tuple(saved.shape)), saved.clone())[1], lambda kept: kept * 1
    ):
        y = (x * v).exp().softmax(0) @ v.T
    with save_on_cpu():
        z = x.T.view(3, 2, 4)
        z = (z * z)[1].sin()
    (y.sum() + z.sum()).backward()
    return shapes, x.grad * 1, v.grad * 1


def differentiate_twice(x, v):
    y = x * 1
    part = y.view(-1)[2:14].view(3, 4)
    part[1].mul_(2)
    y[0] = v[1] ** 2
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return first, torch.autograd.grad(first.square().sum(), x)


def find_anomalies(x, _):
    with torch.autograd.detect_anomaly():
        (x * 0).sqrt().mul(0).sum().backward()


@pytest.mark.parametrize("program", [hook_tensors, hook_nodes, hook_modules, hook_saved, differentiate_twice])
def test_hooks(program):
    assert_as_plain(program, requires_grad=True)


@pytest.mark.filterwarnings("ignore")  # PyTorch tells where the anomaly was made
def test_anomalies_are_found():
    assert_as_plain(find_anomalies, requires_grad=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_programs_that_write(use_reentrant):
    def forward(x):
        y = x * 1
        y[0].mul_(2)
        y.view(-1)[3:9].add_(1)
        return y * y

    def program(x, v):
        y = checkpoint(forward, x, use_reentrant=use_reentrant)
        (y * v).sum().backward()
        return y, x.grad * 1, v.grad * 1

    assert_as_plain(program, requires_grad=True)


# --- inference mode -----------------------------------------------------------------------------------------------


def view_outside(x, _):
    with torch.inference_mode():
        made = x * 2
    return made[0], made.view(-1), made.detach(), made * 2


def write_view_outside(x, _):
    with torch.inference_mode():
        made = x * 2
    made[0].add_(1)


def save_view(x, v):
    with torch.inference_mode():
        made = x * 2
    return made[0] * v[0]


@pytest.mark.parametrize("program", [view_outside, write_view_outside, save_view])
def test_views_of_inference_tensors(program):
    assert_as_plain(program, requires_grad=True)


# --- parameters that PyTorch swaps --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "placements"), PLACES[:3])
def test_modules_swap_their_parameters(mesh, placements):
    module = nn.Linear(6, 4, bias=False)
    module.weight = parameter = nn.Parameter(distribute_tensor(matrices()[0], mesh, placements))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
        module.load_state_dict({"weight": distribute_tensor(matrices()[1].double(), mesh, placements)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert module.weight is parameter
    assert torch.equal(parameter.full_tensor(), matrices()[1].double())
