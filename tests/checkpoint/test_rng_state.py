"""`RngState`: draws go on after a restore as if nothing had been between."""

import random

import numpy as np
import pytest
import torch
from support.states import NUM_GPUS

import dtckpt


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1), np.random.randn()


def test_draws_go_on(tmp_path):
    state = {"rng": dtckpt.PerClient(dtckpt.RngState(), on_resize="keep")}
    draw()  # half of a pair of normal numbers is kept for the next draw
    dtckpt.save(tmp_path / "s", state)
    drawn = draw()
    assert draw() != drawn
    assert dtckpt.restore(tmp_path / "s", state) is state
    assert draw() == drawn


def test_draws_go_on_from_values_that_were_restored_without_a_target(tmp_path):
    dtckpt.save(tmp_path / "s", {"rng": dtckpt.PerClient(dtckpt.RngState())})
    drawn = draw()
    dtckpt.RngState().load_state_dict(dtckpt.restore(tmp_path / "s")["rng"][0])
    assert draw() == drawn


class Gpus:
    """Stands for some GPUs, all of which the program has used, or for none; their states are numbers."""

    def __init__(self, monkeypatch, states):
        self.states = {gpu: torch.tensor([state], dtype=torch.uint8) for gpu, state in enumerate(states)}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(self.states))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [one.clone() for one in self.states.values()])
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: self.states.update({gpu: state.clone()}))

    def numbers(self):
        return [int(state) for state in self.states.values()]


@pytest.mark.parametrize("num_here", range(3))
@pytest.mark.parametrize("num_saved", range(3))
@pytest.mark.parametrize("is_per_client", [True, False])
def test_another_number_of_gpus(tmp_path, monkeypatch, is_per_client, num_saved, num_here):
    rng = dtckpt.RngState()
    state = {"rng": dtckpt.PerClient(rng, on_resize="keep") if is_per_client else rng}
    Gpus(monkeypatch, [11, 12][:num_saved])
    dtckpt.save(tmp_path / "s", state)
    drawn = draw()
    here = Gpus(monkeypatch, [21, 22][:num_here])
    dtckpt.restore(tmp_path / "s", state)
    assert draw() == drawn
    assert here.numbers() == [*[11, 12][: min(num_saved, num_here)], *[21, 22][num_saved:num_here]]


@pytest.mark.cuda
@pytest.mark.skipif(not NUM_GPUS, reason="there is no GPU")
def test_draws_on_gpus_go_on(tmp_path):
    torch.zeros(1, device="cuda")
    dtckpt.save(tmp_path / "s", {"rng": dtckpt.RngState()})
    drawn = torch.rand(3, device="cuda")
    dtckpt.restore(tmp_path / "s", {"rng": dtckpt.RngState()})
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
