"""`RngState`: the states of the random number generators of this process, as an object for a state tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.leaves import OpenState


class RngState(OpenState):
    """The global random number generators: Python's, numpy's, PyTorch's for the host and for this client's GPUs.

    The object holds no state: a save asks the generators, and a restore sets them. As they differ by client, pass the
    object in a `dtckpt.PerClient`. Then each client draws the same numbers as without the interruption.

    >>> import tempfile, torch, dtckpt
    >>> path, state = tempfile.mkdtemp() + "/step_1", {"rng": dtckpt.PerClient(RngState(), on_resize="keep")}
    >>> report = dtckpt.save(path, state)
    >>> drawn = torch.rand(3)
    >>> _ = dtckpt.restore(path, state)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states; of GPUs only if the program has used one, since asking would initialize CUDA."""
        is_initialized: Callable[[], bool] = torch.cuda.is_initialized  # PyTorch does not annotate it
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state_all()} if is_initialized() else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators; of the GPUs, as many as there are both here and in the state."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        for gpu, gpu_state in zip(range(torch.cuda.device_count()), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(gpu_state, gpu)
