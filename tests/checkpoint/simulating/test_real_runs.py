"""A simulation has the same bytes as real processes count."""

import json
from dataclasses import dataclass

import pytest

import dtckpt
from dtckpt import Layout, Machine, SaveOptions, abstract_mesh

from . import simulating_cases as cases

pytestmark = pytest.mark.processes
SHAPES = {"even": (512, 640), "uneven": (4097, 128), "vector": (514,), "copied": (600, 500), "scalar": ()}
STATE = {"model": "bfloat16", "moment": "float32"}
TENSORS = {f"{part}/{name}": (shape, dtype) for part, dtype in STATE.items() for name, shape in SHAPES.items()}
CHUNK_NBYTES = 1 << 16


@dataclass(frozen=True)
class Case:
    clients: int
    devices: int
    axes: dict
    specs: dict
    target: dict
    new: dict


CASES = {
    "two axes to one": Case(
        4,
        1,
        {"dp": 2, "tp": 2},
        {
            "even": ["dp", "tp"],
            "uneven": [("tp", "dp"), "unsharded"],
            "vector": ["dp"],
            "copied": ["unsharded", "unsharded"],
            "scalar": [],
        },
        {"x": 4},
        {
            "even": ["unsharded", "x"],
            "uneven": ["x", "unsharded"],
            "vector": ["unsharded"],
            "copied": ["unsharded", "unsharded"],
            "scalar": [],
        },
    ),
    "several devices a client": Case(
        2,
        2,
        {"replica": 2, "dp": 2},
        {
            "even": ["dp", "unsharded"],
            "uneven": [("replica", "dp"), "unsharded"],
            "vector": ["dp"],
            "copied": ["unsharded", "dp"],
            "scalar": [],
        },
        {"a": 2, "b": 2},
        {
            "even": ["unsharded", ("b", "a")],
            "uneven": ["unsharded", "a"],
            "vector": ["b"],
            "copied": ["unsharded", "unsharded"],
            "scalar": [],
        },
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.json"
    shapes = {name: {"shape": list(shape)} for name, shape in SHAPES.items()}
    file.write_text(json.dumps({"name": "small", "state": STATE, "parameters": shapes}))
    return file


def simulated(model, case, **options):
    """Simulate the case, each client on another host."""
    mesh, target = (abstract_mesh(axes, devices_per_client=case.devices) for axes in (case.axes, case.target))
    return dtckpt.simulate(
        model,
        mesh,
        layouts={f"*/{name}": Layout(specs, mesh) for name, specs in case.specs.items()},
        target_mesh=target,
        target_layouts={f"*/{name}": Layout(specs, target) for name, specs in case.new.items()},
        machine=Machine(devices_per_host=case.devices),
        options=SaveOptions(chunk_nbytes=CHUNK_NBYTES, **options),
    )


def load(operation, link):
    return next(each for each in operation.loads if each.link == link)


@pytest.mark.parametrize("on_gpus", [False, True], ids=["host", "gpus"])
def test_save(pool, tmp_path, model, case, on_gpus):
    counted = pool.values(
        cases.count_save,
        str(tmp_path / "s"),
        case.axes,
        TENSORS,
        case.specs,
        devices=case.devices,
        on_gpus=on_gpus,
        clients=case.clients,
        group=True,
    )
    save = simulated(model, case, check_replicas=on_gpus).operation("save")
    assert [each["write"] for each in counted] == list(save.by_client)
    assert load(save, "storage").total_nbytes == sum(save.by_client)
    assert load(save, "storage").max_nbytes == max(save.by_client)
    staged = [each["stage"] for each in counted]
    assert load(save, "device").total_nbytes == sum(staged)
    assert load(save, "device").max_nbytes == -(-max(staged) // case.devices)
    assert ("hand over" in save.parts) == any(each.get("edges") for each in counted)


@pytest.mark.parametrize("read_once", [False, True], ids=["alone", "read once"])
def test_restore(pool, tmp_path, model, case, read_once):
    common = {"devices": case.devices, "clients": case.clients, "group": True}
    path = str(tmp_path / "s")
    pool.values(cases.count_save, path, case.axes, TENSORS, case.specs, on_gpus=True, **common)
    counted = pool.values(cases.count_restore, path, case.target, TENSORS, case.new, read_once=read_once, **common)
    restore = simulated(model, case).operation("restore, read once" if read_once else "restore")
    assert [read for read, _ in counted] == list(restore.by_client)
    assert load(restore, "network").total_nbytes == sum(received for _, received in counted)
    assert (load(restore, "network").total_nbytes > 0) == read_once


def test_redistribution(pool, model, case):
    counted = pool.values(
        cases.count_redistribution,
        case.axes,
        case.target,
        TENSORS,
        case.specs,
        case.new,
        devices=case.devices,
        clients=case.clients,
        group=True,
    )
    redistribute = simulated(model, case).operation("redistribute")
    assert counted == list(redistribute.by_client)
    assert sum(counted) > 0


def test_reshard(pool, tmp_path, model, case):
    path = tmp_path / "s"
    pool.values(
        cases.count_save,
        str(path),
        case.axes,
        TENSORS,
        case.specs,
        devices=case.devices,
        on_gpus=True,
        clients=case.clients,
        group=True,
    )
    target = abstract_mesh(case.target)
    layouts = {f"*/{name}": Layout(specs, target) for name, specs in case.new.items()}
    options = SaveOptions(chunk_nbytes=CHUNK_NBYTES)
    report = dtckpt.reshard(path, tmp_path / "new", mesh=target, layouts=layouts, options=options)
    planned = simulated(model, case).operation("reshard").by_client
    assert list(planned) == [report.read_nbytes, report.save.client_nbytes]
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert sum(info.num_chunks for info in checkpoint.tensors.values()) == simulated(model, case).num_chunks
