"""A power loss at any file operation of a save with fsync: exactly the old or the new checkpoint restores."""

import os
import random
import tempfile
from pathlib import Path

import pytest
from support.shares import IS_ALL, SEED, amount, share

from . import crash_cases
from .crash_faults import HEARTBEAT_TIMEOUT_S, record
from .forked_clients import Fault
from .power_loss import Disk, write_tree

pytestmark = pytest.mark.processes

SAMPLE = 20
"""How many operations of a save lose the power."""
DRAWS = amount(2, 6)
"""Random choices, at each of them, of the unsynced changes that survive."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the remains of a power loss are written for a moment; disks take long for that many small files."""

HISTORIES = {
    "a new path": (2, False, False),
    "an old checkpoint": (2, True, False),
    "a leader that was killed": (2, True, True),
    "a lone client that was killed": (1, True, True),
}
"""The state before the save: the number of clients, a checkpoint or none, a killed save or none."""


def losses(draw):
    """Yield ways to choose what survives of so many unsynced changes, by name."""
    yield "all is lost", lambda count: 0
    yield "nothing is lost", lambda count: count
    for _ in range(DRAWS):
        yield "some is lost", lambda count: draw.choice((0, count, draw.randint(0, count)))


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_old_or_new_survives(nursery, tmp_path, kvstore, history):
    num_clients, has_old, is_killed = HISTORIES[history]
    options = {"kvstore": kvstore, "clients": num_clients}
    if is_killed:
        (tmp_path / "whole").mkdir()
        nursery.values(crash_cases.save, str(tmp_path / "whole/s"), "old", **options)
        leaders = [each.call for each in record(nursery, tmp_path / "whole" / "s", **options) if each.client == 0]
        # When it has put the new checkpoint in place, and nothing of that is synced yet; or just before, or after.
        commit = leaders.index("renameat2") + 1
        deaths = range(commit, commit + 4) if IS_ALL else [commit + 1]
    else:
        deaths = [None]
    for death in deaths:
        lose_power(nursery, tmp_path / f"disk-{death}", has_old, death, **options)


def lose_power(nursery, folder, has_old, death, **options):
    """Save, and check what a power loss at any operation leaves; let a save before be killed at operation ``death``."""
    path, expected = "runs/7/s", {None}
    folder.mkdir()
    if has_old:
        nursery.values(crash_cases.save, str(folder / path), "old", **options)
        expected = {"old"}
    disk = Disk(folder)
    if death is not None:
        fault = Fault(0, "kill", death)
        job = nursery.start(
            crash_cases.save,
            str(folder / path),
            "killed",
            folder=str(folder),
            fault=fault,
            is_recorded=True,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            **options,
        )
        job.finish()
        for operation in job.operations:
            disk.apply(operation)
        expected.add("killed")
    expected.add("new")
    job = nursery.start(crash_cases.save, str(folder / path), "new", folder=str(folder), is_recorded=True, **options)
    assert not any(answer.error for answer in job.finish())
    draw, found = random.Random(f"{options} {death} {SEED}"), {}
    count = len(job.operations)
    tried = {count, *share(range(count), SAMPLE, f"{options} {death}")}
    for number in range(count + 1):
        for name, choose in losses(draw) if number in tried else ():
            tree = disk.survivors(choose)
            state = hash(tuple(tree.items()))
            if state not in found:
                found[state] = what_restores(tree, path)
            where = f"{found[state]}: {name} after operation {number} of {count}, killed before {death}"
            assert found[state] in (expected if number < count else {"new"}), where
        if number < count:
            disk.apply(job.operations[number])
    everything = disk.survivors(lambda count: count)
    assert everything == Disk(folder).survivors(lambda count: count), "the operations are not all that was done"
    print(f"{options}, killed before {death}: {len(tried)} of {count} operations, {len(found)} different states")


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_a_save_that_shares_files_survives_with_its_base(nursery, tmp_path, kvstore):
    folder, options = tmp_path / "disk", {"kvstore": kvstore, "clients": 2}
    folder.mkdir()
    # Without fsync: so the save syncs the files that it shares, too.
    nursery.values(crash_cases.save, str(folder / "b"), "old", fsync=False, **options)
    disk = Disk(folder)
    arguments = (str(folder / "s"), str(folder / "b"), "new")
    job = nursery.start(crash_cases.save_on_base, *arguments, folder=str(folder), is_recorded=True, **options)
    assert not any(answer.error for answer in job.finish())
    draw, found, count = random.Random(f"base {kvstore} {SEED}"), {}, len(job.operations)
    tried = {count, *share(range(count), SAMPLE, f"base {kvstore}")}
    for number, operation in enumerate([*job.operations, None]):
        for name, choose in losses(draw) if number in tried else ():
            tree = disk.survivors(choose)
            state = hash(tuple(tree.items()))
            if state not in found:
                found[state] = both_that_restore(tree)
            where = f"{found[state]}: {name} after operation {number} of {count}"
            assert found[state] in ([(None, "old"), ("new", "old")] if number < count else [("new", "old")]), where
        if operation is not None:
            disk.apply(operation)
    assert any(operation.call == "linkat" for operation in job.operations)


def both_that_restore(tree):
    """Return the generations of a save that has a base, and of the base; or an error."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        write_tree(tree, Path(folder))
        try:
            return crash_cases.generation_on_base_at(f"{folder}/s"), crash_cases.generation_at(f"{folder}/b")
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_workers_complete_what_survives(nursery, tmp_path, kvstore):
    """Parts that were finished may be of processes that ended long ago; what is marked as finished must be there."""
    source, folder, num_workers = str(tmp_path / "source"), tmp_path / "disk", 3
    nursery.values(crash_cases.save, source, "old", clients=1)
    folder.mkdir()
    disk, operations = Disk(folder), []
    for index in range(num_workers):
        arguments = (source, str(folder / "s"), index, num_workers)
        job = nursery.start(
            crash_cases.reshard_part, *arguments, clients=1, folder=str(folder), is_recorded=True, kvstore=kvstore
        )
        assert not any(answer.error for answer in job.finish())
        operations += job.operations
    draw, states = random.Random(f"{kvstore} {SEED}"), set()
    tried = {len(operations), *share(range(len(operations)), SAMPLE, f"workers {kvstore}")}
    for number, operation in enumerate([*operations, None]):
        for name, choose in losses(draw) if number in tried else ():
            tree = disk.survivors(choose)
            state = hash(tuple(tree.items()))
            if state not in states:
                states.add(state)
                where = f"{name} after operation {number} of {len(operations)}"
                assert what_workers_complete(tree, source, num_workers, kvstore=kvstore) == "old", where
        if operation is not None:
            disk.apply(operation)
    print(f"{kvstore}, workers: {len(tried)} of {len(operations)} operations, {len(states)} different states")


def what_workers_complete(tree, source, num_workers, **options):
    """Return the generation that is found when all workers have come again."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        write_tree(tree, Path(folder))
        try:
            for index in range(num_workers):
                crash_cases.reshard_part(source, f"{folder}/s", index, num_workers, **options)
            return crash_cases.generation_at(f"{folder}/s")
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def what_restores(tree, path):
    """Return the generation that is found on a disk; or an error."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        write_tree(tree, Path(folder))
        try:
            return crash_cases.generation_at(Path(folder) / path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
