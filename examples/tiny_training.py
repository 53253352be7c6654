"""What the small training loops share: a model, rows to learn from, a loader with a position, and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16
BATCH = 12
"""Rows of the global batch; 1, 2, 3, 4, 6 or 12 clients share it."""
ROWS = 60


class Block(nn.Module):
    """A residual block with dropout, so that random states matter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(self.norm(rows)).relu())
        return rows + nn.functional.dropout(hidden, self.dropout, self.training)


class TinyModel(nn.Module):
    """Maps rows to numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def read_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data set: rows, and what the model should say of each."""
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return rows, rows.sin().sum(1, keepdim=True)


class ShardedLoader:
    """Batches of the rows of one client, in another order for each epoch.

    Client i of n takes the rows i, i + n, ... of each global batch.
    """

    def __init__(self, client: int, num_clients: int) -> None:
        self.client, self.num_clients = client, num_clients
        self.rows, self.targets = read_rows()
        self.taken = 0

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches that are left of an epoch."""
        epoch, first = divmod(self.taken * self.num_clients, ROWS)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for batch in order[first:].split(BATCH):
            mine = batch[self.client :: self.num_clients]
            self.taken += len(mine)  # before the batch is out, so that a save after the batch has counted it
            yield self.rows[mine], self.targets[mine]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of one epoch after the other."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """Return the position: how many rows this client has taken, and of how many clients it is one."""
        return {"taken": self.taken, "num_clients": self.num_clients}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that one of the same or another number of clients has saved."""
        self.taken = state["taken"] * state["num_clients"] // self.num_clients


def mean_over_clients(loss: torch.Tensor) -> float:
    """Return the loss of the global batch."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def argument_parser(text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a loop's command line; its help begins with the module's text."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("ckpt"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=8, help="steps of the whole run")
    parser.add_argument("--stop-after", type=int, help="end after this step, as if the run were interrupted")
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser
