"""Folders of Trainer, accelerate and PEFT: real ones, and shapes of them that need several processes or a GPU."""

import json
import shutil

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dtckpt
from dtckpt import errors
from dtckpt.checkpoint.foreign.torch_files import open_stream
from dtckpt.cli.main import main
from dtckpt.storage.local_folder import LocalFolder

from .sample_files import SAMPLES, content, expected, facts, read_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

HUGGINGFACE = SAMPLES / "huggingface"
NAMES = ("trainer", "accelerate", "adapter")
TREES = {
    "trainer": {"model", "optimizer", "scheduler", "rng", "trainer_state"},
    "accelerate": {"model", "optimizer", "scheduler", "custom_checkpoint_0", "rng"},
    "adapter": {"adapter", "adapter_config"},
}
STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


@pytest.fixture
def trainer(tmp_path):
    return shutil.copytree(HUGGINGFACE / "trainer", tmp_path / "trainer")


@pytest.fixture
def folder(tmp_path):
    """A folder of accelerate with one optimizer; its files are added by the tests."""
    path = tmp_path / "state"
    path.mkdir()
    safetensors.torch.save_file(STATE, path / "model.safetensors", metadata={"format": "pt"})
    parameters = [torch.nn.Parameter(each.clone()) for each in STATE.values()]
    optimizer = torch.optim.AdamW(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_all_tensors_are_those_that_the_library_loads(name):
    found = read_all(HUGGINGFACE / name)
    wanted = expected(HUGGINGFACE, name)
    assert {key: found[key] for key in wanted} == wanted
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_tree(name):
    with dtckpt.open_checkpoint(HUGGINGFACE / name) as checkpoint:
        assert checkpoint.format == "huggingface"
        assert dict(checkpoint.refused) == {}
        described = {"config.json", "generation_config.json", "README.md"}
        assert set(checkpoint.unread) - described == ({"training_args.bin"} if name == "trainer" else set())
        assert checkpoint.verify().is_sound
    assert TREES[name] <= dtckpt.restore(HUGGINGFACE / name).keys()


@pytest.mark.share(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_it(name, tmp_path, capsys):
    path = HUGGINGFACE / name
    dtckpt.convert(path, tmp_path / "ours", ignore_rest=True)
    assert main(["diff", str(path), str(tmp_path / "ours"), "--values", "--ignore", "file"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert main(["verify", str(path)]) == 0
    assert read_all(tmp_path / "ours") == read_all(path)


def test_values():
    restored = dtckpt.restore(HUGGINGFACE / "trainer")
    assert restored["trainer_state"]["global_step"] == 2
    assert restored["scheduler"]["last_epoch"] == 2
    assert len(restored["rng"]["python"][1]) == 625
    assert dtckpt.restore(HUGGINGFACE / "adapter")["adapter_config"]["r"] == 2


def test_a_trainer_numbers_its_parameters_and_a_note_says_so():
    """No file of a Trainer tells their order: two groups, and a safetensors file that sorts its names."""
    with dtckpt.open_checkpoint(HUGGINGFACE / "trainer") as checkpoint:
        (note,) = checkpoint.notes
    assert note.startswith("optimizer/state: no file tells the names of the parameters 0, 1, 2")


def test_a_template_gives_moments_their_names(trainer):
    """In the order of the optimizer's groups: decayed parameters, and then biases and norms."""
    restored = dtckpt.restore(trainer)
    named = sorted(content(HUGGINGFACE, "trainer")[1]["params"], key=lambda name: "norm" in name)
    (trainer / "template.json").write_text(json.dumps({name: list(restored["model"][name].shape) for name in named}))
    again = dtckpt.restore(trainer)
    for number, name in enumerate(named):
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(again["optimizer"]["state"][name][kind], restored["optimizer"]["state"][number][kind])
    assert [name for group in again["optimizer"]["param_groups"] for name in group["params"]] == named
    with dtckpt.open_checkpoint(trainer) as checkpoint:
        assert (checkpoint.notes, "template.json" in checkpoint.files.files) == ((), True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda shapes: dict(list(shapes.items())[1:]), "the template has 1 parameters, and .* has 2"),
        (lambda shapes: dict(reversed(shapes.items())), "parameter 0 .* is 'a.bias' of shape .*in the order of"),
        (lambda shapes: [1], "is no template"),
    ],
)
def test_a_template_of_another_optimizer_is_an_error(folder, change, reason):
    shapes = {name: list(tensor.shape) for name, tensor in STATE.items()}
    (folder / "template.json").write_text(json.dumps(shapes))
    assert facts(dtckpt.restore(folder)["optimizer"]["state"]["a.bias"]["exp_avg"])[0] == [2]
    (folder / "template.json").write_text(json.dumps(change(shapes)))
    with pytest.raises(errors.CheckpointCorruptError, match=reason):
        dtckpt.open_checkpoint(folder)


def test_several_processes_models_and_optimizers(folder, tmp_path):
    state = HUGGINGFACE / "accelerate" / "random_states_0.pkl"
    for rank in range(3):
        random = torch.load(state, weights_only=False) | {"step": rank}
        torch.save(random, folder / f"random_states_{rank}.pkl")
    shutil.copy(folder / "model.safetensors", folder / "model_1.safetensors")
    shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    restored = dtckpt.restore(folder)
    assert [restored["rng"][rank]["step"] for rank in range(3)] == [0, 1, 2]
    assert torch.equal(restored["model_1"]["a.weight"], STATE["a.weight"])
    assert restored["optimizer_1"]["state"][0]["step"] == 1
    dtckpt.convert(folder, tmp_path / "ours")
    assert read_all(tmp_path / "ours") == read_all(folder)
    (folder / "random_states_1.pkl").unlink()
    with pytest.raises(errors.CheckpointIncompleteError, match=r"lacks random_states_1.pkl, the random state of"):
        dtckpt.open_checkpoint(folder)


@pytest.mark.parametrize("has_key", [True, False])
def test_fsdp_with_sharded_state(folder, has_key):
    """As accelerate saves it, below a key; and as older versions of transformers, without."""
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.bin").unlink()
    moments = {"state": {name: {"exp_avg": tensor + 1} for name, tensor in STATE.items()}}
    for below, key, state in (("pytorch_model_fsdp_0", "model", STATE), ("optimizer_0", "optimizer", moments)):
        dcp.save({key: state} if has_key else state, checkpoint_id=folder / below)
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    (folder / "trainer_state.json").write_text("{}")
    restored = dtckpt.restore(folder)
    assert torch.equal(restored["model"]["a.weight"], STATE["a.weight"])
    assert torch.equal(restored["optimizer"]["state"]["a.bias"]["exp_avg"], STATE["a.bias"] + 1)
    assert restored["scheduler"] == {"last_epoch": 3}
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == ()
        assert "pytorch_model_fsdp_0/.metadata" in checkpoint.files.files


def test_fsdp_with_whole_state(folder):
    (folder / "model.safetensors").unlink()
    torch.save(STATE, folder / "pytorch_model_fsdp.bin")
    state = {name: {"exp_avg": tensor} for name, tensor in STATE.items()}
    torch.save({"state": state, "param_groups": [{"params": list(STATE)}]}, folder / "optimizer.bin")
    restored = dtckpt.restore(folder)
    assert torch.equal(restored["model"]["a.weight"], STATE["a.weight"])
    assert torch.equal(restored["optimizer"]["state"]["a.weight"]["exp_avg"], STATE["a.weight"])
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.notes == ()


def test_with_the_files_of_fsdps_processes(folder):
    """``LOCAL_STATE_DICT``."""
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.bin").unlink()
    local = SAMPLES / "fsdp" / "fsdp1_flat_2"
    for rank in range(2):
        shutil.copy(local / f"local_rank{rank}.pt", folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    restored = dtckpt.restore(folder)
    assert restored["module"]["_flat_param"].shape == (70,)
    assert restored["trainer_state"] == {"global_step": 5}


def test_with_deepspeed(folder):
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.bin").unlink()
    shutil.copytree(SAMPLES / "deepspeed" / "z3_bf16_2" / "global_step3", folder / "global_step3")
    (folder / "latest").write_text("global_step3")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    restored = dtckpt.restore(folder)
    assert restored["global_steps"] == restored["trainer_state"]["global_step"] == 3
    alone = read_all(SAMPLES / "deepspeed" / "z3_bf16_2")
    assert read_all(folder) == alone
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == ()


def test_an_adapter_beside_its_base(folder):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(HUGGINGFACE / "adapter" / name, folder / name)
    restored = dtckpt.restore(folder)
    assert restored["model"].keys() == STATE.keys()
    assert all(name.startswith("base_model.model.") for name in restored["adapter"])


def test_a_model_in_pickles(tmp_path):
    """One file needs no index. Beside safetensors the pickles are not read, as in transformers."""
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    assert dtckpt.restore(tmp_path).keys() == STATE.keys()
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    assert dtckpt.restore(tmp_path)["model"].keys() == STATE.keys()
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert (list(checkpoint.tensors), checkpoint.unread) == (["model/w"], ("pytorch_model.bin",))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").unlink()
    parts = {"a.weight": "pytorch_model-00001-of-00002.bin", "a.bias": "pytorch_model-00002-of-00002.bin"}
    for name, file in parts.items():
        torch.save({name: STATE[name]}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": parts}))
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert (list(checkpoint.tensors), checkpoint.unread) == (["model/a.weight", "model/a.bias"], ())


@pytest.mark.share(1)
@pytest.mark.parametrize("name", NAMES)
def test_where_directories_are_not_listed(name):
    for file in (HUGGINGFACE / name).iterdir():
        with fsspec.open(f"memory://huggingface/{name}/{file.name}", "wb") as copy:
            copy.write(file.read_bytes())
    assert read_all(f"memory://huggingface/{name}") == read_all(HUGGINGFACE / name)


def test_random_states_of_processes_where_directories_are_not_listed():
    for rank in range(3):
        with fsspec.open(f"memory://random/random_states_{rank}.pkl", "wb") as copy:
            torch.save({"step": rank}, copy)
    assert [each["step"] for each in dtckpt.restore("memory://random")["rng"].values()] == [0, 1, 2]


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_damaged_part_is_refused_and_the_others_are_read(trainer, name):
    data = (trainer / name).read_bytes()
    (trainer / name).write_bytes(data[: len(data) // 2])
    key = "rng" if name.startswith("rng") else name.partition(".")[0]
    with dtckpt.open_checkpoint(trainer) as checkpoint:
        assert list(checkpoint.refused) == [key]
        assert key not in {name.partition("/")[0] for name in checkpoint.tensors}
        assert checkpoint.read("model/model.norm.weight").shape == (8,)
    with pytest.raises(errors.DtckptError):
        dtckpt.convert(trainer, trainer.parent / "new", ignore_rest=False, dry_run=True)


def test_the_arguments_of_a_trainer_are_not_made(trainer):
    """``training_args.bin`` names a class of transformers. Nothing looks it up; the file is named as unread."""
    stream = open_stream(LocalFolder(trainer), "training_args.bin", 0, (trainer / "training_args.bin").stat().st_size)
    assert stream.zip.value.name == "transformers.training_args.TrainingArguments"
    with pytest.raises(errors.CheckpointError, match=r"training_args\.bin"):
        dtckpt.convert(trainer, trainer.parent / "new")
