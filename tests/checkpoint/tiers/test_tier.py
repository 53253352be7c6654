"""Jobs save in the memory of their hosts, lose some of them, and go on."""

import dataclasses
import itertools
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtckpt
from dtckpt import CheckpointManager, LocalTier
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.tiers.durable import RateLimitedSource

from . import tier_cases

pytestmark = pytest.mark.processes


def hosts(count):
    return [f"host{number}" for number in range(count)]


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "root", tmp_path / "tier"


def files_of(folder, host):
    return sorted(file for file in (folder / host).rglob("*.data") if file.parent.name != "spare")


def step_of(file):
    return SaveId.parse(file.parent.name).step


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[0] ^= 4
    file.write_bytes(data)


def restore_all(pool, folders, on, **options):
    """Restore on some hosts; check that all clients have the values of one step, and return the facts of each."""
    restored = pool.values(tier_cases.restore, *folders, on, **options, clients=len(on), group=True)
    assert all(each["is_equal"] and each["step"] == each["noted"] for each in restored)
    assert len({each["step"] for each in restored}) == 1
    return restored


def test_a_lost_host_and_renumbered_clients(pool, folders):
    held = pool.values(tier_cases.save_steps, *folders, hosts(4), [1, 2, 3], clients=4, group=True)
    assert [sorted(dict(each)) for each in held] == [[2, 3]] * 4, "two steps are kept"
    assert [dict(each)[3] for each in held] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [path.name for path in folders[0].glob("step*")] == ["step_00000001"], "only the first one of all"

    tier_cases.remove_host(folders[1], "host1")
    restored = restore_all(pool, folders, ["host3", "host0", "new", "host2"])
    assert restored[0]["step"] == 3
    needed = sum(each["local"].local_nbytes + each["local"].received_nbytes for each in restored)
    sharded = sum(tensor.nbytes for tensor in tier_cases.values(3).values() if tensor.ndim == 2)
    copied = sum(tensor.nbytes for tensor in tier_cases.values(3).values() if tensor.ndim != 2)
    assert needed == sharded + 4 * copied, "each client takes what it needs, and no byte more"


def test_what_does_not_change_is_sent_to_a_host_once(pool, folders):
    sent = pool.values(tier_cases.save_frozen_base, *folders, hosts(2), [1, 2, 3, 4], clients=2, group=True)
    whole, changed = (512 + 2) * 128 * 4, 2 * 128 * 4
    assert sent == [[whole + number * changed for number in range(4)]] * 2
    # The copies alone are whole: of both steps that are kept.
    tier_cases.remove_host(folders[1], "host1")
    for step in (4, 3):
        assert pool.values(tier_cases.restore_frozen_base, *folders, ["host0", "new"], step, clients=2, group=True) == [
            True,
            True,
        ]


def test_the_same_hosts_read_no_byte_of_each_other(pool, folders):
    """Also of what all of them have, which one client has saved."""
    pool.values(tier_cases.save_steps, *folders, hosts(3), [5], clients=3, group=True)
    for _ in range(2):
        restored = restore_all(pool, folders, hosts(3))
        assert all(each["local"].received_nbytes == 0 < each["local"].local_nbytes for each in restored)
        assert all(each["local"].copies == 2 for each in restored)


def test_without_near_copies_they_read_what_all_have(pool, folders):
    pool.values(tier_cases.save_steps, *folders, hosts(3), [5], clients=3, group=True, near_copies=False)
    restored = restore_all(pool, folders, hosts(3), near_copies=False)
    assert sum(each["local"].received_nbytes for each in restored) > 0


def test_a_damaged_near_copy(pool, folders):
    """It is passed over, and said; the part that it is a copy of is read."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [5], clients=2, group=True, copies=1)
    (file,) = files_of(folders[1], "host1")
    index = PartIndex.from_bytes(file.with_suffix(".voted").read_bytes())
    data = bytearray(file.read_bytes())
    data[index.copies[0].offset] ^= 4
    file.write_bytes(data)
    restored = restore_all(pool, folders, hosts(2), copies=1)
    assert restored[0]["local"].passed_over == ()
    assert any("damaged" in text for text in restored[1]["local"].passed_over)
    assert restored[1]["local"].received_nbytes > 0


def test_copies_that_differed_when_they_were_saved(pool, folders):
    """Every host restores the value that the part has."""
    args = (tier_cases.save_different_copies, *folders, hosts(2))
    pool.values(*args, clients=2, group=True)
    first, second = pool.values(tier_cases.restore_values, *folders, hosts(2), clients=2, group=True)
    assert first == second


def test_any_number_of_hosts_in_turn(pool, folders):
    """Each time a host is lost, and the job goes on with another number of hosts, from the parts of the others."""
    counts = [2, 3, 4, 1, 2]
    for step, (count, after) in enumerate(itertools.pairwise(counts), 1):
        copies = count if after == 1 else 2  # one host alone needs all parts
        pool.values(tier_cases.save_steps, *folders, hosts(count), [step], clients=count, group=True, copies=copies)
        if count > 1:
            tier_cases.remove_host(folders[1], hosts(count)[-1])
        (restored, *_) = restore_all(pool, folders, hosts(after))
        assert restored["step"] == step
        assert restored["local"] is not None


def test_a_restore_makes_the_copies_that_are_missing(pool, folders):
    pool.values(tier_cases.save_steps, *folders, hosts(3), [1], clients=3, group=True)
    for lost in ("host0", "host1", "host2", "host0"):
        tier_cases.remove_host(folders[1], lost)
        restored = restore_all(pool, folders, hosts(3))
        assert restored[0]["local"] is not None
        assert restored[0]["local"].copies == 1, "of the parts that the lost host held"


def test_a_step_that_has_its_copies_is_kept_after_a_restart(pool, folders):
    """Newer steps do not take its place while they have none."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True)
    for held in pool.values(tier_cases.go_on_without_copies, *folders, hosts(2), clients=2, group=True):
        assert held == [3, 4, 5]
    tier_cases.remove_host(folders[1], "host1")
    restored = restore_all(pool, folders, hosts(2))
    assert restored[0]["step"] == 3
    assert restored[0]["local"] is not None


def test_the_step_that_a_run_went_back_to_is_kept(pool, folders):
    """The copies of steps that were abandoned protect nothing."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True)
    args = (tier_cases.go_on_without_copies, *folders, hosts(2), 5)
    for held in pool.values(*args, clients=2, group=True):
        assert 5 in held
    tier_cases.remove_host(folders[1], "host1")
    assert restore_all(pool, folders, hosts(2))[0]["step"] == 5


def test_a_flipped_bit_in_one_copy(pool, folders):
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2], clients=2, group=True)
    for file in files_of(folders[1], "host0"):
        if step_of(file) == 2:
            flip_a_bit(file)
    restored = restore_all(pool, folders, hosts(2))
    assert restored[0]["step"] == 2
    assert any("damaged" in text for text in restored[0]["local"].passed_over)


def test_every_copy_of_the_newest_is_damaged(pool, folders):
    """The root has the same step, and it is taken from there."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True, durable=1, keep=2)
    for host in hosts(2):
        for file in files_of(folders[1], host):
            if step_of(file) == 3:
                flip_a_bit(file)
    restored = restore_all(pool, folders, hosts(2))
    assert restored[0]["step"] == 3
    assert restored[0]["local"] is None
    assert restored[0]["skipped"] == {}


def test_a_root_that_was_deleted_and_is_used_again(pool, folders):
    """Situation 12: the steps of the former job are neither restored nor removed, nor do they count as kept ones."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True)
    shutil.rmtree(folders[0])
    held = pool.values(tier_cases.save_steps, *folders, hosts(2), [1], clients=2, group=True)
    assert [sorted(step for step, _ in each) for each in held] == [[1, 2, 3]] * 2
    restored = restore_all(pool, folders, hosts(2))
    assert restored[0]["step"] == 1
    assert restored[0]["local"].age_s < 60


def test_a_root_that_was_deleted_before_a_restore(pool, folders):
    """A client that asks for the remaining step gets it, again and again."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True)
    shutil.rmtree(folders[0])
    for _ in range(2):
        assert restore_all(pool, folders, hosts(2))[0]["step"] == 3


def test_a_root_whose_identity_is_damaged(pool, folders):
    """The tier is taken for its own."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2], clients=2, group=True)
    (folders[0] / ".dtckpt-root").write_bytes(b"\xff" * 8)
    assert restore_all(pool, folders, hosts(2))[0]["local"] is not None


def test_the_tier_does_not_grow(pool, folders):
    """Situation 18: files are used again. Two steps are kept, one is written, and one may lack copies."""
    for used in pool.values(tier_cases.files_over_many_saves, *folders, hosts(2), 24, clients=2, group=True):
        assert max(count for count, _ in used) <= 4 * 2
        assert max(nbytes for _, nbytes in used) <= 4 * used[0][1]


def test_copies_are_handed_over_before_a_client_leaves(pool, folders):
    """Situation 28, over a slow link: a host that is drained after its manager was closed takes nothing with it."""
    args = (tier_cases.save_and_leave, *folders, hosts(2), 1, 1 << 20)
    pool.values(*args, clients=2, group=True, max_rate=2 << 20)
    assert [len(files_of(folders[1], host)) for host in hosts(2)] == [2, 2]
    assert [len(list((folders[1] / host).rglob("*.voted"))) for host in hosts(2)] == [2, 2]


def test_going_back(pool, folders):
    """Situation 25: the steps after the restored step count no more."""
    for found in pool.values(tier_cases.go_back, *folders, hosts(2), clients=2, group=True):
        assert found == [(4, 4.0), (2, 2.0), (3, 30.0), (3, 30.0), (3, 30.0)]


def test_a_step_that_fails_after_each_restore(pool, folders):
    """Situation 26: after two restores without a newer step, the step before is taken, unless the step is named."""
    pool.values(tier_cases.save_steps, *folders, hosts(2), [1, 2, 3], clients=2, group=True)
    steps = [restore_all(pool, folders, hosts(2), max_restores=2)[0]["step"] for _ in range(5)]
    assert steps == [3, 3, 2, 2, 1], "the first step is in the root"
    assert restore_all(pool, folders, hosts(2), step=3, max_restores=2)[0]["local"] is not None
    assert restore_all(pool, folders, hosts(2))[0]["step"] == 3, "who does not ask for it has no bound"
    pool.values(tier_cases.save_steps, *folders, hosts(2), [4], clients=2, group=True)
    assert restore_all(pool, folders, hosts(2), max_restores=2)[0]["step"] == 4


def test_all_hosts_are_lost(pool, folders):
    pool.values(tier_cases.save_steps, *folders, hosts(3), range(7), clients=3, group=True, durable=2)
    for host in hosts(3):
        tier_cases.remove_host(folders[1], host)
    restored = restore_all(pool, folders, hosts(2))
    assert restored[0]["step"] == 6
    assert restored[0]["local"] is None


def test_one_client_alone(tmp_path):
    weight = torch.arange(100.0)
    local = LocalTier(path=tmp_path / "tier", every_steps=2)
    with CheckpointManager(tmp_path / "root", local=local, save_interval_steps=4) as manager:
        for step in range(1, 8):
            weight += 1
            handle = manager.save(step, {"weight": weight, "step": step}, metrics={"loss": 1.0 / step})
            assert (handle is None) == bool(step % 2)
            manager.wait()  # one write to the root at a time; a step that is due meanwhile would come later
        assert manager.all_steps() == [2, 4], "the first one of all, and those that are due"
        assert manager.metrics(4) == {"loss": 0.25}
        restored = manager.restore()
        assert (restored.step, restored.tree["step"]) == (6, 6)
        assert torch.equal(restored.tree["weight"], torch.arange(100.0) + 6)
        assert restored.local.received_nbytes == 0
        assert manager.restore(4).tree["step"] == 4
        assert manager.restore(2).local is None
        with pytest.raises(dtckpt.errors.CheckpointNotFoundError):
            manager.restore(3)


def test_the_status_says_which_step_is_held(tmp_path):
    with CheckpointManager(tmp_path / "root", local=LocalTier(path=tmp_path / "tier", every_steps=1)) as manager:
        manager.save(7, {"step": 7})
        manager.wait()
        (task,) = dtckpt.job_status().tasks
        assert (task.progress.phase, task.progress.step) == ("local step held", 7)


def test_descriptions_of_earlier_steps_are_not_kept(tmp_path):
    """Each step has another description, because its plain values differ."""
    local = LocalTier(path=tmp_path / "tier", every_steps=1)
    with CheckpointManager(tmp_path / "root", local=local, save_interval_steps=1000) as manager:
        counts = []
        for step in range(1, 6):
            manager.save(step, {"step": step})
            counts.append(len(manager._tier.session._server.texts))
    assert len(set(counts)) == 1, counts


def test_training_goes_on_while_the_tier_copies(tmp_path):
    """The saved values are the values at the call, whatever is written to the tensors right after it."""
    weight = torch.zeros(1 << 20)
    local = LocalTier(path=tmp_path / "tier", every_steps=1, keep=1)
    with CheckpointManager(tmp_path / "root", local=local, save_interval_steps=1000) as manager:
        for step in range(1, 6):
            weight.fill_(step)
            manager.save(step, {"weight": weight})
            weight.fill_(-1)
        restored = manager.restore()
        assert torch.equal(restored.tree["weight"], torch.full((1 << 20,), 5.0))


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(LocalTier) if field.name not in ("path", "address")]
)
def test_bad_options(name):
    with pytest.raises(dtckpt.errors.ConfigError, match=name):
        LocalTier(path="/x", **{name: -1})


@given(st.lists(st.integers(1, 10_000), max_size=20), st.floats(1, 1e6))
def test_the_rate_of_writes_to_the_root(sizes, rate):
    """However the elements are cut, and however long a fetch takes, the bytes so far never exceed time times rate."""
    now, done = 0.0, 0

    class Elements:
        max_pending_nbytes = None

        def fetch(self, plan, region):
            return np.empty(plan, np.uint8)

    def sleep(seconds):
        nonlocal now
        now += seconds

    source = RateLimitedSource(Elements(), rate, lambda: now, sleep)
    for size in sizes:
        source.fetch(size, None)
        assert done <= rate * now * (1 + 1e-9)
        done += size
