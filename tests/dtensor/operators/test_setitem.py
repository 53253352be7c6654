"""Index writes through chains of views: values, gradients and errors are as on plain tensors, in every layout."""

import pytest
import torch

from .plain_programs import assert_as_plain

ROW, MASK = torch.arange(6.0), torch.zeros(6, 4, dtype=torch.bool)
MASK[1, 2] = MASK[5, 0] = True
SCOPE = {"torch": torch, "ROW": ROW, "MASK": MASK}

WRITES = [
    "x[1:][0][..., ::2] = v[0, :3]",
    "x.T[1] = 7",
    "x.view(6, 4)[MASK] = 3.0",
    "x.view(-1)[5:9] = v[0, 0]",
    "x.view(2, 2, 6)[:, 1, ::3] = 1.0",
    "x.t()[1:3].t()[0] = 3",
    "x.diagonal()[:] = v[:, 0]",
    "x.unfold(0, 2, 2)[1] = 4.0",
    "x.split(2)[1][0] = ROW",
    "x.unbind(1)[3][1:] = 5",
    "x.unsqueeze(1)[2, 0, 1:3] = 5",
    "x.T.reshape(-1)[3] = 9",
    "x.view(torch.int32)[0] = 1065353216",
    "x.detach()[0][1] = 5",
    "x.data.T[1] = 5",
    "x[None, 1] = 1",
    "x[..., -1] = 2",
    "x[1:2, None, ...] = 5",
    "x[[0, 2], [1, 3]] = v[0, :2]",
    "x[torch.tensor([True, False, True, False])] = ROW",
    "x[torch.tensor(1)] = v[1].double()",
    "x[torch.tensor([0, 1]), None, 1:3] = 5",
    "x[torch.tensor([[0, 1], [1, 2]])] = 5",
    "x[True] = v",
    "x[False] = 4",
    "x[()] = 5",
    "x[[]] = 5",
    "x[x > 1] = v[x.detach() > 1]",
    "x[:2] = v[:1]",
    "x[0] = torch.arange(6)",
    "x[0] = torch.ones(1, 6, dtype=torch.float64)",
    "x[1] += 1",
    "x[1:3, ::2] *= v[1:3, ::2]",
    "x[[1, 1]] += 1",
    "x[x > 1] += 1",
    "x[:, 0] += x[:, 1]",
    "x[0], x[1] = x[1].clone(), x[0].clone()",
    "x[0], x[1] = x[1], x[0]",
    "x.T.index_put_((torch.tensor([0, 0]),), v[:, 0], accumulate=True)",
    "x[1:].masked_fill_(x[1:] > 1, 0)",
    "x.T.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 5.0)",
    "x[:, 1:].copy_(x[:, :-1].clone())",
    "x[5] = 4",
    "x[0] = torch.ones(5)",
    "x[:2] = torch.ones(1, 2, 6)",
    "x[[-5]] = 3",
    "x['a'] = 4",
    "x[2::-1] = 4",
    "x[0] = 1j",
    "del x[0]",
]


@pytest.mark.parametrize("write", WRITES)
def test_index_writes(write):
    """The graph of the written tensor gives the gradients of both tensors."""

    def program(x, v):
        y = x * 1
        flat = y.view(-1)
        exec(write, SCOPE, {"x": y, "v": v})
        (y * torch.arange(24.0).view(4, 6)).sum().backward()
        return y, flat, x.grad * 1, None if v.grad is None else v.grad * 1

    def detached(x, v):
        flat = x.view(-1)
        exec(write, SCOPE, {"x": x, "v": v})
        return x, flat

    assert_as_plain(program, requires_grad=True)
    assert_as_plain(detached, versions=True)
