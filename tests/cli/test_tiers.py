"""``dtckpt tiers`` says which steps the hosts hold, and which would come back without some of them."""

import itertools
import json
import time

import pytest

import dtckpt
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.tiers.holdings import HeldSave
from dtckpt.checkpoint.tiers.status import STATUS_NAME, TierStatus
from dtckpt.errors import CheckpointCorruptError

HOSTS = ("host0", "host1", "host2", "host3")


def save(number, step):
    return SaveId(number, step, 4, False, "00000000")


@pytest.fixture
def root(tmp_path):
    """Four hosts, two copies, an older step with all copies, and the newest one whose copies are under way."""
    root = tmp_path / "run"
    with dtckpt.CheckpointManager(root, is_async=False) as manager:
        manager.save(10, {"step": 10})
    after = time.time_ns()
    first = {client: {f"host{client}", f"host{(client + 2) % 4}"} for client in range(4)}
    held = [
        HeldSave(save(after + 60 * 10**9, 30), {client: (f"host{client}",) for client in range(4)}, is_voted=True),
        HeldSave(save(after, 20), {c: tuple(sorted(hosts)) for c, hosts in first.items()}, is_voted=True),
    ]
    status = TierStatus(
        at_s=time.time(),
        domains=dict.fromkeys(HOSTS, "rack"),
        clients={host: (number,) for number, host in enumerate(HOSTS)},
        copies=2,
        saves=tuple(held),
        nbytes=4 << 30,
        rate=float(1 << 30),
    )
    (root / STATUS_NAME).write_bytes(status.to_bytes())
    return root


def last_line(run, *args):
    return run("tiers", *args).out.splitlines()[-1]


def test_steps_and_copies(run, root):
    lines = run("tiers", root).out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["30", "20"]
    assert "1 copy" in lines[1]
    assert "2 copies" in lines[2]
    assert "step 30 would come back, from the hosts; 0 s of training would be lost" in lines[-1]


def test_without_one_host(run, root):
    line = last_line(run, root, "--without", "host1")
    assert line.startswith("without host1: step 20 would come back, from the hosts; 60 s of training would be lost")
    assert "1.0 GiB" in line, "the share of the host that takes its place"


def test_without_a_host_and_its_partner(run, root):
    line = last_line(run, root, "--without", "host1, host3")
    assert "step 10 would come back, from the root" in line
    assert "lost: no host has the parts of host1, host3" in run("tiers", root, "--without", "host1,host3").out


def test_json(run, root):
    *_, total = run("tiers", root, "--without", "host1", "--json").events
    assert (total["step"], total["tier"], total["without"]) == (20, "local", ["host1"])
    assert total["moved_bytes"] == 1 << 30
    assert total["seconds"] == pytest.approx(1 / 3, abs=0.01), "three hosts send at the same time"
    assert total["loss_probability"] == {"1": 0.0, "2": pytest.approx(1 / 3), "3": 1.0, "4": 1.0}


def test_a_host_that_is_none(run, root):
    run("tiers", root, "--without", "hots1").fails(2, "no host 'hots1'", "host1")


def test_no_local_tier(run, tmp_path):
    run("tiers", tmp_path).fails(3, STATUS_NAME)
    (tmp_path / STATUS_NAME).write_text("{")
    run("tiers", tmp_path).fails(1, f"{STATUS_NAME} cannot be read")


SOUND = {"at_s": 1.0, "hosts": {"a": ["a", [0]]}, "copies": 1, "saves": [], "nbytes": 1, "rate": 0.0}
ODD = [None, "", "x", 7, float("inf"), [], [7], [["x", {}]], {}, {"a": 7}, {"a": ["a", 7]}]
SAVE = "00000000000000000007-1-{}-0-00000000-00000000"
ODD_SAVES = [[SAVE.format(999999999), {}], [SAVE.format(2), {"x": ["a"]}], [SAVE.format(2), [7]], [SAVE.format(2), 7]]


@pytest.mark.parametrize(("key", "odd"), [*itertools.product(SOUND, ODD), *(("saves", [each]) for each in ODD_SAVES)])
def test_a_malformed_status(key, odd):
    """It is refused, or it is a status whose figures can all be computed, soon."""
    assert TierStatus.from_bytes(json.dumps(SOUND).encode()).copies == 1
    try:
        status = TierStatus.from_bytes(json.dumps(SOUND | {key: odd}).encode())
    except CheckpointCorruptError:
        return
    assert status.copy_hosts.domains
    assert all(len(held.missing) <= 1 << 20 for held in status.saves)
