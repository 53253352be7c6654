"""Accelerate: `accelerator_state` returns the state that ``Accelerator.save_state`` saves, as a state tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return the prepared and registered objects of an ``Accelerator``, to be saved, or to be restored into.

    ``dtckpt.save(path, accelerator_state(accelerator))`` stands for ``accelerator.save_state(path)``, and
    ``dtckpt.restore(path, accelerator_state(accelerator))`` for ``accelerator.load_state(path)``. So do `save_async`
    and a `CheckpointManager`. Any number of processes may restore.

    The tree holds the models, optimizers, schedulers, gradient scaler, and data loaders that have a state. Further
    parts are the objects passed to ``register_for_checkpointing``, the step of gradient accumulation, and each client's
    random states.

    Raises:
        ConfigError: The state is with DeepSpeed, Megatron-LM or FSDP1, which save it by themselves.
    """
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise ConfigError(f"{kind} keeps the state of an Accelerator itself; use save_state and load_state, or FSDP2")
    loaders = [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]
    state = {
        "models": accelerator._models,
        "optimizers": accelerator._optimizers,
        "schedulers": accelerator._schedulers,
        "custom_objects": accelerator._custom_objects,
        "dataloaders": [PerClient(loader) for loader in loaders],
        "step": _Step(accelerator),
        "rng": PerClient(RngState(), on_resize="keep"),
    }
    return state if accelerator.scaler is None else {**state, "scaler": accelerator.scaler}


class _Step:
    """The number of batches since the last step of the optimizer, which an ``Accelerator`` counts."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
