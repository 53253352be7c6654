"""A trainer and an inference engine as two jobs: the engine takes the trainer's weights from memory, as they change.

python -m examples.train_and_rollout

starts a coordinator, a trainer (FSDP2 on two processes) and an engine (tensor parallel on two). The trainer learns a
sentence, and publishes its weights every few steps. The engine takes each version onto its own mesh, and writes what
the model says now. Each job has one call: `publish`, and `update`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtckpt
from examples.launch import DemoError, coordinator, torchrun, wait_until

FEED = "policy"
TEXT = b"the engine says what the trainer has learned, version by version. "
CONTEXT, WIDTH, HIDDEN = 8, 16, 128
STEPS, EVERY = 40, 8
"""Steps of the training, and after how many of them it publishes."""
WAIT_S = 120.0


class ByteModel(nn.Module):
    """Says the byte that comes after some bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.up = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(self.up(self.embed(context).flatten(1)).relu())))


def digest_of(model: nn.Module) -> str:
    """Return a digest of all weights, whole; equal on any mesh. Collective: Over all clients."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_line(file: Path, **facts: Any) -> None:
    """Append a line to a file, on client 0."""
    if dist.get_rank() == 0:
        with open(file, "a") as lines:
            lines.write(json.dumps(facts) + "\n")


def read_lines(file: Path) -> dict[int, dict[str, Any]]:
    """Return the whole lines of a file by step."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {facts["step"]: facts for facts in map(json.loads, (line for line in lines if line.endswith("\n")))}


# --- the two jobs -----------------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Run one process of the trainer."""
    dtckpt.init_process_group("gloo")
    torch.manual_seed(0)
    model = ByteModel()
    for layer in (model.up, model.down, model.head):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    rows = torch.tensor([list((TEXT + TEXT)[at : at + CONTEXT + 1]) for at in range(len(TEXT))])
    mine = rows[dist.get_rank() :: dist.get_world_size()]
    with dtckpt.Publisher(FEED) as policy:
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                write_line(folder / "published.jsonl", step=step, digest=digest_of(model))
                policy.publish({"model": model}, step=step)
                wait_for_rollouts(folder, step)
            loss = nn.functional.cross_entropy(model(mine[:, :-1]), mine[:, -1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def wait_for_rollouts(folder: Path, step: int) -> None:
    """Wait until the engine has used the weights of a step, as a trainer that learns from rollouts does."""
    deadline = time.monotonic() + WAIT_S
    while step not in read_lines(folder / "rollouts.jsonl"):
        if time.monotonic() > deadline:
            raise DemoError(f"there are no rollouts of step {step} after {WAIT_S:g} s")
        time.sleep(0.02)


def roll_out(folder: Path) -> None:
    """Run one process of the engine."""
    dtckpt.init_process_group("gloo")
    torch.manual_seed(1)  # its weights are not the trainer's
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(ByteModel(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    addresses = [tensor.data_ptr() for tensor in memory_of(model)]
    with dtckpt.Subscriber(FEED, target={"model": model}, covers=model) as policy:
        while policy.version is None or policy.version.step < STEPS:
            policy.update(timeout_s=WAIT_S)
            assert policy.version is not None
            assert policy.report is not None
            assert addresses == [tensor.data_ptr() for tensor in memory_of(model)]
            write_line(
                folder / "rollouts.jsonl",
                step=policy.version.step,
                digest=digest_of(model),
                text=generate(model).decode("utf8", "backslashreplace"),
                nbytes=policy.report.nbytes_received,
                seconds=policy.report.seconds,
            )
    dist.destroy_process_group()


def memory_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield this client's memory of all parameters."""
    for tensor in model.parameters():
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def generate(model: nn.Module) -> bytes:
    """Return the text that a model says after the beginning of the sentence."""
    said = bytearray(TEXT[:CONTEXT])
    for _ in range(len(TEXT) - CONTEXT):
        said.append(int(model(torch.tensor([list(said[-CONTEXT:])])).argmax()))
    return bytes(said)


# --- both together ----------------------------------------------------------------------------------------------------


def run(out: Path, address: str) -> list[dict[str, Any]]:
    """Run both jobs beside a coordinator; return what the engine wrote of each version.

    Raises:
        DemoError: A job failed, or the engine did not have the trainer's weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = ["--nproc-per-node=2", "-m", "examples.train_and_rollout", f"--folder={out}"]
    with (
        torchrun([*command, "--job=train"], job="trainer", coordinator=address, out=out) as (trainer, its_log),
        torchrun([*command, "--job=roll-out"], job="engine", coordinator=address, out=out) as (engine, log),
    ):
        wait_until(lambda: engine.poll() == 0, engine, log)
        wait_until(lambda: trainer.poll() == 0, trainer, its_log)
    return compare(out)


def compare(out: Path) -> list[dict[str, Any]]:
    """Check that the engine had the trainer's weights in each version; return what it wrote.

    Raises:
        DemoError: It had not.
    """
    published, taken = read_lines(out / "published.jsonl"), read_lines(out / "rollouts.jsonl")
    if [*taken] != [*range(0, STEPS + 1, EVERY)]:
        raise DemoError(f"the engine took the versions of steps {[*taken]}")
    for step, facts in taken.items():
        if facts["digest"] != published[step]["digest"]:
            raise DemoError(f"the engine has other weights than the trainer had in step {step}")
    return [*taken.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of a job; without ``--job``, run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=["train", "roll-out"], help="as what this process runs")
    parser.add_argument("--folder", type=Path, help="folder of the files and logs")
    args = parser.parse_args(argv)
    if args.job:
        {"train": train, "roll-out": roll_out}[args.job](args.folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        out = args.folder or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        try:
            with coordinator(out) as address:
                for facts in run(out, address):
                    print(f"step {facts['step']:3}  {facts['text']}")
        except DemoError as error:
            print(f"train_and_rollout: {error}", file=sys.stderr)
            return 1
    print("the engine had the trainer's weights in each of these steps, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
