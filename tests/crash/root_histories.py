"""Random histories of a root that saves share: saves with reuse, removals, damage, copies, scrubs, kills, restores.

Each action runs in a new client process, which may be killed before a random file operation. After
each action every listed step, of the root and of its copies, is whole and right, or has a file that was damaged here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.states import bits_of

import dtckpt
from dtckpt import CheckpointManager, SaveOptions, errors
from dtckpt.cli.main import main
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of

from .forked_clients import Fault, Nursery

Arrays = dict[str, np.ndarray[Any, Any]]
KINDS = ("ocdbt", "zarr")
MAX_OPERATIONS = 300
"""A kill may come up to this file operation of an action; most actions have fewer, and then end unharmed."""
KEPT_STEPS = 4

# --- actions, in client processes -------------------------------------------------------------------------------------


def save(root: str, step: int, arrays: Arrays, options: SaveOptions, *, is_async: bool, keep: int | None) -> None:
    tree = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with CheckpointManager(root, options=options, reuse=True, is_async=is_async, keep=keep) as manager:
        manager.save(step, tree, force=True)


def collect_garbage(root: str) -> int:
    return main(["gc", root, "--keep", str(KEPT_STEPS - 1), "--min-age", "0", "--yes"])


def remove(path: str) -> None:
    commit_target_of(Path(path)).remove()


def copy(root: str, copies: str, *, keep_links: bool) -> list[str]:
    """Copy; return the names of the steps that could not be copied."""
    return [each.source.name for each in dtckpt.copy(root, copies, keep_links=keep_links).failed]


def scrub(root: str, source: str | None) -> tuple[str, ...]:
    """Scrub; return the names of the steps that are damaged."""
    return dtckpt.scrub(root, source=source).damaged


def restore(root: str) -> tuple[int, dict[str, bytes]]:
    """Restore the newest valid step."""
    restored = CheckpointManager(root).restore()
    return restored.step, bits_of_tree(restored.tree)


def bits_of_tree(tree: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits_of(tensor) for name, tensor in tree.items()}


# --- damaged files ----------------------------------------------------------------------------------------------------


class Damages:
    """The files and folders that a history has damaged. They stay open, so that no new file gets their inode."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def note(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        if self._files.setdefault(os.fstat(descriptor).st_ino, descriptor) != descriptor:
            os.close(descriptor)

    def forgive(self, folder: Path) -> None:
        """Count a checkpoint as whole, although its folder lacked files."""
        if (descriptor := self._files.pop(folder.stat().st_ino, None)) is not None:
            os.close(descriptor)

    def has_touched(self, folder: Path) -> bool:
        """Whether a checkpoint lacks a file, or has a damaged one."""
        return any(each.stat().st_ino in self._files for each in (folder, *folder.rglob("*")))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)


# --- histories --------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """A root, its copies, and the states that their steps must have.

    Args:
        nursery: Starts the processes of the actions.
        folder: Holds both roots.
        draw: The random choices.
    """

    nursery: Nursery
    folder: Path
    draw: random.Random
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = self.draw
        self.root, self.copies = self.folder / "run", self.folder / "copies"
        self.options = SaveOptions(kvstore=draw.choice(KINDS), chunk_nbytes=draw.choice((16 << 10, 1 << 20)))
        self.arrays: Arrays = {f"t{number}": self._noise(40, 64 * draw.choice((1, 8))) for number in range(5)}
        self.step = 0
        # By step, the states that it may have: two of them if a save over an older one was killed.
        self.states: dict[int, list[dict[str, bytes]]] = {}
        self.ever: dict[int, list[dict[str, bytes]]] = {}
        self.damages = Damages()

    def _noise(self, *shape: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.draw.randrange(1 << 30)).standard_normal(shape, np.float32)

    def run(self, num_actions: int) -> None:
        """Save a step, then act at random, and check after each action."""
        try:
            self.save(is_killable=False)
            for _ in range(num_actions):
                act: Callable[[], object] = getattr(self, self.draw.choice(ACTIONS))
                act()
                self.check(self.root, self.states)
                if self.copies.exists():
                    self.check(self.copies, self.ever)
        finally:
            self.damages.close()

    def _act(self, action: Callable[..., Any], *args: Any, is_killable: bool = True, **kwargs: Any) -> Any:
        """Run an action in a process; return its result, None if it was killed."""
        fault, name = None, action.__name__
        if is_killable and self.draw.random() < 0.5:
            at = int(MAX_OPERATIONS ** self.draw.random())  # the first operations of all actions as well as late ones
            fault = Fault(0, "kill", at)
        job = self.nursery.start(action, *args, clients=1, folder=str(self.folder), fault=fault, **kwargs)
        (answer,) = job.finish()
        shown = [each for each in (*args, kwargs) if not isinstance(each, dict) or each is kwargs]
        self.log.append(f"{name} {shown}, {fault}, struck {job.struck}: {answer.error or repr(answer.value)[:200]}")
        assert not answer.error, f"{self}\n{answer.trace}"
        return None if answer.has_died else (answer.value, "ended")

    def __str__(self) -> str:
        return "\n".join(self.log)

    def folders(self) -> list[Path]:
        return sorted(self.root.glob("step_*"))

    # --- actions ------------------------------------------------------------------------------------------------------

    def save(self, *, is_killable: bool = True) -> None:
        draw = self.draw
        for name in draw.sample(sorted(self.arrays), draw.randrange(4)):
            changed = self.arrays[name].copy()
            changed[draw.randrange(30)] += 1
            self.arrays[name] = changed
        if draw.random() < 0.2:
            self.arrays[f"t{draw.randrange(8)}"] = self._noise(30, 64)
        # Sometimes the newest step again, or the step of a save that was killed.
        self.step += draw.random() < 0.85 or not self.step
        state = {name: bits_of(torch.from_numpy(array)) for name, array in self.arrays.items()}
        facts = {"is_async": draw.random() < 0.5, "keep": draw.choice((None, KEPT_STEPS))}
        ended = self._act(
            save, str(self.root), self.step, dict(self.arrays), self.options, is_killable=is_killable, **facts
        )
        self.ever.setdefault(self.step, []).append(state)
        self.states[self.step] = [state] if ended else [*self.states.get(self.step, ()), state]

    def collect_garbage(self) -> None:
        if ended := self._act(collect_garbage, str(self.root)):
            assert ended[0] in (0, 4), str(self)

    def remove(self) -> None:
        if len(folders := self.folders()) > 1:
            self._act(remove, str(self.draw.choice(folders)))

    def damage(self) -> None:
        """A bit of a file flips, or its end is cut off, for all checkpoints that share it; or a checkpoint loses it."""
        folder = self.draw.choice(self.folders())
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
        if not files:
            return
        file, kind = self.draw.choice(files), self.draw.choice(("flip", "flip", "cut", "lose"))
        self.log.append(f"{kind} {file}")
        size = file.stat().st_size
        if kind == "lose":
            self.damages.note(folder)
            file.unlink()
        elif kind == "cut":
            self.damages.note(file)
            os.truncate(file, self.draw.randrange(size))
        else:
            self.damages.note(file)
            with file.open("r+b") as opened:
                at = self.draw.randrange(size)
                byte = os.pread(opened.fileno(), 1, at)[0]
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << self.draw.randrange(8)]), at)

    def copy(self) -> None:
        ended = self._act(copy, str(self.root), str(self.copies), keep_links=self.draw.random() < 0.5)
        if ended:
            copied = {each.name for each in self._whole(self.root)} - {*ended[0]}
            assert copied <= {each.name for each in self.copies.glob("*")}, str(self)

    def scrub(self) -> None:
        """All damage is found, and mended where the copies have the step."""
        source = str(self.copies) if self.copies.exists() and self.draw.random() < 0.8 else None
        touched = {each.name for each in self.folders() if self.damages.has_touched(each)}
        mendable = {each.name for each in self._mendable()} if source else set()
        ended = self._act(scrub, str(self.root), source)
        if ended is None:
            return
        assert {*ended[0]} <= touched - mendable, str(self)
        for name in mendable:
            folder = self.root / name
            self.damages.forgive(folder)
            assert bits_of_tree(dtckpt.restore(folder)) in self.states[step_of(folder)], f"{name}\n{self}"

    def restore(self) -> None:
        if not any(self._whole(self.root)):
            return
        if ended := self._act(restore, str(self.root)):
            step, bits = ended[0]
            assert bits in self.states[step], str(self)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _whole(self, root: Path) -> Iterator[Path]:
        """Yield the listed steps that nothing has damaged."""
        for step in CheckpointManager(root).all_steps():
            folder = root / f"step_{step:08d}"
            if not self.damages.has_touched(folder):
                yield folder

    def _mendable(self) -> Iterator[Path]:
        """Yield the steps that are damaged and have a copy. A lost manifest is told from its copy's."""
        for copied in self._whole(self.copies):
            folder = self.root / copied.name
            if folder.exists() and self.damages.has_touched(folder):
                manifest, twin = folder / MANIFEST_NAME, (copied / MANIFEST_NAME).read_bytes()
                if manifest.exists() and manifest.read_bytes() == twin:
                    yield folder

    def check(self, root: Path, states: dict[int, list[dict[str, bytes]]]) -> None:
        """Every listed step is whole and right, or has damage, and then it is an error or right."""
        for step in CheckpointManager(root).all_steps():
            folder = root / f"step_{step:08d}"
            is_touched = self.damages.has_touched(folder)
            with suppress(errors.DtckptError) if is_touched else _told_by(f"{folder} {self}"):
                restored = bits_of_tree(dtckpt.restore(folder))
                assert restored in states[step], f"{folder}\n{self}"
                if states is self.states:
                    states[step] = [restored]
                if not is_touched:
                    with dtckpt.open_checkpoint(folder) as checkpoint:
                        assert checkpoint.verify().is_sound, f"{folder}\n{self}"


@contextmanager
def _told_by(story: str) -> Iterator[None]:
    """Add a story to an error of the body."""
    try:
        yield
    except errors.DtckptError as error:
        error.add_note(story)
        raise


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


ACTIONS = (
    "save",
    "save",
    "save",
    "collect_garbage",
    "remove",
    "damage",
    "damage",
    "copy",
    "copy",
    "scrub",
    "scrub",
    "restore",
)
