"""`resize_loader`: positions of torchdata's ``StatefulDataLoader`` for another number of clients.

A distributed sampler deals one permutation of the data set out to N clients, in turn. When they have taken k samples
each, the first k N of the permutation are gone, whatever N is. So M clients go on from there::

    permutation   a b c d e f g h i j k l        4 clients have taken 1 sample each, 2 clients go on:
    4 clients     0 1 2 3                        client 0 has taken a c, goes on with e g i k
    2 clients     0 1 0 1 0 1 0 1 0 1 0 1        client 1 has taken b d, goes on with f h j l

The functions take states of torchdata 0.11, with and without workers. All of them are pure, and do not import
torchdata.
"""

from __future__ import annotations

import copy
from typing import Any

from dtckpt.errors import TreeError, capped
from dtckpt.format.containers import ClientValues

_MAX_SEED = 1 << 63


def resize_loader(values: ClientValues, client: int, num_clients: int) -> dict[str, Any]:
    """Return the state of a client's ``StatefulDataLoader``, from the states that another number of clients saved.

    A rule for ``PerClient(loader, on_resize=resize_loader)``. Every sample of the epoch is drawn once, as far as the
    sampler itself draws it once: a ``DistributedSampler`` may repeat some at the end. The data set must be indexed and
    have no state. Client i must read the i-th, (i + n)-th, ... sample of n clients, by
    ``sampler=StatefulDistributedSampler(...)`` or PyTorch's ``DistributedSampler``. If the number of samples that were
    drawn is no multiple of ``num_clients``, the first clients have drawn one more than the others.

    Args:
        values: The states that were saved, by client.
        client: The number of the client that restores.
        num_clients: How many restore.

    Raises:
        TreeError: The states are of another kind, or do not belong to one step.
    """
    if not values or sorted(values) != list(range(values.num_clients)):
        raise TreeError(
            f"positions of a loader cannot be dealt out anew: got clients {capped(sorted(values))}, expected all "
            f"{values.num_clients} clients that saved"
        )
    states = [values[number] for number in range(values.num_clients)]
    drawn = [_drawn(state, number) for number, state in enumerate(states)]
    total = sum(drawn)
    expected = [_share(total, number, len(drawn)) for number in range(len(drawn))]
    if drawn != expected:
        raise TreeError(
            f"positions of a loader cannot be dealt out anew: clients have drawn {capped(drawn)} samples, expected "
            f"{capped(expected)}, as a DistributedSampler deals {total} out to {len(drawn)} clients"
        )
    state: dict[str, Any] = copy.deepcopy(states[client % len(states)])
    main = _main_of(state)
    # A loader that has ended its epoch begins the next one; it must not skip anything there.
    share = 0 if all(each["_iterator_finished"] for each in states) else _share(total, client, num_clients)
    sampler = main["_sampler_iter_state"]
    sampler["samples_yielded"] = share
    if "sampler_state" in sampler:
        sampler["sampler_state"]["yielded"] = share
    if "_base_seed" in main and client >= len(states):
        main["_base_seed"] = (main["_base_seed"] + client) % _MAX_SEED  # workers draw other numbers on each client
    return state


def _share(total: int, client: int, num_clients: int) -> int:
    """Return how many of the first samples of the permutation are a client's."""
    return len(range(client, total, num_clients))


def _main_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that holds the sampler's state: with workers, from the last snapshot."""
    main: dict[str, Any] = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return main


def _drawn(state: Any, client: int) -> int:
    """Return how many samples a client has drawn.

    Raises:
        TreeError: The state is not of the kind that `resize_loader` takes.
    """
    try:
        main = _main_of(state)
        sampler = main["_sampler_iter_state"]
        workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
        state["_iterator_finished"]
        has_own = any(worker["dataset_state"] is not None or worker["fetcher_state"] is not None for worker in workers)
        drawn, steps = int(sampler["samples_yielded"]), int(state.get("_steps_since_snapshot", 0))
        is_dealt_out = "sampler_iter_state" not in sampler and sampler.get("sampler_state", {}).keys() <= {"yielded"}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise TreeError(
            f"position of the loader of client {client} cannot be dealt out anew: it is not the state of torchdata's "
            "StatefulDataLoader with batches of a data set that is indexed; pass your own function as on_resize"
        ) from None
    if has_own or not is_dealt_out:
        raise TreeError(
            f"position of the loader of client {client} cannot be dealt out anew: its "
            f"{'data set' if has_own else 'sampler'} has its own state; use a DistributedSampler on a data set "
            "without a state, or pass your own function as on_resize"
        )
    if steps:
        raise TreeError(
            f"position of the loader of client {client} cannot be dealt out anew: it was saved {steps} batches after "
            "the loader's last snapshot; use snapshot_every_n_steps=1, the loader's default"
        )
    return drawn
