"""The commands on checkpoints of other libraries."""

import pytest
from checkpoint.foreign.sample_files import SAMPLES

ORBAX = SAMPLES / "orbax" / "v0_manager" / "3"
TENSORFLOW = SAMPLES / "tensorflow" / "dtensor_2x2_obj" / "ck-1"


@pytest.mark.parametrize(
    ("path", "kind", "name"), [(ORBAX, "orbax", "state/params"), (TENSORFLOW, "tensorflow", "model/w")]
)
def test_commands(run, path, kind, name, tmp_path):
    inspected = run("inspect", path)
    assert (inspected.code, inspected.err) == (0, "")
    assert kind in inspected.out
    assert name in inspected.out
    verified = run("verify", path)
    assert verified.code == 0
    assert run("convert", path, tmp_path / "own").code == 0
    compared = run("diff", path, tmp_path / "own", "--ignore", "layout")
    assert (compared.code, compared.err) == (0, "")
    back = run("convert", tmp_path / "own", tmp_path / "back", "--to", kind, "--select", f"{name}*")
    assert back.code == 0
    assert run("inspect", tmp_path / "back").out.count(kind)
