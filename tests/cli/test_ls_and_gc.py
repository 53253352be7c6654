import json
import os
import shutil
from contextlib import ExitStack, contextmanager

import pytest
import torch
from support import forkserver

import dtckpt
from dtckpt.checkpoint.managing.garbage import find_garbage
from dtckpt.cli.main import main
from dtckpt.storage import commit_by_rename
from dtckpt.storage.directory_lock import lock_directory


@pytest.fixture
def root(tmp_path):
    """A root of five steps, one of which a run went back from, with a leftover, and things that are no checkpoints."""
    root = tmp_path / "run"
    with dtckpt.CheckpointManager(root, is_async=False) as manager:
        for step in (0, 10, 20, 30):
            manager.save(step, {"w": torch.ones(4, 4)}, metrics={"loss": abs(step - 10) / 10})
        manager.restore(20)
        manager.save(25, {"w": torch.ones(3)}, metrics={"loss": float("nan")})
    dtckpt.save(root / "final", {"w": torch.ones(8)})
    (root / "logs").mkdir()
    (root / "logs" / "log").write_text("x")
    (root / "notes.txt").write_text("x")
    _leave(root / "step_00000040")
    return root


def _leave(target, age_s=7200):
    """Leave what a save that was killed leaves."""
    folder = commit_by_rename.sibling(target, "new", "dead")
    folder.mkdir()
    (folder / "data").write_bytes(b"x" * 5000)
    for path in (folder / "data", folder):
        changed = path.stat().st_mtime - age_s
        os.utime(path, (changed, changed))
    return folder


def _damage(root, step):
    (root / f"step_{step:08d}" / commit_by_rename.MANIFEST_NAME).write_bytes(b"\0" * 64)


def _steps(root):
    return sorted(int(entry.name[5:]) for entry in root.iterdir() if entry.name.startswith("step_"))


def test_ls(run, root):
    *rows, empty, total = run("ls", root).out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [
        *(f"step_{step:08d}" for step in (0, 10, 20, 25, 30)),
        "final",
        "step_00000040",
    ]
    assert [row.split()[0] for row in rows if " * " in row] == ["step_00000025"]
    assert "rolled back, loss=2" in rows[5]
    assert "4.9 KiB" in rows[7]
    assert "leftover" in rows[7]
    assert (empty, total) == ("", f"{root}: 6 checkpoints, 300 B; newest valid step 25")


def test_ls_as_json(run, root):
    _damage(root, 25)
    *events, total = run("ls", root, "--json", "--sort", "size").events
    by_name = {event["name"]: event for event in events}
    assert [event["bytes"] for event in events[:6]] == [64, 64, 64, 64, 32, None]
    damaged = by_name["step_00000025"]
    assert (damaged["state"], damaged["is_newest_valid"], damaged["metrics"]) == (
        "damaged",
        False,
        {"loss": {"float": "nan"}},
    )
    assert damaged["reason"]
    assert by_name["step_00000020"]["is_newest_valid"]
    assert by_name["step_00000030"]["is_rolled_back"]
    assert by_name["step_00000040"]["state"] == "leftover"
    assert (total["newest_valid"], total["checkpoints"], total["holder"]) == (20, 6, None)


def test_ls_tells_who_saves(run, root):
    folder = _leave(root / "step_00000050")
    with lock_directory(folder), dtckpt.CheckpointManager(root, is_async=False) as manager:
        manager.save(60, {"w": torch.ones(3)})
        *events, total = run("ls", root, "--json").events
        # The lock is still this manager's: to look did not give it up.
        assert run("gc", root, "--yes").fails(4, "another manager of this process saves")
    (unfinished,) = [event for event in events if event.get("state") == "unfinished"]
    assert (unfinished["name"], unfinished["holder"], total["holder"]) == (
        "step_00000050",
        "this process",
        "this process",
    )


def test_ls_shows_a_save_that_removes_files_meanwhile(run, root, monkeypatch):
    walk = os.walk

    def walk_with_a_file_that_is_gone(*args, **kwargs):
        for path, folders, files in walk(*args, **kwargs):
            yield path, folders, [*files, "gone"]

    monkeypatch.setattr(os, "walk", walk_with_a_file_that_is_gone)
    (leftover,) = [event for event in run("ls", root, "--json").events if event["event"] == "attempt"]
    assert (leftover["name"], leftover["bytes"]) == ("step_00000040", 5000)


def test_what_is_no_root(run, root, tmp_path):
    for command in ("ls", "gc"):
        run(command, tmp_path / "none").fails(3, "there is no folder of checkpoints")
        run(command, root / "final").fails(3, "is a checkpoint itself", "dtckpt inspect")
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    assert "0 checkpoints" in run("ls", tmp_path / "empty").out


def test_gc_shows_first(run, root):
    before = sorted(root.iterdir())
    *_, result = run("gc", root, "--keep", "2", "--json").events
    assert (result["dry_run"], result["leftovers"], result["steps"]) == (True, 1, 2)
    assert sorted(root.iterdir()) == before
    *_, result = run("gc", root, "--keep", "2", "--json", "--yes").events
    assert (result["dry_run"], result["leftovers"], result["steps"], result["bytes"]) == (False, 1, 2, 5128)
    assert _steps(root) == [20, 25, 30]
    assert not list(root.glob(".*dtckpt-new*"))
    again = run("gc", root, "--keep", "2", "--yes")
    assert (again.code, again.out) == (0, f"removed from {root}: 0 leftovers and 0 steps, 0 B\n")
    assert run("gc", root, "--keep", "2", "--yes", "--quiet").out == ""
    assert dtckpt.CheckpointManager(root).restore().step == 25


def test_gc_without_rules_keeps_all_steps(run, root):
    run("gc", root, "--yes")
    assert _steps(root) == [0, 10, 20, 25, 30]
    assert (root / "final").exists()
    assert (root / "logs" / "log").exists()


def test_gc_keeps_the_best_and_multiples(run, root):
    run("gc", root, "--keep", "1", "--keep-best", "1", "--keep-every", "20", "--yes")
    assert _steps(root) == [0, 10, 20, 25, 30]
    run("gc", root, "--keep", "1", "--keep-best", "1", "--yes")
    assert _steps(root) == [10, 25, 30]
    run("gc", root, "--keep-best", "1", "--metric", "los").fails(2, "'los'", "loss", "--metric")


def test_gc_keeps_by_age(run, root):
    before = _steps(root)
    run("gc", root, "--keep-newer-s", "3600", "--yes")
    assert _steps(root) == before
    run("gc", root, "--keep-every-s", "9e8", "--yes")  # of the present period, the first; and the newest valid one
    assert _steps(root) == [0, 25, 30]


def test_gc_keeps_the_newest_valid_step_and_what_is_damaged(run, root):
    _damage(root, 25)
    run("gc", root, "--keep", "1", "--yes")
    assert _steps(root) == [20, 25, 30]


def test_gc_keeps_an_older_step_where_a_file_of_the_newest_one_is_cut_short(run, tmp_path):
    with dtckpt.CheckpointManager(tmp_path, is_async=False) as manager:
        for step in range(3):
            manager.save(step, {"w": torch.full((600_000,), step)})
    data = max((tmp_path / "step_00000002").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    assert run("gc", tmp_path, "--keep", "1", "--yes").code == 0
    assert _steps(tmp_path) == [1, 2]


def test_gc_leaves_attempts_that_live(run, root):
    young, locked = _leave(root / "step_00000050", age_s=0), _leave(root / "step_00000060")
    with lock_directory(locked):
        *_, result = run("gc", root, "--yes", "--json").events
    assert result["leftovers"] == 1
    assert young.exists()
    assert locked.exists()
    run("gc", root, "--yes", "--min-age", "0")
    assert not young.exists()
    assert not locked.exists()


def test_gc_leaves_a_step_that_is_being_restored(run, root):
    with lock_directory(root / "step_00000000", is_shared=True):
        *_, result = run("gc", root, "--keep", "1", "--yes", "--json").events
    assert (result["steps"], result["in_use"]) == (2, 1)
    assert 0 in _steps(root)


def test_gc_that_was_cut_off_goes_on(run, root, monkeypatch):
    with monkeypatch.context() as patch:
        # As if the process was killed between the rename of step 0 and the deletion.
        patch.setattr(shutil, "rmtree", lambda *_, **__: os.kill(os.getpid(), 2))
        assert run("gc", root, "--keep", "1", "--yes").code == 130
    assert _steps(root) == [10, 20, 25, 30]
    *events, _ = run("gc", root, "--keep", "1", "--yes", "--json").events
    assert [event["name"] for event in events if event["event"] == "leftover"] == ["step_00000000", "step_00000040"]
    assert _steps(root) == [25, 30]
    assert not list(root.glob(".*dtckpt-[nt]*"))


def test_a_step_that_another_gc_removed_first(run, root, monkeypatch):
    def find(*args, **kwargs):
        found = find_garbage(*args, **kwargs)
        shutil.rmtree(root / "step_00000000", ignore_errors=True)
        return found

    monkeypatch.setattr("dtckpt.checkpoint.managing.garbage.find_garbage", find)
    assert run("gc", root, "--keep", "1", "--yes").code == 0
    assert _steps(root) == [25, 30]


def run_command(connection, *args):
    """Run the command in a process that another one has forked, when told to; send its exit code."""
    connection.recv()
    connection.send(main(list(args)))


def save_steps(connection, root):
    """Save a step whenever told to, as a training job does; send which steps there are."""
    with dtckpt.CheckpointManager(root, is_async=False) as manager:
        while (step := connection.recv()) is not None:
            manager.save(step, {"w": torch.ones(3)})
            connection.send(manager.all_steps())


@contextmanager
def started(target, *args):
    ours, theirs = forkserver.Pipe()
    process = forkserver.start(target, theirs, *args)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(20)
        process.kill()


@pytest.mark.processes
def test_processes_that_remove_at_the_same_time(root):
    command = run_command, "gc", str(root), "--keep", "1", "--yes"
    with ExitStack() as stack:
        pipes = [stack.enter_context(started(*command)) for _ in range(3)]
        for pipe in pipes:
            pipe.send("go")
        codes = [pipe.recv() if pipe.poll(60) else None for pipe in pipes]
    assert set(codes) <= {0, 4}, "all is removed, or another process has the right to the root"
    assert 0 in codes
    assert _steps(root) == [25, 30]
    assert not list(root.glob(".*dtckpt-[nt]*"))
    assert dtckpt.restore(root / "step_00000025")["w"].tolist() == [1, 1, 1]


@pytest.mark.processes
def test_a_job_that_saves_keeps_the_right_to_its_root(run, root):
    with started(save_steps, root) as job:
        for step in (50, 60):
            job.send(step)
            assert job.poll(60)
            assert step in job.recv()
            run("gc", root, "--keep", "1", "--yes").fails(4, "saves checkpoints to")
        assert run("gc", root, "--keep", "1").code == 0, "it may look"
        job.send(None)
        with pytest.raises(EOFError):
            job.recv()
    assert run("gc", root, "--keep", "1", "--yes").code == 0
    assert _steps(root) == [60]


@pytest.fixture
def url():
    fsspec = pytest.importorskip("fsspec")
    yield "memory://ls-and-gc/run"
    fsspec.filesystem("memory").rm("/ls-and-gc", recursive=True)


def test_on_an_object_store(run, url):
    manager = dtckpt.CheckpointManager(url, is_async=False, options=dtckpt.SaveOptions(kvstore="zarr"))
    for step in (0, 10, 20):
        manager.save(step, {"w": torch.ones(3)}, metrics={"loss": step})
    *events, total = run("ls", url, "--json").events
    assert [(event["step"], event["is_newest_valid"]) for event in events] == [(0, False), (10, False), (20, True)]
    assert total["holder"].startswith("process ")
    assert json.loads(run("gc", url, "--keep", "1", "--json").out.splitlines()[-1])["steps"] == 2
    run("gc", url, "--keep", "1", "--yes").fails(4, "saves checkpoints to", "--take-over")
    assert manager.all_steps() == [0, 10, 20]
    assert run("gc", url, "--keep", "1", "--yes", "--take-over").code == 0
    assert manager.all_steps() == [20]
    manager.close()
    assert run("gc", url, "--keep", "1", "--yes").code == 0
    run("ls", "memory://ls-and-gc/none").fails(3, "there is no folder of checkpoints")
    run("ls", f"{url}/step_00000020").fails(3)
