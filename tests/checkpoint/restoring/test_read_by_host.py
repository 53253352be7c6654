"""Restores in which the clients of a host read each block once, and hand it on in memory."""

import random

import pytest
from support.states import tensor_of

import dtckpt
from dtckpt import SaveOptions

from . import read_by_host_cases as cases

pytestmark = pytest.mark.processes
COLUMNS = {
    "w": ((512, 1024), "float32", "float32", ["unsharded", "x"]),
    "v": ((301, 1031), "bfloat16", "float32", ["unsharded", "x"]),
    "whole": ((700, 333), "float64", "float64", ["unsharded", "unsharded"]),
}
NEEDED = sum(tensor_of(name, shape, stored).nbytes for name, (shape, stored, *_) in COLUMNS.items())
WHOLE = 700 * 333 * 8
CASTS = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float64"),
    ("int16", "int64"),
    ("uint8", "uint8"),
]


def save(path, tensors, **options):
    tree = {name: tensor_of(name, shape, stored) for name, (shape, stored, *_) in tensors.items()}
    dtckpt.save(path, tree, options=SaveOptions(**options))
    return str(path)


@pytest.fixture(scope="module", params=["ocdbt", "zarr"])
def saved(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp("rings") / "s", COLUMNS, kvstore=request.param, chunk_nbytes=1 << 20)


def drawn(seed):
    """Draw clients, devices per client, axes, and tensors of up to 2 MiB in random layouts."""
    draw = random.Random(seed)
    clients, devices = draw.choice([(2, 1), (2, 2), (3, 1), (4, 1)])
    size = clients * devices
    axes = {"x": size // 2, "y": 2} if size == 4 and draw.random() < 0.6 else {"x": size}
    tensors = {}
    for number in range(4):
        shape = draw.choice([(601, 797), (1, 37, 5003), (40, 30, 211), (7, 60001), (250_001,), (1024, 512)])
        stored, dtype = draw.choice(CASTS)
        specs = ["unsharded"] * len(shape)
        for axis in axes:
            if draw.random() < 0.8 and (free := [dim for dim, spec in enumerate(specs) if spec == "unsharded"]):
                specs[draw.choice(free)] = axis
        tensors[f"t{number}"] = (shape, stored, dtype, specs)
    return clients, devices, axes, tensors, draw.choice([100_000, 400_000, 16 << 20]), draw.choice([1, 2])


@pytest.mark.parametrize("seed", range(12))
def test_every_tensor_comes_back(pool, tmp_path, seed):
    clients, devices, axes, tensors, chunk_nbytes, cores = drawn(seed)
    path = save(tmp_path / "s", tensors, chunk_nbytes=chunk_nbytes)
    answers = pool.values(cases.restore, path, axes, tensors, devices=devices, cores=cores, clients=clients, group=True)
    assert [wrong for wrong, _ in answers] == [[]] * clients


@pytest.mark.parametrize("group", [True, False], ids=["group", "coordinator only"])
def test_each_byte_is_read_once(pool, saved, coordinator, group):
    def taken(**options):
        answers = pool.values(
            cases.restore, saved, {"x": 4}, COLUMNS, clients=4, group=group, coordinator=coordinator, **options
        )
        assert [wrong for wrong, _ in answers] == [[]] * 4
        return sum(nbytes for _, nbytes in answers)

    assert taken(read_once=True) == NEEDED
    assert taken(read_once=None) == NEEDED + 3 * WHOLE, "whole rows are read straight into the tensor"
    assert taken(read_once=False) == 4 * NEEDED
    assert taken(read_once=None, cores=2) == 4 * NEEDED, "a client with two cores reads faster for itself"


@pytest.mark.parametrize("how", ["no ring", "no access"])
def test_clients_that_cannot_open_each_others_rings_read_apart(pool, saved, how):
    answers = pool.values(cases.refused, saved, {"x": 3}, COLUMNS, how, clients=3, group=False)
    assert [wrong for wrong, _ in answers] == [[]] * 3
    assert sum(nbytes for _, nbytes in answers) == 3 * NEEDED


@pytest.mark.parametrize("clients", [2, 4])
def test_damage_that_one_client_meets_fails_all(pool, tmp_path, clients):
    path = save(tmp_path / "s", COLUMNS, kvstore="zarr", chunk_nbytes=1 << 20)
    chunk = max((tmp_path / "s" / "w" / "c").rglob("*"), key=lambda file: (file.is_file(), str(file)))
    data = bytearray(chunk.read_bytes())
    data[-5] ^= 1
    chunk.write_bytes(data)
    answers = pool.run(cases.restore, path, {"x": clients}, COLUMNS, clients=clients, group=True)
    assert [answer.error for answer in answers] == ["CheckpointCorruptError"] * clients, answers
    assert all("'w'" in answer.text for answer in answers)


def test_a_client_that_is_killed_fails_the_others(pool, saved):
    answers = pool.run(cases.killed, saved, {"x": 3}, COLUMNS, clients=3, group=True)
    assert answers[1].has_died
    assert all("client 1" in answer.text and answer.seconds < 20 for answer in (answers[0], answers[2])), answers


def test_a_client_that_stops_fails_all(pool, saved):
    answers = pool.run(cases.stopped, saved, {"x": 3}, COLUMNS, clients=3, group=True)
    assert all(answer.error == "BarrierTimeoutError" and "[1]" in answer.text for answer in answers), answers
    assert all(answer.seconds < 4 * cases.TIMEOUT_S for answer in answers), answers
