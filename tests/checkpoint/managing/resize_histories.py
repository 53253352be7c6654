"""Random histories of processes that train, save, are killed, come and leave, and the process that never stops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dtckpt
from dtckpt import CheckpointManager, Layout, LocalTier

from .resize_cases import OPTIONS, SAVES, Process, die, mesh_of_all

PROCESSES = 4
SIZE = 12


@dataclass(frozen=True)
class World:
    """What the processes of one world do.

    Args:
        members: The processes that are its clients 0, 1, ...
        steps: How many steps they train.
        saves: After which of them they save.
        is_copied: Whether every client has the whole state; else each has its rows.
        killed: The process that is killed at the end; None: none.
    """

    members: tuple[int, ...]
    steps: int
    saves: frozenset[int]
    is_copied: bool
    killed: int | None = None


def worlds_of(chance: random.Random) -> list[World]:
    """Return the worlds of a history; the first one saves its first step."""
    alive = list(range(PROCESSES))
    worlds = list[World]()
    members = chance.sample(alive, chance.randint(1, 3))
    for number in range(5):
        steps, killed = chance.randint(1, 3), None
        saves = {each for each in range(1, steps + 1) if chance.random() < 0.5} | ({1} if not number else set())
        if len(members) > 1 and len(alive) > 2 and number < 4 and chance.random() < 0.5:
            killed = chance.choice(members)
            alive.remove(killed)
        worlds.append(World(tuple(members), steps, frozenset(saves), chance.random() < 0.4, killed))
        # A process that leaves does so in good order: all others of its world have its state, by a save.
        stay = [each for each in members if each != killed]
        if killed is None and chance.random() < 0.3 and len(stay) > 1:
            stay.pop()
            worlds[-1] = World(tuple(members), steps, frozenset(saves | {steps}), worlds[-1].is_copied, None)
        new = [each for each in alive if each not in members]
        members = [*stay, *chance.sample(new, chance.randint(0, len(new)))]
        chance.shuffle(members)
    return worlds


def trained(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Return some rows of the state after a step; each row goes its own way, so that no sum depends on the clients."""
    return (rows * 1.25 + step).sin()


def expected_at(step: int) -> torch.Tensor:
    """Return the state of a process that never stops."""
    whole = torch.arange(float(SIZE * 2)).view(SIZE, 2)
    for each in range(1, step + 1):
        whole = trained(whole, each)
    return whole


def expected_steps(worlds: Sequence[World]) -> list[tuple[int, int]]:
    """Return, for each world, the step that it begins at, and the steps that were lost before it; what is promised."""
    step = saved = 0
    begun = list[tuple[int, int]]()
    for number, world in enumerate(worlds):
        lost = 0
        if number:
            before = worlds[number - 1]
            left = [each for each in before.members if each in world.members]
            is_whole = bool(left) if before.is_copied else set(left) == set(before.members)
            lost = 0 if is_whole else step - saved
        step -= lost
        begun.append((step, lost))
        for each in range(1, world.steps + 1):
            step += 1
            if each in world.saves:
                saved = step
    return begun


def state_of(step: int, *, is_copied: bool) -> dict[str, Any]:
    """Return the state at a step, on a mesh of the present clients."""
    whole, mesh = expected_at(step), mesh_of_all()
    layout = Layout([dtckpt.UNSHARDED if is_copied else "x", dtckpt.UNSHARDED], mesh)
    tensor = dtckpt.dtensor.distribute_tensor(whole, mesh, layout.placements)
    return {"rows": tensor, "step": step}


def play(root: Path, tier: Path | None, worlds: Sequence[World]) -> list[tuple[int, int, bool]]:
    """Go through a history; return the step that this process began each of its worlds at, the steps lost, and whether
    its state was right at the end of each."""
    process, told = Process(), list[tuple[int, int, bool]]()
    host = f"host{process.number}"
    local = None if tier is None else LocalTier(path=tier / host, host=host, every_steps=1, timeout_s=5)
    manager = CheckpointManager(root, options=SAVES, local=local, save_interval_steps=10**6 if local else None)
    tree: dict[str, Any] | None = None
    for number, world in enumerate(worlds):
        if not process.join(world.members):
            tree = None  # it may come again, as a new one
            continue
        lost = 0
        target = state_of(0, is_copied=world.is_copied)
        if number:
            step = None if tree is None else tree["step"]
            resized = manager.resize(tree, step=step, target=target, options=OPTIONS)
            lost = resized.steps_lost
        start = target["step"]
        tree = target
        for each in range(1, world.steps + 1):
            tree["step"] += 1
            for component in tree["rows"].components:
                component.copy_(trained(component, tree["step"]))
            if each in world.saves:
                manager.save(tree["step"], tree)
                manager.wait()
        found = tree["rows"].full_tensor()
        told.append((start, lost, torch.equal(found, expected_at(tree["step"]))))
        if process.number == world.killed:
            die()
    return told
