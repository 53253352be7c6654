"""Objects of a target get what was saved, whatever they hold; tensors of modules keep their shape."""

from collections import deque

import pytest
import torch
from torch import nn

import dtckpt
from dtckpt import RestoreOptions
from dtckpt.errors import ShapeMismatchError, TensorNotFoundError, UnexpectedTensorError


class Holder:
    """An object that returns and loads whatever it holds."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return self.parts

    def load_state_dict(self, state):
        self.parts = state


SAVED = {
    "seen": {"a": 1, "b": torch.arange(3)},
    "rows": torch.arange(6.0).reshape(3, 2),
    "queue": [torch.ones(2), 5, "x"],
    "none": None,
    "tail": deque([1, 2], maxlen=4),
    "pair": (1, (2, 3)),
}
NOW = {
    "same": SAVED,
    "empty": {"seen": {}, "rows": torch.zeros(0, 2), "queue": [], "none": [], "tail": deque(maxlen=4), "pair": ()},
    "more": {
        "seen": {"b": torch.zeros(7), "c": {"d": torch.ones(1)}},
        "rows": torch.zeros(9, 2, dtype=torch.int32),
        "queue": [torch.zeros(5), torch.ones(1), "y", 7],
        "none": torch.ones(3),
        "tail": deque([7, 8, 9], maxlen=4),
        "pair": (1, 2, 3),
    },
    "of other kinds": {"seen": [1], "rows": 0, "queue": {"a": 1}, "none": {}, "tail": deque(maxlen=4), "pair": 5},
}


def are_equal(one, other):
    if isinstance(one, torch.Tensor):
        return type(other) is torch.Tensor and one.dtype == other.dtype and one.equal(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


@pytest.mark.parametrize("now", NOW)
def test_an_object_gets_what_was_saved(tmp_path, now):
    dtckpt.save(tmp_path / "s", {"holder": Holder(**SAVED)})
    holder = Holder(**NOW[now])
    dtckpt.restore(tmp_path / "s", {"holder": holder})
    assert are_equal(holder.parts, SAVED), holder.parts


def test_the_parts_of_an_object_must_be_saved(tmp_path):
    dtckpt.save(tmp_path / "s", {"holder": Holder(rows=torch.ones(2), late=3)})
    holder = Holder(rows=torch.zeros(1), other=torch.zeros(1))
    with pytest.raises(TensorNotFoundError, match="nothing at 'holder/other'"):
        dtckpt.restore(tmp_path / "s", {"holder": holder})
    dtckpt.restore(tmp_path / "s", {"holder": holder}, options=RestoreOptions(allow_missing=True))
    assert holder.parts["late"] == 3
    assert (holder.parts["rows"].tolist(), holder.parts["other"].tolist()) == ([1, 1], [0])


class App:
    """An object that holds modules, as users of PyTorch's DCP write it."""

    def __init__(self, *modules, log=()):
        self.modules, self.log = list(modules), list(log)

    def state_dict(self):
        return {"models": [module.state_dict() for module in self.modules], "log": self.log}

    def load_state_dict(self, state):
        for module, each in zip(self.modules, state["models"], strict=True):
            module.load_state_dict(each)
        self.log = state["log"]


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (nn.Linear(3, 5), ShapeMismatchError),
        (nn.Linear(3, 2, bias=False), UnexpectedTensorError),
        (nn.Sequential(nn.Linear(3, 2)), TensorNotFoundError),
    ],
)
def test_tensors_of_modules_in_an_object_keep_their_shape(tmp_path, module, error):
    saved = App(nn.Linear(3, 2), log=[1, 2])
    dtckpt.save(tmp_path / "s", {"app": saved})
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(error):
        dtckpt.restore(tmp_path / "s", {"app": App(module)})
    assert all(map(torch.equal, module.parameters(), before))
    other = App(nn.Linear(3, 2), log=[7])
    dtckpt.restore(tmp_path / "s", {"app": other})
    assert other.log == [1, 2]
    assert other.modules[0].weight.equal(saved.modules[0].weight)


@pytest.mark.parametrize("module", [nn.Identity(), nn.ModuleDict()])
def test_a_module_without_state_takes_none(tmp_path, module):
    dtckpt.save(tmp_path / "s", {"model": nn.Linear(3, 2), "x": torch.ones(2)})
    target = {"model": module, "x": torch.zeros(2)}
    with pytest.raises(UnexpectedTensorError, match="'model/bias', 'model/weight'"):
        dtckpt.restore(tmp_path / "s", target)
    reports = []
    dtckpt.restore(tmp_path / "s", target, options=RestoreOptions(allow_unexpected=True, report=reports.append))
    assert (reports[0].restored, reports[0].unexpected) == (("x",), ("model/bias", "model/weight"))


class Extra(nn.Linear):
    extra = ()

    def get_extra_state(self):
        return {"history": list(self.extra)}

    def set_extra_state(self, state):
        self.extra = state["history"]


def test_what_a_module_adds_to_its_state_may_grow(tmp_path):
    saved, other = Extra(2, 2), Extra(2, 2)
    saved.extra, other.extra = [torch.ones(3), 4], [torch.zeros(1)]
    dtckpt.save(tmp_path / "s", saved)
    dtckpt.restore(tmp_path / "s", other)
    assert are_equal(other.extra, saved.extra)


def trained(steps, *, groups=1, lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    parameters = list(model.parameters())
    parts = [parameters] if groups == 1 else [parameters[:1], parameters[1:]]
    optimizer = torch.optim.Adam([{"params": part} for part in parts], lr=lr)
    for step in range(steps):
        if step == 2:
            optimizer.zero_grad()
        model[step % 2 if step < 2 else slice(None)](torch.ones(1, 3 - step % 2 if step < 2 else 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("saved_steps", [0, 1, 3])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_optimizer_gets_what_was_saved(tmp_path, saved_steps, steps):
    _, saved = trained(saved_steps, lr=0.5)
    dtckpt.save(tmp_path / "s", saved)
    _, optimizer = trained(steps)
    dtckpt.restore(tmp_path / "s", optimizer)
    assert are_equal(optimizer.state_dict(), saved.state_dict())


def test_an_optimizer_takes_what_a_schedule_adds_to_its_groups(tmp_path):
    _, saved = trained(3)
    torch.optim.lr_scheduler.StepLR(saved, 1)
    dtckpt.save(tmp_path / "s", saved)
    _, optimizer = trained(0)
    dtckpt.restore(tmp_path / "s", optimizer)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_an_optimizer_keeps_its_groups(tmp_path):
    _, saved = trained(3, groups=2)
    dtckpt.save(tmp_path / "s", saved)
    _, optimizer = trained(0)
    with pytest.raises(ShapeMismatchError, match=r"got groups of \[4\] parameters in the target, expected \[1, 3\]"):
        dtckpt.restore(tmp_path / "s", optimizer)
    assert not optimizer.state


def test_an_optimizer_under_another_name(tmp_path):
    _, saved = trained(3)
    dtckpt.save(tmp_path / "s", {"old": saved})
    _, optimizer = trained(0)
    options = RestoreOptions(rename=lambda name: name.replace("old/", "new/"))
    dtckpt.restore(tmp_path / "s", {"new": optimizer}, options=options)
    assert are_equal(optimizer.state_dict(), saved.state_dict())
    raw = trained(0)[1].state_dict()
    dtckpt.restore(tmp_path / "s", {"new": raw}, options=options)
    assert list(raw["state"]) == [0, 1, 2, 3]
