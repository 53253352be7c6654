"""Scrubs: every damage is found within a round and mended from a copy; the state, the budget, other processes."""

import errno
import json
import os
import random
import shutil

import pytest
import torch
from support.shares import SEED, amount

import dtckpt
from dtckpt import errors
from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.copying import scrub_checkpoint
from dtckpt.checkpoint.copying.scrub_state import DAY_S, STATE_NAME, ScrubState

from .roots import OPTIONS, files_in, flip, is_equal, is_step, link_copy, save_steps, state, step_folder

STEPS = (1, 2)


@pytest.fixture
def root(tmp_path):
    return save_steps(tmp_path / "run", STEPS)


@pytest.fixture
def copies(root, tmp_path):
    dtckpt.copy(root, tmp_path / "copies")
    return tmp_path / "copies"


def is_whole(root, copies):
    return all(is_equal(step_folder(root, step), step_folder(copies, step)) for step in STEPS)


def largest(folder):
    return max(files_in(folder), key=lambda file: file.stat().st_size)


# --- damage -------------------------------------------------------------------------------------------------------


def flip_a_bit(file, rng):
    flip(file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8))


def cut_off(file, rng):
    os.truncate(file, rng.randrange(file.stat().st_size))


def remove(file, rng):
    file.unlink()


def fill_with_zeros(file, rng):
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 4096] = bytes(byte ^ 0xFF for byte in data[start : start + 4096])
    file.write_bytes(data)


DAMAGES = (flip_a_bit, flip_a_bit, flip_a_bit, cut_off, remove, fill_with_zeros)


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_damage_is_found_and_mended(tmp_path, kind):
    root, copies = save_steps(tmp_path / "run", STEPS, kind), tmp_path / "copies"
    dtckpt.copy(root, copies)
    assert dtckpt.scrub(root).is_sound
    rng = random.Random(f"{SEED} {kind}")
    for number in range(amount(4, 75)):
        file = rng.choice([file for step in STEPS for file in files_in(step_folder(root, step))])
        damage = rng.choice(DAMAGES)
        damage(file, rng)
        note = f"damage {number}: {damage.__name__} of {file}"
        found = dtckpt.scrub(root)
        assert not found.is_sound, note
        assert {each.checkpoint for each in found.damages} == {root / file.relative_to(root).parts[0]}
        assert not any(each.is_mended for each in found.damages)
        mended = dtckpt.scrub(root, source=copies)
        assert mended.is_sound, (note, mended)
        assert all(each.is_mended for each in mended.damages), note
        assert is_whole(root, copies), note
    assert dtckpt.scrub(root).damages == ()


def test_damage_of_chunks_is_found_without_an_earlier_round(root):
    flip(largest(step_folder(root, 2)), 1000)
    report = dtckpt.scrub(root)
    (damage,) = report.damages
    assert "' is damaged" in damage.reason
    assert "there is no copy; name one by --from" in damage.reason
    assert report.damaged == ("step_00000002",)
    assert dtckpt.scrub(root).damaged == ("step_00000002",)


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_a_lost_manifest_is_mended_only_from_a_copy_that_fits(tmp_path, kind):
    root = save_steps(tmp_path / "run", [1], kind)
    dtckpt.copy(root, tmp_path / "copies")
    save_steps(tmp_path / "others", [1], kind)
    dtckpt.save(step_folder(tmp_path / "others", 1), state(5), options=OPTIONS[kind])
    (step_folder(root, 1) / "dtckpt.manifest").unlink()
    other = dtckpt.scrub(root, source=tmp_path / "others")
    assert "is another checkpoint" in other.damages[0].reason
    assert not other.is_sound
    assert dtckpt.scrub(root, source=tmp_path / "copies").is_sound
    assert is_step(step_folder(root, 1), 1)


def test_parts_that_the_copy_has_damaged_are_not_taken(root, copies):
    for folder, position in ((root, 1000), (copies, 1000)):
        flip(largest(step_folder(folder, 1)), position)
    report = dtckpt.scrub(root, source=copies)
    assert not report.is_sound
    assert "is damaged in the copy, too" in report.damages[0].reason
    flip(largest(step_folder(copies, 1)), 1000)  # the copy is sound again
    assert dtckpt.scrub(root, source=copies).is_sound
    assert is_whole(root, copies)


def test_parts_come_from_both(root, copies):
    flip(largest(step_folder(root, 1)), 1000)
    flip(largest(step_folder(copies, 1)), 250_000)
    report = dtckpt.scrub(root, source=copies)
    assert [each.is_mended for each in report.damages] == [True]
    assert is_step(step_folder(root, 1), 1)


def test_a_file_with_several_names_is_mended_for_each(root, tmp_path):
    shutil.rmtree(step_folder(root, 2))
    link_copy(step_folder(root, 1), step_folder(root, 2))
    dtckpt.copy(root, tmp_path / "copies", keep_links=True)
    file = largest(step_folder(root, 1))
    name = file.relative_to(step_folder(root, 1))
    (tmp_path / "elsewhere").hardlink_to(file)
    flip(file, 1000)
    former = file.stat().st_ino
    assert not dtckpt.scrub(root).is_sound
    assert len(dtckpt.scrub(root, source=tmp_path / "copies").damages) == 1
    now = [(step_folder(root, step) / name).stat().st_ino for step in STEPS]
    assert now[0] == now[1] != former
    assert (tmp_path / "elsewhere").stat().st_ino == former
    assert is_whole(root, tmp_path / "copies")


# --- processes that end or meet -----------------------------------------------------------------------------------


class Cut(BaseException):
    """The end of a process, as far as its files go."""


@pytest.mark.parametrize("at", range(3))
def test_a_scrub_that_is_cut_while_it_mends(root, copies, monkeypatch, at):
    dtckpt.scrub(root)
    flip(largest(step_folder(root, 1)), 1000)
    (step_folder(root, 1) / "metrics.json").unlink()
    (step_folder(root, 2) / "dtckpt.manifest").unlink()
    rename, calls = os.rename, []

    def rename_or_end(source, target, **options):
        calls.append(target)
        if len(calls) > at:
            raise Cut
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", rename_or_end)
    with pytest.raises(Cut):
        dtckpt.scrub(root, source=copies)
    monkeypatch.undo()
    assert dtckpt.scrub(root, source=copies).is_sound
    assert is_whole(root, copies)


def test_a_full_disk(root, copies, monkeypatch):
    flip(largest(step_folder(root, 1)), 1000)
    before = largest(step_folder(root, 1)).read_bytes()

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scrub_checkpoint, "replace_file", refuse)
    report = dtckpt.scrub(root, source=copies)
    assert not report.is_sound
    assert "free space" in report.damages[0].reason
    assert largest(step_folder(root, 1)).read_bytes() == before


@pytest.mark.parametrize("change", ["replace", "remove"])
@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_a_step_that_changes_meanwhile_is_not_touched(tmp_path, change, kind):
    root = save_steps(tmp_path / "run", [1], kind)
    dtckpt.copy(root, tmp_path / "copies")
    dtckpt.scrub(root)
    changed = []

    def progress(*_):
        if not changed:
            changed.append(True)
            if change == "replace":
                dtckpt.save(step_folder(root, 1), state(7), options=OPTIONS[kind])
            else:
                shutil.rmtree(step_folder(root, 1))

    report = dtckpt.scrub(root, source=tmp_path / "copies", progress=progress)
    assert changed
    assert report.damages == ()
    assert is_step(step_folder(root, 1), 7) if change == "replace" else not step_folder(root, 1).exists()


def test_two_scrubs_at_once(root):
    refused = []

    def progress(*_):
        if not refused:
            refused.append(True)
            with pytest.raises(errors.CheckpointConflictError, match="another process scrubs"):
                dtckpt.scrub(root)

    dtckpt.scrub(root, progress=progress)
    assert refused


def test_a_step_that_is_a_link_is_passed_over(root, copies, tmp_path):
    outside = tmp_path / "outside"
    step_folder(root, 2).rename(outside)
    step_folder(root, 2).symlink_to(outside)
    flip(largest(outside), 1000)
    before = largest(outside).read_bytes()
    assert dtckpt.scrub(root, source=copies).damages == ()
    assert largest(outside).read_bytes() == before


# --- rounds -------------------------------------------------------------------------------------------------------


def test_a_round_takes_as_many_runs_as_its_budget_asks(root):
    whole = dtckpt.scrub(root).nbytes
    (root / STATE_NAME).unlink()
    now, runs = [1e9], []
    while not runs or not runs[-1].rotations:
        runs.append(dtckpt.scrub(root, bytes_per_day=whole / 4, now=lambda: now[0]))
        now[0] += DAY_S / 2
    assert 3 <= len(runs) <= 12
    assert [run.next for run in runs][-1] == ""
    assert {run.next for run in runs[:-1]} <= {"step_00000001", "step_00000002"}
    assert sum(run.num_checkpoints for run in runs) == 2
    flip(largest(step_folder(root, 2)), 1000)
    found = []
    for _ in range(3):
        now[0] += DAY_S
        found.append(dtckpt.scrub(root, bytes_per_day=whole, now=lambda: now[0]))
    assert sum(len(run.damages) for run in found[:2]) >= 1
    assert found[-1].damaged == ("step_00000002",)


def test_without_time_there_is_no_budget(root):
    first = dtckpt.scrub(root, bytes_per_day=1, now=lambda: 1e9)
    again = dtckpt.scrub(root, bytes_per_day=1, now=lambda: 1e9)
    assert first.nbytes
    assert again.nbytes == 0
    # A clock that went back does not stop the rounds for ever.
    assert dtckpt.scrub(root, bytes_per_day=1, now=lambda: 1e8).nbytes


def test_a_step_that_was_saved_again_is_a_new_one(root):
    dtckpt.scrub(root)
    dtckpt.save(step_folder(root, 1), state(9), options=OPTIONS["zarr"])
    assert dtckpt.scrub(root).damages == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        "[" * 100_000,
        json.dumps({**json.loads(ScrubState().to_bytes()), "known": {"step_00000001": [1, 2]}}),
        json.dumps({**json.loads(ScrubState().to_bytes()), "at_s": -1}),
        json.dumps({**json.loads(ScrubState().to_bytes()), "segment": 1 << 70}),
        json.dumps({**json.loads(ScrubState().to_bytes()), "name": ["step"]}),
    ],
)
def test_a_state_of_wrong_types_counts_as_none(root, text, caplog):
    flip(largest(step_folder(root, 1)), 1000)
    (root / STATE_NAME).write_text(text)
    assert dtckpt.scrub(root).damaged == ("step_00000001",)
    assert "the round begins again" in caplog.text


def test_a_prepared_state_hides_damage_for_a_round_at_most(root, copies):
    flip(largest(step_folder(root, 1)), 1000)
    facts = {"name": "z" * 100, "segment": 1 << 40, "at_s": 5e9, "left": 1e30, "known": {"step_00000001": [1, 2, 0]}}
    (root / STATE_NAME).write_text(json.dumps({**json.loads(ScrubState().to_bytes()), **facts}))
    dtckpt.scrub(root)
    assert dtckpt.scrub(root, source=copies).damages
    assert is_whole(root, copies)


def test_other_files_in_a_checkpoint_may_come_and_go(root):
    dtckpt.scrub(root)
    (step_folder(root, 1) / "README").write_text("by a user")
    (step_folder(root, 1) / ".metadata").write_text("of another program")
    assert dtckpt.scrub(root).damages == ()


def test_steps_that_share_what_did_not_change(tmp_path):
    """Copies keep the links of saves that reuse chunks; a mended file is mended for all steps."""
    root, copies = tmp_path / "run", tmp_path / "copies"
    with dtckpt.CheckpointManager(root, is_async=False, reuse=True, options=OPTIONS["ocdbt"]) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"frozen": state(0)["w"], "w": state(step)["half"]}, force=True)
    shared = [file for file in files_in(step_folder(root, 1)) if file.stat().st_nlink > 1]
    assert shared
    report = dtckpt.copy(root, copies, keep_links=True)
    assert sum(each.num_linked for each in report.checkpoints) >= 2
    dtckpt.scrub(root)
    file = max(shared, key=lambda file: file.stat().st_size)
    flip(file, file.stat().st_size // 2)
    assert dtckpt.scrub(root).damaged
    assert dtckpt.scrub(root, source=copies).is_sound
    for step in (1, 2, 3):
        assert is_equal(step_folder(root, step), step_folder(copies, step))
        assert dtckpt.restore(step_folder(root, step))["frozen"].equal(state(0)["w"])
    assert file.stat().st_nlink > 1


def test_steps_that_cannot_be_read_do_not_stop_the_round(root):
    """A step of a newer format is told, a step of another library is passed over, and the next one has its turn."""
    torch.save({"w": torch.ones(3)}, (root / "step_00000000").with_suffix(""))
    (root / "step_00000003").mkdir()
    torch.save({"w": torch.ones(3)}, root / "step_00000003" / "model.pt")
    manifest = step_folder(root, 1) / "dtckpt.manifest"
    newer = checkpoint_pb2.ManifestFile.FromString(manifest.read_bytes())
    newer.format_version = 99
    manifest.write_bytes(newer.SerializeToString())
    flip(largest(step_folder(root, 2)), 1000)
    report = dtckpt.scrub(root)
    assert report.damaged == ("step_00000001", "step_00000002")
    assert "newer format" in report.damages[0].reason
    assert report.rotations == 1


def test_drafts_of_a_scrub_that_was_killed_are_removed(root):
    old, new = (step_folder(root, 1) / "client_0" / f".f.{number:016x}.draft" for number in (1, 2))
    for draft in (old, new):
        draft.write_text("draft")
    os.utime(old, (0, 0))
    dtckpt.scrub(root)
    assert not old.exists()
    assert new.exists()
    dtckpt.copy(root, root.parent / "copies")
    assert not [file for file in files_in(root.parent / "copies") if file.name.endswith(".draft")]
