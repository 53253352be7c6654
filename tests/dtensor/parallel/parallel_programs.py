"""Programs written for `torch.distributed.tensor.parallel`; each runs with that, and with `dtckpt.dtensor.parallel`.

A program takes the module that it would import tensors from, runs on 2 clients, and returns its observations as plain
values: mostly how many collectives ran, forward and backward, and whether values and gradients are as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dtensor.dtensor_programs import OURS, raises

AGREEMENT = "all_gather_object"
"""The kind of communication by which our clients agree on a shape; PyTorch's assume that shards are even."""

WIDTH, HEADS, VOCABULARY = 8, 4, 12


class FeedForward(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.wq(x), self.wk(x), self.wv(x))
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.ffn_norm, self.ffn = RootMeanSquareNorm(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """A language model.

    Args:
        reentrant: The kind of activation checkpoint around each block; None for none.
        is_tied: Whether the embedding and the output share one weight.
    """

    def __init__(self, *, reentrant: bool | None = None, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.output.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.output(self.norm(x))


def transformer_plan(api: Any, *, is_sequence: bool, is_loss_parallel: bool) -> dict[str, Any]:
    parallel = styles(api)
    whole, rows = api.Replicate(), api.Shard(1) if is_sequence else api.Replicate()
    column = parallel.ColwiseParallel
    plan = {
        "embedding": parallel.RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "layers.*.attention": parallel.PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole),
        **{f"layers.*.attention.w{name}": column() for name in "qkv"},
        "layers.*.attention.wo": parallel.RowwiseParallel(output_layouts=rows),
        "layers.*.ffn.w1": column(input_layouts=rows),
        "layers.*.ffn.w2": parallel.RowwiseParallel(output_layouts=rows),
        "output": column(
            input_layouts=rows,
            output_layouts=api.Shard(-1) if is_loss_parallel else whole,
            use_local_output=not is_loss_parallel,
        ),
    }
    if is_sequence:
        plan |= {name: parallel.SequenceParallel() for name in ("layers.*.*_norm", "norm")}
    return plan


# --- helpers ------------------------------------------------------------------------------------------------------


def styles(api: Any) -> Any:
    return import_module(f"{api.__name__}.parallel")


def line(api: Any) -> Any:
    return api.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a new module, with the same parameters on all clients."""
    torch.manual_seed(7)
    return build().double()


def counted(api: Any, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result, and how many collectives of tensors it made."""
    with import_module(f"{api.__name__}.debug").CommDebugMode() as mode:
        result = call()
    return result, sum(count for kind, count in mode.get_comm_counts().items() if kind != AGREEMENT)


def whole(api: Any, tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, api.DTensor) else tensor


def part(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return this client's part of a tensor; for None all of it."""
    if dim is None:
        return tensor
    parts = tensor.chunk(dist.get_world_size(), dim)
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else tensor.narrow(dim, 0, 0)


def compare(
    api: Any,
    build: Callable[[], nn.Module],
    plan: Any,
    inputs: Sequence[torch.Tensor],
    *,
    split: int | None = None,
    has_given_split: bool = False,
    mesh: Any = None,
) -> list[Any]:
    """Run a module over a mesh and on one device; return the numbers of collectives.

    Args:
        api: The module that DTensors are imported from.
        build: Makes the module.
        plan: For `parallelize_module`.
        inputs: Of the module.
        split: The dim of the outputs that is split.
        has_given_split: Whether the first input is split along that dim, too.
        mesh: Default a line of all clients.
    """
    plain, module = made(build), made(build)
    module = styles(api).parallelize_module(module, mesh or line(api), plan)
    wanted_inputs = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
    given = [part(one, split if has_given_split and number == 0 else None) for number, one in enumerate(inputs)]
    given = [one.clone().requires_grad_(one.is_floating_point()) for one in given]
    wanted = plain(*wanted_inputs)
    seed = random(*wanted.shape, seed=5)
    (wanted * seed).sum().backward()
    with torch.no_grad():
        module(*given)  # our clients agree on shapes in the first call
    output, forward = counted(api, lambda: module(*given))
    is_distributed = isinstance(output, api.DTensor)
    local = output.to_local() if is_distributed else output
    torch.testing.assert_close(local.detach(), part(wanted.detach(), split))
    _, backward = counted(api, lambda: (local * part(seed, split)).sum().backward())
    for one, other in zip(given, wanted_inputs, strict=True):
        if other.requires_grad:
            torch.testing.assert_close(one.grad, part(other.grad, split if has_given_split else None))
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(api, one.grad), other.grad)
    return [forward, backward, is_distributed]


# --- programs -----------------------------------------------------------------------------------------------------


def feed_forward(api: Any) -> Any:
    """The classic: one all-reduce forward, one backward."""
    parallel = styles(api)
    plan = {"w1": parallel.ColwiseParallel(), "w2": parallel.RowwiseParallel()}
    return [
        compare(api, lambda bias=bias: FeedForward(bias=bias), plan, [random(*shape)])
        for bias in (True, False)
        for shape in ((4, WIDTH), (2, 6, WIDTH))
    ]


def feed_forward_of_sequences(api: Any) -> Any:
    parallel, rows = styles(api), api.Shard(1)
    plan = {
        "w1": parallel.ColwiseParallel(input_layouts=rows),
        "w2": parallel.RowwiseParallel(output_layouts=rows),
    }
    return compare(api, FeedForward, plan, [random(2, 6, WIDTH)], split=1, has_given_split=True)


def attention(api: Any) -> Any:
    parallel, given = styles(api), [random(2, 6, WIDTH)]
    columns = {f"w{name}": parallel.ColwiseParallel() for name in "qkv"}
    alone = {**columns, "wo": parallel.RowwiseParallel()}
    whole = api.Replicate()
    shared = {**alone, "": parallel.PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
    rows = api.Shard(1)
    sequence = {
        **columns,
        "wo": parallel.RowwiseParallel(output_layouts=rows),
        "": parallel.PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole),
    }
    return [
        compare(api, Attention, alone, given),
        compare(api, Attention, shared, given),
        compare(api, Attention, sequence, given, split=1, has_given_split=True),
    ]


def embeddings(api: Any) -> Any:
    parallel, tokens = styles(api), torch.arange(12).reshape(2, 6)
    whole = api.Replicate()
    row, column = parallel.RowwiseParallel, parallel.ColwiseParallel
    kinds = [
        (row(input_layouts=whole), None),
        (row(input_layouts=whole, output_layouts=api.Shard(1)), 1),
        (row(input_layouts=whole, use_local_output=False), None),
        (column(), 2),
        (column(output_layouts=whole), None),
    ]
    return [compare(api, lambda: nn.Embedding(12, 6), style, [tokens], split=split) for style, split in kinds]


def norms(api: Any) -> Any:
    style = styles(api).SequenceParallel
    given = [random(2, 6, WIDTH)]
    return [
        compare(api, build, style(use_local_output=is_local), given, split=1, has_given_split=True)
        for build in (lambda: nn.LayerNorm(WIDTH), RootMeanSquareNorm, nn.Identity)
        for is_local in (True, False)
    ]


def layouts_of_outputs(api: Any) -> Any:
    parallel, given = styles(api), [random(4, 6)]
    return [
        compare(
            api, lambda: nn.Linear(6, 4), style(output_layouts=layout, use_local_output=is_local), given, split=split
        )
        for style in (
            parallel.ColwiseParallel,
            lambda **options: parallel.RowwiseParallel(input_layouts=api.Replicate(), **options),
        )
        for layout, split in ((api.Shard(0), 0), (api.Shard(1), 1), (api.Replicate(), None))
        for is_local in (True, False)
    ]


def transformers(api: Any) -> Any:
    tokens = torch.arange(12).reshape(2, 6)
    return [
        compare(api, Transformer, transformer_plan(api, is_sequence=is_sequence, is_loss_parallel=False), [tokens])
        for is_sequence in (True, False)
    ]


def transformer_with_a_parallel_loss(api: Any) -> Any:
    tokens, targets = torch.arange(12).reshape(2, 6), torch.arange(12).flip(0)
    targets[3] = -100
    model, plain = made(Transformer), made(Transformer)
    plan = transformer_plan(api, is_sequence=True, is_loss_parallel=True)
    model = styles(api).parallelize_module(model, line(api), plan)
    wanted = F.cross_entropy(plain(tokens).flatten(0, 1), targets)
    wanted.backward()
    with styles(api).loss_parallel():
        scores = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(scores, targets)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor().detach(), wanted.detach())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(api, one.grad), other.grad)
    return list(map(str, scores.placements)), list(map(str, loss.placements))


def one_axis_of_a_grid(api: Any) -> Any:
    parallel, grid = styles(api), api.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"w1": parallel.ColwiseParallel(), "w2": parallel.RowwiseParallel()}
    return compare(api, FeedForward, plan, [random(4, WIDTH)], mesh=grid["tp"])


def inference(api: Any) -> Any:
    tokens = torch.arange(12).reshape(2, 6)
    plan = transformer_plan(api, is_sequence=True, is_loss_parallel=False)
    model = styles(api).parallelize_module(made(Transformer), line(api), plan)
    seen = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model.eval()(tokens)
            scores, forward = counted(api, lambda: model.eval()(tokens))
            torch.testing.assert_close(scores, made(Transformer)(tokens))
            seen.append(forward)
    return seen


class Chooser(nn.Module):
    """A module with several inputs, by position and by name, and several outputs."""

    def forward(self, x: Any, note: str, *, scale: Any, offset: Any = None) -> Any:
        return x * scale, note, type(x).__name__, type(offset).__name__


def prepared_values(api: Any) -> Any:
    parallel, mesh = styles(api), line(api)
    whole, columns = api.Replicate(), api.Shard(1)
    x, scale = random(4, 6), random(4, 6, seed=1)
    seen: list[Any] = []
    for use_local_input in (True, False):
        for use_local_output in (True, False):
            module = parallel.parallelize_module(
                Chooser(),
                mesh,
                parallel.PrepareModuleInputOutput(
                    input_layouts=(whole, None),
                    desired_input_layouts=(columns, None),
                    input_kwarg_layouts={"scale": whole},
                    desired_input_kwarg_layouts={"scale": columns},
                    use_local_input=use_local_input,
                    output_layouts=(columns, None, None, None),
                    desired_output_layouts=(api.Shard(0), None, None, None),
                    use_local_output=use_local_output,
                ),
            )
            given = x.clone().requires_grad_()
            product, *others = module(given, "a note", scale=scale, offset=3)
            local = product.to_local() if isinstance(product, api.DTensor) else product
            torch.testing.assert_close(local.detach(), part(x * scale, 0))
            local.sum().backward()
            torch.testing.assert_close(given.grad, scale)
            seen.append((type(product).__name__, others))
    return seen


def current_mesh(api: Any) -> Any:
    mesh = line(api)
    with mesh:
        module = styles(api).parallelize_module(
            made(FeedForward), parallelize_plan={"w1": styles(api).ColwiseParallel()}
        )
    return module.w1.weight.device_mesh == mesh, str(module.w1.weight.placements[0]), type(module.w2.weight).__name__


def sources(api: Any) -> Any:
    """Whose parameters count."""
    seen = []
    for source in (0, 1, None):
        torch.manual_seed(dist.get_rank())
        module = nn.Linear(2, 4)
        own = module.weight.detach().clone()
        plan = {"": styles(api).ColwiseParallel()} if api.__name__ == OURS else styles(api).ColwiseParallel()
        styles(api).parallelize_module(module, line(api), plan, src_data_rank=source)
        torch.manual_seed(source or 0)
        wanted = own if source is None else nn.Linear(2, 4).weight.detach()
        seen.append(torch.equal(module.weight.to_local().detach(), part(wanted, 0)))
    return seen


def refusals(api: Any) -> Any:
    parallel, mesh = styles(api), line(api)
    whole, rows = api.Replicate(), api.Shard(0)
    row, column, prepare = parallel.RowwiseParallel, parallel.ColwiseParallel, parallel.PrepareModuleInput
    apply = parallel.parallelize_module
    counting = apply(nn.Linear(4, 4), mesh, prepare(input_layouts=(whole, whole), desired_input_layouts=(rows, rows)))
    plain = apply(nn.Identity(), mesh, prepare(input_layouts=whole, desired_input_layouts=rows))
    out = parallel.PrepareModuleOutput
    pair = apply(nn.Identity(), mesh, out(output_layouts=(whole, whole), desired_output_layouts=(rows, rows)))
    twice = apply(nn.Linear(4, 4), mesh, column())
    norm = apply(nn.Identity(), mesh, parallel.SequenceParallel())
    return [
        raises(AssertionError, lambda: prepare(input_layouts=(whole, whole), desired_input_layouts=whole)),
        raises(AssertionError, lambda: prepare(input_layouts=whole)),
        raises(AssertionError, lambda: prepare(input_kwarg_layouts={"x": whole}, desired_input_kwarg_layouts={})),
        raises(AssertionError, lambda: out(output_layouts=(whole, whole), desired_output_layouts=whole)),
        raises(ValueError, lambda: counting(random(4, 4).float())),
        raises(AssertionError, lambda: plain("text")),
        raises(ValueError, lambda: pair(random(4, 4))),
        raises(ValueError, lambda: norm("text")),
        raises(NotImplementedError, lambda: apply(nn.Conv1d(1, 1, 1), mesh, column())),
        raises(NotImplementedError, lambda: apply(nn.LayerNorm(3), mesh, row())),
        raises(RuntimeError, lambda: apply(twice, mesh, column())),
        raises(RuntimeError, lambda: apply(nn.Linear(4, 4), None, column())),
        raises(TypeError, lambda: apply(nn.Linear(4, 4), mesh, "rows")),
    ]


PROGRAMS = (
    feed_forward,
    feed_forward_of_sequences,
    attention,
    embeddings,
    norms,
    layouts_of_outputs,
    transformers,
    transformer_with_a_parallel_loss,
    one_axis_of_a_grid,
    inference,
    prepared_values,
    current_mesh,
    sources,
    refusals,
)
