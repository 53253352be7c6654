"""Clients are killed at each point of a local save; the next attempt restores a step that counts, whole."""

import pytest

from . import tier_cases, tier_faults

HOSTS = ["host0", "host1"]
DOES_NOT_COUNT = ("filled", "staged", "index written")
"""A client that dies there has not voted."""
HAS_COPIES = ("copied",)


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "root", tmp_path / "tier"


def die_at(pool, folders, point, victims):
    """Save steps 1 to 3, and let clients die at a point of step 3; check that the others hear of it soon."""
    answers = pool.run(
        tier_faults.save_and_die, *folders, HOSTS, [1, 2, 3], point, victims,
        clients=2, group=True, heartbeat_timeout_s=1.5,
    )  # fmt: skip
    assert all(answers[client].has_died for client in victims)
    for answer in answers:
        assert answer.has_died or (answer.value["error"] and answer.value["seconds"] < 15), answer


def restored_step(pool, folders, hosts=HOSTS):
    answers = pool.values(tier_cases.restore, *folders, hosts, clients=len(hosts), group=True)
    assert all(each["is_equal"] and each["step"] == each["noted"] and each["local"] for each in answers)
    (step,) = {each["step"] for each in answers}
    return step


def go_on(pool, folders, step):
    """The next attempt saves the step that was torn, and one more."""
    held = pool.values(tier_cases.save_steps, *folders, HOSTS, [step + 1, step + 2], clients=2, group=True)
    assert all({step + 1, step + 2} <= dict(each).keys() for each in held)
    assert restored_step(pool, folders, ["host1", "host0"]) == step + 2
    spare = [file for file in folders[1].rglob("spare/*") if not file.name.endswith(".data")]
    assert spare == [], "no draft is left"


@pytest.mark.share(1, of="torn parts")
@pytest.mark.parametrize("point", tier_faults.POINTS)
def test_one_client_dies(pool, folders, point):
    """Situations 1, 9 and 10: the files of its host stay."""
    die_at(pool, folders, point, [1])
    step = restored_step(pool, folders)
    assert step == (2 if point in DOES_NOT_COUNT else 3)
    go_on(pool, folders, step)


@pytest.mark.share(1, of="torn parts, all")
@pytest.mark.parametrize("point", tier_faults.POINTS)
def test_all_clients_die(pool, folders, point):
    # Amid the copies, one of the two: without the first client the other has no host to send its copy to.
    die_at(pool, folders, point, [0] if point in ("copying", "copied") else [0, 1])
    step = restored_step(pool, folders)
    # Where both die before they note the vote, no client knows of it any more.
    assert step == (2 if point in (*DOES_NOT_COUNT, "voted") else 3)
    go_on(pool, folders, step)


@pytest.mark.share(1, of="torn parts")
@pytest.mark.parametrize("point", tier_faults.POINTS)
def test_one_host_dies(pool, folders, point):
    """Situations 2 and 10: the host's parts go with it; a copy counts when it is whole."""
    die_at(pool, folders, point, [1])
    tier_cases.remove_host(folders[1], "host1")
    step = restored_step(pool, folders)
    if point == "removing":  # while the copy is on its way
        assert step in (2, 3)
    else:
        assert step == (3 if point in HAS_COPIES else 2)
    go_on(pool, folders, step)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.share(1)
def test_a_host_dies_in_a_restore(pool, folders, victim):
    """Situation 20: the others hear of it within a heartbeat's timeout, and the next attempt has another host."""
    pool.values(tier_cases.save_steps, *folders, HOSTS, [1, 2, 3], clients=2, group=True)
    answers = pool.run(
        tier_faults.restore_and_die, *folders, HOSTS, [victim], clients=2, group=True, heartbeat_timeout_s=1.5
    )
    assert answers[victim].has_died
    other = answers[1 - victim].value
    assert other["error"]
    assert other["seconds"] < 15
    tier_cases.remove_host(folders[1], HOSTS[victim])
    step = restored_step(pool, folders, [HOSTS[1 - victim], "new"])
    assert step == 3
    go_on(pool, folders, step)
