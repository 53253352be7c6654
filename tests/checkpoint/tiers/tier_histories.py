"""Random histories of a job with a local tier: its clients' actions, and a model of the step that they must restore."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtckpt
from dtckpt import CheckpointManager
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.saving.write import ClientWriter
from dtckpt.errors import CheckpointNotFoundError

from .tier_cases import mesh_of_all, state, tier, values
from .tier_faults import OPTIONS, POINTS, _before, _die

DURABLE = 3
KEEP = 2
POINTS_OF_DEATH = {**POINTS, "writing": lambda act, is_now: _before(ClientWriter, "write", act, is_now)}


@dataclass(frozen=True)
class Script:
    """What the clients of one attempt do.

    Args:
        number: Of the attempt; no other one saves the same values.
        changes: By save, the number of steps since the save before it; the first may go back.
        waits: By save, whether everything under way ends before the next.
        point: Where clients die in the last save; empty: no client dies.
        victims: The clients that die.
    """

    number: int
    changes: tuple[int, ...]
    waits: tuple[bool, ...]
    point: str
    victims: tuple[int, ...]

    def uid(self, save: int) -> int:
        """Return the number that a save's values follow from."""
        return self.number * 100 + save

    def steps(self, start: int) -> list[int]:
        """Return the steps, after the restored one; -1 if nothing was restored."""
        steps = []
        for change in self.changes:
            start = max(0, start + change)
            steps.append(start)
        return steps


def play(root: Path, folder: Path, hosts: Sequence[str], script: Script, told: Path) -> str:
    """Restore, save, and perhaps die; note the restored step in a file. Return the error, if there was one."""
    mesh, is_last = mesh_of_all(), threading.Event()
    client = dtckpt.client_id()
    with ExitStack() as stack:
        if client in script.victims:
            stack.enter_context(POINTS_OF_DEATH[script.point](_die, is_last.is_set))
        try:
            local = tier(folder, hosts, keep=KEEP, timeout_s=5.0)
            with CheckpointManager(root, local=local, save_interval_steps=DURABLE, options=OPTIONS) as manager:
                found = _restore(manager, mesh)
                (told / f"{script.number}_{client}").write_text(json.dumps(found))
                for save, step in enumerate(script.steps(found["step"])):
                    if save == len(script.changes) - 1:
                        is_last.set()
                    manager.save(step, {**state(script.uid(save), mesh), "step": script.uid(save)})
                    if script.waits[save]:
                        manager.wait()
                if not script.victims:
                    manager.wait()
                    dist.barrier()
                elif client in script.victims:
                    manager.wait()
                    _die()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _restore(manager: CheckpointManager, mesh: dtckpt.Mesh) -> dict[str, Any]:
    try:
        restored = manager.restore(target=state(0, mesh))
    except CheckpointNotFoundError:
        return {"step": -1, "uid": None, "is_local": False, "is_equal": True}
    expected = values(restored.tree["step"])
    found = {
        name: tensor.full_tensor() if isinstance(tensor, dtckpt.DTensor) else tensor
        for name, tensor in restored.tree["model"].items()
    }
    is_equal = all(torch.equal(found[name], expected[name]) for name in expected)
    is_local = restored.local is not None
    return {"step": restored.step, "uid": restored.tree["step"], "is_local": is_local, "is_equal": is_equal}


@dataclass
class World:
    """The files of a job's hosts and of its root, as an outsider sees them, and which save has which values.

    It knows nothing of votes but what the clients' scripts say, and asks no code of the tier which step is the newest.

    Args:
        root: The root.
        folder: The tiers of the hosts.
    """

    root: Path
    folder: Path
    uids: dict[str, int] = field(default_factory=dict)
    damaged: dict[Path, int] = field(default_factory=dict)

    def saves(self) -> set[str]:
        return {folder.name for folder in self.folder.glob("*/*/*-*-*-*-*") if folder.is_dir()}

    def note_saves(self, script: Script, start: int) -> None:
        """Note the values of the saves that an attempt has begun."""
        saves = {step: save for save, step in enumerate(script.steps(start))}
        for name in self.saves() - self.uids.keys():
            self.uids[name] = script.uid(saves[SaveId.parse(name).step])

    def _sound(self, host: str, name: str, client: int) -> str:
        """Return ``voted`` or ``index`` if a host has a sound part, else nothing."""
        for data in self.folder.glob(f"{host}/*/{name}/{client}.data"):
            for kind in ("voted", "index"):
                index = data.with_suffix(f".{kind}")
                if index.exists() and not any(self._is_damaged(file) for file in (data, index)):
                    return kind
        return ""

    def _is_damaged(self, file: Path) -> bool:
        return self.damaged.get(file) == file.stat().st_ino

    def expected(self, hosts: Sequence[str]) -> tuple[int, bool] | None:
        """Return the values that must be restored on hosts, and whether from the tier; None: there is nothing."""
        tier_saves = []
        for name in self.saves():
            save = SaveId.parse(name)
            is_voted = any(
                file.with_suffix(".data").exists()
                for host in hosts
                for file in self.folder.glob(f"{host}/*/{name}/*.voted")
            )
            is_whole = all(any(self._sound(host, name, c) for host in hosts) for c in range(save.num_clients))
            if is_voted:
                tier_saves.append((save.number, 1, save.step, is_whole, self.uids[name]))
        steps = {int(path.name[5:]): path for path in self.root.glob("step_*")}
        numbers = {
            step: json.loads((path / "lineage.json").read_bytes().split(b"\n")[0]) for step, path in steps.items()
        }
        newest = max(steps, key=lambda step: numbers[step]["number"], default=None)
        in_root = [
            (numbers[step]["number"], 0, step, True, path)
            for step, path in steps.items()
            if newest is not None and (step == newest or (step < newest and step not in numbers[newest]["aside"]))
        ]
        # Newest first; a run that saved a smaller step has abandoned the greater ones.
        smallest = None
        for _, is_local, step, is_whole, what in sorted(
            [*tier_saves, *in_root], key=lambda each: each[:2], reverse=True
        ):
            is_abandoned = smallest is not None and (step >= smallest if is_local else step > smallest)
            smallest = step if smallest is None else min(step, smallest)
            if is_whole and not is_abandoned:
                return (what, True) if is_local else (dtckpt.restore(what)["step"], False)
        return None

    def damage(self, chance: random.Random) -> None:
        """Damage a file of a part, or remove one."""
        files = sorted(
            file for kind in ("data", "voted", "index") for file in self.folder.glob(f"*/*/*-*-*-*-*/*.{kind}")
        )
        files = [file for file in files if not self._is_damaged(file)]  # to damage one twice might mend it
        if not files:
            return
        file = chance.choice(files)
        kind = chance.choice(["flip", "cut", "remove"])
        if kind == "remove":
            file.unlink()
            return
        data = bytearray(file.read_bytes())
        if kind == "flip":
            data[0] ^= 1 << chance.randrange(8)
        file.write_bytes(data if kind == "flip" else data[: len(data) // 8 if file.suffix != ".data" else 0])
        self.damaged[file] = file.stat().st_ino

    def lose(self, host: str) -> None:
        shutil.rmtree(self.folder / host, ignore_errors=True)


def script_of(number: int, clients: int, chance: random.Random) -> Script:
    saves = chance.randint(1, 4)
    # A run goes back at its first save only: no attempt saves a step twice, so steps tell its saves apart.
    changes = (chance.choice([1, 1, 1, 2, 0, -1, -2]), *(chance.choice([1, 1, 1, 2]) for _ in range(saves - 1)))
    waits = tuple(chance.random() < 0.5 for _ in range(saves))
    if chance.random() < 0.5:
        return Script(number, changes, waits, "", ())
    victims = range(clients) if chance.random() < 0.6 else [chance.randrange(clients)]
    return Script(number, changes, waits, chance.choice(sorted(POINTS_OF_DEATH)), tuple(victims))


def told_by(folder: Path, number: int) -> Mapping[str, Any] | None:
    """Return the step that the clients of an attempt noted as restored, the same for all."""
    texts = {path.read_text() for path in folder.glob(f"{number}_*")}
    assert len(texts) <= 1, texts
    return json.loads(texts.pop()) if texts else None
