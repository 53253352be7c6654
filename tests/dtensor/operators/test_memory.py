"""Which tensors are one memory: storages, `set_`, `resize_`, and `out` tensors, as plain tensors have it."""

import copy

import numpy as np
import pytest
import safetensors.torch
import torch
from support.states import cluster_mesh
from torch import nn

import dtckpt
from dtckpt import Partial, Replicate, Shard
from dtckpt.dtensor import DTensor, distribute_tensor
from dtckpt.errors import LayoutError, OperatorError

from .plain_programs import PLACES, assert_as_plain, matrices

is_alias = torch._C._is_alias_of

RELATED = [
    "x.view(-1)",
    "x.T",
    "x[1:]",
    "x.detach()",
    "x.data",
    "x.contiguous()",
    "x.T.contiguous()",
    "x.reshape(-1)",
    "x.T.reshape(-1)",
    "x.view(-1)[3:15].view(3, 4)",
    "x.split(3)[1]",
    "x.unflatten(1, (2, 3))",
    "x.view(torch.int32)",
    "torch.view_as_complex(x.view(4, 3, 2))",
    "x.as_strided((2,), (1,))",
    "x.t_()",
    "x.float()",
    "x.double()",
    "x * 1",
    "x.clone()",
    "torch.einsum('ij->ji', x)",
]


@pytest.mark.parametrize("expression", RELATED)
def test_storages_tell_which_tensors_share_memory(expression):
    def program(x, _):
        other = eval(expression, {"torch": torch, "x": x})
        same = other.is_set_to(x) if other.dtype == x.dtype else None
        return is_alias(x, other), same, other.is_set_to(eval(expression.replace("_()", ""), {"torch": torch, "x": x}))

    assert_as_plain(program)


def set_and_write(x, v):
    before = x.view(-1)
    x.set_(v)
    flat = torch.zeros_like(v).set_(v.T)
    v.add_(1)
    x[0].mul_(3)
    return x, v, flat, before, is_alias(x, v), x.is_set_to(v), flat.is_set_to(v.T)


def set_to_part(x, v):
    x.set_(v.view(-1)[3:])
    x.add_(1)
    return x, v


def shrink(x, _):
    flat = x.view(-1)
    x.resize_(2, 2)
    x.add_(1)
    return x, flat, is_alias(x, flat)


def shrink_view(x, _):
    rows = x[1:]
    rows.resize_(2, 2).add_(1)
    return rows, x


def grow_empty(x, _):
    made = x.new_empty(0).resize_(3, 2).zero_()
    return made.add_(1), made[1], x.new_empty(0).resize_as_(x.T).copy_(x.T)


@pytest.mark.parametrize("program", [set_and_write, set_to_part, shrink, shrink_view, grow_empty])
def test_set_and_resize(program):
    assert_as_plain(program, versions=True)


def test_tensors_whose_memory_is_shared_do_not_grow():
    for mesh, placements in PLACES:
        x = distribute_tensor(matrices()[0], mesh, placements)
        view = x[1:]
        with pytest.raises(OperatorError, match=r"resize_: .*whose memory other tensors share.*make a new tensor"):
            x.resize_(30)
        assert view.shape == (3, 6)


OUTS = [
    "torch.add(x, v, out=x)",
    "torch.add(x, v, out=x[:])",
    "torch.add(x[1:], v[1:], out=x[1:])",
    "torch.add(x.T, v.T, out=x.T)",
    "torch.mul(x, v, out=x.view(4, 6))",
    "torch.div(x.view(-1), v.view(-1), out=x.view(-1))",
    "torch.add(x[:, 1], v[:, 1], out=x[:, 3])",
    "torch.cumsum(x, 0, out=x)",
    "torch.add(x, v, out=x.detach())",
    "torch.add(x.T, v.T, out=empty)",
    "torch.mm(x.T, v, out=empty)",
    "torch.cat([x.T, v.T], out=empty)",
    "torch.softmax(x.T, 0, out=empty)",
    "torch.sum(x.T, 0, out=empty)",
    "torch.sort(x.T, 0, out=(empty, empty.long()))",
    "torch.max(x.T, 1, out=(x[:, 0].new_empty(0), empty.long()))",
    "torch.linalg.qr(x, out=(empty, x.new_empty(0)))",
    "torch.masked_select(x, x > 1, out=empty)",
    "torch.eq(x, v, out=empty.bool())",
    "torch.eq(x, v, out=empty)",
    "torch.arange(5, out=empty)",
    "torch.linspace(0, 1, 5, out=empty)",
    "torch.ones(3, out=empty)",
    "torch.full((3, 2), 2.0, out=empty)",
    "torch.eye(3, out=empty)",
    "torch.zeros(4, 6, out=x)",
    "torch.add(x, v, out=torch.empty_like(x, dtype=torch.float64))",
    "torch.add(x, v, out=torch.empty_like(x, dtype=torch.int64))",
    "torch.abs(x, out=3)",
]


@pytest.mark.parametrize("call", OUTS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_out(call, requires_grad):
    def program(x, v):
        empty = x.new_empty(0)
        result = eval(call, {"torch": torch, "x": x, "v": v, "empty": empty})
        return result, empty, empty + 1, x, x[1], is_alias(x, empty)

    assert_as_plain(program, requires_grad=requires_grad)


def test_an_empty_part_of_a_tensor_is_no_room_for_a_result():
    """Plain tensors are overwritten from the place where the part begins."""
    for mesh, placements in PLACES:
        x, v = (distribute_tensor(one, mesh, placements) for one in matrices())
        with pytest.raises(LayoutError, match="shape stays"):
            torch.add(x, v, out=x[:0])


REFUSED = {
    "storage": DTensor.storage,
    "untyped_storage": lambda x: torch.ones(4, 6).set_(x.untyped_storage()),
    "DLPack": torch.from_dlpack,
    "DLPack of numpy": np.from_dlpack,
    "capsule": torch.to_dlpack,
    "capsule of utils": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("mesh", "placements"), PLACES[:2])
def test_memory_is_not_handed_out(mesh, placements, name):
    x = distribute_tensor(matrices()[0], mesh, placements)
    with pytest.raises(OperatorError, match="a DTensor itself has no memory to hand out; to_local returns"):
        REFUSED[name](x)


def test_there_is_no_address():
    """PyTorch's distributed checkpoint asks for it, to tell tensors without memory; safetensors refuses those."""
    x = distribute_tensor(matrices()[0], *PLACES[0])
    assert x.data_ptr() == 0
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.save({"x": x})


def test_recurrent_modules_leave_the_memory_of_their_weights(monkeypatch):
    """On a GPU they would bring the weights into one piece of memory."""
    module = nn.LSTM(6, 3)
    for name, one in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(one, *PLACES[0])))
    with monkeypatch.context() as patch:
        patch.setattr(DTensor, "is_cuda", True, raising=False)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
        module.flatten_parameters()
    assert module(distribute_tensor(matrices()[0], *PLACES[0]))[0].shape == (4, 3)


# --- several clients ----------------------------------------------------------------------------------------------


def copy_views(x, _):
    view, source = copy.deepcopy([x.view(-1)[3:15].view(3, 4), x])
    source.add_(1)
    other = copy.copy(view).mul_(2)
    return view, source, other, x, is_alias(view, source)


def write_to_saved(x, _):
    y = x.detach().requires_grad_() * 1
    result = y.exp()
    torch._foreach_add_([result.detach()[1]], 1)
    result.sum().backward()


def make_outs(x, _):
    return [torch.arange(5, out=x.new_empty(0)), torch.exp(x.T, out=x.new_empty(0))]


def run_on_clients():
    mesh = cluster_mesh({"x": 2}, 2, dtckpt.client_id())
    places = [(mesh, [Replicate()]), (mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Partial()])]
    for program in (set_and_write, shrink, shrink_view, copy_views, write_to_saved, make_outs):
        assert_as_plain(program, places=places)
    return True


@pytest.mark.processes
def test_programs_on_clients(pool):
    assert pool.values(run_on_clients, clients=2, group=True) == [True, True]
