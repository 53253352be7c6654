"""Modules on the meta device: a restore gives their tensors memory, and the tensors stay the same objects."""

import weakref

import pytest
import safetensors.torch
import torch
from torch import nn

import dtckpt
from dtckpt.dtensor import DTensor, Shard, distribute_tensor
from dtckpt.errors import DTypeError, ShapeMismatchError, TensorNotFoundError


class Special(nn.Parameter):
    """A class of parameters of a user."""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.special = Special(torch.rand(3), requires_grad=False)
        self.special.tag = "kept"
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.same_mask = self.mask

    def forward(self, rows):
        return self.norm(self.head(self.embedding(rows) + self.special))


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    dtckpt.save(tmp_path / "s", {"model": model, "raw": model.state_dict()})
    return tmp_path / "s", model


def on_meta():
    with torch.device("meta"):
        return Tied()


def restored(path, **target):
    return dtckpt.restore(path, target, options=dtckpt.RestoreOptions(allow_unexpected=True))


def test_a_module_gets_memory(saved):
    path, model = saved
    made = on_meta()
    before = dict([*made.named_parameters(), *made.named_buffers()])
    optimizer = torch.optim.SGD([made.embedding.weight], lr=0.1)
    restored(path, model=made)
    assert all(each is before[name] for name, each in [*made.named_parameters(), *made.named_buffers()])
    assert made.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert made.state_dict()[name].equal(tensor), name
    assert made.head.weight is made.embedding.weight
    assert made.mask is made.same_mask
    assert (type(made.special), made.special.requires_grad, made.special.tag) == (Special, False, "kept")
    assert made.embedding.weight.requires_grad
    made(torch.arange(4)).square().mean().backward()
    optimizer.step()
    assert not made.embedding.weight.equal(model.embedding.weight)


def test_a_state_dict_is_ready_to_be_assigned(saved):
    path, model = saved
    made = on_meta()
    state = made.state_dict()
    assert restored(path, raw=state)["raw"] is state
    made.load_state_dict(state, assign=True)
    assert made.special.equal(model.special)
    assert made.norm.running_mean.equal(model.norm.running_mean)


def test_dtensors_get_memory(tmp_path):
    dtckpt.configure_virtual_devices("CPU", 3)
    mesh = dtckpt.create_mesh({"x": 3})
    whole = torch.arange(14.0).reshape(7, 2)
    dtckpt.save(tmp_path / "s", {"w": whole})
    meta = distribute_tensor(torch.empty(7, 2, device="meta"), mesh, [Shard(0)])
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(meta))
    parameter = module.w
    dtckpt.restore(tmp_path / "s", module)
    assert module.w is parameter
    assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)  # noqa: PT018  (one fact)
    assert (parameter.placements, parameter.device.type) == ((Shard(0),), "cpu")
    assert parameter.full_tensor().equal(whole)


def test_nothing_gets_memory_if_something_is_refused(saved):
    path, _ = saved
    made = on_meta()
    made.late = nn.Linear(2, 2, device="meta")
    with pytest.raises(TensorNotFoundError, match="nothing at 'model/late"):
        restored(path, model=made)
    made = on_meta()
    made.head = nn.Linear(4, 5, bias=False, device="meta")
    with pytest.raises(ShapeMismatchError, match=r"got \(5, 4\) in the target, expected \(5, 3\)"):
        restored(path, model=made)
    assert all(each.is_meta for each in made.parameters())


def test_tensors_that_nobody_would_fill_are_refused(saved):
    path, _ = saved
    made = on_meta()
    made.register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(DTypeError, match="'angles' on the meta device and not in the module's state"):
        restored(path, model=made)
    made.angles = torch.ones(3)
    reference = weakref.ref(made.special)
    with pytest.raises(DTypeError, match="'special' on the meta device with a weak reference"):
        restored(path, model=made)
    del reference
    restored(path, model=made)


class Holder:
    """An object with a module, that loads its state by copies or by assignment."""

    def __init__(self, module, *, assign):
        self.module, self.assign = module, assign

    def state_dict(self):
        return {"model": self.module.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"], assign=self.assign)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_an_object_that_copies_to_a_module_on_meta_is_refused(saved):
    path, model = saved
    made = on_meta()
    with pytest.raises(DTypeError, match="Holder at 'app' keeps tensors on the meta device; restore its module itself"):
        dtckpt.restore(path, {"app": Holder(made, assign=False)}, options=renamed())
    dtckpt.restore(path, {"app": Holder(made, assign=True)}, options=renamed())
    assert made.special.equal(model.special)


def renamed():
    return dtckpt.RestoreOptions(allow_unexpected=True, rename=lambda name: name.replace("model/", "app/model/"))


def test_an_optimizer_needs_its_module(saved, tmp_path):
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()
    dtckpt.save(tmp_path / "o", {"optimizer": optimizer, "model": model})
    made = on_meta()
    fresh = torch.optim.Adam(made.parameters())
    with pytest.raises(DTypeError, match=r"optimizer at 'optimizer': a parameter of shape \(3,\) is on the meta"):
        restored(tmp_path / "o", optimizer=fresh)
    restored(tmp_path / "o", optimizer=fresh, model=made)
    assert not any(value.is_meta for state in fresh.state.values() for value in state.values())
    restored(tmp_path / "o", optimizer=fresh)


class TiedHead(nn.Module):
    """A model whose last layer has the weight of the first, as GPT-2 has."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("left_out", ["head.weight", "embedding.weight"])
@pytest.mark.parametrize("is_meta", [False, True])
def test_a_tied_weight_under_one_of_its_names(tmp_path, left_out, is_meta):
    saved = TiedHead().state_dict()
    del saved[left_out]
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    (weight,) = saved.values()
    with torch.device("meta" if is_meta else "cpu"):
        model = TiedHead()
    dtckpt.restore(tmp_path / "model.safetensors", model)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, weight)


def test_a_weight_that_is_tied_no_more_is_missing(tmp_path):
    saved = TiedHead().state_dict()
    del saved["head.weight"]
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    model = TiedHead()
    model.head.weight = nn.Parameter(torch.ones(5, 3))
    with pytest.raises(TensorNotFoundError, match=r"'head\.weight'"):
        dtckpt.restore(tmp_path / "model.safetensors", model)
