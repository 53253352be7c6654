"""Conversions to and from PyTorch's formats: PyTorch loads them, every bit and value stays, and nothing is half."""

import datetime
import io
import zipfile
from collections import Counter, OrderedDict, deque
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import bits_of, tensor_of

import dtckpt
from checkpoint.optimizer_cases import net, state_by_name, stepped
from dtckpt import errors
from dtckpt.checkpoint.converting import files_target, torch_target
from dtckpt.checkpoint.foreign import dcp_plan
from dtckpt.format.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

TARGETS = {"dcp": "new", "torch": "new.pt"}
PLAIN = {
    "step": 3,
    "names": ["a", None, True],
    "betas": (0.9, 0.95),
    "limit": float("inf"),
    "raw": b"\0\xff",
    "kinds": {torch.float32, torch.bfloat16},
    "device": torch.device("cpu"),
    "count": Counter("aab"),
}


def tensors():
    return {
        **{f"kinds/{dtype}": tensor_of(dtype, (5, 4), dtype) for dtype in DTYPES},
        "layers/0.w": tensor_of("0", (40, 33), "float32").nan_to_num(),
        "scalar": tensor_of("s", (), "float64"),
        "none": torch.zeros(0, 3),
    }


def tree():
    nested = {"kinds": {}, "layers": OrderedDict(), "groups": [{"lr": 0.1}, {"lr": 0.2}], "values": PLAIN}
    for name, tensor in tensors().items():
        folder, _, key = name.rpartition("/")
        (nested[folder] if folder else nested)[key] = tensor
    return nested


@pytest.fixture
def saved(tmp_path):
    dtckpt.save(tmp_path / "saved", tree(), options=dtckpt.SaveOptions(chunk_nbytes=512))
    return tmp_path / "saved"


@pytest.mark.parametrize("form", TARGETS)
def test_there_and_back(tmp_path, monkeypatch, saved, form):
    monkeypatch.setattr(dcp_plan, "CHUNK_NBYTES", 600)
    new = tmp_path / TARGETS[form]
    report = dtckpt.convert(saved, new, to=form, max_shard_size=4000)
    assert (report.format, len(report.files) > 2) == (form, form == "dcp")
    dtckpt.convert(new, tmp_path / "back")
    with dtckpt.open_checkpoint(saved) as one, dtckpt.open_checkpoint(tmp_path / "back") as other:
        assert {name: info.content_digest for name, info in other.tensors.items()} == {
            name: info.content_digest for name, info in one.tensors.items()
        }
        assert repr(sorted(other.values.items())) == repr(sorted(one.values.items()))
        assert {tensor.new_name: tensor.content_digest for tensor in report.tensors} == {
            name: info.content_digest for name, info in one.tensors.items()
        }
    with dtckpt.open_checkpoint(new) as checkpoint:
        verified = checkpoint.verify()
        assert (verified.is_sound, verified.num_unverified) == (True, 0)


def test_torch_load_reads_a_file(tmp_path, saved):
    dtckpt.convert(saved, tmp_path / "new.pt")  # the name tells the format
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    expected = tree()
    assert list(loaded) == list(expected)
    assert type(loaded["layers"]) is OrderedDict
    assert (loaded["groups"], loaded["values"]) == (expected["groups"], PLAIN)
    for name, tensor in tensors().items():
        folder, _, key = name.rpartition("/")
        assert bits_of((loaded[folder] if folder else loaded)[key]) == bits_of(tensor), name
    with zipfile.ZipFile(tmp_path / "new.pt") as archive:
        assert archive.testzip() is None


def test_tied_tensors_are_one_tensor(tmp_path):
    weight = torch.rand(4, 3)
    torch.save({"embed": weight, "head": weight, "part": weight[1:]}, tmp_path / "old.pt")
    dtckpt.convert(tmp_path / "old.pt", tmp_path / "new.pt")
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    assert loaded["embed"] is loaded["head"]
    assert all(map(torch.equal, loaded.values(), (weight, weight, weight[1:])))
    dtckpt.convert(tmp_path / "old.pt", tmp_path / "new", to="dcp")
    assert torch.equal(dtckpt.restore(tmp_path / "new")["head"], weight)


def test_dcp_load_reads_a_directory(tmp_path, monkeypatch, saved):
    monkeypatch.setattr(dcp_plan, "CHUNK_NBYTES", 600)
    dtckpt.convert(saved, tmp_path / "new", to="dcp")
    # Dtypes that PyTorch cannot copy, it cannot load either.
    kinds = {dtype: torch.empty(5, 4, dtype=getattr(torch, dtype)) for dtype in DTYPES if "float4" not in dtype}
    target = {
        "layers": {"0.w": torch.empty(40, 33)},
        "kinds": kinds,
        "none": torch.ones(0, 3),
        "groups": [{"lr": 0}, {"lr": 0}],
        "values": {"step": 0, "betas": None, "kinds": None},
    }
    dcp.load(target, checkpoint_id=tmp_path / "new", no_dist=True)
    assert bits_of(target["layers"]["0.w"]) == bits_of(tensors()["layers/0.w"])
    assert all(bits_of(kinds[dtype]) == bits_of(tensors()[f"kinds/{dtype}"]) for dtype in kinds)
    assert target["groups"] == tree()["groups"]
    assert target["values"] == {key: PLAIN[key] for key in target["values"]}
    flat = {"layers.0.w": torch.empty(40, 33), "scalar": torch.empty((), dtype=torch.float64)}
    dcp.load(flat, checkpoint_id=tmp_path / "new", no_dist=True)
    assert bits_of(flat["layers.0.w"]) == bits_of(tensors()["layers/0.w"])


def test_values_that_only_one_format_holds(tmp_path):
    """`torch.load` makes few classes; a distributed checkpoint holds classes of Python and numpy."""
    state = {
        "numpy": {"scalar": np.float32(1.5), "state": np.random.RandomState(1).get_state()},
        "queue": deque([1, 2], 4),
        "when": datetime.datetime(2024, 1, 2),
        "w": torch.ones(2),
    }
    dtckpt.save(tmp_path / "saved", state)
    dtckpt.convert(tmp_path / "saved", tmp_path / "new", to="dcp")
    target = {"numpy": {"scalar": None, "state": None}, "queue": None, "when": None, "w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path / "new", no_dist=True)
    assert repr(target) == repr(state)
    assert repr(dtckpt.restore(tmp_path / "new")["numpy"]) == repr(state["numpy"])
    with pytest.raises(errors.TreeError, match=r"cannot write the numpy at 'numpy/scalar'.*convert without it"):
        dtckpt.convert(tmp_path / "saved", tmp_path / "new.pt")
    # An array becomes a tensor.
    dtckpt.convert(tmp_path / "saved", tmp_path / "new.pt", select=["numpy/state/*", "w"])
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    np.testing.assert_array_equal(loaded["numpy"]["state"][1].numpy(), state["numpy"]["state"][1])


@pytest.mark.parametrize("form", TARGETS)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, monkeypatch, form):
    new = tmp_path / TARGETS[form]
    clients = dtckpt.PerClient(torch.ones(2))
    dtckpt.save(tmp_path / "saved", {"w": torch.ones(2), "random": clients, "array": np.ones(100)})
    with pytest.raises(errors.TreeError, match="cannot write the PerClient at 'random'"):
        dtckpt.convert(tmp_path / "saved", new, to=form)
    if form == "dcp":
        monkeypatch.setattr(torch_target, "MAX_ARRAYS_NBYTES", 700)
        with pytest.raises(errors.ConfigError, match="at most 700 bytes of them; got 800"):
            dtckpt.convert(tmp_path / "saved", new, to=form, select=["w", "array"])
        dtckpt.save(tmp_path / "list", [torch.ones(2)])
        with pytest.raises(errors.TreeError, match="saves dicts"):
            dtckpt.convert(tmp_path / "list", new, to=form)
    assert not new.exists()
    dtckpt.convert(tmp_path / "saved", new, to=form, select="w")
    assert new.exists()


@pytest.mark.parametrize("to", ["dtckpt", *TARGETS])
def test_a_value_that_cannot_be_read_is_not_left_out_silently(tmp_path, to):
    torch.save({"model": {"w": torch.ones(2)}, "args": Fraction(1, 2)}, tmp_path / "old.pt")
    new = tmp_path / TARGETS.get(to, "new")
    for select in ((), ("model/*", "args")):
        with pytest.raises(errors.TreeError, match=r"cannot read fractions\.Fraction at 'args'"):
            dtckpt.convert(tmp_path / "old.pt", new, to=to, select=select)
    dtckpt.convert(tmp_path / "old.pt", new, to=to, select="model/*")
    assert torch.equal(dtckpt.restore(new)["model"]["w"], torch.ones(2))


@pytest.mark.parametrize("form", TARGETS)
def test_what_is_there_is_replaced_only_if_asked_for(tmp_path, saved, form):
    new = tmp_path / TARGETS[form]
    dtckpt.convert(saved, new, to=form, select="scalar")
    with pytest.raises(errors.CheckpointExistsError, match="overwrite=True"):
        dtckpt.convert(saved, new, to=form)
    dtckpt.convert(saved, new, to=form, overwrite=True)
    with dtckpt.open_checkpoint(new) as checkpoint:
        assert len(checkpoint.tensors) == len(tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["saved", new.name])


@pytest.mark.parametrize("form", TARGETS)
def test_files_that_hold_something_else_are_not_committed(tmp_path, monkeypatch, saved, form):
    new = tmp_path / TARGETS[form]
    read_index = files_target.FORMATS[form].read_index
    for change, text in (
        (lambda index: {**index.tensors, "scalar": index.tensors["layers/0.w"]}, "contradicts|'scalar' is not where"),
        (lambda index: dict(list(index.tensors.items())[1:]), "contradicts|tensors in them are others"),
    ):

        class Changed:
            is_folder = files_target.FORMATS[form].is_folder

            @staticmethod
            def read_index(folder, names, change=change):
                index = read_index(folder, names)
                tensors = change(index)
                object.__setattr__(index, "tensors", tensors)
                return index

        monkeypatch.setitem(files_target.FORMATS, form, Changed)
        with pytest.raises(errors.CheckpointCorruptError, match=text):
            dtckpt.convert(saved, new, to=form)
        assert not new.exists()


def test_the_frame_is_what_pytorch_reads(tmp_path, saved):
    """A file of the plan equals, record by record, what PyTorch writes of the same state."""
    dtckpt.convert(saved, tmp_path / "new.pt", select="layers/*")
    ours = zipfile.ZipFile(tmp_path / "new.pt")
    file = io.BytesIO()
    torch.save(torch.load(tmp_path / "new.pt", weights_only=True), file)
    theirs = zipfile.ZipFile(file)
    names = {name.partition("/")[2] for name in theirs.namelist()} - {".data/serialization_id"}
    assert {name.partition("/")[2] for name in ours.namelist()} == names
    assert all(ours.read(f"archive/{name}") == theirs.read(f"archive/{name}") for name in names)


@pytest.fixture
def trained(tmp_path):
    """A model and its optimizer, whose groups are in another order than its layers; saved at ``trained``."""
    model = net("ab")
    groups = [{"params": [model["b"].weight], "lr": 0.5}, {"params": [model["a"].bias, model["a"].weight]}]
    optimizer = stepped(torch.optim.AdamW(groups), model)
    dtckpt.save(tmp_path / "trained", {"model": model, "optimizer": optimizer, "more": [optimizer]})
    return model, optimizer


def test_an_optimizer_takes_its_state_from_a_file(tmp_path, trained):
    model, optimizer = trained
    dtckpt.convert(tmp_path / "trained", tmp_path / "new.pt")
    loaded = torch.load(tmp_path / "new.pt")
    other = net("ab")
    groups = [{"params": [other["b"].weight]}, {"params": [other["a"].bias, other["a"].weight]}]
    for state in (loaded["optimizer"], loaded["more"][0]):
        target = torch.optim.AdamW(groups)
        target.load_state_dict(state)
        assert state_by_name(target, other) == state_by_name(optimizer, model)
        assert [group["lr"] for group in target.param_groups] == [0.5, 0.001]
        assert [group["param_names"] for group in state["param_groups"]] == [
            ["model/b.weight"],
            ["model/a.bias", "model/a.weight"],
        ]
        assert [*state["state"]] == [0, 1, 2]


def test_names_that_an_optimizer_got_stay_in_a_file(tmp_path):
    model = net("ab")
    optimizer = stepped(torch.optim.AdamW(model.named_parameters()), model)
    dtckpt.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    dtckpt.convert(tmp_path / "saved", tmp_path / "new.pt")
    state, expected = torch.load(tmp_path / "new.pt")["optimizer"], optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert [*state["state"]] == [*expected["state"]]


def test_new_names_reach_the_parameters_of_optimizers(tmp_path, trained):
    model, optimizer = trained
    rename = {"model/*": "net/*"}
    dtckpt.convert(tmp_path / "trained", tmp_path / "new", to="dtckpt", rename=rename)
    with dtckpt.open_checkpoint(tmp_path / "new") as checkpoint:
        assert {"net/a.weight", "optimizer/state/net/a.weight/exp_avg"} <= {*checkpoint.tensors}
        assert checkpoint.verify().damages == ()
    other = net("ba")
    target = torch.optim.AdamW([{"params": [other["b"].weight]}, {"params": [other["a"].weight, other["a"].bias]}])
    dtckpt.restore(tmp_path / "new", {"net": other, "optimizer": target, "more": [target]}, strict="names")
    assert state_by_name(target, other) == state_by_name(optimizer, model)
    dtckpt.convert(tmp_path / "trained", tmp_path / "new.pt", rename=rename)
    (first, _) = torch.load(tmp_path / "new.pt")["optimizer"]["param_groups"]
    assert (first["params"], first["param_names"]) == ([0], ["net/b.weight"])
