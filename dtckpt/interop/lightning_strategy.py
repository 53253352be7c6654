"""Lightning with FSDP2 and tensor parallelism: `DtckptModelParallelStrategy`, by which every process saves its part."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.parameter_names import ParameterNames, named_state
from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.restoring.report import RestoreReport
from dtckpt.checkpoint.restoring.restore import restore
from dtckpt.errors import UnexpectedTensorError, capped
from dtckpt.format import tree as trees
from dtckpt.interop.lightning import DtckptCheckpointIO, is_lightnings

SHARDED = {"state_dict", "optimizer_states"}
"""The keys of values of which every client has a part."""


def _package() -> str:
    """Return the package of Lightning that the program uses: the imported package, else the installed one."""
    names = "lightning.pytorch", "pytorch_lightning"
    imported = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return [*imported, *installed, *names][0]


_strategies = importlib.import_module(f"{_package()}.strategies")


class DtckptModelParallelStrategy(_strategies.ModelParallelStrategy):  # type: ignore[misc, name-defined]
    """``ModelParallelStrategy`` of Lightning, with checkpoints of this library: ``Trainer(strategy=…)``.

    A checkpoint has the form that Lightning gives it with one device: model by name, optimizers as they are. So
    `DtckptCheckpointIO` also loads it under any other strategy, and this strategy loads checkpoints of that class.

    Args:
        args: As for ``ModelParallelStrategy``.
        options: As for `DtckptCheckpointIO`.
        is_async: As for `DtckptCheckpointIO`.
        kwargs: As for ``ModelParallelStrategy``.
    """

    def __init__(self, *args: Any, options: SaveOptions | None = None, is_async: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_io = DtckptCheckpointIO(options, is_async=is_async)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model, as DTensors."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, as DTensors, by the names of its parameters."""
        names = ParameterNames()
        names.add_module(self.model, "state_dict")
        state: dict[str, Any] = named_state(getattr(optimizer, "_optimizer", optimizer), names)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint.

        Collective: Over all clients.

        Args:
            checkpoint: Lightning's checkpoint, as a dict. All clients save the states of the model and the optimizers,
                and each `dtckpt.PerClient`; client 0 alone saves the other values.
            filepath: Where; client 0's path counts.
            storage_options: As for `DtckptCheckpointIO.save_checkpoint`.
        """
        failure: OSError | None = None
        if self.is_global_zero:
            try:
                self.checkpoint_io.make_way(filepath)
            except OSError as error:
                failure = error
        # Also the failure: the others must not wait for a save that does not come.
        path, failure = self.broadcast((filepath, failure))
        if failure is not None:
            raise failure
        tree = {
            key: value
            for key, value in checkpoint.items()
            if self.is_global_zero or key in SHARDED or isinstance(value, PerClient)
        }
        self.checkpoint_io.save(tree, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the model and the optimizers; return all else that it holds.

        Collective: Over all clients.
        """
        path, is_foreign = self.broadcast((checkpoint_path, is_lightnings(checkpoint_path)))
        if is_foreign:
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return loaded
        with open_checkpoint(path) as checkpoint:
            keys = [key for key, _ in (trees.items_of(checkpoint.structure) or ("", []))[1]]
        # Each None is replaced by the saved value.
        target: dict[str, Any] = dict.fromkeys(key for key in keys if key not in SHARDED)
        target["state_dict"] = self.model
        is_training = bool(self.optimizers) and "optimizer_states" in keys
        if is_training:
            target["optimizer_states"] = self.optimizers
        is_strict, reports = self.lightning_module.strict_loading, list[RestoreReport]()
        # Optimizers that are not asked for, when only the model is validated, are no mistake.
        options = RestoreOptions(allow_missing=not is_strict, allow_unexpected=True, report=reports.append)
        restore(path, target, options=options)
        unexpected = [name for name in reports[0].unexpected if name.startswith("state_dict/")]
        if is_strict and unexpected:
            raise UnexpectedTensorError(
                f"the checkpoint at {path} has {capped(map(repr, unexpected))}, which the model lacks; set its "
                "strict_loading to False to pass over them",
                names=unexpected,
            )
        return {key: value for key, value in target.items() if key not in SHARDED}

    def teardown(self) -> None:
        """End the run, after the save in flight. Raises: the error of that save."""
        try:
            super().teardown()
        finally:
            self.checkpoint_io.teardown()
