"""Folders that leave doubt: pointers to nowhere, two formats in one folder, parts that do not fit, and links."""

import json
import os
import shutil
import time

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dtckpt
from dtckpt import errors
from dtckpt.cli.main import main

from .sample_files import SAMPLES, read_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

DEEPSPEED = SAMPLES / "deepspeed" / "z2_bf16_2"
UNIVERSAL = SAMPLES / "deepspeed" / "z2_bf16_2_universal"
MEGATRON = SAMPLES / "megatron_versions" / "v0.13.1"
POINTER = {DEEPSPEED: "latest", MEGATRON: "latest_checkpointed_iteration.txt"}


def copied(source, tmp_path):
    return shutil.copytree(source, tmp_path / "run")


# --- pointers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", POINTER, ids=lambda run: run.name)
@pytest.mark.parametrize(
    "text", ["", " \n", "global_step99", "99", "..", ".", "../elsewhere", "/tmp", "a\0b", "file", "empty"]
)
def test_a_pointer_to_nowhere(tmp_path, run, text):
    """Also where a checkpoint lies: a pointer never leads out of the folder."""
    path = copied(run, tmp_path)
    shutil.copytree(path, tmp_path / "elsewhere")
    (path / "file").write_text("no folder")
    (path / "empty").mkdir()
    (path / POINTER[run]).write_text(text)
    with pytest.raises(errors.CheckpointNotFoundError, match=POINTER[run]) as raised:
        dtckpt.open_checkpoint(path)
    assert repr(text.strip()) in raised.value.message


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.write_text("g" * 300)])
def test_something_else_with_the_name_of_a_pointer(tmp_path, make):
    """It hangs no reader, and hides no format."""
    make(tmp_path / "latest")
    with pytest.raises(errors.CheckpointNotFoundError, match="it holds latest"):
        dtckpt.open_checkpoint(tmp_path)
    shutil.copytree(SAMPLES / "huggingface" / "accelerate", tmp_path, dirs_exist_ok=True)
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "huggingface"
        assert "latest" in checkpoint.unread


def test_several_pointers_are_noted(tmp_path):
    path = copied(DEEPSPEED, tmp_path)
    shutil.copytree(UNIVERSAL / "global_step3_universal", path / "global_step3_universal")
    (path / "latest_universal").write_text("global_step3_universal")
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.notes[0] == "latest_universal names 'global_step3_universal', and global_step3 is read"
    (path / "latest").write_text("global_step4")
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.notes[0] == "latest names 'global_step4', and global_step3_universal is read"
    (path / "latest").write_text("global_step3_universal")
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert not any(note.startswith("latest") for note in checkpoint.notes)


# --- two formats in one folder ----------------------------------------------------------------------------------------


def add_safetensors(path):
    safetensors.torch.save_file({"other": torch.ones(2)}, path / "model.safetensors")
    return {"model.safetensors"}


def add_index(path):
    file = "model-00001-of-00001.safetensors"
    safetensors.torch.save_file({"other": torch.ones(2)}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"other": file}}))
    return {file, "model.safetensors.index.json"}


def add_pickle(path):
    torch.save({"other": torch.ones(2)}, path / "pytorch_model.bin")
    return {"pytorch_model.bin"}


def add_dcp(path):
    dcp.save({"other": torch.ones(2)}, checkpoint_id=path)
    return {".metadata", "__0_0.distcp"}


BASES = {
    "dcp": lambda path: dcp.save({"w": torch.zeros(2)}, checkpoint_id=path),
    "dtckpt": lambda path: dtckpt.save(path, {"w": torch.zeros(2)}),
    "deepspeed": lambda path: shutil.copytree(DEEPSPEED / "global_step3", path),
    "orbax": lambda path: shutil.copytree(SAMPLES / "orbax" / "v1_state", path),
    "fsdp": lambda path: shutil.copytree(SAMPLES / "fsdp" / "fsdp1_flat_2", path),
    "trainer": lambda path: shutil.copytree(SAMPLES / "huggingface" / "trainer", path),
    "tensorflow": lambda path: shutil.copytree(SAMPLES / "tensorflow" / "object", path),
    "run": lambda path: shutil.copytree(DEEPSPEED, path),
}
SAME_FILES = {("dcp", "dcp"), ("dtckpt", "dcp"), ("trainer", "safetensors")}


ADDITIONS = {"safetensors": add_safetensors, "index": add_index, "pickle": add_pickle, "dcp": add_dcp}
PAIRS = sorted({(base, added) for base in BASES for added in ADDITIONS} - SAME_FILES)


@pytest.mark.share(6)
@pytest.mark.parametrize(("base", "added"), PAIRS)
def test_the_format_that_is_not_read_is_told(tmp_path, capsys, base, added):
    """`inspect` names files of the format that is not read, and a conversion stops at them."""
    path = tmp_path / "both"
    BASES[base](path)
    own = set(os.listdir(path))
    new = ADDITIONS[added](path)
    with dtckpt.open_checkpoint(path) as checkpoint:
        rest = {*checkpoint.unread, *checkpoint.refused}
        read = own if checkpoint.format == "dtckpt" else {name.partition("/")[0] for name in checkpoint.files.files}
        assert own | new <= read | {name.partition("/")[0] for name in rest}, checkpoint.format
        left = sorted({*checkpoint.unread} & (own | new))
    assert main(["inspect", str(path)]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in left)
    if left:
        with pytest.raises(errors.DtckptError):
            dtckpt.convert(path, tmp_path / "new")


# --- models of Hugging Face -------------------------------------------------------------------------------------------

NUM_SHARDS, NUM_EXPERTS = 40, 990


def write_model(path, shards):
    """Write a model in several files; return the index."""
    path.mkdir()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        safetensors.torch.save_file({name: torch.ones(1) for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    write_map(path, weight_map)
    return weight_map


def write_map(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_inspect_of_a_mixture_of_experts(tmp_path, capsys):
    """39 600 tensors in 40 files."""
    shards = [[f"layers.{layer}.experts.{expert}.w" for expert in range(NUM_EXPERTS)] for layer in range(NUM_SHARDS)]
    write_model(tmp_path / "model", shards)
    start = time.process_time()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    assert time.process_time() - start < 30  # of the processor: other programs may run beside this one
    assert "39600" in capsys.readouterr().out


def test_the_index_and_the_files_differ(tmp_path):
    path = tmp_path / "model"
    weight_map = write_model(path, [["a", "b"], ["c", "d"]])
    write_map(path, weight_map | {"e": weight_map["a"]})
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
        assert "model-00001-of-00002.safetensors, which lacks it" in checkpoint.refused["e"].message
    with pytest.raises(errors.CheckpointCorruptError, match="which lacks it"):
        dtckpt.restore(path)
    write_map(path, {name: weight_map[name] for name in "abc"} | {"a": weight_map["c"]})
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
        assert list(checkpoint.notes) == [
            "model.safetensors.index.json names the wrong file of: a",
            "model.safetensors.index.json lacks tensors that its files have: d",
        ]
    write_map(path, weight_map | {"e": "model-00003-of-00003.safetensors"})
    with pytest.raises(errors.CheckpointCorruptError, match=r"model-00003-of-00003\.safetensors is missing"):
        dtckpt.open_checkpoint(path)


# --- links ------------------------------------------------------------------------------------------------------------


def linked(source, to):
    """Make a folder whose files are links to files elsewhere, as in Hugging Face's cache."""
    for file in sorted(each for each in source.rglob("*") if each.is_file()):
        link = to / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return to


LINKED = {
    "huggingface/trainer": "model.safetensors",
    "deepspeed/z2_bf16_2": "global_step3/mp_rank_00_model_states.pt",
    "orbax/v0_plain_zarr2_mesh2x2": "params.embed.embedding/.zarray",
    "megatron_versions/v0.13.1/iter_0000007": "common.pt",
}


@pytest.mark.parametrize(("sample", "file"), LINKED.items())
def test_links_out_of_the_folder(tmp_path, sample, file):
    """Links to files are followed, as caches consist of them; a link to nothing is a file that is missing."""
    path = linked(SAMPLES / sample, tmp_path / "links")
    assert read_all(path) == read_all(SAMPLES / sample)
    for target in ("nowhere", os.path.basename(file), "/dev/zero"):
        (path / file).unlink()
        (path / file).symlink_to(target)
        try:
            with dtckpt.open_checkpoint(path) as checkpoint:
                told = str([*checkpoint.unread, *checkpoint.refused.items()])
        except errors.CheckpointError as error:
            told = error.message
        # A document, or the array that it is of.
        assert any(name in told for name in file.removesuffix("/.zarray").split("/")), (target, told)
