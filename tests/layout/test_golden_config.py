"""Environment variables and mesh builders as TensorFlow reads and runs them."""

import pytest

from dtckpt.layout import clients
from dtckpt.layout.create_mesh import create_mesh

from .golden import GOLDEN

CALLS = {
    "client_id": clients.client_id,
    "num_clients": clients.num_clients,
    "job_name": clients.job_name,
    "full_job_name": clients.full_job_name,
    "full_job_name(0)": lambda: clients.full_job_name(0),
    "full_job_name(1)": lambda: clients.full_job_name(1),
    "full_job_name(9)": lambda: clients.full_job_name(9),
    "jobs": clients.jobs,
    "heartbeat_enabled": clients.heartbeat_enabled,
    "num_local_devices(CPU)": lambda: clients.num_local_devices("CPU"),
    "num_global_devices(CPU)": lambda: clients.num_global_devices("CPU"),
    "local_devices(CPU)": lambda: [str(d) for d in clients.local_devices("CPU")],
    "local_devices('cpu',for_client_id=3)": lambda: [str(d) for d in clients.local_devices("cpu", for_client_id=3)],
}
ERRORS = {"ValueError": ValueError, "TypeError": TypeError}


@pytest.mark.parametrize("vector", GOLDEN["config"], ids=lambda v: str(v["env"]))
def test_config(vector, environment):
    environment(vector["env"])
    with clients.virtual_devices(CPU=vector["cpu_logical_devices"]):
        for call, expected in vector["result"].items():
            if isinstance(expected, dict):
                with pytest.raises(ERRORS[expected["raises"]], match=r"got .* expected"):
                    CALLS[call]()
            else:
                assert CALLS[call]() == expected, call


@pytest.mark.parametrize("vector", GOLDEN["create_mesh"], ids=lambda v: str(v["args"]))
def test_create_mesh(vector):
    with clients.virtual_devices(CPU=vector["cpu_logical_devices"]):
        mesh = create_mesh(**vector["args"])
    assert mesh.to_string() == vector["to_string"]
    assert mesh.as_proto().SerializeToString(deterministic=True).hex() == vector["proto_hex"]


@pytest.mark.parametrize("run", GOLDEN["multi_client"]["runs"], ids=lambda run: str(run["misc"]["full_job_name"]))
def test_clients_of_one_cluster(run, environment):
    expected, case = run["misc"], run["cases"][0]
    environment({"DTENSOR_JOBS": "localhost:1,localhost:2", "DTENSOR_CLIENT_ID": str(expected["client_id"])})
    with clients.virtual_devices(CPU=case["devices_per_client"]):
        assert clients.client_id() == expected["client_id"]
        assert clients.job_name() == expected["job_name"]
        assert clients.full_job_name() == expected["full_job_name"]
        assert len(clients.jobs()) == expected["jobs_count"]
        assert clients.num_global_devices("CPU") == expected["num_global_devices"]
