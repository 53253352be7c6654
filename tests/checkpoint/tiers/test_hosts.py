"""Hosts with several clients, and clients that disagree about their hosts."""

import pytest

from . import tier_cases, tier_faults


def test_clients_on_one_host(pool, tmp_path):
    """Situation 4: two clients share the memory of each of two hosts; one host is lost."""
    hosts = ["a", "b", "a", "b"]
    held = pool.values(
        tier_cases.save_steps, tmp_path / "root", tmp_path / "tier", hosts, [1, 2, 3], clients=4, group=True
    )
    assert [dict(each) for each in held] == [{2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}] * 4
    tier_cases.remove_host(tmp_path / "tier", "a")
    answers = pool.values(
        tier_cases.restore, tmp_path / "root", tmp_path / "tier", ["b", "b", "c"], clients=3, group=True
    )
    assert all(each["is_equal"] and each["step"] == 3 and each["local"] for each in answers)


def test_a_manager_that_is_closed_and_saves_again(pool, tmp_path):
    """A client that is behind has not left: the writes to the root meet in another job than before."""
    saved = pool.values(
        tier_faults.close_and_save_again, tmp_path / "root", tmp_path / "tier", ["a", "b"], clients=2, group=True
    )
    assert saved == [[0, 4]] * 2


def test_two_hosts_of_one_name(pool, tmp_path):
    """Each host has separate memory at the path: they must not pass for one host that holds all parts."""
    answers = pool.run(tier_faults.save_as_one_host, tmp_path / "root", tmp_path / "tier", clients=2, group=True)
    assert [answer.error for answer in answers] == ["ConfigError"] * 2, answers
    assert all("another directory" in answer.text for answer in answers)


@pytest.mark.parametrize("name", ["copies", "every_steps", "path", "address"])
def test_options_that_do_not_fit(pool, tmp_path, name):
    """All clients hear of it, by an error that names the option."""
    own = {"copies": 3, "every_steps": 7, "path": tmp_path / "elsewhere", "address": "192.0.2.1"}[name]
    answers = pool.run(
        tier_faults.save_beside, tmp_path / "root", tmp_path / "tier", ["host", "host"], [7], 100,
        clients=2, group=True, by_client={0: ({},), 1: ({name: own},)},
    )  # fmt: skip
    assert [answer.error for answer in answers] == ["ConfigError"] * 2, answers
    assert all(("192.0.2.1" if name == "address" else name) in answer.text for answer in answers)
