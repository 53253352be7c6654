"""`resize_loader`: every sample once on another number of clients, and the same losses on the same number."""

import copy

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from dtckpt import ClientValues
from dtckpt.errors import TreeError
from dtckpt.interop import resize_loader

from . import stateful_loader_cases as cases
from .stateful_loader_cases import NUM_SAMPLES, draw, loader_of, state_after

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

EVERY_SAMPLE = [float(index) for index in range(NUM_SAMPLES)]


@pytest.mark.share(6)
@pytest.mark.parametrize("sampler", ["stateful", "plain"])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 4, 3), (1, 3), (4, 3, 2)], ids=str)
def test_every_sample_is_drawn_once(sizes, num_workers, sampler):
    samples, saved = [], None
    for position, num_clients in enumerate(sizes):
        loaders = [loader_of(client, num_clients, sampler, num_workers) for client in range(num_clients)]
        if saved is not None:
            for client, loader in enumerate(loaders):
                loader.load_state_dict(resize_loader(saved, client, num_clients))
        is_last = position == len(sizes) - 1
        samples += draw(loaders, NUM_SAMPLES if is_last else 5)
        saved = ClientValues({client: loader.state_dict() for client, loader in enumerate(loaders)})
    assert sorted(samples) == EVERY_SAMPLE


def test_the_next_epoch_is_whole():
    saved = state_after(4, NUM_SAMPLES)
    loaders = [loader_of(client, 2, "stateful") for client in range(2)]
    for client, loader in enumerate(loaders):
        loader.load_state_dict(resize_loader(saved, client, 2))
    assert sorted(draw(loaders, NUM_SAMPLES)) == EVERY_SAMPLE


@pytest.mark.parametrize("sampler", ["stateful", "plain"])
def test_a_run_that_is_resumed(pool, tmp_path, sampler):
    path = f"{tmp_path}/step"
    whole = pool.values(cases.train, path, sampler, 4, clients=4, group=True)
    same = pool.values(cases.train, path, sampler, -1, clients=4, group=True)
    assert same == [(losses[5:], samples[5 * cases.BATCH :]) for losses, samples in whole]
    drawn = [sample for _, samples in whole for sample in samples[: 5 * cases.BATCH]]
    for num_clients in (2, 3):
        rest = pool.values(cases.train, path, sampler, -1, clients=num_clients, group=True)
        assert sorted(drawn + [sample for _, samples in rest for sample in samples]) == EVERY_SAMPLE


@pytest.mark.parametrize("has_generator", [True, False])
def test_a_loader_without_a_generator_draws_from_the_global_stream(has_generator):
    loader = StatefulDataLoader(cases.Numbers(), 4, generator=torch.Generator() if has_generator else None)
    before = torch.get_rng_state()
    loader.state_dict()
    assert torch.equal(torch.get_rng_state(), before) == has_generator


def changed(change):
    states = copy.deepcopy(dict(state_after(2, 3)))
    change(states)
    return ClientValues(states, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda states: states.pop(1), "got clients 0, expected all 2 clients"),
        (lambda states: states.update({1: state_after(2, 2)[1]}), r"clients have drawn 12, 8 samples, expected 10, 10"),
        (lambda states: states.update({1: {"position": 3}}), "it is not the state of torchdata's StatefulDataLoader"),
        (lambda states: states[0].update(dataset_state={"at": 1}), "its data set has its own state"),
        (lambda states: states[0].update(fetcher_state={}), "its data set has its own state"),
        (lambda states: states[1]["_sampler_iter_state"].update(sampler_iter_state={}), "its sampler has its own"),
    ],
)
def test_positions_that_cannot_be_dealt_out(change, text):
    with pytest.raises(TreeError, match=text):
        resize_loader(changed(change), 0, 3)


def test_positions_between_two_snapshots_are_refused():
    state = state_after(2, 3)[0]
    between = {
        "_snapshot": {"_main_snapshot": state, "_worker_snapshots": {"worker_0": state}},
        "_steps_since_snapshot": 1,
        "_iterator_finished": False,
    }
    with pytest.raises(TreeError, match="saved 1 batches after the loader's last snapshot"):
        resize_loader(ClientValues({0: between}), 0, 2)
