"""State beside parameters, saved by 4 clients and restored by 1, 2, 3 and 4: values, objects, wrappers, `PerClient`."""

import pytest

from . import flow_cases as cases

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("flows") / "step")
    pool.values(cases.save_flows, path, clients=4, group=True)
    return path


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_all_of_it_comes_back(pool, saved, clients):
    assert pool.values(cases.restore_flows, saved, clients=clients, group=True) == [[]] * clients
