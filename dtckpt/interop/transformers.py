"""Hugging Face's ``Trainer``: `DtckptTrainer`, whose processes save optimizer, scheduler and random states together.

A ``TrainerCallback`` could not do this. ``Trainer`` tells callbacks of a save when it has removed older checkpoints
already, and never which checkpoint it resumes from.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState

from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.parameter_names import name_parameters
from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.restoring.restore import restore
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.checkpoint.saving.save import save

FOLDER = "dtckpt"
"""This library's part of a ``checkpoint-<step>``."""
STATE_NAME = "trainer_state.json"
"""The file that ``Trainer`` writes last of a checkpoint."""
PARTIAL = RestoreOptions(allow_unexpected=True)
"""The random states are restored apart from all else, when ``Trainer`` asks for them."""


class DtckptTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` whose checkpoints are resumed from by any number of processes.

    The trainer saves ``checkpoint-<step>/dtckpt`` instead of ``optimizer.pt``, ``scheduler.pt`` and ``rng_state*.pth``;
    with FSDP2 the sharded model is in it, too. All else of a checkpoint is ``Trainer``'s: the weights, which
    ``from_pretrained`` loads, and ``trainer_state.json``. Checkpoints that ``Trainer`` itself saved are resumed from,
    too. DeepSpeed, FSDP1 and SageMaker keep their own files.

    The class combines with other subclasses: ``class MyTrainer(DtckptTrainer, SFTTrainer)``.

    Attributes:
        save_options: How checkpoints are written; ``overwrite`` is always on.
    """

    save_options = SaveOptions()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train``; True resumes from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            # Trainer would take a checkpoint that a killed process has not finished.
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the optimizer, the scheduler and random numbers. Collective: Over all clients."""
        if not self._has_own_state():
            super()._save_optimizer_and_scheduler(output_dir)
            return
        tree = {**self._state(), "rng": PerClient(RngState())}
        options = replace(self.save_options, overwrite=True)
        save(os.path.join(output_dir, FOLDER), tree, options=options, step=self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._has_own_state():
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # With FSDP2 the model is loaded with its optimizer.
        if not (self._is_fsdp2() and has_folder(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the state of the optimizer and the scheduler. Collective: With FSDP2 over all clients."""
        if has_folder(checkpoint):
            restore(os.path.join(checkpoint or "", FOLDER), self._state(), options=PARTIAL)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if has_folder(checkpoint):
            rng = PerClient(RngState(), on_resize="keep")
            restore(os.path.join(checkpoint or "", FOLDER), {"rng": rng}, options=PARTIAL)
        else:
            super()._load_rng_state(checkpoint)

    def _state(self) -> dict[str, Any]:
        # The weights are in other files, so the tree does not tell the names.
        name_parameters(self.optimizer, self.model)
        state = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        return state | ({"model": self.model} if self._is_fsdp2() else {})

    def _is_fsdp2(self) -> bool:
        return bool(self.is_fsdp_enabled and self.accelerator.is_fsdp2)

    def _has_own_state(self) -> bool:
        """Whether state is saved here, and not by a framework, which writes other files."""
        return self._is_fsdp2() or self.accelerator.distributed_type.value in ("NO", "MULTI_CPU", "MULTI_GPU")


def has_folder(checkpoint: str | None) -> bool:
    """Whether a checkpoint of ``Trainer`` has a part of this library."""
    return checkpoint is not None and os.path.isdir(os.path.join(checkpoint, FOLDER))


def last_complete_checkpoint(output_dir: str) -> str | None:
    """Return the path of the newest ``checkpoint-<step>`` that ``Trainer`` has finished; None if there is none."""
    steps = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        # A checkpoint that a killed process has not finished has no such file, or a part of one.
        with suppress(OSError, ValueError, TypeError):
            TrainerState.load_from_json(str(path / STATE_NAME))
            steps[int(path.name.partition("-")[2])] = str(path)
    return steps[max(steps)] if steps else None
