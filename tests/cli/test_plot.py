import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import UNSHARDED, Layout, abstract_mesh
from dtckpt.checkpoint.timeline import timeline_picture
from dtckpt.cli.charts import MAX_CELLS, traffic, traffic_picture
from dtckpt.format.manifest import PhaseCost


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plot") / "step_1"
    mesh = abstract_mesh({"data": 2, "model": 4})
    rows = packed(torch.ones(8, 16), Layout(["model", UNSHARDED], mesh))
    dtckpt.save(
        path, {"<w&>": rows, "v": packed(torch.ones(8, 16), Layout(["data", "model"], mesh)), "plain": torch.ones(3)}
    )
    return path


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
@pytest.mark.parametrize(
    ("kind", "args"), [("regions", ["<w&>", "--mesh", "x=4"]), ("traffic", ["--mesh", "x=4"]), ("timeline", [])]
)
def test_every_kind_in_every_format(run, saved, tmp_path, kind, args, suffix):
    output = tmp_path / f"picture{suffix}"
    result = run("plot", saved, *args, "-o", output)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"wrote the {kind} of {saved} to {output}\n"
    assert [entry.name for entry in tmp_path.iterdir()] == [output.name]
    if suffix == ".png":
        assert output.read_bytes().startswith(b"\x89PNG")
        return
    text = output.read_text()
    if suffix == ".svg":
        ET.fromstring(text)
    if kind == "regions":
        assert "&lt;w&amp;&gt;" in text
        assert "<w&>" not in text


def test_numbers(run, saved, tmp_path):
    (event,) = run(
        "plot", saved, "v", "--mesh", "x=2", "--layout", "v=x,unsharded", "-o", tmp_path / "a.svg", "--json"
    ).events
    assert len(event["as_saved"]) == 8
    assert event["after_the_reshard"][1] == {"offset": [4, 0], "shape": [4, 16], "devices": [1]}
    (event,) = run(
        "plot", saved, "--mesh", "x=4", "--layout", "v=unsharded,x", "-o", tmp_path / "b.svg", "--json"
    ).events
    assert event["tensors"] == 2
    assert np.sum(event["matrix"]) == event["moved_bytes"] + event["staying_bytes"]
    (event,) = run("plot", saved, "-o", tmp_path / "c.svg", "--json").events
    assert "write" in event["clients"][0]


def test_traffic_of_a_transposition():
    mesh = abstract_mesh({"x": 4})
    matrix = traffic(Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh), (8, 8), 8 * 8 * 4)
    assert (matrix == 2 * 2 * 4).all()
    same = traffic(Layout(["x", UNSHARDED], mesh), Layout(["x", UNSHARDED], mesh), (8, 8), 8 * 8 * 4)
    assert (same == np.diag([64] * 4)).all()
    whole = traffic(Layout([UNSHARDED], mesh), Layout(["x"], abstract_mesh({"x": 2})), (8,), 32)
    assert whole.sum() == 32


def test_what_cannot_be_drawn(run, saved, tmp_path):
    def fails(code, *args_and_texts, texts):
        run("plot", *args_and_texts).fails(code, *texts)

    svg = tmp_path / "a.svg"
    fails(2, saved, "-o", tmp_path / "a.gif", texts=["--output", ".svg"])
    fails(2, saved, "--kind", "regions", "-o", svg, texts=["which tensor"])
    fails(2, saved, "--kind", "traffic", "-o", svg, texts=["--mesh"])
    fails(2, saved, "--layout", "v=x", "-o", svg, texts=["--mesh"])
    fails(2, saved, "plain", "-o", svg, texts=["without a layout"])
    fails(3, saved, "vv", "-o", svg, texts=["did you mean 'v'"])
    fails(
        2, saved, "v", "--mesh", "modell=2", "--layout", "v=model,unsharded", "-o", svg, texts=["did you mean 'modell'"]
    )
    fails(75, saved, "-o", tmp_path / "none" / "a.svg", texts=["cannot be written"])
    dtckpt.convert(saved, tmp_path / "m.safetensors", select="plain")
    fails(1, tmp_path / "m.safetensors", "-o", svg, texts=["no timings", "--mesh"])
    assert not svg.exists()


def test_pictures_of_many_devices_are_bounded():
    picture = traffic_picture(np.ones((512, 512), np.int64), "title", "subtitle")
    assert picture.count("<rect") < MAX_CELLS**2 + 60
    assert "devices 504-511 to devices 504-511: 64 bytes" in picture
    lanes = timeline_picture({client: {"write": PhaseCost(1.0)} for client in range(512)}, "title", "subtitle")
    height = int(re.search(r'height="(\d+)"', lanes)[1])
    assert height < 1300
