"""Damaged, missing and foreign files: another copy is taken, or another step, and never a wrong value."""

import json

import pytest
import torch

from dtckpt import CheckpointManager, LocalTier
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.records import PartIndex, SaveId

from . import tier_cases
from .tier_cases import bits_flipped, parts_of

HOSTS = ["host0", "host1"]


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "root", tmp_path / "tier"


@pytest.fixture
def saved(pool, folders):
    """Steps 1 to 3 of two hosts, of which the last two are in the tier, each part on both."""
    pool.values(tier_cases.save_steps, *folders, HOSTS, [1, 2, 3], clients=2, group=True)
    return folders


def restored(pool, folders, hosts=HOSTS, **options):
    answers = pool.values(tier_cases.restore, *folders, hosts, clients=len(hosts), group=True, **options)
    assert all(each["is_equal"] and each["step"] == each["noted"] for each in answers)
    assert len({each["step"] for each in answers}) == 1
    return answers


def cut(file):
    file.write_bytes(file.read_bytes()[:100])


def lengthen(file):
    file.write_bytes(file.read_bytes() + bytes(4096))


def empty(file):
    file.write_bytes(b"")


def remove(file):
    file.unlink()


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def exchange_with_another_step(file):
    """The file of the same client in another save: sound by itself, but of another step."""
    (other,) = [each for each in file.parents[1].rglob(file.name) if each.parent != file.parent]
    file.write_bytes(other.read_bytes())


DAMAGE = [bits_flipped, cut, empty, remove, replace_by_folder, exchange_with_another_step]
KINDS = ["data", "voted"]


@pytest.mark.share(2, of="damage")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_copy(pool, saved, damage, kind):
    """Situations 15 and 16: the other copy is taken."""
    for file in parts_of(saved[1] / "host0", 3, kind):
        damage(file)
    answers = restored(pool, saved)
    assert [(each["step"], each["skipped"]) for each in answers] == [(3, {})] * 2
    assert all(each["local"] is not None for each in answers)
    if damage not in (remove, replace_by_folder) and kind == "data":
        assert any(each["local"].passed_over for each in answers)


@pytest.mark.share(2, of="damage")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_both_copies_of_one_client(pool, saved, damage, kind):
    """Situation 16: all clients agree on the step before, and it is said what became of the newer one."""
    for host in HOSTS:
        (file,) = [each for each in parts_of(saved[1] / host, 3, kind) if each.name.startswith("1.")]
        damage(file)
    answers = restored(pool, saved)
    assert {each["step"] for each in answers} == {2}
    for each in answers:
        assert each["local"] is not None
        assert 3 in each["skipped"] or 3 in each["local"].lost_steps, each


def test_all_copies_of_all_steps(pool, saved):
    """Then the root's newest is restored."""
    for host in HOSTS:
        for step in (2, 3):
            for file in parts_of(saved[1] / host, step, "data"):
                bits_flipped(file)
    answers = restored(pool, saved)
    assert {(each["step"], each["local"]) for each in answers} == {(1, None)}
    assert all(each["skipped"].keys() == {2, 3} for each in answers)


def test_longer_files_are_sound(pool, saved):
    """A file that is used again may be longer than its part; its copies are as good."""
    for host in HOSTS:
        for file in parts_of(saved[1] / host, 3, "data"):
            lengthen(file)
    tier_cases.remove_host(saved[1], "host1")
    answers = restored(pool, saved)
    assert {each["step"] for each in answers} == {3}
    assert [file.name for file in parts_of(saved[1] / "host1", 3, "data")] == ["0.data", "1.data"], "copied anew"


def test_the_next_saves_after_damage(pool, saved):
    """A damaged step does not hinder the steps after it."""
    for file in parts_of(saved[1] / "host0", 3, "voted"):
        replace_by_folder(file)
    assert restored(pool, saved)[0]["step"] == 3
    held = pool.values(tier_cases.save_steps, *saved, HOSTS, [4, 5], clients=2, group=True)
    assert [[step for step, _ in each if step > 3] for each in held] == [[4, 5]] * 2
    assert restored(pool, saved)[0]["step"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_replaced(pool, saved, kind):
    """After the restore that found it: so the step outlives the host of the other copy."""
    (own, _) = parts_of(saved[1] / "host0", 3, kind)  # the other part is a copy, which no client reads
    bits_flipped(own)
    restored(pool, saved)
    tier_cases.remove_host(saved[1], "host1")
    answers = restored(pool, saved)
    assert {each["step"] for each in answers} == {3}
    assert all(each["local"].passed_over == () for each in answers)


NAMES = ["notes.txt", "3 (copy).data", "03.data", "-1.data", "x.voted", "99999999999999999999.data", "999999999.data"]


@pytest.mark.parametrize("name", [*NAMES, "sub/0.data"])
def test_files_that_are_none_of_the_tier(pool, saved, name):
    """Situation 12: they count for nothing, and no file outside the saves is removed."""
    strange = []
    for folder in {file.parent for file in parts_of(saved[1] / "host0", 3, "data")}:
        for place in (folder / name, folder.parent / name, saved[1] / "host0" / name):
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(b"7")
            (place.with_suffix(".voted")).write_bytes(b"7")
            strange.append(place)
    assert {each["step"] for each in restored(pool, saved)} == {3}
    pool.values(tier_cases.save_steps, *saved, HOSTS, [4, 5, 6], clients=2, group=True)
    assert {each["step"] for each in restored(pool, saved)} == {6}
    assert all(each.exists() for each in strange[1:])


def test_two_jobs_on_one_path(pool, tmp_path):
    """Situation 12: neither job sees, counts or removes the parts of the other, whatever its steps are."""
    tier = tmp_path / "tier"
    roots = [tmp_path / "one", tmp_path / "other"]
    for _ in range(2):
        for root, steps in zip(roots, ([10, 20], [11, 12, 13]), strict=True):
            pool.values(tier_cases.save_steps, root, tier, HOSTS, steps, clients=2, group=True)
    assert [restored(pool, (root, tier))[0]["step"] for root in roots] == [20, 13]
    names = {json.loads(file.read_text())["root"] for file in tier.rglob("job.json")}
    assert names == {str(root) for root in roots}


def test_the_same_root_in_other_words(pool, tmp_path):
    tier = tmp_path / "tier"
    pool.values(tier_cases.save_steps, f"{tmp_path}/run", tier, HOSTS, [1, 2], clients=2, group=True)
    for root in (f"{tmp_path}/run/", f"{tmp_path}/./run", f"{tmp_path}/other/../run"):
        assert restored(pool, (root, tier))[0]["local"] is not None, root


def test_a_process_that_opens_the_tier_again(tmp_path):
    """What a closed manager has left is no hindrance to the next one, nor are they to each other."""
    local = LocalTier(path=tmp_path / "tier", every_steps=1, copies=1)
    beside = CheckpointManager(tmp_path / "root", local=local, save_interval_steps=100)
    for step in range(1, 5):
        with CheckpointManager(tmp_path / "root", local=local, save_interval_steps=100) as manager:
            for each in (10 * step, 10 * step + 1, 10 * step + 2):
                assert manager.save(each, {"w": torch.full((100 * step,), float(each))}) is not None
                manager.wait()
            assert list(tmp_path.glob("tier/*/spare/*")) != []
        assert list(tmp_path.glob("tier/*/spare/*")) == [], "memory that no save fills again is given back"
        assert beside.restore().tree["w"].unique().tolist() == [10.0 * step + 2]
    beside.close()


def test_spare_files_that_nobody_fills(saved):
    """The files of dead processes are no hindrance."""
    local = LocalTier(path=saved[1] / "alone", every_steps=1, copies=1)
    with CheckpointManager(saved[0], local=local, save_interval_steps=100) as manager:
        spare = manager._tier.session.folder.path / "spare"
        spare.mkdir(parents=True)
        for number in range(4):
            (spare / f"0000000000000000-{number}.data").write_bytes(bytes(100))
        for step in (1, 2, 3):
            assert manager.save(step, {"w": torch.ones(100) * step}) is not None
            manager.wait()
        assert manager.restore().tree["w"].tolist() == [3.0] * 100
        assert list(spare.glob("0000000000000000-*")) == []


def test_a_part_that_another_process_of_the_host_replaced(tmp_path):
    """Its file is not filled again by the process that had filled it: that one would write to other memory."""
    folder = HostFolder(tmp_path, "root", host="here")
    folder.make()
    save, file = SaveId(1, 1, 1, False, "00000000"), folder.take(8)
    index = PartIndex(save, 0, 8, b"{}", (), (), {}, ())
    folder.put(file, index, index.to_bytes(), is_voted=True)
    other = tmp_path / "other"
    other.write_bytes(b"replaced")
    other.rename(folder.data_path(save, 0))
    folder.remove(save, 0)
    assert folder.data_path(save, 0).read_bytes() == b"replaced", "the other process removes it"
    again = folder.take(8)
    again.view[:] = b"12345678"
    assert again.path.read_bytes() == b"12345678"
    folder.close()
