"""State dicts of FSDP2, HSDP, tensor parallelism and DDP through DCP, saved on 4 clients, loaded on 4, 1, 2 and 3."""

import pytest

import dtckpt

from . import plugin_cases as cases

pytestmark = pytest.mark.processes

SAVED = [{}, {"dp": 4}, {"dp": 2, "tp": 2}, {"replicate": 2, "shard": 2}]
LOADED = [{"dp": 2, "tp": 2}, {}, {"dp": 2}, {"dp": 3}]


def clients_of(axes):
    clients = 1
    for size in axes.values():
        clients *= size
    return clients


@pytest.fixture(scope="module", params=SAVED, ids=lambda axes: "+".join(axes) or "plain")
def saved(request, pool, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("dcp") / "step_10")
    pool.values(cases.save, path, request.param, clients=4, group=True)
    return path


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "axes", LOADED, ids=lambda axes: "+".join(f"{name}{size}" for name, size in axes.items()) or "1"
)
@pytest.mark.parametrize("by", ["dcp", "dtckpt"])
def test_loaded_on_other_meshes(pool, saved, axes, by):
    clients = clients_of(axes)
    assert pool.values(cases.load, saved, axes, by, clients=clients, group=True) == [[]] * clients


def test_an_ordinary_checkpoint(saved):
    report = dtckpt.open_checkpoint(saved).verify()
    assert report.is_sound
    assert report.num_contents == report.num_tensors - 1  # all but the tensor without elements
