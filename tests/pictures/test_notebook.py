"""Notebooks show meshes, layouts, DTensors, plans and checkpoints as pictures."""

import re
from xml.etree import ElementTree

import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt.dtensor.debug import explain
from dtckpt.pictures.notebook import MAX_CELLS
from dtckpt.pictures.svg import INK

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tips(svg):
    return [each.findtext(f"{SVG}title") for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


@pytest.mark.parametrize(
    "axes", [{"x": 8}, {"a": 2, "b": 4}, {"pp": 4, "dp": 16, "tp": 8}, {"a": 2, "b": 2, "c": 2, "d": 2}]
)
def test_a_mesh_shows_every_device_once(axes):
    mesh = dtckpt.abstract_mesh(axes, devices_per_client=2)
    svg = mesh._repr_svg_()
    assert [int(tip.split()[1].rstrip(",")) for tip in tips(svg) if tip] == list(mesh.device_ids)
    assert f"{mesh.size()} devices of {mesh.size() // 2} clients; one colour for each client" in texts(svg)
    assert f'style="fill:{INK}">0</text>' in svg, "an attribute would yield to the styles of the class"
    width = float(re.search(r'width="(\d+)"', svg)[1])
    assert width < 1000, "a notebook's page is not wider"


def test_devices_of_one_client_have_one_colour():
    svg = dtckpt.abstract_mesh({"x": 6}, devices_per_client=3)._repr_svg_()
    cells = [
        each.get("fill")
        for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if each.find(f"{SVG}title") is not None
    ]
    assert cells[:3] == [cells[0]] * 3
    assert cells[3:] == [cells[3]] * 3
    assert cells[0] != cells[3]


def test_a_mesh_that_is_too_large_is_text():
    assert dtckpt.abstract_mesh({"x": MAX_CELLS + 1})._repr_svg_() is None
    assert dtckpt.Mesh.empty()._repr_svg_() is None


def test_a_layout_has_a_cell_for_each_shard():
    mesh = dtckpt.abstract_mesh({"data": 2, "model": 3})
    svg = dtckpt.Layout(["unsharded", ("model", "data")], mesh)._repr_svg_()
    assert "model+data" in svg
    assert sum(text.startswith("cpu:") for text in texts(svg)) == 6


def test_a_tensor_is_drawn_as_it_lies_and_without_a_picture_it_is_text():
    mesh = dtckpt.abstract_mesh({"x": 2})
    tensor = packed(torch.rand(5, 4), dtckpt.Layout(["x", "unsharded"], mesh))
    assert "[0:3, 0:4]" in texts(tensor._repr_svg_())
    assert packed(torch.rand(2, 2, 2, 2), dtckpt.Layout(["x"] + ["unsharded"] * 3, mesh))._repr_svg_() is None
    assert dtckpt.Layout(["unsharded"], mesh, {"x": "sum"})._repr_svg_() is not None
    assert dtckpt.Layout([dtckpt.MATCH], mesh)._repr_svg_() is None
    assert dtckpt.Layout.from_device("/job:localhost/replica:0/task:0/device:CPU:0")._repr_svg_() is None


def test_a_plan_shows_the_bytes_of_each_device():
    mesh = dtckpt.abstract_mesh({"x": 4}, devices_per_client=1)
    plan = explain(dtckpt.Layout(["x"], mesh), dtckpt.Layout(["unsharded"], mesh), (1024,), torch.float32)
    shown = texts(plan._repr_svg_())
    assert shown.count("3.0 KiB") == 4
    assert "12.0 KiB in all, 12.0 KiB at least; lines mark the least of each device" in shown


def test_a_checkpoint_is_a_table_with_its_largest_tensor(tmp_path):
    mesh = dtckpt.abstract_mesh({"x": 2})
    state = {"a<": packed(torch.rand(4, 4), dtckpt.Layout(["x", "unsharded"], mesh)), "b": torch.ones(3)}
    dtckpt.save(tmp_path / "c", state | {f"t{number}": torch.ones(1) for number in range(50)})
    with dtckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        html = checkpoint._repr_html_()
    assert html.count("<tr>") == 41
    assert "and 12 more" in html
    assert "a&lt;" in html
    assert "a<" not in html
    assert html.count("<svg") == 1


def test_reports_show_their_phases(tmp_path):
    state = {"w": torch.ones(1000)}
    saved = dtckpt.save(tmp_path / "c", state)
    assert {"plan", "write", "merge"} <= {*texts(saved._repr_svg_())}
    reports = []
    dtckpt.restore(tmp_path / "c", state, options=dtckpt.RestoreOptions(report=reports.append))
    assert {"plan", "read"} <= {*texts(reports[0]._repr_svg_())}
