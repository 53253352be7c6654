import datetime
import enum
import pathlib

import numpy as np
import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import Layout, PerClient, SaveOptions, abstract_mesh
from dtckpt.cli.output import pager_command

from .conftest import run_on_terminal


def test_text(run, source, tensors):
    result = run("inspect", source)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert lines[:7] == [
        f"checkpoint  {source}",
        "format      1",
        "job         localhost",
        "clients     1",
        "kvstore     ocdbt",
        "mesh 0      x=2,y=2 (4 CPU devices) named train",
        f"tensors     9, 17 chunks, {nbytes} B",
    ]
    rows = {line.split()[0]: line.split() for line in lines[8:] if line}
    assert rows["model/uneven"][1:8] == ["7x5", "float64", "y+x,unsharded", "4", "280", "B", "2x5"]
    assert rows["optim/scale"][1:8] == ["scalar", "float32", "scalar", "1", "4", "B", "scalar"]
    assert rows["optim/ids"][1:8] == ["6x2", "int64", "none", "1", "96", "B", "6x2"]
    with dtckpt.open_checkpoint(source) as checkpoint:
        assert rows["optim/ids"][8] == f"{checkpoint.info('optim/ids').content_digest:016x}"
    assert rows["step"][1:] == ["7"]
    # Values steer no terminal and break no line.
    assert "note   'a\\nb \\x1b[31m'" in lines


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """A model of 12 layers, of which one is of another dtype."""
    path = tmp_path_factory.mktemp("layered") / "c"
    layers = {str(layer): {"w": torch.ones(4, 6), "norm": torch.ones(5)} for layer in range(12)}
    layers["7"]["norm"] = torch.ones(5, dtype=torch.float64)
    dtckpt.save(path, {"model": {"layers": layers, "embed": torch.ones(30)}, "steps": [1, *range(10)]})
    return path


def rows_of(result, header="TENSOR"):
    """Return the rows of a table, up to the empty line behind it."""
    lines = result.out.splitlines()
    start = next(position for position, line in enumerate(lines) if line.startswith(header))
    stop = next((position for position, line in enumerate(lines) if position > start and not line), len(lines))
    return lines[start + 1 : stop]


def test_the_state_of_an_optimizer_has_the_names_of_its_parameters(run, tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    lines = run("inspect", tmp_path / "s").out.splitlines()
    assert any(line.startswith("optimizer/state/model/weight/momentum_buffer ") for line in lines)
    assert any(line.split() == ["optimizer/param_groups/0/params/0", "'model/weight'"] for line in lines)


def test_tensors_that_are_alike_share_a_line_in_natural_order(run, layered):
    rows = [row.split() for row in rows_of(run("inspect", layered))]
    assert [row[:3] for row in rows] == [
        ["model/embed", "30", "float32"],
        ["model/layers/{0..6,8..11}/norm", "5", "float32"],
        ["model/layers/{0..11}/w", "4x6", "float32"],
        ["model/layers/7/norm", "5", "float64"],
    ]
    assert rows[1][4:] == ["11", "220", "B", "5", "(11", "tensors)"]
    values = [row.split() for row in rows_of(run("inspect", layered), "VALUE")]
    assert [row[0] for row in values] == [f"steps/{position}" for position in range(11)]
    each = [row.split()[0] for row in rows_of(run("inspect", layered, "--each", "--tensor", "*/norm"))]
    assert each == [f"model/layers/{layer}/norm" for layer in range(12)]
    largest = [row.split()[0] for row in rows_of(run("inspect", layered, "--sort", "size"))]
    assert largest[:2] == ["model/layers/{0..11}/w", "model/layers/{0..6,8..11}/norm"]
    lines = run("inspect", layered, "--chunks", "--tensor", "*/w").out.splitlines()
    assert [line.split()[0] for line in lines if "/w/c/0" in line] == [f"model/layers/{layer}/w" for layer in range(12)]


def test_a_tree_with_sizes(run, layered):
    rows = [row.split() for row in rows_of(run("inspect", layered, "--tree"))]
    assert rows == [
        ["model/", "25", "1.5", "KiB"],
        ["embed", "1", "120", "B", "30", "float32"],
        ["layers/", "24", "1.4", "KiB"],
        ["7/norm", "1", "40", "B", "5", "float64"],
        ["{0..6,8..11}/norm", "11", "220", "B", "5", "float32"],
        ["{0..11}/w", "12", "1.1", "KiB", "4x6", "float32"],
    ]
    rows = [row.split()[0] for row in rows_of(run("inspect", layered, "--tree", "--sort", "size"))]
    assert rows == ["model/", "layers/", "{0..11}/w", "{0..6,8..11}/norm", "7/norm", "embed"]


def test_json_is_the_same_with_every_option(run, layered):
    plain = run("inspect", layered, "--json").out
    assert run("inspect", layered, "--json", "--tree", "--sort", "size", "--each").out == plain


def test_long_text_goes_through_a_pager_on_a_terminal(layered):
    # A pager that ends before it has read everything.
    result = run_on_terminal("inspect", layered, "--each", PAGER="head -n 1")
    assert (result.code, result.out) == (0, f"checkpoint  {layered}\n")
    assert run_on_terminal("inspect", layered, "--each", "--no-pager", PAGER="false").out.count("\n") > 30
    assert run_on_terminal("inspect", layered, "--each", PAGER="cat").out.count("\n") > 30


def test_which_pager(monkeypatch):
    assert pager_command({"PAGER": "more -s"}) == "more -s"
    assert pager_command({"PAGER": ""}) is None
    assert pager_command({"PAGER": "cat"}) is None
    for found, command in (("/usr/bin/less", "less"), (None, None)):
        monkeypatch.setattr("shutil.which", lambda name, found=found: found)
        assert pager_command({}) == command


def test_json(run, source, tensors):
    result = run("inspect", source, "--json")
    (event,) = result.events
    assert event["event"] == "checkpoint"
    assert (event["format_version"], event["num_clients"], event["kvstore"]) == (1, 1, "ocdbt")
    assert event["meshes"] == [{"name": "train", "axes": {"x": 2, "y": 2}, "devices": 4, "device_type": "CPU"}]
    assert {tensor["name"]: tensor["bytes"] for tensor in event["tensors"]} == {k: v.nbytes for k, v in tensors.items()}
    assert event["totals"] == {"tensors": 9, "chunks": 17, "bytes": sum(v.nbytes for v in tensors.values())}
    assert event["values"] == {
        "step": 7,
        "lr": 1e-3,
        "limit": {"float": "inf"},
        "raw": {"bytes": "AHg="},
        "note": "a\nb \x1b[31m",
    }
    assert "chunk_list" not in event["tensors"][0]


def test_chunks_of_some_tensors(run, source):
    (event,) = run("inspect", source, "--json", "--chunks", "--tensor", "*/w", "--tensor", "optim/sc*").events
    assert [tensor["name"] for tensor in event["tensors"]] == ["model/w", "optim/scale"]
    assert event["totals"]["tensors"] == 2
    first = event["tensors"][0]["chunk_list"][1]
    with dtckpt.open_checkpoint(source) as checkpoint:
        chunk = checkpoint.tensors["model/w"].chunks[1]
    assert first == {
        "offset": [0, 3],
        "shape": [4, 3],
        "key": "model/w/c/0/1",
        "digest": f"{chunk.digest:016x}",
        "client": 0,
        "origin": None,
    }
    text = run("inspect", source, "--chunks", "--tensor", "model/w").out
    assert "tensors     1 of 9, 4 chunks" in text
    assert f"model/w  0:4,3:6  model/w/c/0/1  {chunk.digest:016x}  0" in text


def test_stored_dtype_parts_and_several_meshes(run, tmp_path):
    tree = {
        "a": packed(torch.rand(4), Layout(["x"], abstract_mesh({"x": 2}))),
        "b": packed(torch.rand(4), Layout(["y"], abstract_mesh({"y": 4}))),
    }
    dtckpt.save(tmp_path / "c", tree, options=SaveOptions(save_as_bf16=True))
    text = run("inspect", tmp_path / "c").out
    assert "float32 (stored bfloat16)" in text
    assert "x on mesh 0" in text
    assert "y on mesh 1" in text
    dtckpt.sharded_save(abstract_mesh({"x": 1}), str(tmp_path / "p"), ["w"], ["4 2 0,2:0,2"], [torch.ones(2, 2)])
    assert "1 (part)" in run("inspect", tmp_path / "p").out
    assert run("inspect", tmp_path / "p", "--json").events[0]["tensors"][0]["is_whole"] is False


def test_a_checkpoint_of_nothing(run, tmp_path):
    dtckpt.save(tmp_path / "c", {})
    assert "tensors     0, 0 chunks, 0 B" in run("inspect", tmp_path / "c", "--chunks").out


def test_not_found(run, source, tmp_path):
    run("inspect", tmp_path / "none").fails(3, "no checkpoint at")
    run("inspect", "").fails(3, "no path")
    run("inspect", source, "--tensor", "w*").fails(3, "matches 'w*'", "'model/half'")
    run("inspect", source / "dtckpt.manifest").fails(3)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x08\x01\x12\x04abcd"])
def test_a_manifest_that_is_none(run, tmp_path, data):
    (tmp_path / "dtckpt.manifest").write_bytes(data)
    run("inspect", tmp_path).fails(1, "dtckpt.manifest")


def test_a_manifest_of_a_newer_format(run, tmp_path):
    (tmp_path / "dtckpt.manifest").write_bytes(b"\x08\x63")
    result = run("inspect", tmp_path, "--json").fails(1, "newer format")
    assert result.events == [
        {"event": "error", "code": "CheckpointVersionError", "exit_code": 1, "message": result.events[0]["message"]}
    ]


@pytest.mark.parametrize("path", ["a\nb\x1b[31m", "\udcff", "x" * 5000, "../../..", "[red]"])
def test_hostile_paths_stay_on_one_line(run, tmp_path, path):
    result = run("inspect", tmp_path / path)
    assert result.code in (3, 75)
    assert result.err.startswith("dtckpt: error: ")
    assert result.err[:-1].isprintable()


def test_what_the_save_took(run, source, tensors):
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    lines = [line.split() for line in run("inspect", source).out.splitlines()]
    start = lines.index(["PHASE", "MEDIAN", "SLOWEST", "CLIENT", "SIZE"])
    plan, write = lines[start + 1 :]
    assert (plan[0], plan[2], plan[4:]) == ("plan", "s", ["s", "0", "0", "B"])
    assert (write[0], write[1], write[5:]) == ("write", write[3], ["0", str(nbytes), "B"])
    phases = run("inspect", source, "--json").events[0]["phases"]
    assert [(each["client"], each["phase"], each["bytes"]) for each in phases] == [(0, "plan", 0), (0, "write", nbytes)]
    assert all(each["seconds"] > 0 for each in phases)


def test_values_that_json_lacks(run, tmp_path):
    dtckpt.save(tmp_path / "s", {"set": {2, 1}, "complex": 1j, "range": range(3), "size": torch.Size([2])})
    (event,) = run("inspect", tmp_path / "s", "--json").events
    assert event["values"] == {
        "set": {"set": [{"value": 1}, {"value": 2}]},
        "complex": {"complex": ["0.0", "1.0"]},
        "range": {"range": [0, 3, 1]},
        "size": {"torch.Size": [2]},
    }
    assert "complex  1j" in run("inspect", tmp_path / "s").out


class Phase(enum.Enum):
    DECAY = 1


def test_values_of_training_code(run, tmp_path):
    tree = {
        "phase": Phase.DECAY,
        "dtype": torch.bfloat16,
        "data": pathlib.Path("a/b"),
        "day": datetime.date(2030, 1, 2),
        "loader": PerClient({"position": 17, "rng": np.arange(3, dtype=np.uint32)}),
    }
    dtckpt.save(tmp_path / "s", tree)
    lines = run("inspect", tmp_path / "s").out.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if " " in line}
    assert rows["phase"] == "EnumMember(kind='Phase', name='DECAY')"
    assert (rows["dtype"], rows["data"], rows["day"]) == (
        "torch.bfloat16",
        "PosixPath('a/b')",
        "datetime.date(2030, 1, 2)",
    )
    assert rows["loader/0/position"] == "17"
    assert rows["loader/0/rng"].split()[:2] == ["3", "uint32"]
    (event,) = run("inspect", tmp_path / "s", "--json").events
    assert event["values"] == {
        "phase": {"enum": ["Phase", "DECAY"]},
        "dtype": {"torch.dtype": "bfloat16"},
        "data": {"PosixPath": "a/b"},
        "day": {"date": "2030-01-02"},
        "loader/0/position": 17,
    }
