"""`accelerator_state`: its content, and the states that it refuses; and FSDP2. Other runs are in test_loops.py."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dtckpt
from dtckpt.errors import ConfigError
from dtckpt.interop import accelerator_state

from .example_cases import call


class Loader:
    use_stateful_dataloader = True

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def accelerator(kind="MULTI_GPU", **more):
    """Stands for an ``Accelerator``, whose import takes seconds."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    facts = {
        "distributed_type": SimpleNamespace(value=kind),
        "is_fsdp2": False,
        "scaler": None,
        "step": 0,
        "_models": [model],
        "_optimizers": [optimizer],
        "_schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 3)],
        "_custom_objects": [torch.nn.BatchNorm1d(2)],
        "_dataloaders": [Loader(), object()],
    }
    return SimpleNamespace(**facts | more)


def test_all_of_it_comes_back(tmp_path):
    saved = accelerator(step=3, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    saved._dataloaders[0].position = 7
    saved._optimizers[0].step()
    saved._schedulers[0].step()
    dtckpt.save(tmp_path / "s", accelerator_state(saved))
    drawn = torch.rand(1)
    restored = accelerator(scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    dtckpt.restore(tmp_path / "s", accelerator_state(restored))
    assert torch.equal(torch.rand(1), drawn)
    assert (restored.step, restored._dataloaders[0].position, restored.scaler.get_scale()) == (3, 7, 8.0)
    assert torch.equal(restored._models[0].weight, saved._models[0].weight)
    assert restored._schedulers[0].last_epoch == 1


@pytest.mark.share(2, of="loops")
def test_fsdp2_goes_on_with_any_number_of_processes(framework_pool, tmp_path):
    run = partial(framework_pool.values, call, "interop.accelerate_cases", "losses_with_fsdp2", str(tmp_path / "s"))
    saved = run(is_saved=True, clients=4, group=True)
    assert saved == [saved[0]] * 4
    assert run(is_saved=False, clients=4, group=True) == saved
    for clients in (1, 2, 3):
        for losses in run(is_saved=False, clients=clients, group=True):
            assert losses == pytest.approx(saved[0], rel=1e-5)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_frameworks_that_save_by_themselves(kind):
    with pytest.raises(ConfigError, match=f"{kind} keeps the state"):
        accelerator_state(accelerator(kind))
    accelerator_state(accelerator("FSDP", is_fsdp2=True))
