"""``dtckpt reshard`` by several workers, which are killed."""

import contextlib
import io
import os
import shutil
import signal
import sys
import time

import pytest
import torch
from support import forkserver
from support.shares import SEED, amount
from support.states import bits_of

import dtckpt
from dtckpt import abstract_mesh, errors
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.resharding import workers
from dtckpt.checkpoint.resharding.reshard import reshard
from dtckpt.checkpoint.resharding.workers import MARK_NAME, Worker
from dtckpt.checkpoint.saving import construction
from dtckpt.cli.main import main
from dtckpt.cli.reshard_progress import ProgressReporter
from dtckpt.storage.directory_lock import lock_directory

NUM_WORKERS = 3
MESH = {"data": 2, "x": 3}
COMMAND = ("reshard", "--mesh", "data=2,x=3", "--workers", str(NUM_WORKERS))


def work(source, target, index, *, count=NUM_WORKERS, resume=True, **options):
    worker = Worker(index, count, resume)
    mesh, layouts = abstract_mesh(MESH), {"model/w": dtckpt.Layout(["data", "x"], abstract_mesh(MESH))}
    return reshard(source, target, mesh=mesh, layouts=layouts, worker=worker, options=SaveOptions(**options)).part


def is_new(target, tensors):
    """Whether the checkpoint is there; then all of it must be, and nothing else."""
    try:
        with dtckpt.open_checkpoint(target) as new:
            assert new.verify().damages == ()
            assert {name: bits_of(new.read(name)) for name in new.tensors} == {
                k: bits_of(v) for k, v in tensors.items()
            }
            names = [name for _, _, files in os.walk(target) for name in files]
            assert not {MARK_NAME, workers.CHUNKS_NAME} & set(names)
            return True
    except errors.CheckpointNotFoundError:
        return False


def staging_of(target):
    return [entry for entry in target.parent.iterdir() if entry.name.startswith(f".{target.name}.dtckpt-")]


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_last_one_commits(source, tmp_path, tensors, kvstore, order):
    target = tmp_path / "new"
    parts = [work(source, target, index, kvstore=kvstore) for index in order]
    assert [part.missing for part in parts] == [tuple(sorted(order[1:])), order[2:], ()]
    assert [part.is_committed for part in parts] == [False, False, True]
    assert is_new(target, tensors)
    assert os.listdir(tmp_path) == ["new"]
    with dtckpt.open_checkpoint(target) as new, dtckpt.open_checkpoint(source) as old:
        assert new.structure == old.structure
        sizes = [info.nbytes for info in new.tensors.values()]
    assert sum(part.nbytes for part in parts) == sum(sizes)
    # A small tensor is not divided, so a worker has at most one more than its share.
    assert max(part.nbytes for part in parts) < sum(sizes) / NUM_WORKERS + max(sizes)


def test_more_workers_than_chunks(source, tmp_path, tensors):
    parts = [work(source, tmp_path / "new", index, count=64) for index in range(64)]
    assert [part.is_committed for part in parts] == [False] * 63 + [True]
    assert is_new(tmp_path / "new", tensors)


def test_who_comes_when_all_is_done_finds_it_done(source, tmp_path, tensors):
    for index in (0, 1, 2, 1, 0):
        part = work(source, tmp_path / "new", index)
    assert (part.nbytes, part.is_committed) == (0, True)
    assert os.listdir(tmp_path) == ["new"]
    assert is_new(tmp_path / "new", tensors)
    with pytest.raises(errors.CheckpointExistsError, match=r"pass SaveOptions\(overwrite=True\) to replace it"):
        work(source, tmp_path / "new", 0, count=2)  # is another checkpoint, although it holds the same


def test_old_one_stays_until_the_new_one_is_whole(source, tmp_path, tensors):
    target = tmp_path / "new"
    dtckpt.save(target, {"old": 1})
    for index in range(NUM_WORKERS):
        assert dtckpt.restore(target) == {"old": 1}
        work(source, target, index, overwrite=True)
    assert is_new(target, tensors)
    assert os.listdir(tmp_path) == ["new"]


def test_finished_parts_are_kept_only_by_who_resumes(source, tmp_path, tensors):
    target = tmp_path / "new"
    first = work(source, target, 0)
    assert work(source, target, 0).nbytes == 0
    assert work(source, target, 0, resume=False).nbytes == first.nbytes > 0
    for index in (1, 2):
        work(source, target, index)
    assert is_new(target, tensors)


def test_one_process_per_worker(source, tmp_path):
    target = tmp_path / "new"
    work(source, target, 0)
    (staging,) = staging_of(target)
    with lock_directory(staging / "client_0"), pytest.raises(errors.CoordinationError, match="is writing part 0"):
        work(source, target, 0, resume=False)


def test_who_finds_another_one_committing_leaves_it_alone(source, tmp_path, tensors):
    target = tmp_path / "new"
    for index in (0, 1):
        work(source, target, index)
    (staging,) = staging_of(target)
    with lock_directory(staging):
        part = work(source, target, 0, resume=False)
        assert (part.nbytes, part.missing, part.is_committed) == (0, (2,), False)
    assert work(source, target, 2).is_committed
    assert is_new(target, tensors)


def test_who_is_overtaken_finds_it_done(source, tmp_path, tensors, monkeypatch):
    """Two processes have one index, and the others commit while the second of them begins."""
    target = tmp_path / "new"
    for index in (0, 1):
        work(source, target, index)

    def share_and_be_overtaken(*args):
        staging = share(*args)
        monkeypatch.undo()
        assert work(source, target, 2).is_committed
        return staging

    share = workers.commit_by_rename.begin_shared
    monkeypatch.setattr(workers.commit_by_rename, "begin_shared", share_and_be_overtaken)
    part = work(source, target, 0)
    assert (part.nbytes, part.missing, part.is_committed) == (0, (), True)
    assert os.listdir(tmp_path) == ["new"]
    assert is_new(target, tensors)


def test_damaged_marks_are_not_trusted(source, tmp_path):
    target = tmp_path / "new"
    work(source, target, 0)
    (staging,) = staging_of(target)
    mark = staging / "client_0" / MARK_NAME
    mark.write_bytes(b"x" + mark.read_bytes()[1:])
    with pytest.raises(errors.CheckpointCorruptError, match="is damaged; remove it and run worker 0 again"):
        work(source, target, 0)


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_chunks_that_a_power_loss_left_incomplete_are_written_again(tmp_path, kvstore):
    tensors, mesh = {"w": torch.arange(101.0 * 3).reshape(101, 3)}, abstract_mesh({"x": 3})
    dtckpt.save(tmp_path / "old", tensors)

    def work_on(index):
        layouts, options = {"w": dtckpt.Layout(["x", dtckpt.UNSHARDED], mesh)}, SaveOptions(kvstore=kvstore)
        worker = Worker(index, NUM_WORKERS)
        return reshard(tmp_path / "old", tmp_path / "new", mesh=mesh, layouts=layouts, worker=worker, options=options)

    for index in range(NUM_WORKERS - 1):
        work_on(index)
    (staging,) = staging_of(tmp_path / "new")
    for file in [file for file in staging.rglob("*") if file.is_file()]:
        file.unlink() if file.name == MARK_NAME else os.truncate(file, 0)
    for chunk in range(NUM_WORKERS):  # of the worker that has not come, from an earlier process
        (staging / "w/c" / str(chunk)).mkdir(parents=True, exist_ok=True)
        (staging / "w/c" / str(chunk) / "0").touch()
    for index in range(NUM_WORKERS):
        work_on(index)
    assert is_new(tmp_path / "new", tensors)


def test_workers_that_differ_do_not_mix(source, tmp_path, tensors):
    """Another format is another checkpoint: no part of one checkpoint is taken for a part of the other."""
    target = tmp_path / "new"
    for index in (0, 1):
        work(source, target, index)
    assert work(source, target, 2, kvstore="zarr").missing == (0, 1)
    assert len(staging_of(target)) == 2
    assert work(source, target, 2).is_committed
    assert is_new(target, tensors)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0), (0, 10_001)])
def test_workers_that_cannot_be(index, count):
    with pytest.raises(errors.ConfigError, match="expected 1 to 10000 workers"):
        Worker(index, count)


def test_object_stores_are_refused(source):
    with pytest.raises(errors.ConfigError, match="a file system only"):
        work(source, "s3://bucket/new", 0)


# --- kills ------------------------------------------------------------------------------------------------------------

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock")


def reshard_until_killed(source, target, index, kvstore, at, pipe):
    """Reshard, and kill this process before file change number ``at``; send the number of changes at the end."""
    num_changes = 0

    def watch(event, args):
        nonlocal num_changes
        is_write = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _CHANGES or is_write:
            if num_changes == at:
                os.kill(os.getpid(), signal.SIGKILL)
            num_changes += 1

    sys.addaudithook(watch)
    work(source, target, index, kvstore=kvstore, overwrite=True)
    pipe.send(num_changes)


@pytest.mark.share(1)
@pytest.mark.processes
@pytest.mark.parametrize(("kvstore", "step"), [("ocdbt", 2), ("zarr", 7)])
def test_the_last_worker_is_killed_at_any_time(source, tmp_path, tensors, kvstore, step):
    """The old checkpoint stays until the new one is complete; the same worker or another may resume and complete it."""
    begun = tmp_path / "begun"
    begun.mkdir()
    dtckpt.save(begun / "new", {"old": 1})
    for index in range(NUM_WORKERS - 1):
        work(source, begun / "new", index, kvstore=kvstore, overwrite=True)
    step = amount(step, 1)
    at, num_changes = SEED % step, None
    while num_changes is None:
        assert at < 200
        root = tmp_path / f"{at}"
        shutil.copytree(begun, root)
        target = root / "new"
        ours, theirs = forkserver.Pipe()
        process = forkserver.start(reshard_until_killed, source, target, NUM_WORKERS - 1, kvstore, at, theirs)
        theirs.close()
        process.join(60)
        if process.exitcode == 0:
            num_changes = ours.recv()
        else:
            assert process.exitcode == -signal.SIGKILL
            assert is_old_or_new(target, tensors)
        process.close()
        ours.close()
        who = NUM_WORKERS - 1 if at % 2 or not (root / "new").exists() else 0
        work(source, target, who, kvstore=kvstore, overwrite=True)
        part = work(source, target, NUM_WORKERS - 1, kvstore=kvstore, overwrite=True)
        assert part.is_committed, at
        assert is_new(target, tensors)
        shutil.rmtree(root)
        at += step
    assert num_changes > 30


def is_old_or_new(target, tensors):
    with dtckpt.open_checkpoint(target) as checkpoint:
        is_old = not checkpoint.tensors
    return is_old or is_new(target, tensors)


def start(source, target, index, *options):
    return forkserver.start(run_worker, index, [*COMMAND, str(source), str(target), "--json", *options])


def run_worker(index, args):
    """In a new process: run the command as a pod of a Job does."""
    os.environ["JOB_COMPLETION_INDEX"] = str(index)
    with contextlib.redirect_stdout(io.StringIO()):
        sys.exit(main(args))


def ended(process):
    process.join(60)
    return process.exitcode


@pytest.mark.processes
def test_processes_at_the_same_time_one_is_killed(source, tmp_path, tensors):
    target = tmp_path / "new"
    started = [start(source, target, index, "--resume") for index in range(NUM_WORKERS)]
    deadline = time.monotonic() + 60
    while not any((staging / "client_1").exists() for staging in staging_of(target)) and not target.exists():
        assert time.monotonic() < deadline
    started[1].kill()
    codes = [ended(process) for process in started]
    assert [codes[0], codes[2]] == [0, 0]
    again = start(source, target, 1, "--resume")
    assert ended(again) == 0
    assert is_new(target, tensors)
    assert os.listdir(tmp_path) == ["new"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_command(run, source, tmp_path, tensors, monkeypatch):
    target = tmp_path / "new"
    first = run(*COMMAND, source, target, "--worker", 0)
    assert first.code == 0
    assert first.out.startswith("worker 0 of 3: wrote ")
    assert first.out.endswith(f"; {target} waits for 2 parts: 1, 2\n")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    second = run(*COMMAND, source, target, "--json")
    facts = second.events[-1]
    assert (facts["event"], facts["worker"], facts["workers"], facts["committed"]) == ("done", 1, 3, False)
    assert facts["missing"] == [2]
    again = run(*COMMAND, source, target, "--resume")
    assert "worker 1 of 3: its part was finished already; " in again.out
    last = run(*COMMAND, source, target, "--worker", 2)
    assert f"{target} is committed\nresharded {source} to {target}: 9 tensors" in last.out
    assert run(*COMMAND, source, target, "--resume").code == 0
    assert is_new(target, tensors)


def test_command_without_an_index(run, source, tmp_path, monkeypatch):
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    run(*COMMAND, source, tmp_path / "new").fails(
        2, "which of the 3 workers is this", "--worker", "JOB_COMPLETION_INDEX"
    )
    run(*COMMAND, source, tmp_path / "new", "--worker", 3).fails(2, "worker 3 of 3")


def test_one_worker_resumes(run, source, tmp_path, tensors, monkeypatch):
    """In an Indexed Job of one, too."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")

    def fail(*_, **__):
        raise errors.StorageError("the disk is gone")

    monkeypatch.setattr(construction, "merge_clients", fail)
    args = ("reshard", source, tmp_path / "new", "--mesh", "data=2,x=3", "--resume")
    run(*args).fails(75, "the disk is gone")
    monkeypatch.undo()
    assert "its part was finished already" in run(*args).out
    assert is_new(tmp_path / "new", tensors)
    assert main(["inspect", str(tmp_path / "new")]) == 0


def test_one_process_that_is_interrupted_keeps_its_parts(run, source, tmp_path, tensors, monkeypatch):
    monkeypatch.setattr("dtckpt.cli.reshard.PART_NBYTES", 200)
    target, written = tmp_path / "new", []
    command = "reshard", source, target, "--mesh", "x=2,y=3"

    def advance(self, name, nbytes):
        written.append(nbytes)
        if sum(written) > 400:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressReporter, "advance", advance)
        result = run(*command)
    assert result.code == 130
    assert result.err.endswith(" --resume\n")
    (staging,) = staging_of(target)
    num_done = len(list(staging.glob("client_*/part.done")))
    assert num_done >= 1
    *events, done = run(*command, "--resume", "--json").events
    assert sorted(event["name"] for event in events if event["event"] == "tensor") == sorted(tensors)
    assert done["tensors"] == len(tensors)
    assert "workers" not in done
    assert is_new(target, tensors)
    assert os.listdir(tmp_path) == ["new"]
    again = run(*command, "--resume")
    assert (again.code, again.err) == (0, ""), "it is there already"
