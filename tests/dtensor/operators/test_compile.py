"""`torch.compile` around DTensors: the graph breaks with a reason, and what comes out is right."""

import pytest
import torch
from torch import nn

from dtckpt import DTensor, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_module, distribute_tensor
from dtckpt.dtensor.torch_compile import REASON

MESH = abstract_mesh({"x": 4})


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def by_value(tensor):
    return tensor * 2 if tensor.sum() > 0 else tensor - 1


def by_shape(tensor):
    return tensor.reshape(-1, tensor.shape[0]).sum(0) * tensor.shape[1]


def in_place(tensor):
    copy = tensor.clone()
    copy.add_(1)
    copy[1:] = 3
    return copy * copy.numel()


def beside_plain(tensor):
    plain = torch.arange(3.0).sin().sum() * 2
    return tensor.sin() * plain


def with_numbers(tensor):
    return tensor * tensor.max().item()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [by_value, by_shape, in_place, beside_plain, with_numbers])
def test_functions(function, backend):
    compiled = torch.compile(function, backend=backend)
    for shape, sign in (((6, 5), 1.0), ((6, 5), -1.0), ((4, 5), 1.0), ((7, 2), -1.0)):
        plain = sign * torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        for placement in (Shard(0), Replicate()):
            made = compiled(distribute_tensor(plain, MESH, [placement]))
            assert isinstance(made, DTensor)
            torch.testing.assert_close(made.full_tensor(), function(plain))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_trains(backend):
    torch.manual_seed(0)
    ours = distribute_module(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), MESH)
    plain = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    plain.load_state_dict({name: value.full_tensor() for name, value in ours.state_dict().items()})
    samples = torch.randn(10, 5)
    compiled = torch.compile(ours, backend=backend)
    for _ in range(3):
        losses = []
        for model, rows in ((compiled, distribute_tensor(samples, MESH, [Shard(0)])), (plain, samples)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = model(rows).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.placements == one.grad.placements == (Replicate(),)
        torch.testing.assert_close(one.full_tensor(), other)


def gathered(tensor):
    return tensor.full_tensor() + torch.ones(4).sin()


def test_a_break_of_the_graph_has_a_reason():
    tensor = distribute_tensor(torch.ones(4), MESH, [Shard(0)])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        torch.compile(gathered, backend="eager", fullgraph=True)(tensor)
