"""Save, lose a client, reshard, resume: the main job of dtckpt, on real processes (``python -m examples.demo``)."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dtckpt
from dtckpt.errors import CheckpointNotFoundError, DtckptError
from examples import plot_layouts, train_and_rollout, train_bytes_lm
from examples.launch import DemoError, coordinator, torchrun, wait_until

STEPS, SAVE_EVERY = 48, 12
COMMITTED, KILLED = "step_24", "step_36"
VICTIM = 2
LOST_AT, LAST = 13, 16
"""The step in which a host is lost, and the last step, of the training that saves in memory."""
TOLERANCE = 1e-4
"""Relative difference of losses: 2 clients add gradients in another order than 4 clients."""
ERROR = r"dtckpt\.errors\.(.+)"
"""How the line begins in which Python says that an error of dtckpt ended a process."""
MOMENT = "optimizer/exp_avg/head.weight"

# The layout of the moments: on four clients matrices are cut in blocks, on two clients in columns.
FOUR_CLIENTS = ["--mesh=data=2,model=2", "--matrix-spec=data,model", "--vector-spec=data+model"]
TWO_CLIENTS = ["--mesh=data=2", "--matrix-spec=unsharded,data", "--vector-spec=data"]
RESHARD = ["--mesh", "data=2", "--layout", "optimizer/*weight*=unsharded,data", "--layout", "optimizer/*bias*=data"]

Facts = dict[int, dict[str, Any]]
"""What a run wrote down, by step: loss, and the bytes and seconds of a checkpoint."""

console = Console(highlight=False, soft_wrap=True)
began = time.monotonic()


def say(text: str) -> None:
    """Print what comes next, with the seconds since the beginning."""
    console.print(f"\n[cyan]{time.monotonic() - began:5.1f} s[/]  [bold]{text}[/]")


def detail(text: str, style: str = "dim") -> None:
    """Print a line below the last step."""
    console.print(f"         {text}", style=style, markup=False)


def check(claim: str, holds: bool) -> None:
    """Print a claim that holds; end the demo at a claim that does not."""
    if not holds:
        raise DemoError(f"this does not hold: {claim}")
    detail(f"✓ {claim}", "green")


# --- training -------------------------------------------------------------------------------------------------------


def launch_arguments(job: str, clients: int, out: Path, *training: str, module: str = "train_bytes_lm") -> list[str]:
    """Return torchrun's arguments."""
    files = [f"--checkpoints={out / job}", f"--losses={out / job}.jsonl", f"--steps={STEPS}"]
    arguments = [f"--nproc-per-node={clients}", "-m", f"examples.{module}", *files, *training]
    detail(f"$ torchrun {shlex.join(arguments)}")
    return arguments


def read_facts(file: Path) -> Facts:
    """Read what a run wrote down."""
    return {facts["step"]: facts for facts in map(json.loads, file.read_text().splitlines())}


def lines_by_client(log: Path, pattern: str) -> dict[int, str]:
    """Return the group of a pattern in the last matching line of every client."""
    lines = re.findall(rf"^\[default(\d+)\]:(?:\[rank\d+\]: )?{pattern}\n", log.read_text("utf8", "replace"), re.M)
    return {int(client): text for client, text in lines}


def train(job: str, clients: int, address: str, out: Path, *training: str) -> Facts:
    """Train to the end."""
    arguments = launch_arguments(job, clients, out, *training)
    with torchrun(arguments, job=job, coordinator=address, out=out) as (run, log):
        wait_until(lambda: run.poll() == 0, run, log)
    return read_facts(out / f"{job}.jsonl")


def train_until_killed(job: str, address: str, out: Path, *training: str) -> Facts:
    """Train on four clients until one is killed while it writes a checkpoint; check what the others say."""
    kill = [f"--victim={VICTIM}", f"--during={KILLED}", f"--save-every={SAVE_EVERY}"]
    # torchrun ends all clients when it sees that one has ended; here the others shall first say why they end.
    arguments = launch_arguments(job, 4, out, *kill, *training, module="kill_during_save")
    arguments = ["--monitor-interval=600", *arguments]
    with torchrun(arguments, job=job, coordinator=address, out=out) as (run, log):
        wait_until(lambda: len(lines_by_client(log, ERROR)) >= 3, run, log)
        last_words, errors = lines_by_client(log, "(kill -9 .+)"), lines_by_client(log, ERROR)
    check(f"client {VICTIM} was killed while it saved {KILLED}: {last_words.get(VICTIM)}", set(last_words) == {VICTIM})
    for client, message in sorted(errors.items()):
        detail(f"client {client} ended with {message}", "yellow")
    is_named = all(re.search(rf"(client |task:){VICTIM}\b", message) for message in errors.values())
    check(f"the error on every other client names client {VICTIM}", is_named and set(errors) == {0, 1, 2, 3} - {VICTIM})
    return read_facts(out / f"{job}.jsonl")


def lose_a_host(out: Path, address: str) -> None:
    """Train with checkpoints in memory; lose a host, with its memory; check that the others bring its state back."""
    file, memory = (
        out / "in-memory.jsonl",
        Path("/dev/shm" if Path("/dev/shm").is_dir() else out) / f"dtckpt-demo-{os.getpid()}",
    )
    training = [
        f"--checkpoints={out / 'in-memory'}",
        f"--memory={memory}",
        f"--steps={LAST}",
        f"--lose={VICTIM}",
        f"--at={LOST_AT}",
    ]
    arguments = ["--nproc-per-node=3", "--max-restarts=1", "-m", "examples.train_in_memory", *training]
    detail(f"$ torchrun {shlex.join(arguments)}")
    try:
        with torchrun(arguments, job="in-memory", coordinator=address, out=out) as (run, log):
            wait_until(lambda: run.poll() == 0, run, log)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    facts = [json.loads(line) for line in file.read_text().splitlines()]
    (restored,) = [each for each in facts if "restored" in each]
    losses = [
        {each["step"]: each["loss"] for each in facts if each["attempt"] == attempt and "loss" in each}
        for attempt in (0, 1)
    ]
    again = sorted(losses[0].keys() & losses[1].keys())
    seconds, nbytes = restored["seconds"], restored["received_nbytes"]
    check(f"host {VICTIM} was lost in step {LOST_AT}, with its process and its memory", max(losses[0]) == LOST_AT)
    check(
        f"all went on from step {restored['restored']}: {nbytes:,} bytes from other hosts, in {seconds:.2f} s",
        nbytes > 0,
    )
    check("nothing was read from the durable checkpoints", not restored["from_root"])
    check(
        f"steps {again[0]} to {again[-1]} have the same losses again, bit for bit",
        all(losses[0][each] == losses[1][each] for each in again),
    )


def hand_over(out: Path, address: str) -> None:
    """Let an engine take the weights of a trainer on another mesh, as they change; show what it says then."""
    versions = train_and_rollout.run(out / "live", address)
    for facts in versions:
        detail(f"step {facts['step']:2}: {facts['nbytes']:,} bytes, in {facts['seconds']:.2f} s: {facts['text'][:56]}")
    texts = {facts["text"] for facts in versions}
    check("in each step the engine had the trainer's weights, bit for bit, and no file was written", len(versions) > 1)
    check(f"it said {len(texts)} different texts", len(texts) > 1)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def check_nothing_lost(folder: Path) -> None:
    """Check that the last committed checkpoint is intact, and that the unfinished one does not exist."""
    with dtckpt.open_checkpoint(folder / COMMITTED) as checkpoint:
        num_chunks = sum(info.num_chunks for info in checkpoint.tensors.values())
        check(f"{COMMITTED} is intact: {num_chunks} chunks read, every digest is right", checkpoint.verify().is_sound)
    state = dtckpt.restore(folder / COMMITTED)  # without a mesh: whole tensors, in this process
    is_whole = f"step_{int(state['step'])}" == COMMITTED and state["config"] == train_bytes_lm.CONFIG
    check(f"it restores: step {int(state['step'])}, {state['config']}", is_whole)
    listed = sorted(item.name for item in folder.iterdir() if not item.name.startswith("."))
    check(f"{KILLED} is not listed: {' '.join(listed)}", KILLED not in listed and COMMITTED in listed)
    try:
        dtckpt.open_checkpoint(folder / KILLED).close()
    except CheckpointNotFoundError as error:
        detail(f"✓ and cannot be opened: {error}", "green")
    else:
        raise DemoError(f"{KILLED}, whose save did not complete, can be opened")


def reshard(source: Path, target: Path) -> None:
    """Lay a checkpoint out for two clients; check that no bit changed."""
    arguments = ["reshard", str(source), str(target), *RESHARD]
    detail(f"$ dtckpt {shlex.join(arguments)}")
    result = subprocess.run([sys.executable, "-m", "dtckpt", *arguments], check=False)
    if result.returncode != 0:
        raise DemoError(f"dtckpt reshard ended with {result.returncode}")
    with dtckpt.open_checkpoint(source) as before, dtckpt.open_checkpoint(target) as after:
        dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in after.tensors.values()})
        is_equal = set(before.tensors) == set(after.tensors) and all(
            torch.equal(before.read(name), after.read(name)) for name in before.tensors
        )
        check(f"{len(after.tensors)} tensors ({', '.join(dtypes)}) are equal bit for bit", is_equal)


# --- results --------------------------------------------------------------------------------------------------------


def compare(reference: Facts, interrupted: Facts, resumed: Facts) -> None:
    """Print the losses side by side; check that they are equal."""
    first = min(resumed)
    lived = {step: facts for step, facts in interrupted.items() if step < first} | resumed
    differences = {step: abs(lived[step]["loss"] / reference[step]["loss"] - 1) for step in reference}
    table = Table("step", "clients", "loss", "uninter-\nrupted", "relative\ndifference", "checkpoint\nbytes", "seconds")
    for column in table.columns:
        column.justify = "right"
    for step in [1, *range(4, STEPS + 1, 4)]:
        facts = lived[step]
        table.add_row(
            str(step),
            "4" if step < first else "2",
            f"{facts['loss']:.6f}",
            f"{reference[step]['loss']:.6f}",
            f"{differences[step]:.1e}",
            f"{facts['nbytes']:,}" if "nbytes" in facts else "",
            f"{facts['save_s']:.2f}" if "save_s" in facts else "",
            end_section=step == first - 1,
        )
    console.print(table)
    worst = max(differences.values())
    check(f"all losses are equal within {TOLERANCE:.0e} (largest relative difference: {worst:.1e})", worst <= TOLERANCE)
    start, end = reference[1]["loss"], lived[STEPS]["loss"]
    check(f"the model learns: loss {start:.2f} at step 1, {end:.2f} at step {STEPS}", end < 0.6 * start)


def picture(before: Path, after: Path, file: Path) -> None:
    """Draw the layout of one moment before and after."""
    panels = []
    for title, path in (("before: four clients", before), ("after dtckpt reshard: two clients", after)):
        with dtckpt.open_checkpoint(path) as checkpoint:
            info = checkpoint.info(MOMENT)
            panels.append((title, info.layout, info.shape))
    plot_layouts.draw(MOMENT, panels, file)


def demo(out: Path, device: str) -> None:
    """Run everything; the four clients, and then two, train on CPUs or share the GPUs that there are."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    committed, resharded = out / "interrupted" / COMMITTED, out / "resharded"
    on_four, on_two = ([f"--device={device}", *layouts] for layouts in (FOUR_CLIENTS, TWO_CLIENTS))
    with coordinator(out) as address:
        say(f"A coordinator serves at {address}; four clients train without interruption")
        reference = train("reference", 4, address, out, *on_four)
        say(f"Four clients train and save every {SAVE_EVERY} steps; one is killed (kill -9) in the middle of a save")
        interrupted = train_until_killed("interrupted", address, out, *on_four)
        say("Nothing that was committed is lost")
        check_nothing_lost(committed.parent)
        say("The last checkpoint is laid out anew, for two clients and other layouts")
        reshard(committed, resharded)
        say("Two clients resume from it")
        resumed = train("resumed", 2, address, out, f"--resume={resharded}", f"--save-every={SAVE_EVERY}", *on_two)
        say("Three hosts save in their memory; one is lost with it, and the others bring its state back")
        lose_a_host(out, address)
        say("An engine on another mesh takes the weights of two trainers from memory, as they change")
        hand_over(out, address)
    say("What they learned, step by step")
    compare(reference, interrupted, resumed)
    picture(committed, resharded, out / "layouts.svg")
    say(f"Done; in {out}:")
    detail(f"layouts.svg         regions of each device before and after: {(out / 'layouts.svg').absolute().as_uri()}")
    detail("reference           checkpoints of four clients, without interruption; losses in reference.jsonl")
    detail(f"interrupted         checkpoints until a client was killed: dtckpt ls {out / 'interrupted'}")
    detail(f"resharded           the last of them, laid out anew: dtckpt inspect {out / 'resharded'}")
    detail("resumed             checkpoints of the two clients that went on")
    detail("in-memory           checkpoints that the three hosts wrote to storage")
    detail("live                what the trainer published and what the engine said; the output of both")


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="Save, lose a client, reshard, resume.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder, emptied first")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="hosts of the last part use CPUs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes are ended then, too
    try:
        demo(arguments.output, arguments.device)
    except (DemoError, DtckptError) as error:
        console.print(f"demo: failed: {error}", style="bold red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
