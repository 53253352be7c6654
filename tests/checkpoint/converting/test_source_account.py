"""Conversions account for all of their source: files, notes and keys, taken, renamed or left."""

import json
from fractions import Fraction

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dtckpt
from dtckpt import errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


@pytest.fixture
def folder(tmp_path):
    """A model of Hugging Face, with files and notes that are no part of its tensors."""
    path = tmp_path / "model"
    path.mkdir()
    tensors = {"a.w": torch.ones(2), "b.w": torch.zeros(3)}
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt", "author": "somebody"})
    (path / "config.json").write_text("{}")
    (path / "state.bin").write_text("unknown")
    return path


def test_what_is_taken_renamed_and_left(folder, tmp_path):
    report = dtckpt.convert(folder, tmp_path / "new", rename={"a.w": "c/w"}, select=["a.*"])
    account = report.account
    assert account.files == ("model.safetensors",)
    assert (account.keys, account.renamed) == (("a.w",), {"a.w": "c/w"})
    assert account.left_files == ("config.json", "state.bin", "model.safetensors: __metadata__/author")
    assert account.left_keys == {"b.w": "not selected"}
    assert account.left == (*account.left_files, "b.w")


def test_nothing_is_left_behind_without_a_word(folder, tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"left behind: state.bin, model.safetensors: __metadata__/author"):
        dtckpt.convert(folder, tmp_path / "new", dry_run=True)
    account = dtckpt.convert(folder, tmp_path / "new", ignore_rest=True, dry_run=True).account
    assert account.left == ("config.json", "state.bin", "model.safetensors: __metadata__/author")
    # The file that a user names is the whole source; its notes are a part of it.
    with pytest.raises(errors.CheckpointError, match=r"left behind: model.safetensors: __metadata__/author"):
        dtckpt.convert(folder / "model.safetensors", tmp_path / "new")


def test_descriptions_of_a_published_model_are_named_and_left(tmp_path):
    """A model as Hugging Face publishes it converts without an option."""
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    names = ["README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        (folder / name).write_text("{}")
    assert sorted(dtckpt.convert(folder, tmp_path / "new").account.left_files) == names


def test_values_of_a_checkpoint_of_ours(tmp_path):
    dtckpt.save(tmp_path / "s", {"w": torch.ones(2), "step": 3, "lr": 0.1})
    account = dtckpt.convert(tmp_path / "s", tmp_path / "new.pt", rename={"step": "steps"}).account
    assert set(account.keys) == {"w", "step", "lr"}
    assert (account.files, account.renamed, account.left) == ((), {"step": "steps"}, ())


def test_what_a_target_cannot_keep(run, tmp_path):
    optimizer = torch.optim.SGD([torch.ones(2)])
    state = {"o": optimizer.state_dict(), "list": [{"a": {}, "w": torch.ones(1)}, []], "kept": (1, {}), "none": []}
    dtckpt.save(tmp_path / "s", state)
    account = dtckpt.convert(tmp_path / "s", tmp_path / "dcp", to="dcp").account
    reason = "distributed checkpoints of PyTorch keep no empty dicts"
    assert account.left_keys == {"o/state": reason, "list/0/a": reason}
    restored = dtckpt.restore(tmp_path / "dcp")
    assert "state" not in restored["o"]
    assert (restored["kept"], restored["none"], restored["list"][1]) == ((1, {}), [], [])
    code, shown = run("convert", tmp_path / "s", tmp_path / "dcp", "--to", "dcp", "--overwrite")
    assert (code, f"left behind: o/state: {reason}\n" in shown.out) == (0, True)
    assert dtckpt.convert(tmp_path / "s", tmp_path / "new.pt").account.left_keys == {}


def test_a_tree_that_is_not_that_of_the_tensors(tmp_path):
    """Another program added a tensor: the tree with its plain values does not count any more, and is named."""
    dtckpt.save(tmp_path / "s", {"w": torch.ones(2), "step": 3})
    dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        notes = opened.metadata()
    more = {"w": torch.ones(2), "v": torch.ones(1)}
    safetensors.torch.save_file(more, tmp_path / "m.safetensors", metadata=notes)
    with pytest.raises(errors.CheckpointError, match=r"left behind: m.safetensors: __metadata__/dtckpt.tree"):
        dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "new")


def test_notes_of_an_index(tmp_path):
    tensors = {"w": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": 8, "total_parameters": 2, "step": 7},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.unread == ("model.safetensors.index.json: metadata/step",)


# --- on the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["convert"], ["reshard", "--mesh", "x=2"]], ids=["convert", "reshard"])
def test_the_exit_code(run, folder, tmp_path, command):
    code, shown = run(*command, folder, tmp_path / "new")
    assert code == 1
    assert "left behind: state.bin, model.safetensors: __metadata__/author; pass --ignore-rest to leave" in shown.err
    assert not (tmp_path / "new").exists()
    code, shown = run(*command, folder, tmp_path / "new", "--ignore-rest")
    assert code == 0
    assert "left behind: config.json: dtckpt does not read it\n" in shown.out
    code, shown = run(*command, folder, tmp_path / "json", "--ignore-rest", "--json")
    start = json.loads(shown.out.splitlines()[0])
    assert start["files_taken"] == ["model.safetensors"]
    assert start["files_left"] == ["config.json", "state.bin", "model.safetensors: __metadata__/author"]
    assert (start["keys_taken"], start["keys_renamed"], start["keys_left"]) == (2, {}, {})


def test_keys_that_are_left(run, tmp_path):

    torch.save({"w": torch.ones(2), "v": torch.ones(1), "args": Fraction(1, 2)}, tmp_path / "old.pt")
    for command in (["convert"], ["reshard", "--mesh", "x=2"]):
        code, shown = run(*command, tmp_path / "old.pt", tmp_path / "new")
        assert code == 1
        assert "fractions.Fraction at 'args'" in shown.err
        assert "or pass --ignore-rest to leave it behind" in shown.err
    code, shown = run("convert", tmp_path / "old.pt", tmp_path / "new", "--ignore-rest", "--select", "w")
    assert code == 0
    assert "left behind: args: cannot read fractions.Fraction at 'args'" in shown.out
    assert "left behind: 1 key that --select does not match\n" in shown.out
    code, shown = run("inspect", tmp_path / "old.pt")
    assert "fractions.Fraction" in shown.out
    code, shown = run("verify", tmp_path / "old.pt")
    assert (code, "not verified: args\n" in shown.out) == (0, True)


def test_what_was_not_read_is_shown(run, folder):
    code, shown = run("verify", folder)
    assert code == 0
    assert "not verified: config.json\n" in shown.out
    _, shown = run("verify", folder, "--json")
    assert json.loads(shown.out)["unread"] == ["config.json", "state.bin", "model.safetensors: __metadata__/author"]
    _, shown = run("inspect", folder)
    assert ["config.json", "dtckpt", "does", "not", "read", "it"] in [line.split() for line in shown.out.splitlines()]
    _, shown = run("inspect", folder, "--json")
    assert json.loads(shown.out)["unread"] == ["config.json", "state.bin", "model.safetensors: __metadata__/author"]


# --- the proof afterwards -----------------------------------------------------------------------------------------

STATE = {
    "model": {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}],
    "step": 3,
    "name": "run",
}


def sources(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"epoch": 4}, tmp_path / "dcp" / "meta.pt")
    torch.save({**STATE, "epoch": 4}, tmp_path / "torch.pt")
    dtckpt.save(tmp_path / "ours", {**STATE, "epoch": 4})
    dtckpt.convert(tmp_path / "ours", tmp_path / "one.safetensors")
    return ["dcp", "torch.pt", "ours", "one.safetensors"]


@pytest.mark.parametrize("form", ["dtckpt", "zarr", "safetensors", "dcp", "torch"])
def test_a_source_and_what_was_made_of_it_are_the_same(run, tmp_path, form):
    for source in sources(tmp_path):
        target = tmp_path / f"{source}.{form}"
        assert run("convert", tmp_path / source, target, "--to", form)[0] == 0
        code, shown = run("diff", tmp_path / source, target)
        assert code == 0, (source, form, shown.out)
        assert run("diff", target, tmp_path / source)[0] == 0


def test_what_differs_is_found(run, tmp_path):
    sources(tmp_path)
    changed = {**STATE, "epoch": 5, "model": {**STATE["model"], "b": torch.zeros(2, dtype=torch.bfloat16)}}
    torch.save(changed, tmp_path / "changed.pt")
    (tmp_path / "dcp" / "notes.txt").write_text("x")
    code, shown = run("diff", tmp_path / "dcp", tmp_path / "changed.pt", "--json")
    events = [json.loads(line) for line in shown.out.splitlines()]
    assert code == 1
    assert {(event["path"], event["kind"]) for event in events[:-1]} == {
        ("epoch", "value"),
        ("model/b", "elements"),
        ("notes.txt", "file"),
    }
    assert [event["a"] for event in events if event.get("kind") == "file"] == ["not read"]
    code, shown = run("diff", tmp_path / "torch.pt", tmp_path / "dcp")
    assert code == 1
    assert ["notes.txt", "file", "not", "read"] in [line.split() for line in shown.out.splitlines()]
    assert run("diff", tmp_path / "torch.pt", tmp_path / "dcp", "--ignore", "file")[0] == 0
