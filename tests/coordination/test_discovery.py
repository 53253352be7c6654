"""Where the coordinator is looked for, and in which order."""

import itertools
import logging

import pytest

from dtckpt.coordination import connect
from dtckpt.coordination.discovery import CoordinatorAddress, find_coordinator
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.errors import ConfigError

FLAG = "flag:1"
ENV = {"DTCKPT_COORDINATOR": "env:2"}
JOBSET = {"DTCKPT_JOBSET_COORDINATOR": "jobset"}
PORT = {"DTCKPT_COORDINATOR_PORT_NUMBER": "3"}
MASTER = {"MASTER_ADDR": "master"}
PET = {"PET_MASTER_ADDR": "pet"}

# Every combination of the flag and the variables. First match wins.
RULES = [
    # said                            address          source
    ({"flag"}, "flag:1", "an argument"),
    ({"env"}, "env:2", "DTCKPT_COORDINATOR"),
    ({"jobset", "port"}, "jobset:3", "DTCKPT_JOBSET_COORDINATOR"),
    ({"jobset"}, "jobset:50051", "DTCKPT_JOBSET_COORDINATOR"),
    ({"master", "port"}, "master:3", "MASTER_ADDR and DTCKPT_COORDINATOR_PORT_NUMBER"),
    ({"pet", "port"}, "pet:3", "PET_MASTER_ADDR and DTCKPT_COORDINATOR_PORT_NUMBER"),
]
VARIABLES = {"env": ENV, "jobset": JOBSET, "port": PORT, "master": MASTER, "pet": PET}
COMBINATIONS = [
    frozenset(said)
    for count in range(len(VARIABLES) + 2)
    for said in itertools.combinations(["flag", *VARIABLES], count)
]


@pytest.mark.parametrize("said", COMBINATIONS, ids=lambda said: "+".join(sorted(said)) or "nothing")
def test_first_match_wins(said):
    env = {name: value for each in said - {"flag"} for name, value in VARIABLES[each].items()}
    expected = next((CoordinatorAddress(*rest) for needs, *rest in RULES if needs <= said), None)
    assert find_coordinator(env, FLAG if "flag" in said else None) == expected
    # An empty variable counts as not set.
    env |= {name: "" for each in VARIABLES.values() for name in each if name not in env}
    assert find_coordinator(env, FLAG if "flag" in said else "") == expected


@pytest.mark.parametrize("variables", [JOBSET, MASTER])
@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "1.5"])
def test_bad_ports_are_refused_where_they_are_needed(variables, port):
    with pytest.raises(ConfigError, match=f"DTCKPT_COORDINATOR_PORT_NUMBER: got '{port}'"):
        find_coordinator(variables | {"DTCKPT_COORDINATOR_PORT_NUMBER": port})
    assert find_coordinator(variables | ENV | {"DTCKPT_COORDINATOR_PORT_NUMBER": port}).address == "env:2"


def test_ipv6_addresses_get_brackets():
    assert find_coordinator({"MASTER_ADDR": "fd00::7"} | PORT).address == "[fd00::7]:3"


def test_connecting_uses_and_logs_it(caplog):
    with caplog.at_level(logging.INFO, "dtckpt.coordination"):
        chosen = connect.connect(MASTER | PORT)
    assert chosen._address == "master:3"
    assert "the coordinator is at master:3, says MASTER_ADDR and DTCKPT_COORDINATOR_PORT_NUMBER" in caplog.text
    assert isinstance(connect.connect(MASTER), SingleClientCoordination)


def test_variables_that_kubernetes_makes_of_a_service_name_nothing():
    service = {"DTCKPT_COORDINATOR_SERVICE_HOST": "10.0.0.1", "DTCKPT_COORDINATOR_PORT": "tcp://10.0.0.1:50051"}
    assert find_coordinator(service | MASTER | PET) is None
    assert find_coordinator(service | JOBSET).address == "jobset:50051"
