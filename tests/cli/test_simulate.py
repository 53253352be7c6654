import json
import math
import xml.etree.ElementTree as ET

import pytest

import dtckpt
from dtckpt.checkpoint.simulating.model_shapes import expanded, known_models, open_model
from dtckpt.errors import ConfigError

PUBLISHED = {"llama-3-8b": 8.03e9, "llama-3-70b": 70.55e9, "llama-3-405b": 405.85e9, "deepseek-v3": 671.03e9}
"""Parameters of the models, as their makers count them."""


@pytest.mark.parametrize(("model", "count"), PUBLISHED.items())
def test_models_have_the_published_number_of_parameters(model, count):
    assert open_model(model).num_parameters == pytest.approx(count, rel=1e-3)
    assert known_models() == sorted(PUBLISHED)


def test_text(run):
    result = run("simulate", "llama-3-8b", "--mesh", "dp=8,tp=8", "--mtbf", "5")
    assert (result.code, result.err) == (0, "")
    assert "Llama 3 8B: 8.03 billion parameters; 104.7 GiB of state in 1164 tensors" in result.out
    assert "64 clients on 8 hosts" in result.out
    assert "with a failure every 5.0 h, save every" in result.out
    assert "target mesh" not in result.out
    assert "redistribute" not in result.out


def test_totals_agree_with_operations(run):
    *operations, total = run(
        "simulate", "llama-3-8b", "--mesh", "dp=8", "--to-mesh", "dp=4", "--json", "--storage", "1GB"
    ).events
    by_name = {each["operation"]: each for each in operations}
    assert list(by_name) == ["save", "restore", "redistribute", "reshard"]
    save = by_name["save"]
    assert sum(save["by_client"]) == total["bytes"] == 14 * total["parameters"]
    assert save["parts"]["write"] == total["bytes"] / 1e9
    assert total["lag_s"] == save["seconds"] == pytest.approx(math.fsum(save["parts"].values()))
    assert total["blocking_s"] == save["parts"]["stage"]
    assert total["interval_s"] == dtckpt.optimal_interval(total["blocking_s"], total["mtbf_s"], lag_s=total["lag_s"])
    assert total["lost_share"] < 1


def test_replicas_are_read_once_over_all(run):
    args = ("simulate", "llama-3-8b", "--mesh", "replica=4,dp=2", "--state", "model=bfloat16", "--json")
    _, alone, once, total = run(*args).events
    links = {each["link"]: each for each in once["links"]}
    assert (alone["operation"], once["operation"]) == ("restore", "restore, read once")
    assert sum(alone["by_client"]) == pytest.approx(4 * total["bytes"], rel=1e-3)
    assert links["storage"]["total_nbytes"] < 1.01 * total["bytes"]
    # All clients are on one host.
    assert links["network"]["total_nbytes"] == 0


def test_clients_that_are_planned_stand_for_all():
    mesh = dtckpt.abstract_mesh({"dp": 64}, devices_per_client=1)
    every, some = (dtckpt.simulate("llama-3-8b", mesh, sample=sample) for sample in (64, 10))
    assert every.planned_clients == list(range(64))
    assert some.planned_clients == [*range(8), *range(56, 64)]
    read = {found.operation("restore").loads[0].total_nbytes for found in (every, some)}
    assert max(read) <= 1.01 * min(read)


def test_small_chunks_and_large_manifests_are_noted(run, tmp_path):
    def notes(shape):
        file = tmp_path / "model.json"
        file.write_text(json.dumps({"name": "m", "parameters": {"{0..99}.w": {"shape": shape, "layout": "x"}}}))
        return run("simulate", file, "--mesh", "x=64", "--json").events[-1]["notes"]

    assert [note for note in notes([64 << 20]) if "chunk" in note] == []
    assert "on average" in notes([64 << 10])[0]


def test_charts(run, tmp_path):
    for suffix in ("svg", "html", "png"):
        output = tmp_path / f"charts.{suffix}"
        result = run("simulate", "llama-3-8b", "--mesh", "dp=4", "--to-mesh", "dp=2", "-o", output)
        assert result.out.endswith(f"wrote the charts to {output}\n")
    texts = [each.text for each in ET.fromstring((tmp_path / "charts.svg").read_text()).iter() if each.text]
    assert {"save", "restore", "redistribute", "reshard"} <= set(texts)


def test_names_with_braces():
    assert list(expanded("a.{0..1,7}.b.{2}")) == ["a.0.b.2", "a.1.b.2", "a.7.b.2"]
    assert list(expanded("plain")) == ["plain"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "lacks 'parameters'"),
        ('{"name": "m", "parameters": {}}', "1 to"),
        ('{"name": "m", "parameters": {"w": {"shape": [2], "layout": "x,y"}}}', "2 dims"),
        ('{"name": "m", "parameters": {"w": {"shape": [-2]}}}', "negative"),
        ('{"name": "m", "parameters": {"{0..999999999}": {"shape": [2]}}}', "too many"),
        ('{"name": "m", "parameters": {"{1,1}": {"shape": [2]}}}', "twice"),
        ('{"name": "m", "state": {"model": "float3"}, "parameters": {"w": {"shape": [2]}}}', "float3"),
        ("[" * 100_000, "cannot be used"),
    ],
)
def test_files_that_describe_no_model(tmp_path, text, reason):
    file = tmp_path / "model.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        open_model(file)


def test_what_cannot_be_simulated(run, tmp_path):
    run("simulate", "llama-3-8", "--mesh", "x=2").fails(2, "did you mean 'llama-3-8b'")
    run("simulate", tmp_path / "none.json", "--mesh", "x=2").fails(2, "cannot be used")
    run("simulate", "llama-3-8b", "--mesh", "x=3", "--devices-per-client", "2").fails(2, "expected sizes")
    run("simulate", "llama-3-8b", "--mesh", "x=6", "--devices-per-client", "3").fails(2, "divisor of the 8")
    run("simulate", "llama-3-8b", "--mesh", "x=2", "--layout", "nothing=x").fails(2, "no tensor matches")
    run("simulate", "llama-3-8b", "--mesh", "x=2", "--to-layout", "*=x").fails(2, "--to-mesh")
    run("simulate", "llama-3-8b", "--mesh", "x=2", "--network", "fast").fails(2, "size cannot be used")
    run("simulate", "llama-3-8b", "--mesh", "x=2", "-o", tmp_path / "a.gif").fails(2, "--output")
