"""A restore visits its target once: each object is asked for its state once, whatever its place in the target."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import dtckpt
from dtckpt import RestoreOptions
from dtckpt.checkpoint.restoring.target import visit_target
from dtckpt.errors import TreeError


class Counted:
    """An object that counts how often it is asked for the state of the object inside."""

    def __init__(self, inner):
        self.inner = inner
        self.calls = 0

    def state_dict(self):
        self.calls += 1
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Numbers:
    """Holds plain values, as the position of a data loader."""

    def __init__(self):
        self.held = {"seen": 3}

    def state_dict(self):
        return dict(self.held)

    def load_state_dict(self, state):
        self.held = dict(state)


def count_calls(monkeypatch, kind):
    """Count the calls of ``state_dict`` of each object of a class, by id."""
    calls, plain = {}, kind.state_dict

    def counted(self, *args, **options):
        calls[id(self)] = calls.get(id(self), 0) + 1
        return plain(self, *args, **options)

    monkeypatch.setattr(kind, "state_dict", counted)
    return calls


def trained():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 5)}


def fresh():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 5)}


@pytest.mark.parametrize("make", [trained, fresh])
def test_modules_optimizers_and_schedulers_are_asked_once(tmp_path, monkeypatch, make):
    dtckpt.save(tmp_path / "c", trained())
    target = make()
    # PyTorch's class has the method: a module asks the modules inside it with the same one.
    calls = {each: count_calls(monkeypatch, each) for each in (torch.optim.AdamW, StepLR)}
    of_modules = count_calls(monkeypatch, nn.Sequential)
    dtckpt.restore(tmp_path / "c", target)
    assert of_modules == {id(target["model"]): 1}
    assert calls == {torch.optim.AdamW: {id(target["optimizer"]): 1}, StepLR: {id(target["scheduler"]): 1}}


@pytest.mark.parametrize(
    "place",
    [
        lambda counted: counted,
        lambda counted: {"a": [{"b": counted}]},
        lambda counted: {"one": counted, "two": counted},
        lambda counted: {"outer": Counted(counted)},
        dtckpt.PerClient,
    ],
    ids=["root", "deep", "twice", "inside", "per client"],
)
def test_an_object_is_asked_once_in_any_place(tmp_path, place):
    dtckpt.save(tmp_path / "c", place(Counted(Numbers())))
    counted = Counted(Numbers())
    counted.inner.held = {"seen": 0}
    dtckpt.restore(tmp_path / "c", place(counted))
    assert (counted.calls, counted.inner.held) == (1, {"seen": 3})


@pytest.mark.parametrize(("key", "columns"), [("absent", 4), ("model", 5)])
def test_a_refused_restore_asks_once_and_changes_nothing(tmp_path, key, columns):
    dtckpt.save(tmp_path / "c", {"model": nn.Linear(4, 4)})
    counted = Counted(nn.Linear(columns, 4))
    before = copy.deepcopy(counted.inner.state_dict())
    with pytest.raises(dtckpt.errors.CheckpointError):
        dtckpt.restore(tmp_path / "c", {key: counted})
    assert counted.calls == 1
    assert all(value.equal(before[name]) for name, value in counted.inner.state_dict().items())


def test_a_renamed_target_is_asked_once(tmp_path):
    dtckpt.save(tmp_path / "c", {"old": nn.Linear(2, 2)})
    counted = Counted(nn.Linear(2, 2))
    dtckpt.restore(
        tmp_path / "c", {"new": counted}, options=RestoreOptions(rename=lambda name: name.replace("old", "new"))
    )
    assert counted.calls == 1


def test_the_visit_finds_meshes_names_and_places():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    target = visit_target({"model": model, "optimizer": optimizer, "more": [7, torch.ones(2)]})
    assert target.meshes == frozenset()
    assert target.parameter_names.of(model.weight) == ("model/weight",)
    assert [slot.path for slot in target.root.walk() if isinstance(slot.value, torch.Tensor)] == [
        ("model", "weight"), ("model", "bias"), ("more", "1"),
    ]  # fmt: skip


def test_a_target_that_holds_itself_is_refused():
    target = {}
    target["inner"] = target
    with pytest.raises(TreeError, match="contain itself"):
        visit_target(target)
