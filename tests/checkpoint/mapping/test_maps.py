"""Maps of tensors: stacked, split, transposed and sliced, for every reader, in any region; and maps that do not fit."""

import argparse
import json
import math
import random

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.shares import SEED, amount

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES
from dtckpt import RestoreOptions, SaveOptions, TensorMap, errors
from dtckpt.checkpoint.mapping.map_rules import parse_view
from dtckpt.checkpoint.mapping.map_sizes import known_sizes
from dtckpt.cli.main import main

from . import map_cases

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

LAYERS, GROUPS, EACH, DIM, HIDDEN = 3, 2, 4, 5, 6
FUSED = torch.arange(float(LAYERS * GROUPS * EACH * DIM * HIDDEN)).reshape(LAYERS, -1, HIDDEN)
STATE = {
    "layers.qkv": FUSED,
    "layers.out": torch.rand(LAYERS, 7, HIDDEN),
    "embed": torch.rand(8, HIDDEN),
    "norm": torch.rand(HIDDEN),
    "other": torch.ones(2),
}
MAP = {
    "sizes": {"groups": GROUPS, "dim": DIM},
    "rules": [
        {
            "from": {"*layers.qkv": "layers (groups each dim) hidden"},
            "to": {
                "*h.{layers}.q": "(groups each[:-2] dim) hidden",
                "*h.{layers}.k": "(groups each[-2:-1] dim) hidden",
                "*h.{layers}.v": "hidden (dim groups each[-1:])",
            },
        },
        {"from": {"*layers.out": "layers out hidden"}, "to": {"*h.{layers}.out": "hidden out"}},
        {"from": {"*embed": "words hidden"}, "to": {"*wte": "words[:real] hidden"}, "optional": True},
        {"from": "*norm", "to": "*ln"},
    ],
}


def mapped(state):
    """Return what the map makes of the state, by PyTorch's own means."""
    whole = state["layers.qkv"].view(LAYERS, GROUPS, EACH, DIM, HIDDEN)
    result = {"ln": state["norm"]}
    for layer in range(LAYERS):
        result |= {
            f"h.{layer}.q": whole[layer, :, :-2].reshape(-1, HIDDEN),
            f"h.{layer}.k": whole[layer, :, -2].reshape(-1, HIDDEN),
            f"h.{layer}.v": whole[layer, :, -1].permute(2, 1, 0).reshape(HIDDEN, -1),
            f"h.{layer}.out": state["layers.out"][layer].T,
        }
    return result


def write(path, state, form):
    """Write a checkpoint in a format."""
    if form == "safetensors":
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    elif form == "torch":
        torch.save(state, path)
    elif form == "dcp":
        dcp.save(state, checkpoint_id=path)
    elif form in ("orbax", "tensorflow"):
        write(f"{path}-ours", state, "zarr")
        dtckpt.convert(f"{path}-ours", path, to=form)
    else:
        kvstore, codec = ("zarr", "none") if form == "zarr" else ("ocdbt", form)
        dtckpt.save(path, state, options=SaveOptions(kvstore=kvstore, codec=codec, chunk_nbytes=4096, fsync=False))
    return path


FORMS = ("safetensors", "torch", "dcp", "orbax", "tensorflow", "zarr", "none", "zstd", "blosc")


def rules(**changes):
    content = {**MAP, "rules": [rule for rule in MAP["rules"] if "*embed" not in rule["from"]], **changes}
    return TensorMap.parse(content)


@pytest.mark.share(4)
@pytest.mark.parametrize("form", FORMS)
def test_every_region_of_every_tensor(tmp_path, form):
    path = write(tmp_path / "c", STATE, form)
    draw = random.Random(f"{SEED} {form}")
    wanted = mapped(STATE)
    with dtckpt.open_checkpoint(path, map=rules()) as checkpoint:
        assert set(checkpoint.tensors) == {*wanted, "embed", "other"}
        for name, tensor in wanted.items():
            assert torch.equal(checkpoint.read(name), tensor)
            for _ in range(amount(4, 100)):
                offset = [draw.randrange(size) for size in tensor.shape]
                shape = [draw.randrange(size - start + 1) for start, size in zip(offset, tensor.shape, strict=True)]
                region = dtckpt.Region(tuple(offset), tuple(shape))
                assert torch.equal(checkpoint.read(name, region), tensor[region.slices()])
        assert checkpoint.verify().is_sound
        assert "2 tensors that no rule of the map names stay as they are: embed, other" in checkpoint.notes[-1]


def test_random_rules_there_and_back(tmp_path):
    """A rule is read from either side: the inverse of a map undoes it, whatever is joined, cut and transposed."""
    for case in range(amount(6, 400)):
        draw = random.Random(f"{SEED} rules {case}")
        sizes = {axis: draw.randrange(1, 5) for axis in "abcd"}
        stacked = draw.sample("abcd", draw.randrange(2))
        cut = draw.choice([axis for axis in "abcd" if axis not in stacked])
        edge = draw.randrange(sizes[cut] + 1)

        def view(axes, part="", draw=draw, cut=cut):
            names = [f"{axis}{part if axis == cut else ''}" for axis in draw.sample(axes, len(axes))]
            split = sorted(draw.sample(range(len(names) + 1), draw.randrange(3)))
            parts = [names[start:stop] for start, stop in zip([0, *split], [*split, len(names)], strict=True)]
            return " ".join(f"({' '.join(part)})" for part in parts)

        inner = [axis for axis in "abcd" if axis not in stacked]
        end = "".join(f".{{{axis}}}" for axis in stacked)
        parts = {f"n{end}": f"[:{edge}]", f"o{end}": f"[{edge}:]"} if 0 < edge < sizes[cut] else {f"n{end}": ""}
        to = {name: view(inner, part) for name, part in parts.items()}
        rule = TensorMap.parse({"rules": [{"from": {"w": view("abcd")}, "to": to}]}).with_sizes(sizes)
        (whole,) = rule.rules[0].source.values()
        shape = [math.prod(sizes[part.axis] for part in dim) for dim in whole]
        state = {"w": torch.randperm(math.prod(sizes.values())).reshape(shape).float()}
        path = write(tmp_path / f"{case}", state, "torch")
        dtckpt.convert(path, tmp_path / f"{case}.new", to="torch", map=rule)
        dtckpt.convert(tmp_path / f"{case}.new", tmp_path / f"{case}.old", to="torch", map=rule.inverse())
        assert torch.equal(dtckpt.restore(tmp_path / f"{case}.old")["w"], state["w"]), (case, rule)


def test_scalars_and_tensors_without_elements(tmp_path):
    state = {"s.0": torch.tensor(1.0), "s.1": torch.tensor(2.0), "e": torch.ones(0, 3)}
    rule = TensorMap.parse(
        {"rules": [{"from": {"s.{n}": ""}, "to": {"s": "n"}}, {"from": {"e": "a b"}, "to": {"f": "b a"}}]}
    )
    dtckpt.convert(write(tmp_path / "c", state, "torch"), tmp_path / "new", map=rule)
    new = dtckpt.restore(tmp_path / "new")
    assert (new["s"].tolist(), new["f"].shape) == ([1, 2], (3, 0))
    restored = dtckpt.restore(tmp_path / "new", options=RestoreOptions(map=rule.inverse()))
    assert {name: tensor.tolist() for name, tensor in restored.items()} == {"s.0": 1, "s.1": 2, "e": []}


def test_a_checkpoint_of_megatron():
    """Written by Megatron-Core on two tensor-parallel processes; moments have the names of their parameters."""
    path = SAMPLES / "megatron" / "tp2pp1_swiglu"
    stored = dtckpt.restore(path)
    fused = stored["optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"].view(2, 2, 3, 4, 8)
    with dtckpt.open_checkpoint(path, map=TensorMap.load("megatron-llama", {"groups": 2, "dim": 4})) as checkpoint:
        found = checkpoint.read("optimizer.state.exp_avg.model.layers.1.self_attn.k_proj.weight")
        assert torch.equal(found, fused[1, :, 1].reshape(8, 8))
        found = checkpoint.read("model.layers.0.mlp.up_proj.weight")
        assert torch.equal(found, stored["decoder.layers.mlp.linear_fc1.weight"][0, 12:])
        assert checkpoint.values["iteration"] == 5
        assert "decoder.final_layernorm.bias" in checkpoint.notes[-1]
        assert not any("decoder.layers" in name for name in checkpoint.tensors if "bias" not in name)


def test_a_tree_keeps_what_the_map_does_not_take(tmp_path):
    tree = {"model": STATE, "args": argparse.Namespace(lr=0.1), "step": 3}
    torch.save(tree, tmp_path / "c.pt")
    restored = dtckpt.restore(tmp_path / "c.pt", options=RestoreOptions(map=rules()))
    assert (restored["step"], restored["args"].lr) == (3, 0.1)
    wanted = mapped(STATE)
    assert restored["model"].keys() == {*wanted, "embed", "other"}
    assert all(torch.equal(restored["model"][name], tensor) for name, tensor in wanted.items())


def test_by_a_manager(tmp_path):
    with dtckpt.CheckpointManager(tmp_path / "run", is_async=False) as manager:
        manager.save(1, STATE, force=True)
        target = {name: torch.empty(tensor.shape) for name, tensor in mapped(STATE).items()}
        manager.restore(target=target, options=RestoreOptions(map=rules(), allow_unexpected=True))
    assert all(torch.equal(target[name], tensor) for name, tensor in mapped(STATE).items())


@pytest.mark.processes
def test_onto_a_mesh(pool, tmp_path):
    """Each client reads its part of a tensor that is a part of a fused one, across the cuts of both."""
    path = write(tmp_path / "c", STATE, "zstd")
    content = {**MAP, "rules": MAP["rules"][:2]}
    wanted = {name: tensor.tolist() for name, tensor in mapped(STATE).items() if name[-2:] in (".q", ".v")}
    assert pool.values(map_cases.restore, str(path), content, clients=2, group=True) == [wanted, wanted]


def test_into_a_target(tmp_path):
    path = write(tmp_path / "c", STATE, "none")
    target = {name: torch.empty(tensor.shape) for name, tensor in mapped(STATE).items()}
    dtckpt.restore(path, target, options=RestoreOptions(map=rules(), allow_unexpected=True))
    assert all(torch.equal(target[name], tensor) for name, tensor in mapped(STATE).items())


def test_the_command(run, tmp_path):
    path = write(tmp_path / "c.safetensors", STATE, "safetensors")
    (tmp_path / "map.json").write_text(json.dumps({"rules": MAP["rules"]}))
    sizes = ["--map-size", f"groups={GROUPS}", "--map-size", f"dim={DIM}"]
    options = ["--map", tmp_path / "map.json", *sizes, "--map-size", "real=8"]
    assert run("convert", path, tmp_path / "new", *options)[0] == 0
    new = dtckpt.restore(tmp_path / "new")
    assert torch.equal(new["h.2.v"], mapped(STATE)["h.2.v"])
    assert torch.equal(new["wte"], STATE["embed"])
    back = ["--map-back", tmp_path / "map.json", *sizes, "--map-size", "real=8"]
    assert run("convert", tmp_path / "new", tmp_path / "back.safetensors", *back)[0] == 0
    restored = dtckpt.restore(tmp_path / "back.safetensors")
    assert all(torch.equal(restored[name], tensor) for name, tensor in STATE.items())
    for wrong in (["--map", "none"], ["--map", "a", "--map-back", "b"], ["--map-size", "x=1"]):
        assert run("convert", path, tmp_path / "x", *wrong)[0] == 2
    assert run("convert", path, tmp_path / "x", "--map", tmp_path / "map.json", "--map-size", "groups=two")[0] == 2


def test_elements_that_a_map_leaves_are_no_secret(tmp_path):
    path = write(tmp_path / "c", STATE, "zarr")
    cut = TensorMap.parse(MAP).with_sizes({"real": 6})
    with pytest.raises(errors.CheckpointError, match="embed: 12 elements that the map does not take"):
        dtckpt.convert(path, tmp_path / "new", map=cut)
    report = dtckpt.convert(path, tmp_path / "new", map=cut, ignore_rest=True)
    assert report.account.left_files == ("embed: 12 elements that the map does not take",)
    assert torch.equal(dtckpt.restore(tmp_path / "new")["wte"], STATE["embed"][:6])
    with pytest.raises(errors.RegionNotFoundError, match="of its elements are in no tensor that is named '\\*wte'"):
        dtckpt.open_checkpoint(tmp_path / "new", map=cut.with_sizes({"words": 8}).inverse())


RULE = MAP["rules"][0]
SPLIT = {"from": {"a": "(parts x)"}, "to": {"b": "(parts[:1] x)", "c": "(parts[1:2] x)"}}


@pytest.mark.parametrize(
    ("state", "rule", "sizes", "error", "reason"),
    [
        (STATE, RULE, {}, errors.ConfigError, "the size of axis 'dim' .* pass it, as --map-size dim=N"),
        (STATE, RULE, {"groups": 7, "dim": 5}, errors.ConfigError, "axis 'each'"),
        (
            STATE,
            RULE,
            {"groups": 2, "dim": 5, "each": 5},
            errors.ShapeMismatchError,
            r"expected \(3, 50, 6\) by the map",
        ),
        (STATE, {**RULE, "from": {"*x": "layers (groups each dim) hidden"}}, {}, errors.TensorNotFoundError, "no such"),
        (STATE, {"from": {"embed": "a"}, "to": {"x": "a"}}, {}, errors.ShapeMismatchError, "expected 1 dims"),
        (STATE, {"from": "embed", "to": "norm"}, {}, errors.TensorNameError, "the checkpoint has another one"),
        (
            STATE,
            {"from": "embed", "to": "norm/x"},
            {},
            errors.TensorNameError,
            "something else of the checkpoint is in",
        ),
        ({"b": FUSED, "a": FUSED}, {"from": {"{i}.x": "", "b": ""}, "to": {"y": "i"}}, {}, errors.ConfigError, "axes"),
        (
            {"0.x": FUSED, "2.x": FUSED},
            {"from": {"{i}.x": "a b c"}, "to": {"y": "i a b c"}},
            {},
            errors.TensorNotFoundError,
            "'1.x'",
        ),
        (
            {"0.x": FUSED, "1.x": FUSED.double()},
            *({"from": {"{i}.x": "a b c"}, "to": {"y": "i a b c"}}, {}, errors.DTypeError, "several dtypes"),
        ),
        (
            {"b": FUSED},
            {"from": SPLIT["to"], "to": SPLIT["from"]},
            {},
            errors.TensorNotFoundError,
            "lacks a tensor that",
        ),
        (
            {"b": torch.ones(2), "c": torch.ones(2)},
            *(
                {"from": {"b": "x[:2]", "c": "x[1:3]"}, "to": {"a": "x"}},
                {"x": 3},
                errors.ConfigError,
                "share elements",
            ),
        ),
        (
            {"a": torch.ones(3)},
            {"from": {"a": "x"}, "to": {"b": "x[:2]", "c": "x[:1]"}},
            *({}, errors.ConfigError, "share elements"),
        ),
        (
            {"a": FUSED},
            {"from": {"a": "x y z"}, "to": {"b": "x y[:no] z"}},
            {},
            errors.ConfigError,
            "size 'no' of the map",
        ),
    ],
)
def test_maps_that_do_not_fit(tmp_path, state, rule, sizes, error, reason):
    path = write(tmp_path / "c.pt", state, "torch")
    with pytest.raises(error, match=reason):
        dtckpt.open_checkpoint(path, map=TensorMap.parse({"rules": [rule], "sizes": sizes}))


@pytest.mark.parametrize(
    "content",
    [
        *([], {}, {"rules": 3}, {"rules": [3]}, {"rules": [{"from": "a"}]}, {"rules": [], "more": 1}),
        *({"rules": [], "sizes": {"x": 1}}, {"rules": [SPLIT], "sizes": {"x": 0}}, {"rules": [{**SPLIT, "more": 1}]}),
        {"rules": [{**SPLIT, "optional": 1}]},
        {"rules": [{"from": "*a", "to": "b"}]},
        {"rules": [{"from": "a", "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "x"}, "to": {"b": "y"}}]},
        {"rules": [{"from": {"a": "x x"}, "to": {"b": "x x"}}]},
        {"rules": [{"from": {"a.{x}": "x"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "(x"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "x)"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "((x))"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "x[1]"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": "x[-1:1]"}, "to": {"b": "x"}}]},
        {"rules": [{"from": {"a": 3}, "to": {"b": "x"}}]},
    ],
)
def test_documents_that_are_no_maps(tmp_path, content):
    (tmp_path / "map.json").write_text(json.dumps(content))
    with pytest.raises(errors.ConfigError):
        TensorMap.load(tmp_path / "map.json")


def test_views():
    (first, second) = parse_view(" (a b[1:-2] ) c[:n]")
    assert [(part.axis, part.start, part.stop) for part in (*first, *second)] == [
        ("a", None, None),
        ("b", 1, -2),
        ("c", None, "n"),
    ]
    assert parse_view("") == ()


def test_sizes_of_heads():
    """Megatron's number of groups has a default, which counts only with grouped queries."""
    args = {"args/num_attention_heads": 8, "args/num_query_groups": 1, "args/kv_channels": 16}
    assert known_sizes(args, None) == {"groups": 8, "dim": 16}
    assert known_sizes({**args, "args/group_query_attention": True}, None) == {"groups": 1, "dim": 16}
    assert known_sizes({}, {"n_head": 4, "n_embd": 32}) == {"groups": 4, "dim": 8}
    assert known_sizes({}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}) == {
        "groups": 2,
        "dim": 3,
    }
    assert known_sizes({}, [3]) == {}


def test_maps_are_for_checkpoints_on_storage():
    with pytest.raises(errors.ConfigError, match="save it first"):
        dtckpt.open_checkpoint("live://feed", map=rules())
    assert main(["convert", "live://feed", "x", "--map", "megatron-llama"]) == 2
