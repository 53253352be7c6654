"""The loops of examples/ go on as if nothing had been between: saved by 4 processes, restored by 1, 2, 3 and 4."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from .example_cases import run_loop

LOOPS = {
    "train_ddp": (),
    "train_fsdp2": (),
    "train_fsdp2_tp": (),
    "train_hsdp": (),
    "train_titan": (),
    "train_accelerate": (),
    "train_hf_trainer": (),
    "train_lightning, ddp": ("--strategy", "ddp"),
    "train_lightning, fsdp2": ("--strategy", "fsdp2"),
}
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, STOP = 6, 4
WITHOUT_RANDOM = ("--dropout", "0")
"""With dropout, another number of processes draws other masks."""


def losses(pool, loop, folder, clients, *options):
    """Run a loop; return its losses, which are the same on all clients."""
    argv = ["--checkpoints", str(folder), "--steps", str(STEPS), *LOOPS[loop], *options]
    answers = pool.values(run_loop, loop.partition(",")[0], argv, clients=clients)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.share(2, of="loops")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_goes_on(framework_pool, tmp_path, loop):
    whole = losses(framework_pool, loop, tmp_path / "whole", 4)
    assert len(whole) == STEPS
    before = losses(framework_pool, loop, tmp_path / "part", 4, "--stop-after", str(STOP))
    assert before == whole[:STOP]
    assert losses(framework_pool, loop, tmp_path / "part", 4) == whole[STOP:]


@pytest.mark.share(2, of="loops")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_goes_on_with_another_number_of_processes(framework_pool, tmp_path, loop):
    first = tmp_path / "first"
    before = losses(framework_pool, loop, first, 4, *WITHOUT_RANDOM, "--stop-after", str(STOP))
    assert len(before) == STOP
    folders = {clients: shutil.copytree(first, tmp_path / str(clients), symlinks=True) for clients in (1, 2, 3)}
    expected = pytest.approx(losses(framework_pool, loop, first, 4, *WITHOUT_RANDOM), rel=1e-5)
    for clients, folder in folders.items():
        assert losses(framework_pool, loop, folder, clients, *WITHOUT_RANDOM) == expected, clients


def test_other_strategies_of_lightning_go_on(framework_pool, tmp_path):
    expected = losses(framework_pool, "train_lightning, ddp", tmp_path / "whole", 2)[STOP:]
    for before, after in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        folder = tmp_path / before
        losses(framework_pool, f"train_lightning, {before}", folder, 2, "--stop-after", str(STOP))
        assert losses(framework_pool, f"train_lightning, {after}", folder, 2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", sorted({loop.partition(",")[0] for loop in LOOPS}))
def test_the_first_screen_has_the_commands(name):
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    commands = re.findall(rf"^ *torchrun --nproc-per-node \d -m examples\.{name} --checkpoints ckpt.*", text, re.M)
    assert len(commands) == 2
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text()
