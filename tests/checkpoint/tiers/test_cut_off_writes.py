"""Clients die while a step of the tier is written to the root: others finish the write after the restart."""

import pytest
import torch

import dtckpt

from . import tier_cases, tier_faults

HOSTS = ["host0", "host1", "host2"]


@pytest.mark.parametrize("victims", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.share(1)
def test_a_write_that_is_cut_off(pool, tmp_path, victims, after):
    """Situation 24. With ``after``, local saves went on meanwhile, and the newest of them is written."""
    root, tier = tmp_path / "root", tmp_path / "tier"
    answers = pool.run(
        tier_faults.save_and_die_writing, root, tier, HOSTS, 3, after, victims,
        clients=3, group=True, heartbeat_timeout_s=1.5,
    )  # fmt: skip
    assert [answer.has_died for answer in answers] == [client in victims for client in range(3)]
    assert all(answer.has_died or answer.value["error"] for answer in answers)
    assert [path.name for path in root.glob("step*")] == ["step_00000001"]

    # Another number of hosts, of which one is new; the first host that died has lost its memory.
    left = [host for host in HOSTS if host != HOSTS[victims[0]]]
    tier_cases.remove_host(tier, HOSTS[victims[0]])
    answers = pool.values(tier_faults.go_on, root, tier, [*reversed(left), "new", "newer"], clients=4, group=True)
    for answer in answers:
        assert answer["step"] == 3 + after
        assert answer["is_local"]
        assert answer["steps"] == [1, 3 + after]
        assert answer["metrics"] == {"step": 3 + after}
        assert answer["most"] <= 1
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == [
        "step_00000001",
        f"step_{3 + after:08}",
    ]
    tree = dtckpt.restore(root / f"step_{3 + after:08}")
    expected = tier_cases.values(3 + after)
    assert all(torch.equal(tree["model"][name], expected[name]) for name in expected)
