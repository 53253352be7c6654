"""State trees in pickles: what ``torch.save`` writes of containers, plain values, tensors and arrays."""

import argparse
import datetime
import enum
import pathlib
import pickle
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from storage.untrusted.hash_attacks import colliding_numbers
from storage.untrusted.untrusted_checkpoints import limit_memory

from checkpoint.foreign.torch_files import saved, tree_of, zip_of
from dtckpt.checkpoint.foreign import pickle_names, pickle_syntax, pickled_tree, pickled_values
from dtckpt.checkpoint.foreign.pickle_syntax import parse_pickle
from dtckpt.checkpoint.foreign.pickled_tensors import StorageView
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.errors import CheckpointCorruptError, TreeError
from dtckpt.format import tree as trees

PROTOCOLS = (2, 4, 5)
PLAIN = {
    "none": None,
    "numbers": [True, 1, -(2**70), 1.5, float("inf"), 1 + 2j],
    "texts": ["", "ä\n", b"", b"\0\xff"],
    "containers": [(), [], {}, (1, [2, {"a": 3}])],
    "keys": {1: "int", "a": "str", None: 1, (1, "a"): 2, 1.5: 3, False: 4, b"k": 5},
    "sets": [set(), {1, 2}, frozenset(), frozenset({(1, "a"), 3})],
    "range": range(1, 9, 2),
    "torch": [torch.Size([2, 3]), torch.float32, torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda", 1)],
    "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j), np.float16(2)],
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/a")],
    "dates": [
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=5))),
        datetime.timedelta(1, 2, 3),
    ],
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict(c=2))]),
    "counter": Counter("abab"),
    "defaultdicts": [defaultdict(None, {"a": 1}), *(defaultdict(kind) for kind in (int, float, str, list, dict, set))],
    "deques": [deque(), deque([1, 2], 3), deque([1, 2])],
    "namespace": types.SimpleNamespace(a=1, b=types.SimpleNamespace()),
}


def test_every_name_that_is_allowed_has_a_maker():
    assert set(pickle_names.VALUES.values()) == set(pickled_values._MAKERS)
    assert set(pickle_names.ARRAYS.values()) == set(pickled_values._ARRAY_MAKERS)
    assert set(pickle_names.CONTAINERS.values()) == set(pickled_tree._READERS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_back(protocol):
    tree = tree_of(PLAIN, pickle_protocol=protocol)
    assert tree.refused == {}
    built = trees.build(tree.node, None)
    assert repr(built) == repr(PLAIN)
    # And the structure is as in a save of the same tree.
    assert trees.dump(tree.node) == trees.dump(trees.flatten(PLAIN, torch.is_tensor)[1])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_of_numpy_come_back(protocol):
    arrays = {
        "plain": np.arange(6, dtype=np.int16).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "every other": np.arange(9)[::2],
        "scalar": np.array(1.5),
        "empty": np.empty((0, 3), np.float32),
        "bool": np.array([True, False]),
        "random": np.random.RandomState(7).get_state(),
    }
    tree = tree_of(arrays, pickle_protocol=protocol)
    assert tree.refused == {}
    assert trees.array_names(tree.node) == list(tree.leaves)
    for name, array in tree.leaves.items():
        expected = arrays["random"][1] if name == "random/1" else arrays[name]
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.bool])
def test_tensors_are_views_of_storages(dtype):
    base = torch.zeros(3, 4).to(dtype)
    state = OrderedDict(
        base=base,
        column=base[:, 1],
        transposed=base.t(),
        scalar=base[2, 3],
        parameter=torch.nn.Parameter(base[1:], requires_grad=False),
        expanded=base[:1].expand(5, 4),
        empty=base[:, :0],
    )
    leaves = tree_of(state).leaves
    assert list(leaves) == list(state)
    for name, view in leaves.items():
        tensor = state[name].detach()
        assert view == StorageView(
            "0",
            str(tensor.dtype).removeprefix("torch."),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            base.untyped_storage().nbytes(),
        )


def test_a_tensor_with_attributes_is_a_tensor():
    tensor = torch.ones(2)
    tensor.note = "mine"
    assert tree_of(tensor).node == {"tensor": "value"}
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "mine"
    assert tree_of([parameter]).node == {"list": [{"tensor": "0"}]}


def test_the_arguments_of_a_program_are_a_namespace():
    tree = tree_of(argparse.Namespace(lr=1, sizes=[2]))
    assert trees.build(tree.node, None) == types.SimpleNamespace(lr=1, sizes=[2])


class Color(enum.Enum):
    RED = 1


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_what_cannot_be_read_is_left_out_with_the_reason():
    tensor = torch.ones(2, 2)
    tree = tree_of(
        {
            "step": 3,
            "args": Fraction(1, 2),
            "color": Color.RED,
            "bytearray": bytearray(b"a"),
            "layout": torch.strided,
            "class": argparse.Namespace,
            "deep": {"good": 1, "list": [tensor, Fraction(1, 2)]},
            "big": 1 << 9000,
            "objects": np.array(["text"]),
            "swapped": np.arange(3, dtype=">i4"),
            "sparse": tensor.to_sparse(),
            "lazy": tensor.to(torch.complex64).conj(),
            "meta": tensor.to("meta"),
            "quantized": torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8),
        }
    )
    assert trees.build(tree.node, None) == {"step": 3, "deep": {"good": 1}}
    assert tree.leaves == {}
    expected = {
        "args": "cannot read fractions.Fraction at 'args'",
        "color": "Color at 'color'",
        "bytearray": "bytearray",
        "layout": "torch.serialization._get_layout",
        "class": "cannot read argparse.Namespace at 'class'",
        "deep/list": "cannot read fractions.Fraction at 'deep/list/1'",
        "big": "int at 'big' is too large",
        "objects": "its dtype is 'U4'",
        "swapped": "big-endian",
        "sparse": "_rebuild_sparse_tensor",
        "lazy": "resolve_conj",
        "meta": "_rebuild_meta_tensor_no_storage",
        "quantized": "_rebuild_qtensor",
    }
    assert tree.refused.keys() == expected.keys()
    for path, text in expected.items():
        assert text in tree.refused[path].message, path


def test_keys_of_any_text_have_the_names_that_a_save_gives_them():
    state = {"": torch.ones(1), "..": {"/a//b": torch.ones(2)}, "c/d": torch.ones(3), 5: torch.ones(4)}
    tree = tree_of(state)
    assert trees.dump(tree.node) == trees.dump(trees.flatten(state, torch.is_tensor)[1])
    assert list(tree.leaves) == ["%", "%2E%2E/%/a/%/b", "c/d", "5"]


def test_two_paths_of_one_name_are_refused():
    assert "both be named 'a/b'" in tree_of({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}).refused["a/b"].message


HOSTILE = {
    "itself": b"}q\0(X\1\0\0\0ah\0X\1\0\0\0bh\0u.",
    "itself in a list": b"]q\0(h\0h\0e.",
    "deep": b"]" * 100 + b"a" * 99 + b".",
    "laughs": b"X\1\0\0\0aq\0" + b"2\x86" * 60 + b".",
    "laughs of dicts": b"}q\0"
    + b"".join(b"}(X\1\0\0\0ah%cX\1\0\0\0bh%cuq%c" % (n, n, n + 1) for n in range(50))
    + b".",
    "much text": b"X\0\0\x10\0" + b"a" * (1 << 20) + b"q\0" + b"2\x86" * 14 + b".",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_trees_end(program):
    with limit_memory(512 << 20), pytest.raises(CheckpointCorruptError, match="does it contain itself"):
        read_tree(parse_pickle(program, "it"))


def test_long_lists_of_short_values_are_read(monkeypatch):
    """Without the part of the budget that any pickle has."""
    monkeypatch.setattr(pickle_syntax, "FLOOR_NBYTES", 1 << 20)
    for value in (
        [number % 10 for number in range(1 << 18)],
        [None] * (1 << 18),
        list(range(1 << 17)),
        [(number, number % 10) for number in range(1 << 15)],
        dict.fromkeys(range(1 << 16), 0),
    ):
        parsed = zip_of(saved({"a": value}))
        assert trees.build(read_tree(parsed.value, budget=parsed.budget).node, None) == {"a": value}


def test_a_text_that_is_part_of_many_names_costs_its_bytes():
    text = b"X\0\0\1\0" + b"a" * (1 << 16) + b"q\0"
    with limit_memory(512 << 20), pytest.raises(CheckpointCorruptError, match="describes too much"):
        read_tree(parse_pickle(text + b"0(" + (b"}(h\0h\0u" * 5000) + b"l.", "it"))


COLLIDING = {
    "equal hashes": [1 + number * ((1 << 61) - 1) for number in range(20_000)],
    "a path of full slots": colliding_numbers(20_000),
}


@pytest.mark.parametrize("numbers", COLLIDING.values(), ids=COLLIDING)
def test_keys_that_take_for_ever_to_hash_are_refused(numbers):
    """As members of a set, as keys, and in tuples; written as tuples, as no set of these could be made here."""
    members = pickle.dumps(tuple(numbers), 2)[:-1]
    start = time.process_time()
    with pytest.raises(TreeError, match="takes for ever"):
        read_tree(parse_pickle(b"c__builtin__\nset\n" + members[2:] + b"\x85R.", "it"))
    keys = b"}(" + b"".join(pickle.dumps(number, 2)[2:-1] + b"N" for number in numbers) + b"u."
    with pytest.raises(CheckpointCorruptError, match="takes for ever"):
        read_tree(parse_pickle(keys, "it"))
    assert time.process_time() - start < 5


def test_an_expanded_tensor_is_refused_by_name_if_it_is_far_larger_than_what_is_stored():
    small, huge = torch.ones(1).expand(1 << 10, 1 << 10), torch.ones(1).expand(1 << 20, 1 << 20)
    tree = tree_of({"small": small, "huge": huge, "deep": {"w": torch.ones(2)}})
    assert list(tree.leaves) == ["small", "deep/w"]
    assert "it was expanded to 4398046511104 bytes, of 4 that are stored" in tree.refused["huge"].message


def test_tensors_that_share_their_description_end():
    """Thousands of DTensors whose state is one object of a hundred thousand fields."""
    state = b"}(" + b"".join(b"X\6\0\0\0f%05dN" % number for number in range(100_000)) + b"uq\0"
    rebuild = b"ctorch._tensor\n_rebuild_from_type_v2\nq\1"
    one = b"h\1(ctorch._utils\n_rebuild_tensor_v2\nctorch.distributed.tensor\nDTensor\n)h\0tR"
    program = state + rebuild + b"0(" + b"".join(b"X\4\0\0\0%04d" % number + one for number in range(3000)) + b"d."
    start = time.process_time()
    assert len(read_tree(parse_pickle(program, "it")).refused) == 3000
    assert time.process_time() - start < 5


CALLS = {
    "a key that takes for ever to hash": b"}" + b")" + b"2\x86" * 40 + b"Ns.",
    "a set of such": b"c__builtin__\nset\n]" + b")" + b"2\x86" * 40 + b"a\x85R.",
    "a key that is a list": b"}]Ns.",
    "bytes of a size": b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "a shape of texts": b"ctorch\nSize\nX\1\0\0\0a\x85\x85R.",
    "a device that is none": b"ctorch\ndevice\nX\1\0\0\0a\x85R.",
    "a year that is none": b"cdatetime\ndate\nK\0K\0K\0\x87R.",
    "another encoding": b"c_codecs\nencode\nX\1\0\0\0aX\5\0\0\0punyc\x86R.",
    "a dtype by text": b"cnumpy.core.multiarray\nscalar\nX\2\0\0\0f4C\4\0\0\0\0\x86R.",
    "keywords": b"\x80\x04ctorch\nSize\n)}(X\1\0\0\0aNu\x92.",
    "state of a value": b"c__builtin__\ncomplex\nK\1K\1\x86R]b" + b".",
    "a call of a value": b"K\1)R.",
    "a factory that is code": b"ccollections\ndefaultdict\ncos\nsystem\n\x85R.",
    "a factory that is a class of torch": b"ccollections\ndefaultdict\nctorch\nint\n\x85R.",
    "a deque of a text": b"ccollections\ndeque\nX\1\0\0\0aX\1\0\0\0a\x86R.",
    "a namespace of no dict": b"ctypes\nSimpleNamespace\n)RK\1b.",
}


@pytest.mark.parametrize("program", CALLS.values(), ids=CALLS)
def test_hostile_calls_are_refused(program):
    with pytest.raises(TreeError, match=r"cannot|deeper"):
        read_tree(parse_pickle(program, "it"))
