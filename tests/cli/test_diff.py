import json

import pytest
import safetensors.torch
import torch
from support.states import packed

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.inspecting.tensor_comparison import DifferenceKind
from dtckpt.cli import diff

from .conftest import run_on_terminal, run_process


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints of a training run, of which the second one came from another mesh."""
    folder = tmp_path_factory.mktemp("pair")
    for name, size in (("a", 2), ("b", 4)):
        mesh = abstract_mesh({"x": size})
        layers = {f"layers.{layer}.w": torch.arange(12.0).reshape(4, 3) for layer in range(12)}
        tree = {"model": layers | {"norm": torch.ones(3)}, "step": size}
        tree["model"]["head"] = packed(torch.arange(8.0), Layout(["x"], mesh))
        if name == "b":
            layers["layers.3.w"][2, 1] += 0.5
            layers["layers.3.w"][0, 0] = float("nan")
            for layer in range(8, 11):
                tree["model"][f"layers.{layer}.w"] = torch.zeros(2, dtype=torch.float16)
            tree["model"]["norm"] = tree["model"]["norm"].double()
        del tree["model"]["layers.0.w" if name == "b" else "layers.11.w"]
        dtckpt.save(folder / name, tree)
    return str(folder / "a"), str(folder / "b")


def rows_of(result):
    return [line.split(maxsplit=2) for line in result.out.splitlines()]


def test_one_long_name_does_not_make_every_line_long(tmp_path, run):
    names = ["".join(chr(97 + number // 26**digit % 26) for digit in range(3)) for number in range(300)]
    safetensors.torch.save_file({name: torch.ones(1) for name in [*names, "x" * 100_000]}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    for result in (
        run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors"),
        run("inspect", tmp_path / "a.safetensors"),
    ):
        assert len(result.out) < 500_000


def test_text(run, pair):
    result = run("diff", *pair)
    assert (result.code, result.err) == (1, "")
    lines = result.out.splitlines()
    assert lines[:4] == [f"A  {pair[0]}", f"B  {pair[1]}", "", lines[3]]
    assert lines[3].split() == ["PATH", "DIFFERENCE", "A", "B"]
    rows = [line.split(maxsplit=2) for line in lines[4:-3]]
    assert [row[:2] for row in rows] == [
        ["model/head", "layout"],
        ["model/layers.0.w", "missing"],
        ["model/layers.3.w", "elements"],
        ["model/layers.{8..10}.w", "shape"],
        ["model/layers.{8..10}.w", "dtype"],
        ["model/layers.11.w", "extra"],
        ["model/norm", "dtype"],
        ["step", "value"],
    ]
    assert rows[0][2].split() == ["x", "on", "x=2", "x", "on", "x=4"]
    assert rows[1][2].split() == ["4x3", "float32"]
    assert rows[3][2].split() == ["4x3", "2"]
    assert lines[-2].startswith("12 tensors (8 by digest, 36 B read in ")
    assert lines[-2].endswith("compared: 1 missing, 1 extra, 1 value, 3 shape, 4 dtype, 1 layout, 1 elements")
    assert "--values" in lines[-1]


def test_values(run, pair):
    result = run("diff", *pair, "--values", "--select", "*.3.w")
    (row,) = [line for line in result.out.splitlines() if line.startswith("model/layers.3.w")]
    assert row.split(maxsplit=4)[1:4] == ["elements", "7", "7.5"]
    assert row.endswith(
        "2 of 12 elements differ, max abs error 0.5 at [2, 1], max rel error 0.0666666667 at [2, 1], 1 with NaN"
    )
    assert "--values" not in result.out


def test_json(run, pair):
    *differences, result = run("diff", *pair, "--values", "--json").events
    assert {event["event"] for event in differences} == {"difference"}
    by_kind = {(event["path"], event["kind"]): event for event in differences}
    assert by_kind["model/layers.3.w", "elements"] == {
        "event": "difference",
        "path": "model/layers.3.w",
        "kind": "elements",
        "a": None,
        "b": None,
        "elements": 12,
        "different": 2,
        "nan": 1,
        "max_abs": {"index": [2, 1], "error": 0.5, "a": 7.0, "b": 7.5},
        "max_rel": {"index": [2, 1], "error": pytest.approx(0.5 / 7.5), "a": 7.0, "b": 7.5},
    }
    facts = {key: (event["a"], event["b"]) for key, event in by_kind.items()}
    assert facts["step", "value"] == (2, 4)
    assert facts["model/layers.0.w", "missing"] == ({"shape": [4, 3], "dtype": "float32", "bytes": 48}, None)
    assert facts["model/head", "layout"][1] == {"sharding_specs": ["x"], "mesh": {"x": 4}}
    assert facts["model/norm", "dtype"][1] == {"dtype": "float64", "stored_dtype": "float64"}
    assert facts["model/layers.8.w", "shape"] == ([4, 3], [2])
    assert {
        key: result[key] for key in ("event", "is_same", "differences", "tensors", "values", "by_digest", "read")
    } == {
        "event": "diff",
        "is_same": False,
        "differences": len(differences),
        "tensors": 12,
        "values": 1,
        "by_digest": 7,
        "read": 2,
    }
    plain = run("diff", *pair, "--json", "--select", "*.3.w").events[0]
    with dtckpt.open_checkpoint(pair[0]) as checkpoint:
        assert plain["a"] == f"{checkpoint.info('model/layers.3.w').content_digest:016x}"


def test_errors_that_json_lacks(run, tmp_path):
    dtckpt.save(tmp_path / "a", {"w": torch.tensor(1.0)})
    dtckpt.save(tmp_path / "b", {"w": torch.tensor(float("inf"))})
    event = run("diff", tmp_path / "a", tmp_path / "b", "--values", "--json").events[0]
    infinite = {"float": "inf"}
    assert event["max_abs"] == {"index": [], "error": infinite, "a": 1.0, "b": infinite}


def test_the_same(run, pair):
    result = run("diff", pair[0], pair[0])
    assert (result.code, result.out) == (0, "13 tensors (13 by digest) and 1 value compared: all the same\n")
    result = run("diff", *pair, "--select", "model/head", "--ignore", "layout")
    assert (result.code, result.out) == (0, "1 tensor (1 by digest) and 0 values compared: all the same\n")


def test_a_model_in_another_format(run, pair, tmp_path):
    model = tmp_path / "model.safetensors"
    with dtckpt.open_checkpoint(pair[0]) as checkpoint:
        tensors = {name.removeprefix("model/"): checkpoint.read(name) for name in checkpoint.tensors}
    safetensors.torch.save_file(tensors, model)
    args = ("--select", "model/*", "--rename", "model/*=*", "--ignore", "layout")
    assert run("diff", pair[0], model, *args).code == 0
    safetensors.torch.save_file(tensors | {"more": torch.ones(1)}, model)
    result = run("diff", pair[0], model, *args, "--no-values", "--json")
    assert result.code == 1
    assert {(event["kind"], event.get("reason")) for event in result.events[:-1]} == {
        ("extra", None),
        ("unknown", "elements were not read, and no digests tell"),
    }


def test_what_cannot_be_used(run, pair, tmp_path):
    run("diff", pair[0], tmp_path / "none").fails(3, "no checkpoint at")
    run("diff", *pair, "--select", "q*").fails(3, "matches 'q*'")
    run("diff", *pair, "--rename", "a").fails(2, "--rename 'a'")
    run("diff", *pair, "--ignore", "nothing").fails(2, "--ignore")
    run("diff", *pair, "--max-memory", "1KiB").fails(2, "--max-memory is too small")
    run("diff", *pair, "--max-memory", "x").fails(2, "size cannot be used")
    assert run("diff", pair[0], tmp_path / "none", "--json").events[0]["code"] == "CheckpointNotFoundError"


def test_kinds_are_those_of_the_library():
    assert tuple(DifferenceKind) == diff.DIFFERENCES
    for kind in DifferenceKind:
        assert kind in diff.EPILOG


def test_names_steer_no_terminal(run, tmp_path):
    dtckpt.save(tmp_path / "a", {"note": "a\nb\x1b[31m", "k\x1b[0m": 1})
    dtckpt.save(tmp_path / "b", {"note": "c"})
    assert "\x1b" not in run("diff", tmp_path / "a", tmp_path / "b").out


def test_on_a_terminal(pair):
    """The text goes through the pager that the user has set; with ``--no-pager`` it does not."""
    for args, shown in ((["--values"], "PAGED"), (["--values", "--no-pager"], "2 of 12")):
        result = run_on_terminal("diff", *pair, *args, PAGER="sed s/^/PAGED:/")
        assert result.code == 1
        assert shown in result.out
        assert "comparing" in result.out  # the bar
        assert ("PAGED" in result.out) == (shown == "PAGED")


def test_urls(run, pair, tmp_path):
    dtckpt.save("memory://diffs/step_1", {"w": torch.ones(3)}, options=SaveOptions(kvstore="zarr"))
    dtckpt.save(tmp_path / "step_1", {"w": torch.ones(3)})
    assert run("diff", "memory://diffs/step_1", tmp_path / "step_1").code == 0
    result = run("diff", "memory://diffs/step_1", f"file://{pair[0]}", "--json")
    assert result.code == 1
    assert run("cat", "memory://diffs/step_1", "w[1:]").out == "[1. 1.]\n"


def test_in_a_pipe(pair):
    result = run_process("diff", *pair, "--values", "--json")
    assert (result.code, result.err) == (1, "")
    assert json.loads(result.out.splitlines()[-1])["event"] == "diff"
