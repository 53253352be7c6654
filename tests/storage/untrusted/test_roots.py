"""Roots with links, fifos and hard links in the place of the files that dtckpt writes there.

No command and no manager changes a file outside of such a root, or waits for ever. Every error is of a documented
class.
"""

import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.time_limit import time_limit

import dtckpt
from dtckpt import CheckpointManager, LocalTier
from dtckpt.checkpoint.copying.scrub_state import STATE_NAME
from dtckpt.checkpoint.managing.root import LOCK_NAME, RootLock
from dtckpt.checkpoint.managing.run_history import RUNS_FOLDER
from dtckpt.checkpoint.parts.host_folder import HostFolder, job_name
from dtckpt.checkpoint.resharding.workers import MARK_NAME
from dtckpt.checkpoint.tiers.root_identity import IDENTITY_NAME
from dtckpt.checkpoint.tiers.status import STATUS_NAME
from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.main import main
from dtckpt.errors import CheckpointConflictError, DtckptError, StorageError
from dtckpt.storage import commit_by_rename
from dtckpt.storage.local_folder import LocalFolder

TREE = {"w": torch.arange(6.0)}
WAIT_S = 60
FILES = [
    LOCK_NAME,
    IDENTITY_NAME,
    STATUS_NAME,
    f"{IDENTITY_NAME}.draft",
    f".{IDENTITY_NAME[1:]}.draft",
    f"{STATUS_NAME}.draft",
    STATE_NAME,
]
FOLDERS = [
    RUNS_FOLDER,
    "step_00000001",
    "step_00000003",
    ".step_00000003.dtckpt-new-1",
    ".step_00000002.dtckpt-old-1",
    ".step_00000002.dtckpt-trash-1",
]


def fifo(entry, outside):
    os.mkfifo(entry)


def link(entry, outside):
    entry.symlink_to(outside)


def dangling_link(entry, outside):
    entry.symlink_to(outside.with_name("not there"))


def loop(entry, outside):
    entry.symlink_to(entry.name)


def hard_link(entry, outside):
    entry.hardlink_to(outside)


def to_everything(entry, outside):
    entry.symlink_to("/")


@pytest.fixture
def elsewhere(tmp_path):
    """A directory outside of the root, with files that look like a root's files."""
    folder = tmp_path / "elsewhere"
    dtckpt.save(folder / "checkpoint", TREE)
    (folder / "file").write_text("precious")
    (folder / "names").mkdir()
    for name in ("00000000001764108000000000", "step_00000001", "data", "dtckpt.manifest", "lineage.json"):
        (folder / "names" / name).write_text("precious")
    return folder


def content(folder):
    """Everything in a directory, with the kind of each entry and the number of its names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = (status.st_mode, data)
    return found


def key_at(folder):
    """Write a private key; return its path."""
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(key)
    return folder / "key.pem"


def work(root, tier_path):
    """Do all that the library does below a root; return the errors."""
    errors = []

    def attempt(function):
        try:
            function()
        except DtckptError as error:
            errors.append(error)

    def saves(**options):
        with CheckpointManager(root, keep=2, is_async=False, **options) as manager:
            for step in (2, 3, 4):
                attempt(lambda step=step: manager.save(step, TREE, force=True))
            attempt(manager.restore)

    attempt(lambda: saves(every="auto"))
    attempt(lambda: saves(local=LocalTier(path=tier_path, every_steps=1)))
    for command in (
        ["ls", root],
        ["gc", root, "--keep", "1", "--min-age", "0"],
        ["gc", root, "--keep", "1", "--min-age", "0", "--yes"],
        ["gc", root, "--keep", "1", "--min-age", "0", "--yes"],
        ["ls", root],
        ["copy", root, root.parent / "copies"],
        ["scrub", root],
        ["scrub", root, "--from", root.parent / "copies"],
        ["copy", root.parent / "copies", root, "--overwrite", "--keep-links"],
        ["sign", root / "step_00000003", "--key", key_at(root.parent)],
    ):
        code = main([str(each) for each in command])
        assert code not in (ExitCode.USAGE, ExitCode.INTERNAL), command
    return errors


CASES = [
    *((name, kind) for name in FILES for kind in (link, dangling_link, loop, hard_link, fifo, to_everything)),
    *((name, kind) for name in FOLDERS for kind in (link, dangling_link, loop, fifo, to_everything)),
]


@pytest.mark.share(12)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_nothing_outside_of_a_prepared_root_changes(tmp_path, elsewhere, name, kind):
    root = tmp_path / "root"
    root.mkdir()
    if name.startswith(".step_00000002"):
        dtckpt.save(root / "step_00000002", TREE)
    outside = elsewhere / ("file" if name in FILES else "checkpoint" if name == "step_00000003" else "names")
    kind(root / name, outside)
    before = content(elsewhere)
    with time_limit(WAIT_S):
        work(root, tmp_path / "tier")
    assert content(elsewhere) == before


def test_gc_removes_a_link_as_a_link(tmp_path, elsewhere):
    root = tmp_path / "root"
    for step in (2, 3):
        dtckpt.save(root / f"step_0000000{step}", TREE)
    (root / "step_00000001").symlink_to(elsewhere / "checkpoint")
    (root / ".step_00000009.dtckpt-new-1").symlink_to("/")
    before = content(elsewhere)
    assert main(["gc", str(root), "--keep", "2", "--min-age", "0", "--yes"]) == 0
    assert content(elsewhere) == before
    assert sorted(os.listdir(root)) == [LOCK_NAME, "step_00000002", "step_00000003"]


def test_gc_says_what_it_could_not_remove(tmp_path, capsys, monkeypatch):
    (tmp_path / ".step_00000002.dtckpt-trash-1").mkdir()
    monkeypatch.setattr(LocalFolder, "remove_tree", lambda *_: None)
    assert main(["gc", str(tmp_path), "--min-age", "0", "--yes"]) == ExitCode.TRY_AGAIN
    output, error = capsys.readouterr()
    assert "0 leftovers and 0 steps" in output + error
    assert "cannot remove all leftovers" in error


def test_a_save_to_a_link_that_the_user_names_follows_it(tmp_path, elsewhere):
    (tmp_path / "latest").symlink_to(elsewhere / "checkpoint")
    dtckpt.save(tmp_path / "latest", {"w": TREE["w"] + 1}, options=dtckpt.SaveOptions(overwrite=True))
    assert dtckpt.restore(elsewhere / "checkpoint")["w"].equal(TREE["w"] + 1)


def test_workers_do_not_build_in_a_link(tmp_path, elsewhere):
    before = content(elsewhere)
    (tmp_path / ".s.dtckpt-new-reshard-1").symlink_to(elsewhere / "names")
    with pytest.raises(StorageError, match="nothing is written through it"):
        commit_by_rename.begin_shared(tmp_path / "s", "reshard-1")
    assert content(elsewhere) == before


@pytest.mark.parametrize("name", ["s/dtckpt.manifest", f"{{building}}/client_1/{MARK_NAME}"])
def test_workers_do_not_wait_for_a_fifo(tmp_path, name):
    dtckpt.save(tmp_path / "source", TREE)
    reshard = ["reshard", *map(str, (tmp_path / "source", tmp_path / "s")), "--mesh", "x=2", "--workers", "2"]
    if "building" in name:
        assert main([*reshard, "--worker", "0"]) == 0
        (building,) = tmp_path.glob(".s.dtckpt-new-*")
        name = name.format(building=building.name)
    fifo_path = tmp_path / name
    fifo_path.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo_path)
    with time_limit(WAIT_S):
        assert main([*reshard, "--worker", "0", "--resume"]) in (ExitCode.CONFLICT, ExitCode.FAILED)


LEVELS = 2200
"""More than the stack has frames, and than a path of 4096 bytes has names."""


def deepen(folder, levels):
    """Make directories in each other, deeper than Python's stack and than the longest path."""
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)


@pytest.mark.share(1)
@pytest.mark.parametrize("role", ["new", "old", "trash"])
def test_directories_deeper_than_the_stack(tmp_path, role):
    deepen(tmp_path / f".step_00000001.dtckpt-{role}-1", LEVELS)
    deepen(tmp_path / f".step_00000002.dtckpt-{role}-1", LEVELS)
    with CheckpointManager(tmp_path, is_async=False) as manager:
        manager.save(1, TREE)
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["gc", str(tmp_path), "--min-age", "0", "--yes"]) == 0
    assert sorted(set(os.listdir(tmp_path)) - {RUNS_FOLDER}) == [LOCK_NAME, "step_00000001"]


@pytest.mark.parametrize(
    "name", ["x{}", "step_{:08d}", ".step_{:08d}.dtckpt-new-1", ".step_{:08d}.dtckpt-old-1", ".s.dtckpt-new-{}"]
)
def test_a_root_is_not_listed_for_each_of_its_entries(tmp_path, monkeypatch, name):
    listed = []
    siblings = commit_by_rename.siblings
    monkeypatch.setattr(commit_by_rename, "siblings", lambda *args: listed.append(args) or siblings(*args))
    for number in range(100):
        (tmp_path / name.format(number)).mkdir()
    with CheckpointManager(tmp_path, is_async=False) as manager:
        manager.save(1000, TREE)
        manager.restore()
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["gc", str(tmp_path), "--min-age", "0", "--yes"]) == 0
    assert len(listed) < 30


@pytest.mark.parametrize("prepare", [lambda path, to: path.symlink_to(to), lambda path, _: path.mkdir(mode=0o777)])
def test_a_prepared_directory_of_a_local_tier_is_refused(tmp_path, elsewhere, prepare):
    before, root = content(elsewhere), tmp_path / "root"
    (tmp_path / "tier").mkdir()
    folder = tmp_path / "tier" / job_name(str(root))
    prepare(folder, elsewhere / "names")
    if not folder.is_symlink():
        folder.chmod(0o777)
    with pytest.raises(StorageError, match="remove it"):
        HostFolder(tmp_path / "tier", str(root), host="here").make()
    assert content(elsewhere) == before


def test_other_users_cannot_read_a_local_tier(tmp_path):
    folder = HostFolder(tmp_path / "tier", "root", host="here")
    folder.make()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_root_that_every_user_may_write_to_is_warned_of_once(tmp_path, caplog):
    tmp_path.chmod(0o777)
    for _ in range(2):
        with CheckpointManager(tmp_path, is_async=False) as manager:
            manager.save(1, TREE)
    assert caplog.text.count("every user may write to") == 1


def test_the_holder_of_a_lock_cannot_forge_lines(tmp_path):
    lock = tmp_path / LOCK_NAME
    lock.write_text("process 1\n\x1b[2Jroot on host")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        shown = r"process 1\n\x1b[2Jroot on host"
        assert RootLock(tmp_path).holder() == shown
        with pytest.raises(CheckpointConflictError, match=re.escape(f"{shown} saves checkpoints")):
            RootLock(tmp_path).acquire()
        process.stdin.close()


def test_drafts_of_dead_processes_are_removed(tmp_path):
    old, new, other = (tmp_path / f".dtckpt-root.{number:016x}.draft" for number in (1, 2, 3))
    for path in (old, new):
        path.write_text("draft")
    os.utime(old, (0, 0))
    other.symlink_to(new)
    with CheckpointManager(tmp_path, is_async=False) as manager:
        manager.save(1, TREE)
    assert not old.exists()
    assert new.exists()


class TestLocalFolder:
    """What an entry that a stranger prepared can lead to."""

    CHANGES = (
        lambda folder: folder.write("a/f", b"new"),
        lambda folder: folder.replace("a/f", b"new"),
        lambda folder: folder.remove_files(["a/f"]),
        lambda folder: folder.remove_tree("a/f"),
        lambda folder: folder.create("a/g", b"new"),
        lambda folder: os.close(folder.new_file("a/g")),
        lambda folder: (folder / "a").make(),
        lambda folder: (folder / "a" / "b").make(),
        lambda folder: (folder / "a").remove(["f"]),
        lambda folder: (folder / "a").open_lock("f", to_write=True),
        lambda folder: folder.rewrite("a/f").__enter__(),
        lambda folder: folder.link("a/g", folder, "a/f"),
        lambda folder: os.close(folder.open_file("a/f")),
    )

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_link_in_the_place_of_a_folder_is_an_error(self, tmp_path, change):
        outside, inside = tmp_path / "outside", tmp_path / "inside"
        outside.mkdir()
        inside.mkdir()
        (outside / "f").write_text("precious")
        (inside / "a").symlink_to(outside)
        with pytest.raises(NotADirectoryError, match="a is a link, or no directory, and nothing is written through it"):
            change(LocalFolder(inside))
        assert content(outside) == {"f": ((outside / "f").lstat().st_mode, b"precious")}

    @pytest.mark.parametrize("kind", [link, dangling_link, loop, hard_link, fifo, to_everything])
    @pytest.mark.parametrize("change", CHANGES[:4])
    def test_another_entry_in_the_place_of_a_file_is_replaced(self, tmp_path, kind, change):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "f").write_text("precious")
        (tmp_path / "inside" / "a").mkdir(parents=True)
        kind(tmp_path / "inside" / "a" / "f", outside / "f")
        with time_limit(WAIT_S):
            change(LocalFolder(tmp_path / "inside"))
        found = tmp_path / "inside" / "a" / "f"
        assert not os.path.lexists(found) or (found.lstat().st_nlink, found.read_bytes()) == (1, b"new")
        assert (outside / "f").read_text() == "precious"

    def test_what_has_the_name_stays_if_a_file_is_created(self, tmp_path):
        folder = LocalFolder(tmp_path)
        assert folder.create("f", b"first")
        assert not folder.create("f", b"second")
        assert folder.read("f") == b"first"
        with pytest.raises(FileExistsError):
            folder.new_file("f")
        assert os.listdir(tmp_path) == ["f"]
