import numpy as np
import pytest

from dtckpt.layout.mesh import Mesh


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
