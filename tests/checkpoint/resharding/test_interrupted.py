"""Reshards that are killed, or whose disk, source or target fails: clear errors, a target that is whole or absent."""

import os
import shutil
import signal
import sys

import pytest
import torch
from crash import crash_cases
from crash.forked_clients import Nursery
from support import forkserver, mounts
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh, errors
from dtckpt.checkpoint.resharding.reshard import reshard
from dtckpt.checkpoint.resharding.workers import Worker

OLD, NEW = abstract_mesh({"x": 4, "y": 2}), abstract_mesh({"x": 2, "y": 3})
WHOLE = {name: tensor_of(name, (64, 96), "float32") for name in "abcdefgh"}
LAYOUTS = {"*": Layout(["x", "y"], NEW)}


@pytest.fixture(params=["ocdbt", "zarr"])
def kvstore(request):
    return request.param


@pytest.fixture
def source(tmp_path, kvstore):
    path = tmp_path / "source" / "s"
    path.parent.mkdir()
    tree = {name: packed(tensor, Layout(["x", "y"], OLD)) for name, tensor in WHOLE.items()}
    dtckpt.save(path, tree, options=SaveOptions(kvstore=kvstore))
    return path


def files_of(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def run(source, target, *, progress=None, worker=None, **options):
    return reshard(
        source,
        target,
        mesh=NEW,
        layouts=LAYOUTS,
        max_memory=256 << 10,  # for two tensors at one time
        progress=progress,
        worker=worker,
        options=SaveOptions(**options),
    )


def is_whole(target):
    """Whether the new checkpoint is there; then it must hold everything."""
    try:
        with dtckpt.open_checkpoint(target) as new:
            assert new.verify().is_sound
            assert {name: bits_of(new.read(name)) for name in new.tensors} == {k: bits_of(v) for k, v in WHOLE.items()}
            assert {info.layout for info in new.tensors.values()} == set(LAYOUTS.values())
            return True
    except errors.CheckpointNotFoundError:
        return False


class Once:
    """A `Progress` that does something when the second tensor begins."""

    def __init__(self, work):
        self._work = work

    def __call__(self, name, nbytes):
        if name != "a" and self._work:
            work, self._work = self._work, None
            work()


# --- kills ------------------------------------------------------------------------------------------------------------

NUM_KILLS = 50
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock")


def run_until_killed(source, target, kvstore, at, pipe):
    """Reshard, and kill this process before its operation number ``at`` on files; send the number of all at the end."""
    count = 0

    def watch(event, args):
        nonlocal count
        if event in _CHANGES:
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(watch)
    run(source, target, worker=Worker(0, 1), kvstore=kvstore)
    pipe.send(count)


def killed(source, target, kvstore, at):
    """Reshard in a new process that is killed; return the number of its operations if it came to the end."""
    ours, theirs = forkserver.Pipe()
    process = forkserver.start(run_until_killed, source, target, kvstore, at, theirs)
    theirs.close()
    process.join(60)
    code = process.exitcode
    found = ours.recv() if code == 0 else None
    process.close()
    ours.close()
    assert code in (0, -signal.SIGKILL)
    return found


@pytest.fixture
def num_operations(source, tmp_path, kvstore):
    """The number of operations on files of a reshard that is not killed."""
    count = killed(source, tmp_path / "counted", kvstore, -1)
    shutil.rmtree(tmp_path / "counted")
    return count


@pytest.mark.share(3)
@pytest.mark.processes
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_kill_leaves_the_source_and_a_state_that_goes_on(source, tmp_path, kvstore, num_operations, number):
    before, target = files_of(source), tmp_path / "new"
    at = number * num_operations // NUM_KILLS
    assert killed(source, target, kvstore, at) is None
    is_whole(target)
    assert killed(source, target, kvstore, num_operations // 2) in (None, *range(num_operations // 2 + 1))
    is_whole(target)
    run(source, target, worker=Worker(0, 1), kvstore=kvstore)
    assert is_whole(target)
    assert files_of(source) == before
    assert sorted(os.listdir(tmp_path)) == ["new", "source"]


# --- disks, sources, targets ------------------------------------------------------------------------------------------


def reshard_to(source, target, kvstore, with_worker):
    run(source, target, worker=Worker(0, 1) if with_worker else None, kvstore=kvstore)


@pytest.mark.share(1)
@pytest.mark.processes
@pytest.mark.parametrize("with_worker", [False, True])
def test_a_disk_that_is_full_amid(source, tmp_path, kvstore, with_worker):
    folder = tmp_path / "disk"
    folder.mkdir()
    if reason := mounts.reason_unsupported(str(folder)):
        pytest.skip(f"may not mount a file system: {reason}")
    before = files_of(source)
    with Nursery(mounts.mount_small, str(folder), 64 << 10) as nursery:
        (answer,) = nursery.run(reshard_to, str(source), f"{folder}/new", kvstore, with_worker, clients=1)
        assert (answer.error, "free space" in answer.text) == ("StorageFullError", True), answer
        assert "new" not in nursery.values(crash_cases.names_in, str(folder), clients=1)[0]
    assert files_of(source) == before


def test_a_source_that_is_damaged_amid(source, tmp_path, kvstore):
    def damage():
        for file in source.rglob("*"):
            if file.is_file() and (file.parent.name == "d" or "c" in file.relative_to(source).parts):
                file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))

    with pytest.raises(errors.CheckpointCorruptError, match="digest does not match"):
        run(source, tmp_path / "new", progress=Once(damage), kvstore=kvstore)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_source_that_is_removed_or_replaced_amid(source, tmp_path, kvstore, is_replaced):
    """The files of a database stay open, and are read to the end; files of chunks are opened one by one."""

    def remove():
        shutil.rmtree(source)
        if is_replaced:
            dtckpt.save(source, {name: torch.zeros(64, 96) for name in WHOLE}, options=SaveOptions(kvstore=kvstore))

    def work():
        run(source, tmp_path / "new", progress=Once(remove), kvstore=kvstore)

    if kvstore == "ocdbt":
        work()
        assert is_whole(tmp_path / "new")
    else:
        with pytest.raises(errors.CheckpointConflictError, match="was replaced or removed while it was being read"):
            work()
        assert "new" not in os.listdir(tmp_path)


def test_two_reshards_to_one_target(source, tmp_path, kvstore):
    """The second one begins and ends while the first one writes, which it takes the target from."""
    target = tmp_path / "new"
    with pytest.raises(errors.StorageError, match="another attempt saves to this path, and took over"):
        run(source, target, progress=Once(lambda: run(source, target, kvstore=kvstore)), kvstore=kvstore)
    assert is_whole(target)
    assert sorted(os.listdir(tmp_path)) == ["new", "source"]


def test_two_processes_of_one_worker(source, tmp_path, kvstore):
    target, found = tmp_path / "new", []

    def run_second():
        with pytest.raises(errors.CoordinationError, match="is writing part 0"):
            run(source, target, worker=Worker(0, 1), kvstore=kvstore)
        found.append(True)

    assert run(source, target, progress=Once(run_second), worker=Worker(0, 1), kvstore=kvstore).part.is_committed
    assert found == [True]
    assert is_whole(target)
