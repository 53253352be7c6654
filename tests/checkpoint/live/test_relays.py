"""Readers that serve versions on, each on a host of its own: processes with a coordinator."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.client_processes import Pool
from support.coordinators import server_in_thread

from . import relay_cases
from .relay_cases import NBYTES

pytestmark = pytest.mark.processes
HOSTS = [f"engine{number}" for number in range(8)]


@pytest.fixture
def hosts():
    """Runs cases, each in a client process of a separate job; returns their answers in order."""
    with ExitStack() as stack:
        port = stack.enter_context(server_in_thread())

        def run(*cases):
            pools = [stack.enter_context(Pool()) for _ in cases]

            def answer(pool, case):
                (work, *args), options = case[0], case[1] if len(case) > 1 else {}
                return pool.run(work, *args, clients=1, group=True, coordinator=f"127.0.0.1:{port}", **options)[0]

            with ThreadPoolExecutor(len(cases)) as threads:
                return list(threads.map(answer, pools, cases))

        yield run


def values(answers):
    assert not [answer for answer in answers if answer.error or answer.has_died], [a.trace or a for a in answers]
    return [answer.value for answer in answers]


def test_eight_hosts_that_begin_together_take_two_copies_from_the_source(hosts, tmp_path):
    ends = [f"{host} has it" for host in HOSTS]
    sent, *found = values(
        hosts(
            ((relay_cases.publish, tmp_path, ends),),
            *(((relay_cases.read_on, tmp_path, host, ends),) for host in HOSTS),
        )
    )
    assert not any(each["differs"] for each in found)
    assert all(sum(each["pulled"].values()) == each["mapped"] == NBYTES for each in found)
    assert not any(each["sent"] or each["passed_over"] for each in found)
    assert sum(each["pulled"].get("trainer", 0) for each in found) <= 2 * NBYTES
    assert sent <= 2.1 * NBYTES  # with the indexes
