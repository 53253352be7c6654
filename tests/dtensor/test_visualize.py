import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import cluster_mesh, layouts, meshes, packed, shapes

from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Region, abstract_mesh
from dtckpt.dtensor.debug import sharding_grid, sharding_html, sharding_svg, visualize_sharding
from dtckpt.errors import LayoutError, LayoutTypeError

SVG = "{http://www.w3.org/2000/svg}"
MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", UNSHARDED], MESH)


def tensor_with(layout, shape):
    return packed(torch.zeros(shape), layout)


def shown(capsys, layout, shape, **options):
    visualize_sharding(tensor_with(layout, shape), **options)
    return capsys.readouterr().out


def cells_of(svg):
    """Text of the tooltip, box and lines of every cell of a picture."""
    return [
        (
            cell.findtext(f"{SVG}title"),
            tuple(float(cell.find(f"{SVG}rect").get(name)) for name in ("x", "y", "width", "height")),
            [text.text for text in cell.findall(f"{SVG}text")],
        )
        for cell in ET.fromstring(svg).iter(f"{SVG}g")
        if cell.get("class") == "c"
    ]


# --- pictures -----------------------------------------------------------------------------------------------------


@given(st.data())
def test_the_grid_tells_once_what_every_device_holds(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes)
    layout = data.draw(layouts(mesh, len(shape)))
    grid = sharding_grid(layout, shape)
    assert len({region for region, _ in grid}) == len(grid)
    assert sorted(device for _, devices in grid for device in devices) == sorted(mesh.device_ids)
    for region, devices in grid:
        assert list(devices) == sorted(devices)
        assert all(layout.region(device, shape) == region for device in devices)
    covered = torch.zeros(shape, dtype=torch.int64)
    for region, _ in grid:
        covered[region.slices()] += 1
    assert bool((covered == 1).all())


def test_the_grid_runs_along_the_tensor_also_where_the_devices_do_not():
    layout = Layout([("y", "x"), UNSHARDED], MESH)
    assert sharding_grid(layout, (4, 3)) == [
        (Region((0, 0), (1, 3)), (0,)),
        (Region((1, 0), (1, 3)), (2,)),
        (Region((2, 0), (1, 3)), (1,)),
        (Region((3, 0), (1, 3)), (3,)),
    ]


# --- terminal -----------------------------------------------------------------------------------------------------


def test_a_matrix(capsys):
    assert shown(capsys, ROWS, (8, 6), header="weight [bold] of layer 1") == (
        "weight [bold] of layer 1\n"
        "shape (8, 6); mesh x=2, y=2; sharding specs (x, unsharded)\n"
        "┌───────────────┬─────────┐\n"
        "│ dim 0 \\ dim 1 │ 0:6     │\n"
        "├───────────────┼─────────┤\n"
        "│ 0:4           │ cpu:0,1 │\n"
        "├───────────────┼─────────┤\n"
        "│ 4:8           │ cpu:2,3 │\n"
        "└───────────────┴─────────┘\n\n"
    )


def test_three_dims_are_shown_slice_by_slice(capsys):
    layout = Layout(["z", "y", "x"], abstract_mesh({"x": 2, "y": 1, "z": 2}))
    assert shown(capsys, layout, (3, 1, 2)) == (
        "shape (3, 1, 2); mesh x=2, y=1, z=2; sharding specs (z, y, x)\n"
        "dim 0 in 0:2\n"
        "┌───────────────┬───────┬───────┐\n"
        "│ dim 1 \\ dim 2 │ 0:1   │ 1:2   │\n"
        "├───────────────┼───────┼───────┤\n"
        "│ 0:1           │ cpu:0 │ cpu:2 │\n"
        "└───────────────┴───────┴───────┘\n"
        "dim 0 in 2:3\n"
        "┌───────────────┬───────┬───────┐\n"
        "│ dim 1 \\ dim 2 │ 0:1   │ 1:2   │\n"
        "├───────────────┼───────┼───────┤\n"
        "│ 0:1           │ cpu:1 │ cpu:3 │\n"
        "└───────────────┴───────┴───────┘\n\n"
    )


def test_a_vector_with_an_empty_shard_and_a_pending_sum(capsys):
    layout = Layout(["x"], abstract_mesh({"x": 4, "y": 2}), {"y": "sum"})
    assert shown(capsys, layout, (5,)) == (
        "shape (5,); mesh x=4, y=2; sharding specs (x)\n"
        "partial: sum over y\n"
        "┌────────┬─────────┐\n"
        "│ region │ devices │\n"
        "├────────┼─────────┤\n"
        "│ [0:2]  │ cpu:0,1 │\n"
        "│ [2:4]  │ cpu:2,3 │\n"
        "│ [4:5]  │ cpu:4,5 │\n"
        "└────────┴─────────┘\n"
        "no elements on cpu:6,7\n\n"
    )


def test_a_tensor_without_elements(capsys):
    assert shown(capsys, ROWS, (0, 4)) == (
        "shape (0, 4); mesh x=2, y=2; sharding specs (x, unsharded)\n"
        "the tensor has no elements: no elements on cpu:0-3\n\n"
    )


def test_scalars_and_four_dims_get_a_list(capsys):
    assert "│ []     │ cpu:0-3 │" in shown(capsys, Layout([], MESH), ())
    assert "│ [0:1, 0:1, 0:2, 1:2] │ cpu:1,3 │" in shown(
        capsys, Layout([UNSHARDED, UNSHARDED, UNSHARDED, "y"], MESH), (1, 1, 2, 2)
    )


@pytest.mark.parametrize(
    ("axes", "shape", "part"),
    [
        pytest.param({"x": 1, "y": 17}, (1, 17), "│ [0:1, 16:17] │ cpu:16  │", id="columns"),
        pytest.param({"x": 300, "y": 1}, (300, 1), "and 44 more", id="rows"),
    ],
)
def test_fine_cuts_get_a_bounded_list(capsys, axes, shape, part):
    text = shown(capsys, Layout(["x", "y"], abstract_mesh(axes)), shape)
    assert part in text
    assert len(text.splitlines()) < 270


def test_many_devices_are_counted(capsys):
    layout = Layout([UNSHARDED, "y"], abstract_mesh({"x": 40, "y": 2}))
    text = shown(capsys, layout, (1, 2))
    assert "cpu:0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30 and 24 more │" in text


@given(st.data())
@settings(max_examples=examples(40))
def test_every_tensor_can_be_printed(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes)
    layout = data.draw(layouts(mesh, len(shape)))
    visualize_sharding(tensor_with(layout, shape), header=data.draw(st.text(st.characters(codec="utf-8"))))


@pytest.mark.parametrize("client", range(3))
def test_the_client_of_the_first_device_prints(capsys, client):
    layout = Layout(["x"], cluster_mesh({"x": 6}, 3, client))
    visualize_sharding(DTensor([torch.zeros(1)] * 2, layout, (6,), torch.float32))
    assert bool(capsys.readouterr().out) == (client == 0)


def test_a_client_outside_the_mesh_prints_nothing(capsys):
    there = cluster_mesh({"x": 2}, 2, 0)
    mesh = Mesh(there.dim_names, there.global_device_ids(), [], [], "", there.global_devices())
    visualize_sharding(DTensor([], Layout(["x"], mesh), (2,), torch.float32))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("use_rich", [False, True])
def test_colours_are_for_terminals(capsys, monkeypatch, use_rich):
    assert "\x1b" not in shown(capsys, ROWS, (8, 6), use_rich=use_rich)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    backgrounds = set(re.findall(r";48;2;[\d;]+m", shown(capsys, ROWS, (8, 6), use_rich=use_rich)))
    assert len(backgrounds) == 2 * use_rich


def test_what_is_no_dtensor_is_refused():
    for show in (visualize_sharding, sharding_svg, sharding_html):
        with pytest.raises(LayoutError, match="needs a DTensor; got Tensor"):
            show(torch.zeros(2))


# --- pictures -----------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_picture_has_one_cell_per_region_and_none_overlap(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes.filter(lambda shape: len(shape) <= 3))
    layout = data.draw(layouts(mesh, len(shape)))
    svg = sharding_svg(layout, shape, title=data.draw(st.text()))
    root, cells = ET.fromstring(svg), cells_of(svg)
    grid = sharding_grid(layout, shape)
    assert sorted(title.split(" on ")[0] for title, _, _ in cells) == sorted(str(region) for region, _ in grid)
    width, height = float(root.get("width")), float(root.get("height"))
    for _, (x, y, wide, high), _ in cells:
        assert wide > 0
        assert high > 0
        assert 0 <= x < x + wide <= width
        assert 0 <= y < y + high <= height
    for panel in root.findall(f"{SVG}g[@transform]"):
        boxes = [cell.find(f"{SVG}rect") for cell in panel.findall(f"{SVG}g")]
        places = [tuple(float(box.get(name)) for name in ("x", "y", "width", "height")) for box in boxes]
        for position, (x, y, wide, high) in enumerate(places):
            for left, top, _, _ in places[position + 1 :]:
                assert left >= x + wide or top >= y + high


def test_the_places_follow_the_sizes():
    layout = Layout(["x", "y"], MESH)
    boxes = {title: box for title, box, _ in cells_of(sharding_svg(layout, (5, 4)))}
    assert list(boxes) == [
        "[0:3, 0:2] on cpu:0",
        "[0:3, 2:4] on cpu:1",
        "[3:5, 0:2] on cpu:2",
        "[3:5, 2:4] on cpu:3",
    ]
    first, right, below, _ = boxes.values()
    assert first[2] == right[2]
    assert math.isclose(first[3] + 3, 252)  # 3 of 5 rows of 420 pixels, less the gap between two cells
    assert math.isclose(below[3] + 3, 168)
    assert first[:2] == (1.5, 1.5)
    assert right[1] == first[1] < below[1]


def test_short_chunks_are_widened():
    boxes = [box for _, box, _ in cells_of(sharding_svg(Layout(["x"], abstract_mesh({"x": 10})), (101,)))]
    assert boxes[-1][2] == 40 - 3  # 2 of 101 elements would get 18 pixels of 920
    assert len({width for _, _, width, _ in boxes[:-1]}) <= 2  # 11 of 101 each, up to rounding


def test_texts_stand_in_their_cells():
    svg = sharding_svg(Layout(["x", "y"], MESH), (7, 5))
    cells = [cell for cell in ET.fromstring(svg).iter(f"{SVG}g") if cell.get("class") == "c"]
    for cell, (_, (x, y, width, height), _) in zip(cells, cells_of(svg), strict=True):
        texts = cell.findall(f"{SVG}text")
        assert len(texts) == 2
        assert all(float(text.get("x")) == pytest.approx(x + width / 2, abs=0.2) for text in texts)
        assert all(y + 12 < float(text.get("y")) < y + height for text in texts)


def test_cells_say_who_holds_what_where_there_is_room():
    (cell,) = cells_of(sharding_svg(Layout.replicated(MESH, 1), (4,)))
    assert cell[2] == ["cpu:0-3", "[0:4]"]
    svg = sharding_svg(Layout(["x", "y"], abstract_mesh({"x": 40, "y": 40})), (4000, 4000))
    assert len(cells_of(svg)) == 1600
    assert not any(lines for _, _, lines in cells_of(svg))


def test_device_sets_differ_in_colour_and_replicas_share_one():
    fills = re.findall(r'rx="4" fill="(#\w+)"', sharding_svg(ROWS, (8, 6)))
    assert len(fills) == len(set(fills)) == 2


def test_pictures_of_tensors_are_those_of_their_layouts():
    tensor = tensor_with(ROWS, (8, 6))
    assert sharding_svg(tensor) == sharding_svg(ROWS, (8, 6)) == sharding_svg(tensor, (8, 6))
    assert sharding_html(tensor, title="w") == sharding_html(ROWS, (8, 6), title="w")


def test_empty_regions_and_pending_sums_are_shown():
    layout = Layout(["x"], abstract_mesh({"x": 4, "y": 2}), {"y": "sum"})
    svg = sharding_svg(layout, (5,))
    assert "partial: sum over y" in svg
    assert "no elements on" in svg
    assert [title for title, _, _ in cells_of(svg)][-1] == "[5:5] on cpu:6,7"
    assert svg.count("stroke-dasharray") == 1
    assert "the tensor has no elements" in sharding_svg(ROWS, (0, 3))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(LayoutError, match="at most 3 dims"):
        sharding_svg(Layout.replicated(MESH, 4), (1, 2, 3, 4))
    with pytest.raises(LayoutTypeError, match="got no shape"):
        sharding_svg(ROWS)
    with pytest.raises(LayoutError, match="expected 2 sizes"):
        sharding_html(ROWS, (3,))
    with pytest.raises(LayoutError, match="expected its own"):
        sharding_svg(tensor_with(ROWS, (8, 6)), (6, 8))


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(dict(attrs))))

    def handle_data(self, data):
        self.texts.append(data)


def test_hostile_titles_stay_text():
    title = "</title><script>alert('1')</script>\"&<img onerror=x>\x00"
    plain, hostile = _Page(), _Page()
    plain.feed(sharding_html(ROWS, (8, 6), title="w"))
    hostile.feed(sharding_html(ROWS, (8, 6), title=title))
    assert hostile.tags == plain.tags
    assert title.replace("\x00", "\ufffd") in "".join(hostile.texts)


def test_a_page_lists_the_regions():
    page = sharding_html(ROWS, (8, 6))
    assert "<tr><td>[0:4, 0:6]<td>24<td>cpu:0,1\n<tr><td>[4:8, 0:6]<td>24<td>cpu:2,3\n</table>" in page
