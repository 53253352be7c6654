"""``dtckpt convert``: options, output, events, and exit codes."""

import json
import os

import safetensors.torch
import torch
from support.states import bits_of

import dtckpt
from dtckpt.checkpoint.converting.targets import target_names
from dtckpt.cli.options import TARGETS

from .conftest import run_process


def test_formats_of_the_help_are_those_of_the_library():
    assert sorted(TARGETS) == sorted(target_names())


def test_there_and_back(run, source, tmp_path, tensors):
    model, back = tmp_path / "m.safetensors", tmp_path / "back"
    result = run("convert", source, model)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"converted {source} (dtckpt) to {model} (safetensors): 9 tensors, ")
    assert ", 1 file in " in result.out
    assert result.out.count("\n") == 1
    result = run("convert", model, back)
    assert (result.code, result.err) == (0, "")
    assert f"to {back} (dtckpt): 9 tensors, " in result.out
    with dtckpt.open_checkpoint(back) as new, dtckpt.open_checkpoint(source) as old:
        assert {name: bits_of(new.read(name)) for name in new.tensors} == {k: bits_of(v) for k, v in tensors.items()}
        assert new.structure == old.structure


def test_options(run, source, tmp_path, tensors):
    arguments = ["--select", "model/*", "--select", "optim/a=b", "--rename", "model/*=m.*", "--rename", "optim/a=b=c"]
    result = run(
        "convert", source, tmp_path / "m", "--to", "safetensors", *arguments, "--dtype", "float32",
        "--max-shard-size", "200B", "--max-memory", "1MiB",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    files = [name for name in os.listdir(tmp_path / "m") if name.endswith(".safetensors")]
    read = {
        name: tensor for file in files for name, tensor in safetensors.torch.load_file(tmp_path / "m" / file).items()
    }
    assert len(files) > 1
    assert sorted(read) == ["c", "m.half", "m.tiny", "m.uneven", "m.w"]
    assert all(tensor.dtype == torch.float32 for tensor in read.values())
    assert torch.equal(read["m.w"], tensors["model/w"])
    result = run("convert", source, tmp_path / "z", "--to", "zarr", "--codec", "zstd")
    assert result.code == 0
    with dtckpt.open_checkpoint(tmp_path / "z") as checkpoint:
        assert checkpoint.manifest.kvstore == "zarr"
        assert checkpoint.tensors["model/w"].codec == "zstd"
    result = run("convert", source, tmp_path / "t.safetensors", "--tied", "model/w=model/uneven")
    result.fails(2, "'model/w' and 'model/uneven' cannot be tied")


def test_a_dry_run_shows_the_plan(run, source, tmp_path):
    result = run("convert", source, tmp_path / "m.safetensors", "--dry-run", "--rename", "model/w=new")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["TENSOR", "NEW", "NAME", "SHAPE", "DTYPE", "SIZE"]
    assert ["model/w", "new", "8x6", "float32", "192", "B"] in [line.split() for line in lines]
    assert lines[-1].startswith("would write 9 tensors, ")
    assert lines[-1].endswith("(safetensors); this was a dry run, nothing was written")
    assert not (tmp_path / "m.safetensors").exists()


def test_events(run, source, tmp_path):
    result = run("convert", source, tmp_path / "m.safetensors", "--json")
    start, *between, done = result.events
    assert (start["event"], start["from"], start["to"], start["tensors"]) == ("start", "dtckpt", "safetensors", 9)
    assert list(start["files"]) == ["m.safetensors"]
    assert [event["event"] for event in between] == ["tensor"] * 9
    with dtckpt.open_checkpoint(source) as checkpoint:
        for event in between:
            info = checkpoint.tensors[event["name"]]
            assert event["content_digest"] == f"{info.content_digest:016x}"
            assert (event["new_name"], event["dtype"], event["bytes"]) == (info.name, info.dtype_name, info.nbytes)
    assert done["event"] == "done"
    assert done["seconds"] > 0
    result = run("convert", source, tmp_path / "m.safetensors", "--json", "--dry-run", "--overwrite")
    assert [event["event"] for event in result.events] == ["start", *["tensor"] * 9, "done"]
    assert result.events[1]["content_digest"] is None


def test_errors(run, source, tmp_path):
    target = tmp_path / "m.safetensors"
    run("convert", tmp_path / "none", target).fails(3, "there is no checkpoint at")
    run("convert", source, target, "--to", "pickle").fails(2, "--to")
    run("convert", source, target, "--select", "nothing").fails(3, "is named 'nothing'")
    run("convert", source, target, "--rename", "model").fails(2, "--rename 'model' cannot be used; expected OLD=NEW")
    run("convert", source, target, "--rename", "a=b", "--rename", "a=c").fails(2, "each name once")
    run("convert", source, target, "--max-memory", "1KiB").fails(2, "--max-memory is too small")
    run("convert", source, target, "--max-shard-size", "much").fails(2, "size cannot be used")
    run("convert", source, target, "--dtype", "int8").fails(2, "dtype cannot be used")
    target.write_bytes(b"")
    run("convert", source, target).fails(4, "pass --overwrite to replace it")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x20" + bytes(50))
    run("convert", tmp_path / "damaged.safetensors", tmp_path / "x").fails(1, "damaged.safetensors")
    (tmp_path / "notes.txt").write_text("x")
    run("convert", tmp_path / "notes.txt", tmp_path / "x").fails(3, "no format that dtckpt reads")


def test_other_commands_read_safetensors(run, tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3, 4, dtype=torch.bfloat16), "e": torch.zeros(0)}, path)
    result = run("inspect", path)
    assert (result.code, result.err) == (0, "")
    assert ["format", "safetensors"] in [line.split() for line in result.out.splitlines()]
    assert ["w", "3x4", "bfloat16", "none", "1", "24", "B", "1x1"] in [line.split() for line in result.out.splitlines()]
    (event,) = run("inspect", path, "--json", "--chunks").events
    assert event["format"] == "safetensors"
    assert "kvstore" not in event
    (chunk,) = (
        event["tensors"][1]["chunk_list"] if event["tensors"][1]["name"] == "w" else event["tensors"][0]["chunk_list"]
    )
    assert (chunk["digest"], chunk["client"]) == (None, None)
    assert chunk["key"].startswith("m.safetensors@")
    result = run("verify", path)
    assert result.code == 0
    assert f"{path} is readable: 2 tensors, 1 chunk, " in result.out
    assert "no digest is noted of 1 tensor: bytes that changed since are not found there" in result.out
    (event,) = run("verify", path, "--json").events
    assert (event["is_sound"], event["unverified"]) == (True, 1)
    run("convert", path, tmp_path / "noted.safetensors")
    result = run("verify", tmp_path / "noted.safetensors")
    assert "noted.safetensors is sound: 2 tensors" in result.out
    result = run("reshard", path, tmp_path / "s", "--mesh", "x=2", "--layout", "w=x,unsharded")
    assert (result.code, result.err) == (0, "")
    assert dtckpt.restore(tmp_path / "s")["w"].sum() == 12


def test_as_a_process(source, tmp_path):
    result = run_process("convert", source, tmp_path / "m.safetensors", "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out.splitlines()[-1])["event"] == "done"
