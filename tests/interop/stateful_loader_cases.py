"""A training loop with torchdata's loader: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import dtckpt
from dtckpt import PerClient
from dtckpt.interop import resize_loader

NUM_SAMPLES, BATCH = 192, 4
SAMPLERS = {"stateful": StatefulDistributedSampler, "plain": DistributedSampler}


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own indices."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def loader_of(client: int, num_clients: int, sampler: str, num_workers: int = 0) -> StatefulDataLoader[torch.Tensor]:
    """Return the loader of a client."""
    own = SAMPLERS[sampler](Numbers(), num_replicas=num_clients, rank=client, shuffle=True, seed=3)
    generator = torch.Generator().manual_seed(client)
    return StatefulDataLoader(Numbers(), BATCH, sampler=own, num_workers=num_workers, generator=generator)


def train(path: str, sampler: str, save_at: int) -> tuple[list[str], list[float]]:
    """Go on from a checkpoint if there is one; return the losses and the samples of this client.

    Args:
        path: The checkpoint; it is saved after some steps.
        sampler: The kind of sampler.
        save_at: Step after which to save, and after which a run that saves goes on; -1: do not save.
    """
    client, num_clients = dtckpt.client_id(), dtckpt.num_clients()
    torch.manual_seed(client)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    loader = loader_of(client, num_clients, sampler)
    state: dict[str, Any] = {
        "model": PerClient(model, on_resize="modulo"),
        "loader": PerClient(loader, on_resize=resize_loader),
        "rng": PerClient(dtckpt.RngState(), on_resize="keep"),
    }
    if save_at < 0:
        dtckpt.restore(path, state, group=range(num_clients))
    losses, samples = [], []
    optimizer = torch.optim.SGD(model.parameters(), 1e-7)
    for step, batch in enumerate(loader):
        loss = model(batch.double()[:, None]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        samples += batch.tolist()
        if step == save_at:
            dtckpt.save(path, state, group=range(num_clients))
    return losses, samples


def draw(loaders: list[StatefulDataLoader[torch.Tensor]], num_batches: int) -> list[float]:
    """Draw batches of several loaders, the same number of each that goes on; return the samples."""
    found: list[float] = []
    for loader in loaders:
        batches = iter(loader)
        for _ in range(num_batches):
            batch = next(batches, None)
            found += [] if batch is None else batch.tolist()
    return found


@functools.cache
def state_after(num_clients: int, num_batches: int) -> dtckpt.ClientValues:
    """Return the states of loaders that have drawn some batches."""
    loaders = [loader_of(client, num_clients, "stateful") for client in range(num_clients)]
    draw(loaders, num_batches)
    return dtckpt.ClientValues({client: loader.state_dict() for client, loader in enumerate(loaders)})
