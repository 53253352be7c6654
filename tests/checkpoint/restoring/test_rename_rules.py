"""Other names for what is in a checkpoint, and the report of a restore."""

import re

import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import Layout, RestoreOptions, abstract_mesh
from dtckpt.checkpoint.restoring.rename_rules import renamed
from dtckpt.checkpoint.restoring.report import Cast, Reshaped
from dtckpt.errors import (
    ConfigError,
    DTypeError,
    ShapeMismatchError,
    TensorNameError,
    TensorNotFoundError,
    UnexpectedTensorError,
)

NAMES = ["encoder/0/w", "encoder/0/b", "encoder/1/w", "encoder/1/b", "head", "step"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"head": "out/w"}, {"head": "out/w"}),
        ({"head": "head"}, {}),
        ({"encoder/*/w": "blocks/*/weight"}, {"encoder/0/w": "blocks/0/weight", "encoder/1/w": "blocks/1/weight"}),
        ({"*/[01]/b": "*/bias", "encoder/1/b": "b1"}, {"encoder/0/b": "encoder/bias", "encoder/1/b": "b1"}),
        ({"enc*/0/*": "x*/*"}, {"encoder/0/w": "xoder/w", "encoder/0/b": "xoder/b"}),
        (
            {re.compile(r"encoder/(\d)/(?P<n>.)"): r"\g<n>\1"},
            {f"encoder/{i}/{n}": f"{n}{i}" for i in (0, 1) for n in "bw"},
        ),
        ({"head": "step", "step": "head"}, {"head": "step", "step": "head"}),
        (str.upper, {name: name.upper() for name in NAMES}),
        ({"*d": "z*", re.compile("head"): "zhea"}, {"head": "zhea"}),
    ],
)
def test_rules(rules, expected):
    assert renamed(rules, NAMES) == expected


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ({"head": "step"}, TensorNameError, "'head' and 'step' would both become 'step'"),
        ({"encoder/*/w": "w"}, TensorNameError, "'encoder/0/w' and 'encoder/1/w' would both become 'w'"),
        (lambda name: "x", TensorNameError, "would both become 'x'"),
        ({"h*": "a*", "*d": "b*"}, TensorNameError, "several rules match 'head'; it would become 'aead' or 'bhea'"),
        ({"tail": "x"}, TensorNotFoundError, "nothing is named 'tail'; the checkpoint has encoder/0/w"),
        ({"tail*": "x*", "head": "x"}, TensorNotFoundError, "nothing is named 'tail\\*'"),
        ({re.compile("hea"): "x"}, TensorNotFoundError, "nothing is named 'hea'"),
        (lambda name: None, ConfigError, "must return a name; got None for 'encoder/0/w'"),
    ],
)
def test_rules_that_do_not_fit(rules, error, text):
    with pytest.raises(error, match=text):
        renamed(rules, NAMES)


@pytest.mark.parametrize("wrong", [{"a": 1}, {1: "a"}, {"a": ""}, ["a"], {"a*": "b*c*"}, {"a": "*"}], ids=str)
def test_what_are_no_rules(wrong):
    with pytest.raises(ConfigError, match="option rename"):
        RestoreOptions(rename=wrong)


@pytest.fixture
def path(tmp_path):
    tree = {"encoder": [{"w": torch.ones(2), "b": torch.zeros(1)}, {"w": torch.ones(2) * 2}], "head": torch.arange(3)}
    dtckpt.save(tmp_path / "s", {**tree, "step": 7, 5: {"lr": 0.5}})
    return tmp_path / "s"


def test_into_a_target(path):
    target = {
        "blocks": [{"weight": torch.zeros(2), "b": torch.ones(1)}, {"weight": torch.zeros(2)}],
        "out": {"head": torch.zeros(3, dtype=torch.int64)},
        "n": {"step": 0},
        5: {"lr": 0.0},
    }
    reports = []
    rename = {"encoder/*/w": "blocks/*/weight", "encoder/0/b": "blocks/0/b", "head": "out/head", "step": "n/step"}
    dtckpt.restore(path, target, options=RestoreOptions(rename=rename, report=reports.append))
    assert target["blocks"][1]["weight"].tolist() == [2, 2]
    assert target["blocks"][0]["b"].tolist() == [0]
    assert target["out"]["head"].tolist() == [0, 1, 2]
    assert (target["n"], target[5]) == ({"step": 7}, {"lr": 0.5})
    (report,) = reports
    assert set(report.restored) == {"blocks/0/weight", "blocks/0/b", "blocks/1/weight", "out/head"}
    assert report.renamed["encoder/1/w"] == "blocks/1/weight"
    assert report.nbytes_read == 8 + 8 + 4 + 24
    assert (report.missing, report.unexpected, report.cast, report.reshaped, report.refusal) == ((), (), (), (), "")


def test_as_a_new_tree(path):
    tree = dtckpt.restore(path, options=RestoreOptions(rename={"encoder/0/b": "bias", "5/*": "optim/*"}))
    assert tree["bias"].tolist() == [0]
    assert [set(layer) for layer in tree["encoder"]] == [{"w"}, {"w"}]
    assert (tree["optim"], tree["step"]) == ({"lr": 0.5}, 7)
    mesh = abstract_mesh({"x": 1})
    layouts = {"out": Layout(["x"], mesh), "*": lambda name, info: Layout(["unsharded"] * len(info.shape), mesh)}
    options = RestoreOptions(rename={"head": "out"})
    assert dtckpt.restore(path, mesh=mesh, layouts=layouts, options=options)["out"].layout.sharding_specs == ["x"]


def test_a_name_through_a_tensor(path):
    with pytest.raises(TensorNameError, match="lead through 'head'"):
        dtckpt.restore(path, options=RestoreOptions(rename={"step": "head/step"}))


def test_named_tensors(tmp_path):
    mesh = abstract_mesh({"x": 1})
    dtckpt.name_based_save(mesh, tmp_path / "s", {"a/w": packed(torch.ones(4), Layout(["x"], mesh))})
    template = packed(torch.zeros(4), Layout(["x"], mesh))
    options = RestoreOptions(rename={"a/w": "b"})
    restored = dtckpt.name_based_restore(mesh, tmp_path / "s", {"b": template}, options=options)
    assert restored["b"].full_tensor().tolist() == [1] * 4
    with pytest.raises(TensorNotFoundError, match="no tensor 'a/w'; it has 'b'"):
        dtckpt.name_based_restore(mesh, tmp_path / "s", {"a/w": template}, options=options)


def restored_with(path, target, **options):
    reports = []
    dtckpt.restore(path, target, options=RestoreOptions(report=reports.append, **options))
    return reports[0]


def test_a_partial_restore_is_reported(path):
    head, extra = torch.zeros(3), torch.ones(2)
    target = {"head": head, "extra": extra, "lr": 3.0}
    report = restored_with(path, target, cast="any", allow_missing=True, allow_unexpected=True)
    assert report.restored == ("head",)
    assert report.missing == ("extra",)
    assert report.defaulted == ("lr",)
    assert report.unexpected == ("5/lr", "encoder/0/b", "encoder/0/w", "encoder/1/w", "step")
    assert report.cast == (Cast("head", "int64", "float32"),)
    assert report.nbytes_read == 24
    assert (head.tolist(), extra.tolist(), target["lr"]) == ([0, 1, 2], [1, 1], 3.0)


@pytest.mark.parametrize(
    ("target", "options", "error"),
    [
        ({"head": torch.zeros(3), "v": torch.zeros(2)}, {}, TensorNotFoundError),
        ({"head": torch.zeros(4)}, {}, ShapeMismatchError),
        ({"head": torch.zeros(3, dtype=torch.int8)}, {"cast": "exact"}, DTypeError),
        ({"head": torch.zeros(3, dtype=torch.bfloat16)}, {"cast": "any"}, UnexpectedTensorError),
    ],
)
def test_a_refusal_is_reported_whole(path, target, options, error):
    reports = []
    with pytest.raises(error) as caught:
        dtckpt.restore(path, target, options=RestoreOptions(report=reports.append, **options))
    (report,) = reports
    assert report.refusal == str(caught.value)
    assert report.restored == ()
    assert "step" in report.unexpected
    assert report.missing == tuple(name for name in ("v",) if name in target)
    saved, wanted = (3,), tuple(target["head"].shape)
    assert report.reshaped == (() if wanted == saved else (Reshaped("head", saved, wanted),))
    assert [cast.name for cast in report.cast] == ["head"]
    assert not any(bool(tensor.any()) for tensor in target.values())
