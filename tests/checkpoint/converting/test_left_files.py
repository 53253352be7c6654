"""For every format: a file that dtckpt does not read is named, and a conversion that would leave it fails."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from storage.untrusted.hostile_files import write_honest

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES
from dtckpt import errors
from dtckpt.checkpoint.foreign.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

STATE = {"a": torch.ones(2), "b": torch.zeros(3)}


def safetensors_folder(path):
    path.mkdir()
    safetensors.torch.save_file(STATE, path / "model.safetensors", metadata={"format": "pt"})


def parts_folder(path, form="safetensors"):
    path.mkdir()
    stem = "model" if form == "safetensors" else "pytorch_model"
    weight_map = {name: f"{stem}-{number}-of-2.{form}" for number, name in enumerate(STATE, 1)}
    for name, file in weight_map.items():
        if form == "safetensors":
            safetensors.torch.save_file({name: STATE[name]}, path / file, metadata={"format": "pt"})
        else:
            torch.save({name: STATE[name]}, path / file)
    (path / f"{stem}.{form}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def torch_folder(path):
    path.mkdir()
    torch.save(STATE, path / "pytorch_model.bin")


def nemo_folder(path):
    shutil.copytree(SAMPLES / "megatron/tp2pp1_swiglu/iter_0000005", path / "weights")


def megatron_zarr_folder(path):
    write_honest(path.parent / "written", "megatron zarr").rename(path)


def sample(name):
    return lambda path: shutil.copytree(SAMPLES / name, path)


CASES = {
    "safetensors": (safetensors_folder, "", "x.bin"),
    "safetensors of an index": (parts_folder, "", "model-3-of-3.safetensors"),
    "torch": (torch_folder, "", "y.bin"),
    "torch of an index": (lambda path: parts_folder(path, "bin"), "", "pytorch_model-3-of-3.bin"),
    "dcp": (lambda path: dcp.save(STATE, checkpoint_id=path), "", "__9_0.distcp"),
    "dcp, below": (lambda path: dcp.save(STATE, checkpoint_id=path), "", "more/x"),
    "dcp of Megatron": (sample("megatron_versions/v0.19.0/iter_0000007"), "", "integrity.json"),
    "dcp of Megatron, common.pt": (sample("megatron/tp2pp1_swiglu/iter_0000005"), "", "x.yaml"),
    "dcp of NeMo": (nemo_folder, "", "context/model.yaml"),
    "dcp of NeMo, weights": (nemo_folder, "", "weights/x"),
    "dcp of FSDP1": (sample("fsdp/fsdp1_orig_2/sharded"), "", "x"),
    "megatron": (megatron_zarr_folder, "", "x.json"),
    "fsdp": (sample("fsdp/fsdp1_flat_2"), "", "x.json"),
    "deepspeed": (sample("deepspeed/z2_bf16_2/global_step3"), "", "swap.tensor"),
    "deepspeed, stage 3": (sample("deepspeed/z3_bf16_2/global_step3"), "", "x/y"),
    "deepspeed, a larger job": (
        *(sample("deepspeed/z1_fp32_2/global_step3"), "", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ),
    "deepspeed, universal": (sample("deepspeed/z2_bf16_2_universal/global_step3_universal"), "", "zero/x.txt"),
    "deepspeed, a run": (sample("deepspeed/z2_bf16_2"), "", "global_step3/x"),
    "orbax": (sample("orbax/v0_plain_zarr2_mesh2x2"), "", "x"),
    "orbax, items": (sample("orbax/v1_checkpointables"), "", "more/x"),
    "orbax, an item": (sample("orbax/v0_manager/3"), "", "state/x"),
    "tensorflow": (sample("tensorflow/object"), "", "x"),
    "tensorflow, by prefix": (sample("tensorflow/object"), "ckpt-1", "ckpt-1.meta"),
    "huggingface": (sample("huggingface/trainer"), "", "x.bin"),
    "huggingface, accelerate": (sample("huggingface/accelerate"), "", "model_1.bin.lock"),
    "huggingface, adapter": (sample("huggingface/adapter"), "", "x/adapter_model.safetensors"),
}
"""By name, which begins with the format: what writes the folder, the path in it, and the file that is added."""


def test_no_format_is_left_out():
    assert {name.replace(" ", ",").partition(",")[0] for name in CASES} == FORMATS.keys()


@pytest.mark.share(9)
@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_not_read_fails_a_conversion(name, run, tmp_path):
    write, below, file = CASES[name]
    folder = tmp_path / "source"
    write(folder)
    path = folder / below
    known = set(dtckpt.convert(path, tmp_path / "x", ignore_rest=True, dry_run=True).account.left_files)
    assert known <= {"training_args.bin", "config.json", "generation_config.json", "README.md"}
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"somebody's")
    with pytest.raises(errors.CheckpointError) as raised:
        dtckpt.convert(path, tmp_path / "new")
    code, shown = run("convert", path, tmp_path / "new", "--ignore-rest", "--json")
    (left,) = set(json.loads(shown.out.splitlines()[0])["files_left"]) - known
    assert left.removeprefix("../").partition("/")[0] in file
    assert left in raised.value.message
    assert (code, (tmp_path / "new").is_dir()) == (0, True)
    code, shown = run("convert", path, tmp_path / "newer")
    assert (code, left in shown.err, (tmp_path / "newer").exists()) == (1, True, False)
