"""Exchanges as one native collective: which they are, and that they give what an exchange of boxes gives."""

import pytest
import torch

from dtckpt import UNSHARDED, Layout
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.native_collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    NativeCollective,
    find_collective,
)

from .native_collective_cases import check, mesh_of


@pytest.mark.processes
@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER])
def test_a_collective_gives_what_an_exchange_of_boxes_gives(pool, kind):
    assert pool.values(check, kind, range(60), clients=4, group=True) == [[]] * 4


MESH = mesh_of((2, 2), range(4), 0)
SUM = {"a0": "sum"}


def collective_of(source, target, shape=(8, 8), mesh=MESH, there=None, before=None, after=None):
    change = LayoutChange(Layout(source, mesh, before), Layout(target, there or mesh, after), shape, torch.float32)
    return find_collective(change)


def test_what_is_a_collective():
    none = UNSHARDED
    assert collective_of([none, none], [none, none], before=SUM) == NativeCollective(ALL_REDUCE, ("a0",))
    assert collective_of([none, "a1"], [none, "a1"], (3, 3), before=SUM) == NativeCollective(ALL_REDUCE, ("a0",))
    assert collective_of(["a0", none], [none, none]) == NativeCollective(ALL_GATHER, ("a0",), 0)
    assert collective_of([none, ("a1", "a0")], [none, "a1"]) == NativeCollective(ALL_GATHER, ("a0",), 1)
    assert collective_of([none, ("a1", "a0")], [none, none]) == NativeCollective(ALL_GATHER, ("a1", "a0"), 1)
    assert collective_of(["a1", none], ["a1", "a0"], before=SUM) == NativeCollective(REDUCE_SCATTER, ("a0",), 1)
    both = {"a0": "sum", "a1": "avg"}
    assert collective_of([none, none], [("a1", "a0"), none], before=both) == NativeCollective(
        REDUCE_SCATTER, ("a1", "a0"), 0
    )
    kept = {"a1": "max"}
    assert collective_of(["a0", none], [none, none], before=kept, after=kept) == NativeCollective(
        ALL_GATHER, ("a0",), 0
    )


def test_what_is_none():
    none = UNSHARDED
    assert collective_of(["a0", none], [none, none], (7, 8)) is None, "uneven"
    assert collective_of([("a0", "a1"), none], ["a0", none], (6, 8)) is None, "uneven inside an even shard"
    assert collective_of([none, none], ["a0", none], (5, 8), before=SUM) is None, "uneven"
    assert collective_of(["a0", "a1"], [none, none]) is None, "two dims"
    assert collective_of(["a0", none], [none, "a0"]) is None, "an all-to-all"
    assert collective_of([("a0", "a1"), none], [("a1", "a0"), none]) is None, "a permutation"
    assert collective_of([("a0", "a1"), none], ["a1", none]) is None, "the major axis goes"
    assert collective_of(["a0", none], ["a1", none]) is None, "another axis"
    assert collective_of([none, none], ["a0", none]) is None, "a slice"
    assert collective_of([none, none], ["a1", none], before=SUM) is None, "scattered over another axis"
    assert collective_of([none, none], [("a0", "a1"), none], before=SUM) is None, "scattered and sliced"
    assert collective_of(["a1", none], [none, none], before=SUM) is None, "reduced and gathered"


def test_only_among_clients_of_one_mesh_with_a_device_each():
    rows, whole = ["a0", UNSHARDED], [UNSHARDED, UNSHARDED]
    assert collective_of(rows, whole, there=mesh_of((2, 2), (1, 0, 2, 3), 0)) is None
    assert collective_of(rows, whole, there=mesh_of((2,), (0, 1), 0)) is None
    assert collective_of(rows, whole, mesh=mesh_of((2, 2), (0, 1), 0, devices=2)) is None
    assert collective_of(rows, whole, mesh=mesh_of((2, 2), (0,), 0, devices=4)) is None
    assert collective_of(["a0", UNSHARDED], whole, mesh=mesh_of((1,), (0,), 0)) is None


def test_every_client_finds_the_same():
    for client in range(4):
        mesh = mesh_of((2, 2), (2, 0, 3, 1), client)
        assert collective_of([("a1", "a0"), UNSHARDED], ["a1", UNSHARDED], mesh=mesh) == NativeCollective(
            ALL_GATHER, ("a0",), 0
        )
