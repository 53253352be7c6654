"""Pipelines on FSDP2, whose stages save model, optimizer and scheduler as they are, go on with other stages."""

import pytest

from . import pipeline_cases as cases

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """A checkpoint of 2 stages x 2 replicas, and the losses of the steps after it."""
    path = str(tmp_path_factory.mktemp("run") / "step")
    losses, *others = pool.values(cases.save, path, 2, clients=4, group=True)
    assert others == [losses] * 3
    return path, losses


def test_the_same_stages_go_on_bit_for_bit(pool, run):
    path, losses = run
    assert pool.values(cases.resume, path, 2, clients=4, group=True) == [losses] * 4


@pytest.mark.parametrize(("stages", "clients"), [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_other_stages_on_other_numbers_of_clients_go_on(pool, run, stages, clients):
    path, losses = run
    for found in pool.values(cases.resume, path, stages, clients=clients, group=True):
        assert found == pytest.approx(losses, rel=1e-5)
