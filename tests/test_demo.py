"""The demo, which is the first thing that a new user runs, keeps working."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interop.example_cases import run_loop
from support.client_processes import Pool
from support.coordinators import server_in_thread

from examples import train_and_rollout

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.share(1, of="jobs of torchrun")
@pytest.mark.processes
def test_demo_shows_what_it_claims(tmp_path: Path) -> None:
    output = tmp_path / "demo-output"
    command = [sys.executable, "-m", "examples.demo", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all losses are equal" in result.stdout
    assert (output / "layouts.svg").stat().st_size > 0


def test_its_training_goes_on_with_fewer_clients(pool, tmp_path: Path) -> None:
    """What the demo starts by torchrun, in each run of the tests."""
    checkpoints, losses = tmp_path / "run", tmp_path / "losses"
    files = ["--checkpoints", str(checkpoints), "--losses", str(losses), "--steps", "4"]
    pool.values(run_loop, "train_bytes_lm", [*files, "--save-every", "2"], clients=4)
    whole = [json.loads(line)["loss"] for line in losses.read_text().splitlines()]
    fewer = ["--mesh", "data=2", "--matrix-spec", "unsharded,data", "--vector-spec", "data"]
    pool.values(run_loop, "train_bytes_lm", [*files, *fewer, "--resume", str(checkpoints / "step_2")], clients=2)
    resumed = [json.loads(line)["loss"] for line in losses.read_text().splitlines()]
    assert len(whole) == 4
    assert resumed == pytest.approx(whole[2:], rel=1e-4)


def test_its_training_in_memory_goes_on_from_there(pool, tmp_path: Path) -> None:
    """Four hosts, of which the second one comes back empty, and then three."""
    checkpoints, memory = tmp_path / "run", tmp_path / "memory"
    arguments = ["--checkpoints", str(checkpoints), "--memory", str(memory), "--dropout", "0"]
    pool.values(run_loop, "train_in_memory", [*arguments, "--steps", "11"], clients=4)
    shutil.rmtree(memory / "host1")
    for clients, steps in ((4, 16), (3, 17)):
        pool.values(run_loop, "train_in_memory", [*arguments, "--steps", str(steps)], clients=clients)
    facts = [json.loads(line) for line in Path(f"{checkpoints}.jsonl").read_text().splitlines()]
    restores = [
        (each["restored"], each["from_root"], each["received_nbytes"] > 0) for each in facts if "restored" in each
    ]
    assert restores == [(10, False, True), (15, False, True)]
    losses = [(each["step"], each["loss"]) for each in facts if "step" in each]
    assert losses[10] == losses[11] == (11, losses[10][1]), "the step that is done again has the same loss"


@pytest.mark.processes
def test_its_engine_takes_the_weights_of_its_trainer(tmp_path: Path) -> None:
    """Two jobs, as the demo starts them by torchrun."""
    with (
        server_in_thread(heartbeat_timeout_s=20.0) as port,
        Pool() as trainers,
        Pool() as engines,
        ThreadPoolExecutor(1) as thread,
    ):
        options = {"clients": 2, "coordinator": f"127.0.0.1:{port}"}
        loop, folder = "train_and_rollout", f"--folder={tmp_path}"
        trained = thread.submit(trainers.values, run_loop, loop, ["--job=train", folder], **options)
        engines.values(run_loop, loop, ["--job=roll-out", folder], **options)
        trained.result()
    versions = train_and_rollout.compare(tmp_path)
    texts = [facts["text"] for facts in versions]
    assert len(set(texts)) > 2
    assert train_and_rollout.TEXT.decode().startswith(texts[-1][:32])
    assert len({facts["nbytes"] for facts in versions}) == 1


def test_an_engine_with_other_weights_is_found(tmp_path: Path) -> None:
    steps = range(0, train_and_rollout.STEPS + 1, train_and_rollout.EVERY)
    for name in ("published", "rollouts"):
        lines = [json.dumps({"step": step, "digest": f"{name if step == steps[2] else step}"}) for step in steps]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(train_and_rollout.DemoError, match=f"step {steps[2]}"):
        train_and_rollout.compare(tmp_path)
