"""vLLM: its inference workers take live versions, by a weight-transfer engine; its trainer side publishes them.

vLLM calls `register` in every process, by the entry point group ``vllm.general_plugins``. A user then chooses
``WeightTransferConfig(backend="dtckpt")``. There is one module for each range of versions of vLLM's interface; all
else here knows nothing of vLLM but ``model.load_weights``.
"""

from __future__ import annotations

import importlib

NAME = "dtckpt"
"""Of the backend."""
INTERFACE = f"{__name__}.engine_0_33"
"""The module for the interface of vLLM from 0.33 on."""


def register() -> None:
    """Add the engine and the trainer side to vLLM's factories; they are imported when a job chooses them."""
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory.register_engine(NAME, INTERFACE, "DtckptWeightTransferEngine")
    factory.WeightTransferTrainerFactory.register_engine(NAME, INTERFACE, "DtckptTrainerEngine")
