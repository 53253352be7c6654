"""Whatever can be saved in a checkpoint can be saved in the tier, and comes back bit for bit, wherever it lies."""

import pytest

import dtckpt

from . import tier_cases, tier_states

HOSTS = ["host0", "host1", "host2"]


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "root", tmp_path / "tier"


def run(pool, case, folders, hosts, *args, **kwargs):
    return pool.values(case, *folders, hosts, *args, clients=len(hosts), group=True, **kwargs)


@pytest.mark.parametrize("hosts", [["host0", "host1"], ["new", "host1", "host0"], ["host1"]])
def test_kinds_of_tensors(pool, folders, hosts):
    """Dtypes, empty tensors, numbers, strides, common memory; on as many clients, more, and fewer."""
    run(pool, tier_states.save_kinds, folders, HOSTS[:2])
    if len(hosts) != 2:
        tier_cases.remove_host(folders[1], "host0")
    assert run(pool, tier_states.restore_kinds, folders, hosts) == [[]] * len(hosts)


def test_stages_of_a_pipeline(pool, folders):
    """Clients pass different keys, and other ones in the next save."""
    run(pool, tier_states.save_own_keys, folders, HOSTS, [1, 2, 3])
    tier_cases.remove_host(folders[1], "host1")
    expected = {f"layer {client + 3 * number}": [client + 30.0] for client in range(3) for number in range(3)}
    for answer in run(pool, tier_states.restore_own_keys, folders, ["host2", "host0"]):
        assert answer == {"layers": expected, "step": 3, "is_local": True}


def test_values_of_each_client(pool, folders):
    run(pool, tier_states.save_per_client, folders, HOSTS)
    assert run(pool, tier_states.restore_per_client, folders, HOSTS, "error") == [0, 1, 2]
    tier_cases.remove_host(folders[1], "host0")
    assert run(pool, tier_states.restore_per_client, folders, ["host2", "host1"], "keep") == [0, 1]


def test_a_model_of_fsdp2(pool, folders):
    run(pool, tier_states.train_fsdp, folders, HOSTS[:2], is_first=True)
    tier_cases.remove_host(folders[1], "host1")
    assert run(pool, tier_states.train_fsdp, folders, ["new", "host0", "newer"], is_first=False) == [True] * 3


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("missing", "TensorNotFoundError"),
        ("unexpected", "UnexpectedTensorError"),
        ("shape", "ShapeMismatchError"),
        ("dtype", "DTypeError"),
    ],
)
def test_a_target_that_asks_for_something_else(pool, folders, kind, error):
    """Situation 32: the errors are as for any checkpoint, and no older step is restored instead."""
    run(pool, tier_states.save_little, folders, HOSTS[:2])
    for name, text in run(pool, tier_states.restore_more, folders, HOSTS[:2], kind):
        assert name == error, text
    step, weight, _ = run(pool, tier_states.restore_more, folders, HOSTS[:2], "")[0]
    assert (step, weight) == (2, [2.0] * 4)


def test_a_tensor_that_the_tier_never_had_is_allowed(pool, folders):
    run(pool, tier_states.save_little, folders, HOSTS[:2])
    assert run(pool, tier_states.restore_more, folders, HOSTS[:2], "allowed") == [[2, [2.0] * 4, [7.0] * 3]] * 2


def test_tensors_that_change_after_the_call(pool, folders):
    """Situation 31: neither the tier nor the root sees what training does next."""
    run(pool, tier_states.save_changed, folders, HOSTS[:2])
    assert run(pool, tier_states.changed_values, folders, HOSTS[:2]) == [[5, [5.0], [5.0]]] * 2
    for folder in folders[0].glob("step*"):
        tree = dtckpt.restore(folder)
        assert tree["weight"].unique().tolist() == tree["plain"].unique().tolist() == [tree["step"]]


@pytest.mark.parametrize("at", [6, 7])
def test_preemption(pool, folders, at):
    """Situation 27: the step at which all know of the signal is in the root when the job ends, due or not."""
    for answer in run(pool, tier_states.preempt, folders, HOSTS[:2], at):
        assert answer["last"] == at
        assert answer["steps"][-1] == at
    assert dtckpt.restore(folders[0] / f"step_{at:08}")["w"].tolist() == [float(at)] * 6
