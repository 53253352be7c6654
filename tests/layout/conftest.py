import os

import numpy as np
import pytest

from dtckpt.layout.mesh import Mesh

_PREFIXES = ("DTENSOR_", "DTCKPT_", "TORCHELASTIC_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """One client alone, whatever environment the tests run in; gives a function that sets variables."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def seen_by():
    """A function: the mesh of an array of clients, ids row-major, as one client sees it."""

    def make(client, owners, names, mesh_name=""):
        owners = np.asarray(owners)
        count = dict.fromkeys(owners.ravel().tolist(), 0)
        devices = []
        for owner in owners.ravel().tolist():
            devices.append(f"/job:w/replica:0/task:{owner}/device:CPU:{count[owner]}")
            count[owner] += 1
        ids = np.arange(owners.size).reshape(owners.shape)
        mine = ids[owners == client].tolist()
        return Mesh(names, ids, mine, [devices[index] for index in mine], mesh_name, devices)

    return make
