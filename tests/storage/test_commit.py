"""The contract of the commit, for every kind of target: a directory, a prefix on an object store, any other URL."""

import pytest
import torch
from support.states import bits_of, differences, tensor_of

import dtckpt
from dtckpt import UNSHARDED, Layout, Region, SaveOptions
from dtckpt.checkpoint.saving import construction as saving
from dtckpt.checkpoint.saving import merge as merging
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
)
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import is_inside, location_of
from dtckpt.storage.zarr_files import ChunkFileWriter
from dtckpt.storage.zarr_tensorstore import DATABASE_NAME, TensorStoreWriter, client_folder

from . import saved_states

WHOLES = {
    **saved_states.WHOLES,
    "w": tensor_of("w", (37, 20), "float32"),
    "a/b": tensor_of("a/b", (64,), "bfloat16"),
    "large": tensor_of("large", (700, 513), "float32"),
    "scalar": tensor_of("scalar", (), "complex64"),
    "empty": torch.zeros(0, 3),
    "zeros": torch.zeros(36, 8),
    "flags": tensor_of("flags", (11,), "bool"),
}


def holds(path, step):
    return saved_states.holds(path, step, WHOLES)


@pytest.fixture
def save(kvstore):
    def call(path, step=1, **options):
        return dtckpt.save(
            path,
            saved_states.state(step, WHOLES),
            options=SaveOptions(kvstore=kvstore, chunk_nbytes=700_000, **options),
        )

    return call


@pytest.fixture
def path(root):
    return f"{root}/step_1"


@pytest.mark.share(2)
def test_what_is_saved_is_restored(path, save):
    report = save(path)
    assert str(report.path) == path
    assert report.path.name == "step_1"
    assert holds(path, 1)
    assert holds(report.path, 1)
    layout = Layout([UNSHARDED, ("x", "y")], saved_states.MESH)
    restored = dtckpt.restore(path, mesh=saved_states.MESH, layouts={"w": layout})
    assert differences(restored["w"], WHOLES["w"] + 1) == []
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
        region = Region((300, 5), (3, 500))
        assert bits_of(checkpoint.read("large", region)) == bits_of(WHOLES["large"][region.slices()])
        assert checkpoint.info("large").read_nbytes(region) < checkpoint.info("large").nbytes


@pytest.mark.share(1)
def test_nothing_is_replaced_without_consent(path, save):
    save(path, 1)
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        save(path, 2)
    assert holds(path, 1)
    for step in (2, 3):
        save(path, step, overwrite=True)
        assert holds(path, step)


def test_there_is_nothing(path):
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        dtckpt.open_checkpoint(path)
    with pytest.raises(CheckpointNotFoundError):
        dtckpt.restore(path)


STEPS = {
    "a write": "write",
    "the writes' end": "commit",
    "merging": (merging, "merge"),
    "tidying": (saving, "remove_working_files"),
    "the commit": (saving, "merge_clients"),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("step", STEPS)
def test_a_save_that_fails_leaves_what_was_there(path, save, monkeypatch, step):
    save(path, 1)

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        target = STEPS[step]
        for owner, name in (
            [target] if isinstance(target, tuple) else [(TensorStoreWriter, target), (ChunkFileWriter, target)]
        ):
            patch.setattr(owner, name, fail)
        with pytest.raises(ZeroDivisionError):
            save(path, 2, overwrite=True)
        with pytest.raises(ZeroDivisionError):
            save(f"{path}_other", 2)
    assert holds(path, 1)
    with pytest.raises(CheckpointNotFoundError):
        dtckpt.open_checkpoint(f"{path}_other")
    save(path, 3, overwrite=True)
    assert holds(path, 3)


@pytest.mark.share(1)
def test_what_is_not_to_be_seen_is_not_committed(path, save, monkeypatch):
    """A client's missing database would pass for an empty database."""
    merge = merging.merge

    def lose(kind, root, last_written, *shared):
        ((client, key),) = last_written.items()
        folder, name = (root / client_folder(client), DATABASE_NAME) if kind == "ocdbt" else (root, key)
        folder.read(name, 0, 1)
        folder.remove([name])
        merge(kind, root, last_written, *shared)

    save(path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "merge", lose)
        with pytest.raises(CheckpointCorruptError, match=r"clients 0 wrote .* does not see.*nothing was committed"):
            save(path, 2, overwrite=True)
    assert holds(path, 1)


@pytest.mark.share(1)
def test_who_is_taken_over_amid_a_save_says_so(path, save, monkeypatch):
    commits = {kind: kind.commit for kind in (TensorStoreWriter, ChunkFileWriter)}

    def lose(writer):
        another = commit_target_of(location_of(path)).begin("1-another")
        if is_object_store(another):
            another._register.give_up_older(another.token)  # as it does when it is about to be committed
        commits[type(writer)](writer)

    save(path, 1)
    with monkeypatch.context() as patch:
        for kind in commits:
            patch.setattr(kind, "commit", lose)
        with pytest.raises(StorageError, match="another attempt saves to this path, and took over"):
            save(path, 2, overwrite=True)
    assert holds(path, 1)
    save(path, 3, overwrite=True)
    assert holds(path, 3)


# --- attempts --------------------------------------------------------------------------------------------


def build(target, token):
    """Begin an attempt and write all of it."""
    attempt = target.begin(token)
    fill(attempt, token)
    return attempt


def fill(attempt, token):
    attempt.folder.write("data", token.encode())
    attempt.folder.write(MANIFEST_NAME, token.encode())


def is_object_store(attempt):
    return hasattr(attempt.folder, "clear")


def content(target):
    folder = target.locate()
    found = folder.read("data")
    assert folder.read(MANIFEST_NAME) == found
    return found.decode()


@pytest.fixture
def target(path):
    return commit_target_of(location_of(path))


def test_nothing_shows_before_the_commit(target):
    attempt = build(target, "1")
    with pytest.raises(CheckpointNotFoundError, match="did not complete"):
        target.locate()
    attempt.commit(overwrite=False)
    assert content(target) == "1"


def test_the_newest_attempt_owns_the_target(target):
    build(target, "1").commit(overwrite=False)
    older, newer = build(target, "2"), build(target, "3")
    if not is_object_store(older):  # there the older attempt lives until the newer commits
        with pytest.raises(StorageError, match="another attempt"):
            older.commit(overwrite=True)
        assert content(target) == "1"
    newer.commit(overwrite=True)
    with pytest.raises(StorageError, match="another attempt"):
        older.commit(overwrite=True)
    older.abandon()
    assert content(target) == "3"


def test_a_late_attempt_commits_nothing(target):
    """An attempt that was given up goes on writing, also after its successor is done."""
    older, newer = target.begin("1"), build(target, "2")
    newer.commit(overwrite=False)
    if is_object_store(older):  # on a file system the directory is gone
        fill(older, "1")
    with pytest.raises(StorageError):
        older.commit(overwrite=True)
    joined = target.join(older.token)
    joined.sweep()
    assert content(target) == "2"


def test_two_that_want_an_empty_target(target):
    first = build(target, "1")
    first.commit(overwrite=False)
    with pytest.raises(CheckpointExistsError):
        target.check_target(overwrite=False)
    second = build(target, "2")
    with pytest.raises(CheckpointExistsError):
        second.commit(overwrite=False)
    second.abandon()
    assert content(target) == "1"


def test_an_attempt_that_nobody_began(target):
    attempt = target.begin("1")
    target.join(attempt.token).validate(1)
    with pytest.raises(StorageError, match="client 3 does not see"):
        target.join("0-no-such-attempt").validate(3)


def test_abandoning_is_harmless(target):
    attempt = build(target, "1")
    attempt.abandon()
    attempt.abandon()
    with pytest.raises(CheckpointNotFoundError):
        target.locate()
    committed = build(target, "2")
    with committed.keep_alive():
        committed.commit(overwrite=False)
        committed.abandon()
    assert content(target) == "2"


def test_removing(target):
    build(target, "1").commit(overwrite=False)
    with target.pin():
        assert content(target) == "1"
    target.remove()
    with pytest.raises(CheckpointNotFoundError):
        target.locate()
    build(target, "2").commit(overwrite=False)
    assert content(target) == "2"


# --- managers --------------------------------------------------------------------------------------------


@pytest.mark.share(1)
def test_a_manager(root, kvstore, caplog):
    options = SaveOptions(kvstore=kvstore)
    weight = torch.zeros(5)
    with dtckpt.CheckpointManager(root, keep=2, options=options) as manager:
        assert manager.all_steps() == []
        for step in range(5):
            manager.save(step, {"w": weight + step}, metrics={"loss": 5.0 - step})
        manager.wait()
        assert manager.all_steps() == [3, 4]
        assert manager.metrics(4) == {"loss": 1.0}
        found = manager.restore()
        assert (found.step, found.tree["w"].tolist()) == (4, [4.0] * 5)
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(1)
        manager.save(4, {"w": weight - 1})
        manager.wait()
        folder = commit_target_of(manager.path(4)).locate()
        folder.write(MANIFEST_NAME, folder.read(MANIFEST_NAME)[:-1])
        found = manager.restore()
        assert (found.step, list(found.skipped)) == (3, [4])
    with dtckpt.CheckpointManager(root, keep=2, options=options) as other:
        other.save(5, {"w": weight})
        other.wait()
        assert other.latest_step() == 5
    assert not [record for record in caplog.records if "could not" in record.message]


def test_two_managers(root, kvstore):
    options = SaveOptions(kvstore=kvstore)
    first, second = (dtckpt.CheckpointManager(root, is_async=False, options=options) for _ in range(2))
    with first, second:
        first.save(1, {"step": 1})
        # With locks the first keeps the root; without, the newest has it.
        has_locks = "://" not in root
        loser, winner = (second, first) if has_locks else (first, second)
        if not has_locks:
            second.save(2, {"step": 2})
        with pytest.raises(dtckpt.errors.CheckpointConflictError, match="saves checkpoints to"):
            loser.save(3, {"step": 3})
        winner.save(4, {"step": 4})
        assert winner.latest_step() == 4


def test_locations(root, tmp_path):
    inner, outer = location_of(f"{root}/a/b"), location_of(f"{root}/a")
    assert is_inside(inner, outer)
    assert not is_inside(outer, inner)
    assert not is_inside(location_of(f"{root}/ab"), outer)
    assert inner.parent == outer
    assert (inner.name, str(outer / "b")) == ("b", str(inner))
    assert location_of(f"{root}/a/") == outer
