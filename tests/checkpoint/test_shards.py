"""`Shards`: plain tensors that are parts of global ones are saved by some clients, and restored by others."""

import pytest
import torch
from support import shards_cases as cases
from torch import nn

import dtckpt
from dtckpt import Shards
from dtckpt.errors import ComponentError, ConfigError, LayoutError, LayoutTypeError, MeshError


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["group", "torch mesh", "mesh"])
@pytest.mark.parametrize("is_async", [False, True])
def test_parts_come_back_on_any_number_of_clients(pool, tmp_path, kind, is_async):
    path = f"{tmp_path}/s"
    pool.values(cases.save_tree, path, kind, is_async=is_async, clients=4, group=True)
    back = dtckpt.restore(path)
    assert [back[name].equal(cases.whole(*shape)) for name, shape in {"rows": (8, 3), "columns": (3, 8)}.items()]
    assert back["uneven"].equal(cases.whole(7, 2))
    for clients in (1, 2, 3 if kind == "group" else 4):
        if clients != 3:
            assert pool.values(cases.restore_tree, path, kind, clients=clients, group=True) == [[]] * clients
