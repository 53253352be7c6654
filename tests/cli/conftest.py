import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from support.states import packed, tensor_of

import dtckpt
from dtckpt import UNSHARDED, Layout, abstract_mesh
from dtckpt.cli.main import main


@dataclass(frozen=True)
class Result:
    """What one run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def events(self):
        return [json.loads(line) for line in self.out.splitlines()]

    def fails(self, code, *texts):
        """Check that it failed with one line, of which the texts are parts."""
        assert self.code == code, self
        assert self.err.startswith("dtckpt: error: "), self
        assert self.err.count("\n") == 1, self
        for text in texts:
            assert text in self.err, self
        return self


@pytest.fixture
def run(capsys):
    """Run the command in this process."""

    def call(*args):
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return call


COMMAND = [sys.executable, "-W", "error", "-m", "dtckpt.cli.main"]


def run_process(*args, program=("-m", "dtckpt.cli.main"), **options):
    """Run the command as a new process, where any warning is an error."""
    command = [sys.executable, "-W", "error", *program, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    return Result(done.returncode, done.stdout, done.stderr)


def run_on_terminal(*args, cwd=None, **environment):
    """Run the command as a process in a terminal; all that it shows is its output."""
    main_end, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    shown = []
    settings = {"TERM": "xterm", "COLUMNS": "200", "PAGER": "cat"} | environment
    with subprocess.Popen([*COMMAND, *map(str, args)], env=os.environ | settings, cwd=cwd, **streams) as process:
        os.close(terminal)
        # The other end fails once no process has the terminal open.
        with suppress(OSError):
            while data := os.read(main_end, 1 << 16):
                shown.append(data)
        code = process.wait(60)
    os.close(main_end)
    return Result(code, b"".join(shown).decode().replace("\r\n", "\n"), "")


SHAPES = {
    "model/w": ((8, 6), "float32", ["x", "y"]),
    "model/uneven": ((7, 5), "float64", [("y", "x"), UNSHARDED]),
    "model/half": ((4, 4), "bfloat16", ["y", UNSHARDED]),
    "model/tiny": ((5,), "float8_e4m3fn", ["x"]),
    "optim/a=b": ((4,), "float32", ["x"]),
    "optim/flags": ((3,), "bool", None),
    "optim/ids": ((6, 2), "int64", None),
    "optim/empty": ((0, 3), "float32", None),
    "optim/scale": ((), "float32", []),
}
VALUES = {"step": 7, "lr": 1e-3, "limit": float("inf"), "raw": b"\0x", "note": "a\nb \x1b[31m"}


@pytest.fixture(scope="session")
def tensors():
    """The tensors of the source checkpoint, whole, by name."""
    random = {name: tensor_of(name, shape, dtype) for name, (shape, dtype, _) in SHAPES.items()}
    # Rounded below, and a NaN may be rounded to another one.
    return {
        name: torch.nan_to_num(tensor) if tensor.dtype in (torch.float32, torch.float64) else tensor
        for name, tensor in random.items()
    }


@pytest.fixture(scope="session")
def source(tmp_path_factory, tensors):
    """Path of a checkpoint with all sorts of tensors and values."""
    mesh = abstract_mesh({"x": 2, "y": 2}, "train")
    tree = {"model": {}, "optim": {}, **VALUES}
    for name, whole in tensors.items():
        folder, _, key = name.partition("/")
        specs = SHAPES[name][2]
        tree[folder][key] = whole if specs is None else packed(whole, Layout(specs, mesh))
    path = tmp_path_factory.mktemp("source") / "step_7"
    dtckpt.save(path, tree)
    return path
