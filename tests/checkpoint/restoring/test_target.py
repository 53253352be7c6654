"""A restore visits its target once: each object is asked for its state once, whatever its place in the target."""

import copy
import types
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import dtckpt
from dtckpt import RestoreOptions
from dtckpt.checkpoint.restoring import memory, state_layouts
from dtckpt.checkpoint.restoring.target import visit_target
from dtckpt.errors import DTypeError, ShapeMismatchError, TreeError


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


class Copies(UserDict):
    """A mapping that returns a new object at each look, as `shelve.Shelf` does."""

    def __getitem__(self, key):
        return copy.deepcopy(self.data[key])


class Changing:
    """An object whose `state_dict` changes the tree that the object is in."""

    def __init__(self, change):
        self.change = change

    def state_dict(self):
        self.change()
        return {"n": 1}

    def load_state_dict(self, state):
        pass


def test_a_mapping_of_copies_takes_new_values(tmp_path):
    dtckpt.save(tmp_path / "c", {"a": {"w": np.arange(3.0), "n": 5}})
    target = {"a": Copies(w=np.zeros(3), n=0)}
    dtckpt.restore(tmp_path / "c", target)
    assert target["a"]["w"].tolist() == [0, 1, 2]
    assert target["a"]["n"] == 5


@pytest.mark.parametrize("make", [dict, types.SimpleNamespace], ids=["dict", "namespace"])
def test_a_container_at_two_places_gets_the_last_value(tmp_path, make):
    dtckpt.save(tmp_path / "c", {"a": make(x=5), "b": make(x=7)})
    shared = make(x=7)
    dtckpt.restore(tmp_path / "c", {"a": shared, "b": shared})
    assert shared == make(x=7)


def test_an_object_that_resets_another_one_does_not_win(tmp_path):
    class Sampler:
        def __init__(self):
            self.state = {"epoch": 3}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    sampler = Sampler()
    reset = Changing(lambda: None)
    reset.load_state_dict = lambda state: sampler.state.update(epoch=0)
    dtckpt.save(tmp_path / "c", {"loader": {"n": 1}, "sampler": {"epoch": 3}})
    dtckpt.restore(tmp_path / "c", {"loader": reset, "sampler": sampler})
    assert sampler.state == {"epoch": 3}


@pytest.mark.parametrize("first", ["state", "object"])
def test_an_object_that_changes_the_tree_while_it_is_asked(tmp_path, first):
    dtckpt.save(tmp_path / "c", {"state": {"w": torch.ones(3), "rows": [torch.ones(2)]}, "object": {"n": 2}})
    tensors = torch.zeros(3), torch.zeros(2)
    state = {"w": torch.zeros(5), "rows": []}

    def change():
        state["w"], state["rows"][:] = tensors[0], [tensors[1]]

    parts = {"state": state, "object": Changing(change)}
    target = {first: parts[first], **parts}
    dtckpt.restore(tmp_path / "c", target)
    assert state["w"] is tensors[0]
    assert state["rows"][0] is tensors[1]
    assert tensors[0].equal(torch.ones(3))
    assert tensors[1].equal(torch.ones(2))


@pytest.mark.parametrize("saved", [{"a": 1}, {"a": 1, "trainer": {"n": 2}}], ids=["missing", "saved"])
def test_an_object_with_a_lazy_module(tmp_path, saved):
    trainer = Changing(lambda: None)
    trainer.net = nn.LazyLinear(3)
    dtckpt.save(tmp_path / "c", saved)
    target = {"a": 0, "trainer": trainer}
    dtckpt.restore(tmp_path / "c", target, options=RestoreOptions(allow_missing=True))
    assert target["a"] == 1


class OnMeta:
    """Holds a module on the meta device, and an optimizer of it in its state."""

    def __init__(self):
        with torch.device("meta"):
            self.module = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def state_dict(self):
        return {"n": 1, "optimizer": self.optimizer}

    def load_state_dict(self, state):
        pass


def test_an_optimizer_on_the_meta_device_in_the_state_of_an_object(tmp_path):
    dtckpt.save(tmp_path / "c", {"object": {"n": 2}})
    with pytest.raises(DTypeError, match="'object' keeps tensors on the meta device"):
        dtckpt.restore(tmp_path / "c", {"object": OnMeta()}, options=RestoreOptions(allow_missing=True))


def test_an_object_that_loads_into_a_new_module_on_the_meta_device(tmp_path):
    class Renewing(Counted):
        def load_state_dict(self, state):
            with torch.device("meta"):
                self.inner = nn.Linear(2, 2)

    with torch.device("meta"):
        renewing = Renewing(nn.Linear(2, 2))
    dtckpt.save(tmp_path / "c", {"object": nn.Linear(2, 2)})
    with pytest.raises(DTypeError, match="'object' keeps tensors on the meta device"):
        dtckpt.restore(tmp_path / "c", {"object": renewing})


def test_the_visit_finds_meshes_names_and_places():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    target = visit_target({"model": model, "optimizer": optimizer, "more": [7, torch.ones(2)]})
    assert target.meshes == frozenset()
    assert target.parameter_names.of(model.weight) == ("model/weight",)
    assert [slot.path for slot in target.root.walk() if isinstance(slot.value, torch.Tensor)] == [
        ("model", "weight"), ("model", "bias"), ("more", "1"),
    ]  # fmt: skip


def test_a_misfit_is_found_before_memory_is_allocated(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "c", {"fresh": {"a": torch.ones(2)}, "last": [1, 2]})
    allocated = []
    monkeypatch.setattr(memory, "new_memory", lambda *args: allocated.append(args) or torch.empty(2))
    monkeypatch.setattr(state_layouts, "new_memory", lambda *args: allocated.append(args) or torch.empty(2))
    # An empty dict takes the saved items.
    with pytest.raises(ShapeMismatchError, match="the sequence at 'last'"):
        dtckpt.restore(tmp_path / "c", {"fresh": {}, "last": [0]})
    assert not allocated
    dtckpt.restore(tmp_path / "c", {"fresh": {}, "last": [0, 0]})
    assert len(allocated) == 1


def test_a_target_that_holds_itself_is_refused():
    target = {}
    target["inner"] = target
    with pytest.raises(TreeError, match="contain itself"):
        visit_target(target)
