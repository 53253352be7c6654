"""Values of training code in a state tree: arrays of numpy, members of enums, tensors of wrapper subclasses."""

import enum
import pathlib
import random

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import dtckpt
from dtckpt import EnumMember, RestoreOptions, TensorParts
from dtckpt.errors import DTypeError, ShapeMismatchError, TensorNotFoundError, TreeError


class Phase(enum.Enum):
    WARMUP = "warmup"
    DECAY = "decay"


class Order(enum.IntEnum):
    FIRST = 1


def saved(tmp_path, tree):
    dtckpt.save(tmp_path / "s", tree)
    return tmp_path / "s"


# --- arrays of numpy ---

ARRAYS = {
    "float64": np.linspace(0, 1, 5),
    "bool": np.array([True, False]),
    "uint16": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "complex64": np.ones(2, np.complex64) * 1j,
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3)),
    "transposed": np.arange(6).reshape(2, 3).T,
    "reversed": np.arange(6)[::-2],
    "broadcast": np.broadcast_to(np.ones(1), (3,)),
}


def same(one, other):
    return type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


def test_arrays_come_back_as_arrays(tmp_path):
    path = saved(tmp_path, ARRAYS)
    for back in (dtckpt.restore(path), dtckpt.restore(path, dict.fromkeys(ARRAYS))):
        assert all(same(back[name], array) and back[name].flags.writeable for name, array in ARRAYS.items())
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["transposed"].shape == (3, 2)


def test_arrays_of_a_target_are_filled_in_place(tmp_path):
    path = saved(tmp_path, ARRAYS)
    target = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    target["uint16"] = np.zeros((3, 2), np.uint16).T
    before = dict(target)
    dtckpt.restore(path, target)
    assert all(target[name] is before[name] and same(target[name], array) for name, array in ARRAYS.items())


def test_an_array_and_a_tensor_fill_each_other(tmp_path):
    path = saved(tmp_path, {"a": np.arange(3.0), "t": torch.arange(3)})
    target = {"a": torch.zeros(3, dtype=torch.float64), "t": np.zeros(3, np.int64)}
    dtckpt.restore(path, target)
    assert (target["a"].tolist(), target["t"].tolist()) == ([0, 1, 2], [0, 1, 2])


def test_arrays_are_not_laid_out_on_a_mesh(tmp_path):
    path = saved(tmp_path, {"a": np.arange(3.0), "t": torch.arange(3)})
    back = dtckpt.restore(path, mesh=dtckpt.abstract_mesh({"x": 1}))
    assert (type(back["a"]), type(back["t"])) == (np.ndarray, dtckpt.DTensor)


def test_large_arrays_are_not_in_the_manifest(tmp_path):
    path = saved(tmp_path, {"a": np.zeros(1 << 20)})
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert len(checkpoint.manifest.tree) < 100


@pytest.mark.parametrize("dtype", ["U3", "O", ">f4", "M8[s]", "longdouble"])
def test_arrays_that_cannot_be_stored(tmp_path, dtype):
    with pytest.raises(DTypeError, match=r"array 'a/0': dtype .* cannot be stored; .* convert it by astype"):
        dtckpt.save(tmp_path / "s", {"a": [np.zeros(2, dtype)]})


def test_arrays_that_cannot_be_filled(tmp_path):
    path = saved(tmp_path, {"a": np.arange(4.0)})
    for array in (np.arange(4.0)[::-1], np.broadcast_to(np.ones(1), (4,))):
        with pytest.raises(TreeError, match=r"into the array at 'a': it is read-only, .*; pass a copy\(\)"):
            dtckpt.restore(path, {"a": array})
    with pytest.raises(ShapeMismatchError, match=r"'a' has another shape; got \(3,\)"):
        dtckpt.restore(path, {"a": np.zeros(3)})
    with pytest.raises(DTypeError, match="'a' would be converted"):
        dtckpt.restore(path, {"a": np.zeros(4, np.float32)})
    narrow = {"a": np.zeros(4, np.float32)}
    dtckpt.restore(path, narrow, options=RestoreOptions(cast="any"))
    assert narrow["a"].tolist() == [0, 1, 2, 3]


def test_random_states_resume(tmp_path):
    path = saved(tmp_path, {"numpy": np.random.get_state(), "python": random.getstate()})
    wanted = np.random.random(3).tolist(), random.random()
    back = dtckpt.restore(path)
    np.random.set_state(back["numpy"])
    random.setstate(back["python"])
    assert (np.random.random(3).tolist(), random.random()) == wanted


# --- members of enums ---


def test_a_target_gives_members_their_class(tmp_path):
    tree = {"phase": Phase.DECAY, "order": [Order.FIRST], "path": pathlib.Path("data"), "dtype": torch.bfloat16}
    path = saved(tmp_path, tree)
    target = {"phase": Phase.WARMUP, "order": [Order.FIRST], "path": None, "dtype": None}
    assert dtckpt.restore(path, target) == tree
    back = dtckpt.restore(path)
    assert (back["phase"], back["order"]) == (EnumMember("Phase", "DECAY"), [EnumMember("Order", "FIRST")])
    assert dtckpt.restore(saved(tmp_path / "again", back), target) == tree
    with pytest.raises(TreeError, match=r"has Phase.DECAY at 'phase'; Order of the target has no such member"):
        dtckpt.restore(path, {**target, "phase": Order.FIRST})


def test_a_member_takes_what_was_saved_as_another_value(tmp_path):
    """As any plain value of a target does."""
    assert dtckpt.restore(saved(tmp_path, {"a": "decay"}), {"a": Phase.WARMUP}) == {"a": "decay"}


# --- tensors of wrapper subclasses ---


class Scaled(torch.Tensor):
    """Integers and their scale, as a quantized weight."""

    def __new__(cls, integers, scale, dtype, mode=Phase.DECAY):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=dtype)

    def __init__(self, integers, scale, dtype, mode=Phase.DECAY):
        self.integers, self.scale, self.mode = integers, scale, mode

    def __tensor_flatten__(self):
        return ["integers", "scale"], {"dtype": self.dtype, "mode": self.mode}

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Scaled(parts["integers"], parts["scale"], context["dtype"], context["mode"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def scaled(fill=3, shape=(2, 4), dtype=torch.float32, **mode):
    return Scaled(torch.full(shape, fill, dtype=torch.int8), torch.full((2,), fill / 8), dtype, **mode)


def test_tensors_of_subclasses_are_filled_in_place(tmp_path):
    path = saved(tmp_path, {"w": scaled(), "nested": [TwoTensor(scaled(1), scaled(2))]})
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert {"w/integers", "w/scale", "nested/0/a/scale"} <= set(checkpoint.tensors)
    target = {"w": scaled(0), "nested": [TwoTensor(scaled(0), scaled(0))]}
    weight, integers = target["w"], target["w"].integers
    dtckpt.restore(path, target)
    assert (target["w"] is weight, weight.integers is integers) == (True, True)
    assert (integers.unique().tolist(), weight.scale.tolist()) == ([3], [3 / 8, 3 / 8])
    assert target["nested"][0].b.integers.unique().tolist() == [2]


def test_without_a_target_a_subclass_is_its_parts(tmp_path):
    back = dtckpt.restore(saved(tmp_path, {"w": scaled()}))["w"]
    assert (type(back), back.kind, back.shape) == (TensorParts, "Scaled", (2, 4))
    assert back.context == {"dtype": torch.float32, "mode": EnumMember("Phase", "DECAY")}
    assert back["integers"].unique().tolist() == [3]
    target = scaled(0)
    dtckpt.restore(saved(tmp_path / "again", {"w": back}), {"w": target})
    assert target.scale.tolist() == [3 / 8, 3 / 8]


@pytest.mark.parametrize(
    "target",
    [
        scaled(0, dtype=torch.float64),
        scaled(0, mode=Phase.WARMUP),
        scaled(0, shape=(4, 2)),
        TwoTensor(torch.ones(2, 4), torch.ones(2, 4)),
    ],
    ids=["dtype", "mode", "shape", "class"],
)
def test_parts_of_another_kind_of_tensor_are_refused(tmp_path, target):
    path = saved(tmp_path, {"w": scaled()})
    with pytest.raises(TreeError, match=r"tensor at 'w' was saved as \('Scaled', \(2, 4\), .*cannot take; restore it"):
        dtckpt.restore(path, {"w": target})


def test_parts_and_tensors_do_not_fill_each_other(tmp_path):
    with pytest.raises(TensorNotFoundError, match="has a TensorParts at 'w'; the target wants a tensor"):
        dtckpt.restore(saved(tmp_path, {"w": scaled()}), {"w": torch.ones(2, 4)})
    with pytest.raises(TreeError, match="at 'w' was saved as tensor, which the parts of the target's Scaled"):
        dtckpt.restore(saved(tmp_path / "t", {"w": torch.ones(2, 4)}), {"w": scaled()})


class Remade(TwoTensor):
    """A tensor that makes its parts anew."""

    def __getattribute__(self, name):
        made = super().__getattribute__(name)
        return made.clone() if name == "a" else made


def test_parts_that_are_made_anew_are_saved_and_not_filled(tmp_path):
    path = saved(tmp_path, {"w": Remade(torch.ones(2), torch.ones(2))})
    assert dtckpt.restore(path)["w"]["a"].tolist() == [1, 1]
    with pytest.raises(TreeError, match="into the Remade at 'w': it does not keep its parts as attributes"):
        dtckpt.restore(path, {"w": Remade(torch.zeros(2), torch.zeros(2))})


def test_a_context_that_only_code_could_make_is_refused(tmp_path):
    with pytest.raises(TreeError, match="cannot save function at 'w/2/mode': expected"):
        dtckpt.save(tmp_path / "s", {"w": scaled(mode=lambda: 1)})


def test_a_save_in_the_background_keeps_the_values_of_the_call(tmp_path):
    tree = {"a": np.arange(3), "reversed": np.arange(3)[::-1], "w": scaled()}
    handle = dtckpt.save_async(tmp_path / "s", tree)
    tree["a"][:] = 0
    tree["reversed"][:] = 0
    tree["w"].integers.zero_()
    handle.result(30)
    back = dtckpt.restore(tmp_path / "s")
    assert (back["a"].tolist(), back["reversed"].tolist()) == ([0, 1, 2], [2, 1, 0])
    assert back["w"]["integers"].unique().tolist() == [3]
