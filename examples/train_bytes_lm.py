r"""Train a small byte-level language model on several clients, with sharded checkpoints. Start it with torchrun.

Parameters are replicated. Adam's moments are DTensors: every client holds and updates only its own region of them,
and the regions of the updated parameters are gathered. Every client draws the same global batch and takes its slice,
so the losses do not depend on the number of clients.

    torchrun --nproc-per-node 4 -m examples.train_bytes_lm --steps 32 --save-every 8 --checkpoints ckpt
    torchrun --nproc-per-node 2 -m examples.train_bytes_lm --steps 32 --resume ckpt/step_16 --checkpoints more \
        --mesh data=2 --matrix-spec unsharded,data --vector-spec data
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dtckpt
from dtckpt.dtensor import init_device_mesh

CONFIG = {
    "model": "byte-gru",
    "embedding": 96,
    "hidden": 192,
    "batch": 16,
    "sequence": 48,
    "lr": 4e-3,
    "betas": (0.9, 0.98),
    "eps": 1e-8,
}


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, embedding)
        self.rnn = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embed(text))
        return self.head(hidden)


class ShardedAdam:
    """Adam whose moments are sharded, and whose every client updates only its region of every parameter.

    Args:
        parameters: Parameters by name, equal on all clients.
        layouts: By name, the layout of the moments of a parameter; one local device per client.
        config: ``lr``, ``betas`` and ``eps``.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], layouts: dict[str, dtckpt.Layout], config: dict) -> None:
        self.parameters = parameters
        self.lr, self.betas, self.eps = config["lr"], config["betas"], config["eps"]
        self.regions = {
            name: layouts[name].region(layouts[name].mesh.local_device_ids()[0], parameter.shape)
            for name, parameter in parameters.items()
        }
        self.exp_avg: dict[str, dtckpt.DTensor] = {}
        self.exp_avg_sq: dict[str, dtckpt.DTensor] = {}
        for name, region in self.regions.items():
            for moments, dtype in ((self.exp_avg, torch.bfloat16), (self.exp_avg_sq, torch.float32)):
                component = torch.zeros(region.shape, dtype=dtype, device=parameters[name].device)
                moments[name] = dtckpt.pack([component], layouts[name], parameters[name].shape)

    def state_dict(self) -> dict[str, dict[str, dtckpt.DTensor]]:
        """Return the moments."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_state_dict(self, state: dict[str, dict[str, dtckpt.DTensor]]) -> None:
        """Take over moments."""
        self.exp_avg, self.exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Update all parameters from their gradients; ``number`` counts from 1."""
        beta1, beta2 = self.betas
        for name, parameter in self.parameters.items():
            box = self.regions[name].slices()
            grad = parameter.grad[box]
            exp_avg, exp_avg_sq = self.exp_avg[name].to_local(), self.exp_avg_sq[name].to_local()
            exp_avg.copy_(exp_avg.float().lerp_(grad, 1 - beta1))  # computed in float32, kept in bfloat16
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = exp_avg_sq.div(1 - beta2**number).sqrt_().add_(self.eps)
            updated = parameter[box] - self.lr / (1 - beta1**number) * exp_avg.float() / scale
            whole = dtckpt.pack([updated], self.exp_avg[name].layout, parameter.shape).full_tensor()
            parameter.copy_(whole)


def read_text() -> torch.Tensor:
    """Return real text that every machine has: the Python standard library's own source."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def next_batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this client's slice of the next global batch: bytes, and the bytes that follow them.

    The places are drawn from torch's random numbers, whose state is the same on all clients and part of the checkpoint.
    """
    starts = torch.randint(len(text) - CONFIG["sequence"] - 1, (CONFIG["batch"],))
    mine = starts.chunk(dtckpt.num_clients())[dtckpt.client_id()]
    rows = text[mine[:, None] + torch.arange(CONFIG["sequence"] + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def train_step(model: ByteModel, optimizer: ShardedAdam, text: torch.Tensor, number: int) -> float:
    """Do one step of data-parallel training; return the loss of the global batch."""
    inputs, targets = (batch.to(model.head.weight.device) for batch in next_batch(text))
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    loss = loss.detach()
    for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)
        tensor.div_(dtckpt.num_clients())
    optimizer.step(number)
    return loss.item()


def parse_specs(text: str) -> list[str | tuple[str, ...]]:
    """Read one sharding spec per dim: ``data,unsharded``, or ``data+model`` for a dim that both axes split."""
    return [tuple(spec.split("+")) if "+" in spec else spec for spec in text.split(",")]


def train(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Train, and save every few steps; yield the facts of every step."""
    axes = {axis: int(size) for axis, _, size in (item.partition("=") for item in args.mesh.split(","))}
    mesh = init_device_mesh(args.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if CONFIG["batch"] % dtckpt.num_clients():
        raise SystemExit(f"a batch of {CONFIG['batch']} cannot be divided equally among {dtckpt.num_clients()} clients")
    layout_of_rank = {
        1: dtckpt.Layout(parse_specs(args.vector_spec), mesh),
        2: dtckpt.Layout(parse_specs(args.matrix_spec), mesh),
    }
    torch.manual_seed(0)  # the same first parameters and batches on every client
    model = ByteModel(CONFIG["embedding"], CONFIG["hidden"]).to(args.device)
    parameters = dict(model.named_parameters())
    layouts = {name: layout_of_rank[parameter.ndim] for name, parameter in parameters.items()}
    optimizer = ShardedAdam(parameters, layouts, CONFIG)
    state = {
        "model": model,  # replicated: plain tensors, a copy on every client
        "optimizer": optimizer,  # sharded: DTensors
        "step": torch.tensor(0),
        "rng": torch.get_rng_state(),
        "config": dict(CONFIG),
    }
    if args.resume:
        dtckpt.restore(args.resume, state)
        if state["config"] != CONFIG:
            raise SystemExit(f"{args.resume} is of another model: {state['config']}")
        torch.set_rng_state(state["rng"])
    text = read_text()
    while state["step"] < args.steps:
        state["step"] += 1
        step = int(state["step"])
        facts = {"step": step, "loss": train_step(model, optimizer, text, step)}
        if args.save_every and step % args.save_every == 0:
            state["rng"] = torch.get_rng_state()
            report = dtckpt.save(args.checkpoints / f"step_{step}", state, step=step)
            facts |= {"nbytes": report.nbytes, "save_s": report.total_s}
        yield facts


def main(argv: Sequence[str] | None = None) -> None:
    """Run one client."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model.")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the checkpoints step_<N>")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--resume", help="checkpoint to go on from")
    parser.add_argument("--mesh", default="data=2,model=2", help="axes and sizes of the mesh over all clients")
    parser.add_argument("--matrix-spec", default="data,model", help="layout of the moments of matrices")
    parser.add_argument("--vector-spec", default="data+model", help="layout of the moments of vectors")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="clients may share a GPU")
    parser.add_argument("--losses", default="losses.jsonl", help="file for one JSON line per step")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # rounds to 10 bits: losses would depend on the number of clients
    dtckpt.init_process_group("gloo")
    dtckpt.initialize_multi_client()
    with open(args.losses if dtckpt.client_id() == 0 else os.devnull, "w", buffering=1) as log:
        for facts in train(args):
            print(json.dumps(facts), file=log)
    dtckpt.shutdown_multi_client()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
