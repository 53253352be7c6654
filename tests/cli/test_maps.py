"""``inspect`` and ``verify`` of a checkpoint under the names and shapes of a map."""

import json

import pytest
import torch

import dtckpt
from dtckpt import SaveOptions

LAYERS, DIM, HIDDEN = 2, 3, 4
STATE = {"layers.qk": torch.arange(float(LAYERS * 2 * DIM * HIDDEN)).reshape(LAYERS, -1, HIDDEN), "norm": torch.ones(5)}
MAP = {
    "rules": [
        {
            "from": {"layers.qk": "layers (two dim) hidden"},
            "to": {"h.{layers}.q": "(two[:1] dim) hidden", "h.{layers}.k": "(two[1:] dim) hidden"},
        },
        {"from": "norm", "to": "ln"},
    ],
    "sizes": {"two": 2},
}
NEW = {"h.0.q": [DIM, HIDDEN], "h.0.k": [DIM, HIDDEN], "h.1.q": [DIM, HIDDEN], "h.1.k": [DIM, HIDDEN], "ln": [5]}
OLD = {"layers.qk": [LAYERS, 2 * DIM, HIDDEN], "norm": [5]}


@pytest.fixture
def map_file(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    return tmp_path / "map.json"


@pytest.fixture
def saved(tmp_path):
    """One chunk for each layer."""
    options = SaveOptions(kvstore="zarr", chunk_nbytes=2 * DIM * HIDDEN * 4)
    dtckpt.save(tmp_path / "s", STATE, options=options)
    return tmp_path / "s"


def shapes(result):
    assert (result.code, result.err) == (0, "")
    (event,) = result.events
    return {tensor["name"]: tensor["shape"] for tensor in event["tensors"]}


def test_inspect_shows_the_tensors_of_the_map(run, saved, map_file):
    assert shapes(run("inspect", saved, "--json")) == OLD
    assert shapes(run("inspect", saved, "--json", "--map", map_file)) == NEW
    out = run("inspect", saved, "--map", map_file, "--tensor", "h.*", "--each").out
    assert "dtckpt, mapped" in out
    shown = [line.split()[0] for line in out.splitlines() if line.startswith("h.")]
    assert shown == ["h.0.k", "h.0.q", "h.1.k", "h.1.q"]


def test_inspect_from_the_other_side(run, saved, map_file, tmp_path):
    dtckpt.convert(saved, tmp_path / "new", map=str(map_file))
    assert shapes(run("inspect", tmp_path / "new", "--json", "--map-back", map_file)) == OLD


def test_verify_names_damage_as_the_map_does(run, saved, map_file):
    sound = run("verify", saved, "--map", map_file, "--json")
    assert sound.code == 0
    assert sound.events[-1].items() >= {"is_sound": True, "tensors": 5}.items()
    (chunk,) = saved.glob("layers.qk/c/1/*/*")
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    damaged = run("verify", saved, "--map", map_file, "--json")
    assert damaged.code == 1
    assert not damaged.events[-1]["is_sound"]
    named = {event["tensor"] for event in damaged.events[:-1]} - {""}
    assert named == {"h.1.q", "h.1.k"}


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_maps_that_cannot_be_used(run, saved, map_file, command, tmp_path):
    run(command, saved, "--map", map_file, "--map-back", map_file).fails(2, "one of --map and --map-back; got both")
    run(command, saved, "--map-size", "two=2").fails(2, "one of --map and --map-back; got none")
    run(command, saved, "--map", map_file, "--map-size", "two=few").fails(2, "must be a whole number")
    run(command, saved, "--map", tmp_path / "none.json").fails(2, "none.json")
    run(command, saved, "--map-back", map_file).fails(3, "h.")
    run(command, "live://feed", "--map", map_file).fails(2, "save it first")
