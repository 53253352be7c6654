"""Readers that serve versions on, each on another host: processes with a coordinator."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.client_processes import Pool
from support.coordinators import server_in_thread

from . import relay_cases
from .relay_cases import NBYTES

pytestmark = pytest.mark.processes
HOSTS = [f"engine{number}" for number in range(8)]
CASE_S = 180.0
"""Longer than any wait of a case, also for its processes to begin on a busy machine."""


@pytest.fixture
def hosts(request):
    """Runs cases, each in a client process of a separate job; returns their answers in order."""
    with ExitStack() as stack:
        port = stack.enter_context(server_in_thread(heartbeat_timeout_s=getattr(request, "param", 20.0)))

        def run(*cases):
            pools = [stack.enter_context(Pool()) for _ in cases]

            def answer(pool, case):
                (work, *args), options = case[0], case[1] if len(case) > 1 else {}
                options = {"clients": 1, "timeout_s": CASE_S, "coordinator": f"127.0.0.1:{port}"} | options
                return pool.run(work, *args, group=True, **options)

            with ThreadPoolExecutor(len(cases)) as threads:
                return [each for answers in threads.map(answer, pools, cases) for each in answers]

        yield run


def values(answers):
    assert not [answer for answer in answers if answer.error or answer.has_died], [a.trace or a for a in answers]
    return [answer.value for answer in answers]


def test_eight_hosts_that_begin_together_take_two_copies_from_the_source(hosts, tmp_path):
    ends = [f"{host} has it" for host in HOSTS]
    sent, *found = values(
        hosts(
            ((relay_cases.publish, tmp_path, ends), {"is_patient": True}),
            *(((relay_cases.read_on, tmp_path, host, ends), {"is_patient": True}) for host in HOSTS),
        )
    )
    assert not any(each["differs"] for each in found)
    assert all(sum(each["pulled"].values()) == each["mapped"] == NBYTES for each in found)
    assert not any(each["sent"] or each["passed_over"] for each in found)
    assert sum(each["pulled"].get("trainer", 0) for each in found) <= 2 * NBYTES
    assert sent <= 2.1 * NBYTES  # with the indexes


def test_a_relay_dies_in_the_middle(hosts, tmp_path):
    others = HOSTS[:3]
    ends = [f"{host} has it" for host in others]
    word = "victim is in the middle"
    answers = hosts(
        ((relay_cases.publish, tmp_path, ends),),
        ((relay_cases.die_in_the_middle, tmp_path, "victim"),),
        *(((relay_cases.read_on_after, tmp_path, word, host, ends),) for host in others),
    )
    assert answers[1].has_died
    sent, *found = values([answers[0], *answers[2:]])
    assert not any(each["differs"] for each in found)
    # They took pieces from it, and it is named.
    assert any("victim" in each["pulled"] for each in found)
    assert any("host victim" in text for each in found for text in each["passed_over"])
    assert all(sum(each["pulled"].values()) == each["mapped"] == NBYTES for each in found)
    assert sent <= 3 * NBYTES


@pytest.mark.parametrize("serve", [True, False], ids=["relay", "reader"])
def test_the_memory_of_a_relay_is_damaged(hosts, tmp_path, serve):
    """Situation 39: no reader gets a wrong byte, the relay is named, and it serves the version no more."""
    ends, word = ["engine has it"], "bad is damaged"
    _, bad, found = values(
        hosts(
            ((relay_cases.publish, tmp_path, ends),),
            ((relay_cases.damage_after, tmp_path, "bad", ends),),
            (
                (relay_cases.read_on_after, tmp_path, word, "engine", ends),
                {"serve": serve},
            ),
        )
    )
    assert not found["differs"]
    assert any("host bad: " in text and " is damaged" in text for text in found["passed_over"])
    assert bad == {"held": 0, "differs": [], "files": 0}
    assert (found["pulled"] if serve else found["sent"])["trainer"] > 0


@pytest.mark.parametrize("hosts", [3.0], indirect=True)
def test_relays_have_the_version_when_its_publisher_is_dead(hosts, tmp_path):
    """Situation 3: the memory of the trainer is gone."""
    ends = ["late0 has it", "late1 has it"]
    word = "engine has it"
    answers = hosts(
        ((relay_cases.publish_and_die, tmp_path, word),),
        ((relay_cases.read_on, tmp_path, "engine", ends),),
        # One of them comes when the registry knows that the trainer is lost.
        ((relay_cases.read_on_after, tmp_path, word, "late0", ends), {"serve": False}),
        ((relay_cases.read_on_when_lost, tmp_path, word, "late1", ends),),
    )
    assert answers[0].has_died
    _, late, later = values(answers[1:])
    assert not late["differs"]
    assert late["sent"] == {"engine": NBYTES}
    assert not later["differs"]
    assert sum(later["pulled"].values()) == NBYTES
    assert "trainer" not in later["pulled"]


def test_the_clients_of_a_host_pull_each_part_once(hosts, tmp_path):
    ends = ["engine has it", "engine1 has it"]
    sent, *found = values(
        hosts(
            ((relay_cases.publish, tmp_path, ends),),
            ((relay_cases.read_on, tmp_path, "engine", ends), {"clients": 2}),
        )
    )
    assert not any(each["differs"] for each in found)
    assert sum(sum(each["pulled"].values()) for each in found) == NBYTES
    assert all(each["mapped"] == NBYTES for each in found), found
    assert sent <= 1.1 * NBYTES


def test_a_relay_frees_old_versions(hosts, tmp_path):
    _, (versions, differs, num_files, mapped) = values(
        hosts(((relay_cases.publish, tmp_path, ["took 2"], (1, 2)),), ((relay_cases.read_again, tmp_path, "engine"),))
    )
    assert (versions, differs, num_files, mapped) == (1, [[], []], 0, [0, 1])


def test_a_relay_without_memory_reads_as_other_readers_do(hosts, tmp_path):
    ends = ["engine has it"]
    _, found = values(
        hosts(
            ((relay_cases.publish, tmp_path, ends),), ((relay_cases.read_on_without_memory, tmp_path, "engine", ends),)
        )
    )
    assert (found["differs"], found["sent"], found["pulled"]) == ([], {"trainer": NBYTES}, {})
    assert found["passed_over"] == [f"no room for {NBYTES} bytes"]
