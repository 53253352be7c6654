"""Cases of tensor parallelism that PyTorch's does not cover, for client processes: ties, uneven shards, errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dtckpt import dtensor
from dtckpt.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, parallel
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from dtckpt.errors import DtckptError

from .parallel_programs import (
    FeedForward,
    Transformer,
    compare,
    line,
    made,
    random,
    transformer_plan,
)

TOKENS = torch.arange(12).reshape(2, 6)
R = Replicate()


# --- one parameter of several modules --------------------------------------------------------------------------------


def tied_in_one_plan() -> Any:
    """The gradient is the sum of both uses, as on one device."""
    return [
        compare(
            dtensor,
            lambda: Transformer(is_tied=True),
            transformer_plan(dtensor, is_sequence=is_sequence, is_loss_parallel=False),
            [TOKENS],
        )
        for is_sequence in (True, False)
    ]


def tied_in_several_calls() -> Any:
    """Whether embedding and output share one weight after each call, and the state has it under both names."""
    model, mesh = made(lambda: Transformer(is_tied=True)), line(dtensor)
    seen = []
    row, column = RowwiseParallel(input_layouts=R), ColwiseParallel(output_layouts=R)
    for module, style in ((model.output, column), (model.embedding, row)):
        parallelize_module(module, mesh, style)
        seen.append((model.output.weight is model.embedding.weight, len(list(model.parameters()))))
    plain = made(lambda: Transformer(is_tied=True))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    loaded = io.BytesIO()
    torch.save(model.state_dict(), loaded)
    loaded.seek(0)
    model.load_state_dict(torch.load(loaded, weights_only=True))
    return [*seen, model.output.weight is model.embedding.weight]


def tied_to_a_module_without_a_style() -> Any:
    model, mesh = made(lambda: Transformer(is_tied=True)), line(dtensor)
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=R)})
    plain = made(lambda: Transformer(is_tied=True))
    torch.testing.assert_close(model(TOKENS).full_tensor(), plain(TOKENS))
    return model.output.weight is model.embedding.weight, str(model.output.weight.placements[0])


def tied_in_different_layouts() -> Any:
    model = made(lambda: Transformer(is_tied=True))
    plan = {"embedding": ColwiseParallel(), "output": ColwiseParallel()}
    return error_of(lambda: parallelize_module(model, line(dtensor), plan))


def parameters_that_only_look_alike() -> Any:
    """A weight that a module no longer in use had shared is distributed anew, in any layout."""
    first, second, mesh = nn.Linear(4, 4), nn.Linear(4, 4), line(dtensor)
    second.weight = first.weight
    parallelize_module(first, mesh, ColwiseParallel())
    del first
    return str(parallelize_module(second, mesh, RowwiseParallel()).weight.placements[0])


# --- shards of different sizes, shapes that clients agree on ---------------------------------------------------------


class OddFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w1, self.w2 = nn.LayerNorm(7), nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(self.norm(x))))


def uneven_shards() -> Any:
    rows = Shard(1)
    columns_and_rows = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
    sequences = {
        "norm": SequenceParallel(),
        "w1": ColwiseParallel(input_layouts=rows),
        "w2": RowwiseParallel(output_layouts=rows),
    }
    return [
        compare(dtensor, OddFeedForward, columns_and_rows, [random(2, 3, 7)]),
        *(
            compare(dtensor, OddFeedForward, sequences, [random(2, length, 7)], split=1, has_given_split=True)
            for length in (3, 4, 5, 1)
        ),
    ]


def agreements() -> Any:
    """Exchanges in the first call and in the second: clients agree on a shape once, if at all."""
    mesh, rows, seen = line(dtensor), Shard(1), []
    plans = [
        {"w1": ColwiseParallel(), "w2": RowwiseParallel()},
        {"w1": ColwiseParallel(input_layouts=rows), "w2": RowwiseParallel(output_layouts=rows)},
    ]
    for number, plan in enumerate(plans):
        module = parallelize_module(made(FeedForward), mesh, plan)
        given = random(2, 11 + number, 8)
        for value in (given, distribute_tensor(given, mesh, [R])):
            for _ in range(2):
                with CommDebugMode() as mode:
                    module(value)
                seen.append(mode.get_total_counts())
    return seen


# --- parameters ------------------------------------------------------------------------------------------------------


def replicas_of_norms() -> Any:
    """Norms whose weights differ between clients get one client's weights; frozen weights stay frozen."""
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.fill_(dist.get_rank() + 3)
    norm.bias.requires_grad_(False)
    parallelize_module(norm, line(dtensor), SequenceParallel(), src_data_rank=1)
    return norm.weight.to_local().tolist(), norm.weight.requires_grad, norm.bias.requires_grad


def meta_parameters() -> Any:
    """A model without memory is parallelized first, and gets values afterwards."""
    with torch.device("meta"):
        model = FeedForward()
    parallelize_module(model, line(dtensor), {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    plain = FeedForward()
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 0.5)
    torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    return model.w1.weight.is_meta, tuple(model.w1.weight.shape), tuple(model.w1.weight.to_local().shape)


# --- errors: the same class and text on every client -----------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except DtckptError as error:
        return type(error).__name__, str(error)
    return None


def component_of_a_wrong_size() -> Any:
    """One client's input does not fit; the others are in the layer's reduction already."""
    module = parallelize_module(nn.Linear(8, 4), line(dtensor), RowwiseParallel())
    return error_of(lambda: module(torch.ones(2, 4 + dist.get_rank())))


def no_tensor_on_one_client() -> Any:
    module = parallelize_module(nn.Linear(8, 4), line(dtensor), RowwiseParallel())
    return error_of(lambda: module("text" if dist.get_rank() else torch.ones(2, 4)))


def plans_that_differ() -> Any:
    styles = [ColwiseParallel(), RowwiseParallel()]
    return error_of(lambda: parallelize_module(nn.Linear(8, 8), line(dtensor), styles[dist.get_rank()]))


def shards_that_do_not_follow() -> Any:
    module = parallelize_module(nn.LayerNorm(4), line(dtensor), SequenceParallel())
    return error_of(lambda: module(torch.ones(2, 3 + 2 * dist.get_rank(), 4)))


# --- loss ------------------------------------------------------------------------------------------------------------


def losses() -> Any:
    """The kinds of communication, forward and backward, of each loss that equals the loss of one device."""
    mesh, seen = line(dtensor), set()
    for shape, dim in (((6, 9), 1), ((2, 9, 3), 1), ((9,), 0), ((2, 8, 3, 2), 1)):
        targets = torch.arange(torch.Size(shape).numel() // shape[dim]).reshape([*shape[:dim], *shape[dim + 1 :]]) % 7
        for reduction in ("mean", "sum", "none"):
            for more in ({}, {"ignore_index": 3}, {"weight": random(shape[dim]).abs()}):
                options = {"ignore_index": 1, **more, "reduction": reduction}
                plain = random(*shape).requires_grad_()
                scores = distribute_tensor(random(*shape), mesh, [Shard(dim)]).requires_grad_()
                wanted = F.cross_entropy(plain, targets, **options)
                (wanted * random(*wanted.shape)).sum().backward()
                with loss_parallel():
                    with CommDebugMode() as forward:
                        loss = F.cross_entropy(scores, targets, **options)
                    torch.testing.assert_close(loss.full_tensor().detach(), wanted.detach())
                    seed = distribute_tensor(random(*wanted.shape), mesh, [R])
                    with CommDebugMode() as backward:
                        (loss * seed).sum().backward()
                torch.testing.assert_close(scores.grad.full_tensor(), plain.grad)
                assert loss.placements == (R,)
                assert scores.grad.placements == (Shard(dim),)
                seen.add((*forward.get_comm_counts().items(), *backward.get_comm_counts().items()))
    return seen


def losses_in_other_layouts() -> Any:
    """What PyTorch's `loss_parallel` refuses: whole or split rows, pending sums, means over a grid, label smoothing."""
    scores, targets = random(6, 8), torch.arange(6)
    line_mesh = line(dtensor)
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    placed = [
        (line_mesh, [R], targets),
        (line_mesh, [Shard(0)], targets),
        (line_mesh, [Shard(0)], distribute_tensor(targets, line_mesh, [Shard(0)])),
        (line_mesh, [Partial()], targets),
        (grid, [Shard(0), Shard(1)], targets),
        (grid, [Shard(0), Shard(1)], distribute_tensor(targets, grid, [Shard(0), R])),
        (grid, [R, Shard(1)], targets),
        (grid, [Shard(1), Shard(1)], targets),
    ]
    for mesh, placements, given in placed:
        for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"weight": random(8).abs()}):
            plain = scores.clone().requires_grad_()
            ours = distribute_tensor(scores, mesh, placements).requires_grad_()
            wanted = F.cross_entropy(plain, targets, **options)
            wanted.backward()
            with loss_parallel():
                loss = F.cross_entropy(ours, given, **options)
                loss.backward()
            torch.testing.assert_close(loss.full_tensor().detach(), wanted.detach())
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
    shares = random(6, 8, seed=3).softmax(1)
    with loss_parallel():
        loss = F.cross_entropy(distribute_tensor(scores, line_mesh, [Shard(1)]), shares)
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(scores, shares))


# --- the model that PyTorch ships with its tests ---------------------------------------------------------------------


def torchs_transformer() -> Any:
    """Parallelize that model by its own code, with our names in the place of PyTorch's, and compare it with itself."""
    from torch.testing._internal.distributed._tensor import common_dtensor as theirs

    names = [name for api in (dtensor, parallel) for name in api.__all__ if hasattr(theirs, name)]
    ours = {name: getattr(parallel, name, None) or getattr(dtensor, name) for name in names}
    tokens = torch.arange(2 * 6).reshape(2, 6) % 8
    for options in ({"weight_tying": True}, {"weight_tying": False, "checkpoint_activations": True}):
        for is_sequence in (True, False):
            for is_attention_local in (True, False):
                args = theirs.ModelArgs(dropout_p=0.0, **options)
                plain, model = (made(lambda args=args: theirs.Transformer(args)) for _ in range(2))
                with patch.multiple(theirs, **ours):
                    theirs.Transformer.parallelize(model, line(dtensor), is_sequence, is_attention_local)
                    scores = model(tokens)
                    scores.sum().backward()
                wanted = plain(tokens)
                wanted.sum().backward()
                torch.testing.assert_close(scores, wanted)
                for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                    gradient = one.grad.full_tensor() if isinstance(one, DTensor) else one.grad
                    torch.testing.assert_close(gradient, other.grad)
    return sorted(ours)


def checkpointed() -> Any:
    """With activation checkpoints of both kinds; PyTorch's `CommDebugMode` cannot count what these run."""
    plan = transformer_plan(dtensor, is_sequence=True, is_loss_parallel=False)
    return [compare(dtensor, lambda kind=kind: Transformer(reentrant=kind), plan, [TOKENS]) for kind in (True, False)]


def trained() -> Any:
    """Steps of an optimizer, with a tied weight and a parallel loss, are as on one device."""
    plan = transformer_plan(dtensor, is_sequence=True, is_loss_parallel=True)
    model = parallelize_module(made(lambda: Transformer(is_tied=True)), line(dtensor), plan)
    plain = made(lambda: Transformer(is_tied=True))
    seen = []
    for each, block in ((model, loss_parallel), (plain, nullcontext)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        seen.append([])
        for _ in range(6):
            optimizer.zero_grad()
            with block():
                loss = F.cross_entropy(each(TOKENS).flatten(0, 1), TOKENS.flatten().roll(-1))
                loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            seen[-1].append(loss.item())
    torch.testing.assert_close(*seen)
    assert seen[0][-1] < 0.9 * seen[0][0]


def _plan_that_keeps_values_distributed() -> dict[str, Any]:
    rows = Shard(1)
    return {
        "embedding": RowwiseParallel(input_layouts=R, output_layouts=rows, use_local_output=False),
        "layers.*.*_norm": SequenceParallel(),
        "norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=rows, desired_input_layouts=R),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=rows, use_local_output=False),
        "layers.*.ffn.w1": ColwiseParallel(use_local_output=False),
        "layers.*.ffn.w2": RowwiseParallel(output_layouts=rows, use_local_output=False),
        "output": ColwiseParallel(output_layouts=R),
    }


def kept_distributed() -> Any:
    """With ``use_local_output=False`` throughout, values stay DTensors from module to module."""
    plan = _plan_that_keeps_values_distributed()
    model, plain = (parallelize_module(made(Transformer), line(dtensor), plan), made(Transformer))
    with CommDebugMode() as mode:
        scores = model(TOKENS)
    torch.testing.assert_close(scores, plain(TOKENS))
    scores.sum().backward()
    plain(TOKENS).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    return dict(mode.get_comm_counts())


def lengths_that_change() -> Any:
    """Sequences whose shards change on some clients only: from 3 to 4 tokens, so the first client's shard stays."""
    kept = parallelize_module(made(Transformer), line(dtensor), _plan_that_keeps_values_distributed())
    plain = made(Transformer)
    for length in (3, 4, 6, 5, 3):
        torch.testing.assert_close(kept(TOKENS[:, :length]), plain(TOKENS[:, :length]))
    plan = transformer_plan(dtensor, is_sequence=True, is_loss_parallel=False)
    local = parallelize_module(made(Transformer), line(dtensor), plan)
    torch.testing.assert_close(local(TOKENS[:, :3]), plain(TOKENS[:, :3]))
    try:
        local(TOKENS[:, :4])
    except DtckptError as error:
        return type(error).__name__, str(error)
    return None
