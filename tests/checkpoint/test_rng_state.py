"""`RngState`: draws go on after a restore as if nothing had been between."""

import random

import numpy as np
import pytest
import torch

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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_draws_on_cards_go_on(tmp_path):
    torch.zeros(1, device="cuda")
    dtckpt.save(tmp_path / "s", {"rng": dtckpt.RngState()})
    drawn = torch.rand(3, device="cuda")
    dtckpt.restore(tmp_path / "s", {"rng": dtckpt.RngState()})
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
