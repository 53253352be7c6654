"""Random histories of jobs that publish and read: the clients' operations, and the times at which clients are killed.

Each client writes its observations to a file, a line at a time, so that the words of a killed client stay.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.client_processes import Answer, Pool
from support.coordinators import ServerProcess

import dtckpt
from dtckpt import Layout, Publisher, Subscriber
from dtckpt.checkpoint.live import publisher as publisher_module
from dtckpt.checkpoint.live import sources, version_choice
from dtckpt.checkpoint.live import subscriber as subscriber_module
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.lending_folder import LendingFolder
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.checkpoint.restoring import restore
from dtckpt.checkpoint.saving.staging import StagingMemory
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import NEWEST
from dtckpt.errors import BarrierTimeoutError, ClientLostError, CoordinatorUnavailableError, DtckptError, FencedError

FEED = "policy"
SHAPES = {"w": (16, 12), "moment": (8, 20), "norm": (7,)}
HEARTBEAT_S = 3.0
ROUND_S = 15.0
"""Longest wait at a barrier."""
CALL_S = 60.0
"""No call of a client takes longer, whatever happens to the others."""
ATTEMPT_S = 150.0
START_S = 30.0

PUBLISHER_POINTS = {
    "stage": (StagingMemory, "stage"),
    "digest": (publisher_module, "described_pieces"),
    "announce": (FeedClient, "announce"),
    "put": (HostFolder, "put"),
    "put part": (FeedClient, "put_part"),
    "lend": (LendingFolder, "lend"),
    "await": (publisher_module, "await_readers"),
    "retire": (FeedClient, "retire"),
    "withdraw": (FeedClient, "withdraw"),
    "free": (HostFolder, "remove"),
    "close": (HostFolder, "close"),
}
READER_POINTS = {
    "subscribe": (FeedClient, "subscribe"),
    "open": (version_choice, "open_version"),
    "copy": (OpenPart, "copy"),
    "box": (OpenPart, "elements"),
    "fill": (restore, "fill_tensors"),
    "done": (FeedClient, "done"),
    "apply": (restore, "copy_into"),
    "fetched": (subscriber_module, "LiveReport"),
}


def values(uid: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a version: a function of its uid, which no other version has."""
    generator = torch.Generator().manual_seed(uid)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def laid_out(dim: int) -> dict[str, torch.Tensor]:
    """Return zeros, of which the matrices are sharded along a dim over all clients. Collective."""
    whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    clients = int(os.environ["WORLD_SIZE"])
    mesh = dtckpt.create_distributed_mesh([("x", clients)], device_type="CPU")
    layout = Layout(["x", dtckpt.UNSHARDED] if dim == 0 else [dtckpt.UNSHARDED, "x"], mesh)
    return {
        name: dtckpt.dtensor.distribute_tensor(tensor, mesh, layout.placements) if tensor.ndim == 2 else tensor
        for name, tensor in whole.items()
    }


def parts(tree: dict[str, torch.Tensor], uid: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this client's parts of a tree, with the same parts of a version; version -1 has zeros. Local."""
    whole = values(uid) if uid >= 0 else {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, tensor in tree.items():
        if isinstance(tensor, dtckpt.DTensor):
            for device, part in zip(tensor.layout.mesh.local_device_ids(), tensor.components, strict=True):
                yield part, whole[name][tensor.layout.region(device, SHAPES[name]).slices()]
        else:
            yield tensor, whole[name]


def is_version(target: dict[str, torch.Tensor], uid: int) -> bool:
    """Whether this client's part of a target equals its part of a version; version -1: the target is unchanged."""
    return all(mine.equal(expected) for mine, expected in parts(target, uid))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_at(owner: Any, name: str, call: int) -> Any:
    """Return a patch by which this process dies when a function is called for the so-many-th time."""
    real, calls = getattr(owner, name), [0]

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            _die()
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, patched)


def _slowly(owner: Any, name: str, pause_s: float) -> Any:
    real = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pause_s)
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, patched)


@dataclass(frozen=True)
class Script:
    """What the clients of one attempt of a job do.

    Args:
        job: Its name.
        attempt: Its number.
        seed: Of what they choose at random, alike on all clients.
        points: By client, where it dies, and at which call; others die by the driver's hand, or live.
        is_remote: Whether its readers find no part on this host.
        pause_s: How long they stand still before each piece.
    """

    job: str
    attempt: int
    seed: str
    points: dict[int, tuple[str, int]] = field(default_factory=dict)
    is_remote: bool = False
    pause_s: float = 0.0


class Diary:
    """What a client saw."""

    def __init__(self, told: Path, script: Script) -> None:
        self._told, self._script = told, script
        self.client = int(os.environ["RANK"])
        name = f"{script.job}-{script.attempt}-{self.client}"
        self._path = told / f"{name}.diary"
        (told / f"{name}.pid").write_text(str(os.getpid()))

    def note(self, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def tried(self, what: str, call: Callable[[], Any]) -> bool:
        """Make a call, and note how it ended; return whether this attempt can go on."""
        start, error = time.monotonic(), ""
        is_over = False
        try:
            call()
        except DtckptError as failure:
            error = f"{type(failure).__name__}: {failure}"[:500]
            is_over = isinstance(failure, FencedError | ClientLostError | BarrierTimeoutError)
            if isinstance(failure, CoordinatorUnavailableError):
                time.sleep(0.2)
        self.note(what=what, error=error, seconds=round(time.monotonic() - start, 2))
        return not is_over

    @property
    def goes_on(self) -> bool:
        return not (self._told / "end").exists()


def play(told: Path, folder: Path, script: Script) -> str:
    """Do a client's part of an attempt. Return ``end``, or ``again`` if the job must begin another attempt."""
    os.environ |= {"DTCKPT_JOB": script.job, "DTCKPT_ATTEMPT": str(script.attempt)}
    diary, chance = Diary(told, script), random.Random(script.seed)
    points = PUBLISHER_POINTS if script.job == "trainer" else READER_POINTS
    act = _publish if script.job == "trainer" else _read
    with ExitStack() as stack:
        if diary.client in script.points:
            point, call = script.points[diary.client]
            diary.note(what=f"dies at call {call} of {point!r}")
            stack.enter_context(dying_at(*points[point], call))
        if script.is_remote:
            stack.enter_context(mock.patch.object(sources, "folder_of", return_value=None))
        if script.pause_s:
            for name in ("copy", "elements"):
                stack.enter_context(_slowly(OpenPart, name, script.pause_s))
        try:
            goes_on = act(diary, script, folder, chance)
        except DtckptError as error:  # of opening and closing
            diary.note(what="open or close", error=f"{type(error).__name__}: {error}"[:500])
            goes_on = False
        return "end" if goes_on else "again"


def _publish(diary: Diary, script: Script, folder: Path, chance: random.Random) -> bool:
    step, model = max(0, 10 * script.attempt - chance.choice([0, 5, 15])), laid_out(chance.choice([0, 1]))
    options = dtckpt.SaveOptions(timeout_s=ROUND_S)
    when_full, keep = chance.choice(["wait", "skip", "raise"]), chance.choice([1, 1, 2])
    with Publisher(
        FEED, folder=folder, keep=keep, when_full=when_full, timeout_s=4.0, address="127.0.0.1", options=options
    ) as publisher:
        for number in range(1000):
            if not diary.goes_on and number > 2:
                return True
            uid, wait, pause = (
                1000 * script.attempt + number,
                chance.random() < 0.6,
                chance.choice([0.0, 0.0, 0.1, 0.5]),
            )
            for part, value in parts(model, uid):
                part.copy_(value)
            tree = {"model": model, "uid": uid, "step": step}

            lends = chance.random() < 0.3

            def publish(tree=tree, step=step, wait=wait, lends=lends, pause=pause) -> None:
                if lends:
                    try:
                        with publisher.publish(tree, step=step, copy=False):
                            time.sleep(pause)
                    finally:
                        _train(tree["model"])
                elif publisher.publish(tree, step=step, wait=wait) is not None:
                    _train(tree["model"])

            if not diary.tried(f"publish {uid} (step {step}), wait={wait}, lends={lends}", publish):
                return False
            step += chance.choice([1, 1, 2, -1]) if step else 1
            time.sleep(pause)
    return True


def _train(model: dict[str, torch.Tensor]) -> None:
    for part, _ in parts(model, 0):
        part.fill_(7.0)


def _read(diary: Diary, script: Script, folder: Path, chance: random.Random) -> bool:
    target: dict[str, Any] = {"model": laid_out(chance.choice([0, 1])), "uid": -1, "step": -1}
    options, before = dtckpt.RestoreOptions(timeout_s=ROUND_S), 0
    with Subscriber(FEED, target, options=options, timeout_s=5.0) as subscriber:
        for _ in range(1000):
            if not diary.goes_on:
                return True
            way = chance.choice(["update", "fetch", "in place", "fetch and drop", "hold"])
            pause = chance.choice([0.0, 0.1, 0.5, 1.5])

            def take(way=way, pause=pause) -> None:
                if way == "hold":
                    _hold(diary, pause)
                elif way == "in place":
                    subscriber.update(in_place=True, timeout_s=2.0)
                elif way == "update":
                    subscriber.update(timeout_s=2.0)
                else:
                    staged = subscriber.fetch(timeout_s=2.0)
                    time.sleep(pause)
                    if way == "fetch":
                        staged.apply()

            goes_on = diary.tried(way, take)
            version = subscriber.version
            if version is not None:
                diary.note(
                    number=version.number, step=version.step, uid=target["uid"], told_step=target["step"],
                    is_whole=is_version(target["model"], target["uid"]), is_older=version.number < before,
                )  # fmt: skip
                before = version.number
            elif not subscriber.is_mixed:
                diary.note(is_whole=before == 0 and is_version(target["model"], -1), number=0, what="nothing yet")
            if not goes_on:
                return False
    return True


def _hold(diary: Diary, pause_s: float) -> None:
    """Look at a version twice, slowly."""
    choice = version_choice.VersionChoice(FEED, NEWEST, wait_s=2.0, timeout_s=5.0)
    with (
        mock.patch.object(version_choice.VersionChoice, "of_location", return_value=choice),
        dtckpt.open_checkpoint(f"live://{FEED}") as held,
    ):
        expected = values(held.values["uid"])
        for name in ("w", "moment", "norm"):
            is_right = held.read(f"model/{name}").equal(expected[name])
            diary.note(what="held", is_whole=is_right, uid=held.values["uid"])
            time.sleep(pause_s)


class History:
    """A coordinator, jobs, and what happens to them.

    Args:
        folder: Of files.
        seed: Of everything that is chosen at random.
        pools: Processes, by job.
    """

    def __init__(self, folder: Path, seed: str, pools: dict[str, Pool]) -> None:
        self.told, self.memory = folder / "told", folder / "memory"
        self.told.mkdir(parents=True)
        self.chance = random.Random(seed)
        self._seed, self._pools = seed, pools
        self.server = ServerProcess(heartbeat_timeout_s=HEARTBEAT_S)
        self.events: list[str] = []
        self.answers: list[tuple[Script, list[Answer]]] = []
        self.errors: list[str] = []
        self.last_attempts: dict[str, int] = {}

    def run(self, seconds: float) -> None:
        """Let the jobs run, and do to them what chance wants; then let them end in peace."""
        threads = [threading.Thread(target=self._job, args=(job,)) for job in self._pools]
        for thread in threads:
            thread.start()
        # Processes start slowly on a busy machine, and what happens should happen to something.
        start = time.monotonic()
        while time.monotonic() < start + START_S and not all(self._has_begun(job) for job in self._pools):
            time.sleep(0.1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self.chance.uniform(0.2, 1.5))
            self._happen()
        (self.told / "end").write_bytes(b"")
        for thread in threads:
            thread.join(2 * ATTEMPT_S)
            assert not thread.is_alive(), "a job did not end"

    def _has_begun(self, job: str) -> bool:
        return any(self.told.glob(f"{job}-*.diary"))

    def close(self) -> None:
        self.server.kill()

    def _happen(self) -> None:
        kind = self.chance.choice(["kill", "kill", "stop", "stop", "coordinator", "nothing"])
        if kind == "coordinator":
            down_s = self.chance.choice([0.0, 0.5, 2.0])
            self._note(f"the coordinator is killed, and started {down_s} s later")
            self.server.kill()
            time.sleep(down_s)
            self.server = ServerProcess(port=self.server.port, heartbeat_timeout_s=HEARTBEAT_S)
        elif kind != "nothing":
            victims = sorted(self.told.glob("*.pid"))
            if victims:
                victim = self.chance.choice(victims)
                with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                    pid = int(victim.read_text())
                    if kind == "kill":
                        self._note(f"{victim.stem} is killed")
                        victim.unlink()
                        os.kill(pid, signal.SIGKILL)
                        return
                    stop_s = self.chance.choice([0.3, 1.0, 1.5 * HEARTBEAT_S])
                    self._note(f"{victim.stem} stands still for {stop_s} s")
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(stop_s)
                    os.kill(pid, signal.SIGCONT)

    def _note(self, text: str) -> None:
        self.events.append(f"{time.monotonic():.1f} {text}")

    def _job(self, job: str) -> None:
        chance, attempt = random.Random(f"{self._seed} {job}"), 0
        try:
            while not (self.told / "end").exists() or attempt == 0:
                self.attempt(job, attempt, chance)
                attempt += 1
            self.last_attempts[job] = attempt
        except BaseException as error:
            self.errors.append(f"{job}, attempt {attempt}: {type(error).__name__}: {error}")

    def attempt(self, job: str, attempt: int, chance: random.Random, *, is_calm: bool = False) -> list[Answer]:
        """Run an attempt of a job."""
        clients = chance.choice([1, 2])
        points: dict[int, tuple[str, int]] = {}
        if not is_calm and chance.random() < 0.5:
            names = sorted(PUBLISHER_POINTS if job == "trainer" else READER_POINTS)
            points = {chance.randrange(clients): (chance.choice(names), chance.randint(1, 6))}
        is_remote, pause_s = chance.random() < 0.3, chance.choice([0.0, 0.0, 0.3, 1.5])
        script = Script(job, attempt, f"{self._seed} {job} {attempt}", points, is_remote, 0.0 if is_calm else pause_s)
        self._note(f"{clients} clients begin {script}")
        answers = self._pools[job].run(
            play, self.told, self.memory, script,
            clients=clients, group=True, coordinator=f"127.0.0.1:{self.server.port}",
            heartbeat_timeout_s=HEARTBEAT_S, timeout_s=ATTEMPT_S,
        )  # fmt: skip
        for path in self.told.glob(f"{job}-{attempt}-*.pid"):
            path.unlink(missing_ok=True)
        self.answers.append((script, answers))
        return answers

    # --- observations -------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(self.told.glob("*.diary")):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # cut by a kill
                    yield path.stem, json.loads(line)

    def story(self) -> str:
        """Return everything, for the message of a failure."""
        diaries = "\n".join(f"{who}: {facts}" for who, facts in self.lines())
        ends = "\n".join(f"{script}: {answers}" for script, answers in self.answers)
        return "\n".join([*self.events, diaries, ends, *self.errors])
