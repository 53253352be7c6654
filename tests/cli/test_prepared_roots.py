"""The small files of a root may come from a stranger: each field of each file is replaced by JSON of every kind.

A file that cannot be right counts as unknown, with a warning, or gives an error of dtckpt. Nothing else happens.
"""

import json
import shutil
import time

import pytest
import torch
from support.shares import share

import dtckpt
from dtckpt.checkpoint.copying.scrub_state import STATE_NAME
from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME
from dtckpt.checkpoint.managing.root import MANAGERS, root_of
from dtckpt.checkpoint.managing.run_history import RUNS_FOLDER
from dtckpt.checkpoint.managing.step_folders import METRICS_NAME
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.tiers.holdings import HeldSave
from dtckpt.checkpoint.tiers.root_identity import IDENTITY_NAME, claim_identity, read_identity
from dtckpt.checkpoint.tiers.status import STATUS_NAME, TierStatus
from dtckpt.cli.exit_codes import ExitCode
from dtckpt.errors import DtckptError
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.commit_by_decision import REGISTER_FOLDER
from dtckpt.storage.location import location_of

STEP = "step_00000020"
KEEP = dtckpt.Retention(last=2, best=1, newer_than_s=1.0, every_s=3600.0)
ZARR = dtckpt.SaveOptions(kvstore="zarr")
VALUES = {
    "null": "null",
    "true": "true",
    "negative": "-1",
    "fraction": "0.5",
    "nan": "NaN",
    "infinite": "-Infinity",
    "long": "1" + "0" * 30,
    "longer than a float": "1" + "0" * 400,
    "longer than Python reads": "1" * 5000,
    "last": str((1 << 63) - 1),
    "empty text": '""',
    "text": '"text"',
    "digits": '"12"',
    "half a character": '"\\ud800"',
    "array": "[]",
    "array of arrays": "[[], [[]]]",
    "object": "{}",
    "object of objects": '{"a": {"b": null}}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "cut off": "",
}


@pytest.fixture(scope="module")
def sound_root(tmp_path_factory):
    """A root with each of the files: of a manager that chooses its interval and had a local tier."""
    root = tmp_path_factory.mktemp("roots") / "run"
    with dtckpt.CheckpointManager(root, is_async=False, every="auto", local=None) as manager:
        for step in (10, 20):
            manager.save(step, {"w": torch.ones(4)}, metrics={"loss": step / 10}, force=True)
    save = SaveId(time.time_ns(), 30, 2, False, "00000000")
    status = TierStatus(
        at_s=time.time(),
        domains={"host0": "rack0", "host1": "rack1"},
        clients={"host0": (0,), "host1": (1,)},
        copies=2,
        saves=(HeldSave(save, {0: ("host0", "host1"), 1: ("host1",)}, is_voted=True),),
        nbytes=1 << 20,
        rate=1e9,
    )
    (root / STATUS_NAME).write_bytes(status.to_bytes())
    claim_identity(root_of(root).folder, str(root), "0123abcd")
    dtckpt.scrub(root, bytes_per_day=1)
    return root


def _places(value, path=()):
    """Yield the paths of all values in parsed JSON, the whole first."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _texts(sound):
    """Yield the name and the text of each JSON document in which one value is replaced, or one field is missing."""
    for path in _places(sound):
        document = [json.loads(json.dumps(sound))]
        holder, key = document, 0
        for part in path:
            holder, key = holder[key], part
        holder[key] = "HERE"
        for name, text in VALUES.items():
            yield f"{path}: {name}", json.dumps(document[0]).replace('"HERE"', text)
        if path:
            del holder[key]
            yield f"{path}: missing", json.dumps(document[0])


def _lineage(text):
    data = text.encode()
    return b"%s\n%016x\n" % (data, bytes_digest(data))


def _variants(path):
    """Yield a stranger's variants of a small file: the name of each in the test, and its bytes."""
    found = path.read_bytes()
    encode = _lineage if path.name == LINEAGE_NAME else str.encode
    sound = found.partition(b"\n")[0].decode()
    if path.name == IDENTITY_NAME:
        yield from ((name, text.encode()) for name, text in VALUES.items())
    else:
        yield from ((name, encode(text)) for name, text in _texts(json.loads(sound)))
    yield "no JSON", b"\0\xff"
    yield "empty", b""


def _check_commands(run, root):
    for command in (
        ["ls"],
        ["ls", "--json", "--sort", "age"],
        ["gc", "--keep", "1"],
        ["gc", "--keep-newer-s", "3600", "--json"],
        ["tiers"],
        ["tiers", "--json"],
        ["scrub", "--json"],
    ):
        result = run(command[0], root, *command[1:])
        assert result.code in (ExitCode.OK, ExitCode.FAILED), (command, result)
        # `scrub` tells of damage on its output.
        if result.code and command[0] != "scrub":
            assert result.err.count("dtckpt: error: ") == 1, (command, result)
            assert STATUS_NAME in result.err, (command, result)
        if "--json" in command:
            assert result.events


def _check_manager(root):
    """Save, which also removes what ``keep`` does not keep, and restore; return the error, if one was raised."""
    try:
        with dtckpt.CheckpointManager(root, is_async=False, every="auto", keep=KEEP) as manager:
            manager.restore()
            manager.should_save(30)
            manager.save(30, {"w": torch.ones(4)}, metrics={"loss": 0.5}, force=True)
            manager.best_step()
        with dtckpt.CheckpointManager(root) as manager:
            assert manager.restore().step == 30
    except DtckptError as error:
        return error
    return None


FILES = {
    "lineage": f"{STEP}/{LINEAGE_NAME}",
    "metrics": f"{STEP}/{METRICS_NAME}",
    "run": f"{RUNS_FOLDER}/*",
    "tiers": STATUS_NAME,
    "identity": IDENTITY_NAME,
    "scrub": STATE_NAME,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_commands_and_managers_pass_over_files_of_wrong_types(run, sound_root, tmp_path, kind):
    root = tmp_path / "run"
    shutil.copytree(sound_root, root)
    (path,) = root.glob(FILES[kind])
    for name, data in share(list(_variants(path)), 12, kind):
        path.write_bytes(data)
        print(name)  # shown if it fails
        _check_commands(run, root)
        error = None if kind == "tiers" else _check_manager(root)
        # No save can follow the last number; no other text here is not a fallback.
        assert error is None or (kind == "lineage" and "('number',): last" in name), error
        if kind == "identity":
            read_identity(root_of(root).folder, str(root))
        if kind != "tiers":
            shutil.rmtree(root)
            shutil.copytree(sound_root, root)


@pytest.mark.parametrize("kind", ["claim", "manager"])
def test_object_stores_pass_over_files_of_wrong_types(run, kind):
    url = f"memory://prepared-{kind}"
    root = root_of(location_of(url))
    with dtckpt.CheckpointManager(url, is_async=False, options=ZARR) as manager:
        manager.save(10, {"w": torch.ones(4)})
        folder = root.folder / (MANAGERS if kind == "manager" else f"{REGISTER_FOLDER}/{STEP}")
        sound = {"renewed_s": 1.0, "process": 1, "host": "host0"}
        entry = f"{1:020d}-00000000"
        for name, text in share([*_texts(sound), ("no JSON", "x")], 12, kind):
            print(name)  # shown if it fails
            folder.write(entry, text.encode())
            assert run("ls", url).code == ExitCode.OK
            assert run("gc", url, "--keep", "1").code == ExitCode.OK
            manager.save(20, {"w": torch.ones(4)})
            manager.restore()
    root.right.release()


def test_a_manager_passes_over_entries_of_other_names():
    url = "memory://foreign-entries"
    folder = root_of(location_of(url)).folder / MANAGERS
    for name in ("", "-", "x-y", "٣-0"):
        folder.write(f"0{name}", b"[]")
    with dtckpt.CheckpointManager(url, is_async=False, options=ZARR) as manager:
        manager.save(10, {"w": torch.ones(4)})
        assert manager.all_steps() == [10]
