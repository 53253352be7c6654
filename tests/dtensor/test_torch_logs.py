"""The log ``dtckpt.dtensor`` follows PyTorch's setting ``dtensor``."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from dtckpt import Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.operators import dispatch

OURS = logging.getLogger("dtckpt.dtensor")
MESH = abstract_mesh({"x": 4})


@pytest.fixture
def set_logs():
    yield torch._logging.set_logs
    torch._logging.set_logs()


def run() -> None:
    tensor = distribute_tensor(torch.arange(12.0).reshape(6, 2), MESH, [Shard(0)])
    dispatch.clear()
    for _ in range(2):
        _ = tensor + 1
    tensor.nonzero()
    tensor.redistribute(placements=[Replicate()])


def test_debug_shows_dispatch_choices_and_redistributions(set_logs, capsys):
    set_logs(dtensor=logging.DEBUG)
    run()
    text = capsys.readouterr().err
    for line in (
        "operator aten.add.Tensor: chose operands as it is, results [S(0)]",
        "operator aten.add.Tensor will run by rule on (6, 2) [S(0)]",
        "operator aten.add.Tensor runs by rule, as before, on (6, 2) [S(0)]",
        "operator aten.nonzero.default has no rule",
        "redistribute (6, 2) of torch.float32",
    ):
        assert text.count(line) >= 1, line


def test_info_shows_what_has_no_rule_only(set_logs, capsys):
    set_logs(dtensor=logging.INFO)
    run()
    assert [line.partition("] ")[2][:31] for line in capsys.readouterr().err.splitlines()] == [
        "operator aten.nonzero.default h"
    ]


def test_off_it_costs_nothing_and_a_level_of_the_program_stays(set_logs, capsys):
    run()
    assert not OURS.isEnabledFor(logging.DEBUG)
    set_logs(dtensor=logging.DEBUG)
    assert OURS.isEnabledFor(logging.DEBUG)
    set_logs(dtensor=logging.ERROR)
    assert (OURS.level, OURS.handlers) == (logging.NOTSET, [])
    OURS.setLevel(logging.INFO)
    set_logs()
    level, OURS.level = OURS.level, logging.NOTSET
    OURS.setLevel(logging.NOTSET)
    assert level == logging.INFO
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["all", "distributed"])
def test_settings_that_include_it_count_too(set_logs, capsys, name):
    set_logs(**{name: logging.DEBUG})
    run()
    assert "operator aten.add.Tensor: chose operands as it is, results [S(0)]" in capsys.readouterr().err
    set_logs(**{name: logging.DEBUG}, dtensor=logging.ERROR)
    run()
    assert "operator" not in capsys.readouterr().err
    set_logs(**{name: logging.ERROR})
    assert (OURS.level, OURS.handlers) == (logging.NOTSET, [])


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("setting", "level"),
    [
        ("+dtensor", logging.DEBUG),
        ("dtensor", logging.INFO),
        ("+all", logging.DEBUG),
        ("all", logging.INFO),
        ("distributed", logging.INFO),
        ("-all", logging.WARNING),
        ("+all,-dtensor", logging.WARNING),
        ("graph_breaks", logging.WARNING),
    ],
)
def test_the_environment_says_it(setting, level):
    code = "import dtckpt.dtensor, logging; print(logging.getLogger('dtckpt.dtensor.operators').getEffectiveLevel())"
    environment = {**os.environ, "TORCH_LOGS": setting}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(shown.stdout) == level
