"""Pickles as the calls that they ask for: what Python writes is read, nothing runs, and hostile pickles end soon."""

import os
import pickle
import struct
from collections import OrderedDict, deque
from dataclasses import dataclass
from fractions import Fraction

import pytest
from storage.untrusted.untrusted_checkpoints import limit_memory

from dtckpt.checkpoint.foreign import pickle_syntax
from dtckpt.checkpoint.foreign.pickle_syntax import Global, Pairs, Persistent, PickledCall, parse_pickle
from dtckpt.errors import CheckpointCorruptError

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
VALUES = [
    None,
    True,
    False,
    *(0, 1, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, -(2**70), 10**400),
    *(0.0, -1.5, float("inf")),
    *("", "a", "ä" * 300, "\ud800", b"", b"\xff" * 300),
    [],
    [1, [2, "a"]],
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    tuple(range(2000)),
    list(range(2000)),
]


def plain(value):
    """Return the value with dicts and sets in place of what stands for them."""
    if type(value) is Pairs:
        return {plain(key): plain(item) for key, item in value}
    if type(value) is PickledCall and value.name in ("builtins.set", "builtins.frozenset"):
        return {plain(item) for item in (*value.items, *(value.arguments[0] if value.arguments else ()))}
    if type(value) is PickledCall and value.name == "_codecs.encode":
        return value.arguments[0].encode("latin-1")
    if type(value) is PickledCall and value.name in ("__builtin__.bytes", "builtins.bytes"):
        return b""
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_are_read_as_python_writes_them(protocol):
    for value in [*VALUES, {}, {"a": {1: [2]}, (1, 2): 3}, dict.fromkeys(range(2000))]:
        assert plain(parse_pickle(pickle.dumps(value, protocol), "it")) == value


@pytest.mark.parametrize("protocol", range(4, pickle.HIGHEST_PROTOCOL + 1))
def test_sets_and_bytearrays_have_opcodes(protocol):
    assert plain(parse_pickle(pickle.dumps([{1, 2}, frozenset({3})], protocol), "it")) == [{1, 2}, {3}]
    call = parse_pickle(pickle.dumps(bytearray(b"abc"), protocol), "it")
    assert (call.name, call.arguments[0]) == ("builtins.bytearray", b"abc" if protocol > 4 else call.arguments[0])


@dataclass
class Facts:
    size: int


class Keywords:
    def __getnewargs_ex__(self):
        return (1,), {"size": 2}

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_are_calls(protocol):
    name = f"{__name__}.Facts"
    facts = parse_pickle(pickle.dumps(Facts(3), protocol), "it")
    assert (facts.name, facts.arguments, facts.state) == (name, (), [("size", 3)])
    ordered = parse_pickle(pickle.dumps(OrderedDict(a=1), protocol), "it")
    assert (ordered.name, ordered.pairs) == ("collections.OrderedDict", [("a", 1)])
    queue = parse_pickle(pickle.dumps(deque([1, 2], 4), protocol), "it")
    assert (queue.name, queue.arguments[1], queue.items) == ("collections.deque", 4, [1, 2])
    assert parse_pickle(pickle.dumps(Facts, protocol), "it") == Global(name)
    assert parse_pickle(pickle.dumps(Fraction(1, 2), protocol), "it").name == "fractions.Fraction"
    if protocol > 3:
        assert parse_pickle(pickle.dumps(Keywords(), protocol), "it").keywords == [("size", 2)]


def test_objects_that_are_shared_stay_one():
    shared = ["a"]
    first, second = parse_pickle(pickle.dumps([shared, shared]), "it")
    assert first is second


def test_persistent_objects(tmp_path):
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", "7") if value == 7 else None

    with open(tmp_path / "file", "wb") as file:
        Pickler(file).dump([7])
    (persistent,) = parse_pickle((tmp_path / "file").read_bytes(), "it")
    assert type(persistent) is Persistent
    assert persistent.key == ("storage", "7")


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_runs(protocol, tmp_path):
    command = f"touch {tmp_path}/ran"
    for call in [(os.system, (command,)), (eval, (f"open('{tmp_path}/ran', 'w')",)), (__import__, ("antigravity",))]:
        value = parse_pickle(pickle.dumps(Runs(*call), protocol), "it")
        assert value.arguments == call[1]
    assert list(tmp_path.iterdir()) == []


HOSTILE = {
    "a result that is called": b"cos\nsystem\n(tR(tR.",
    "a string that is called": b"X\x01\0\0\0a)R.",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_name_has_none(program):
    assert parse_pickle(program, "it").name == ""


MALFORMED = {
    "empty": b"",
    "no end": b"\x80\x04N",
    "an empty stack": b".",
    "a tuple of an empty stack": b"\x87.",
    "no mark": b"t.",
    "no such memo": b"h\x05.",
    "cut short": b"X\xff\0\0\0abc.",
    "long": b"\x8d" + struct.pack("<Q", 2**63) + b"a.",
    "a name without an end": b"cos",
    "a name that is no text": b"c\xff\n\xff\n.",
    "an odd number of keys and values": b"}(Nu.",
    "keys of a list": b"](NNu.",
    "items of a dict": b"}(Ne.",
    "state of a list": b"]Nb.",
    "arguments that are no tuple": b"cos\nsystem\n]R.",
    "a name of numbers": b"NN\x93.",
    "an extension": b"\x82\x01.",
    "a buffer": b"\x97.",
    "protocol 0": b"I1\n.",
    "an instance": b"(ios\nsystem\n.",
}


@pytest.mark.parametrize("program", MALFORMED.values(), ids=MALFORMED)
def test_malformed_pickles_are_refused(program):
    with pytest.raises(CheckpointCorruptError, match="the pickle in some/file cannot be read"):
        parse_pickle(program, "some/file")


def test_prefixes_of_a_pickle_are_refused():
    data = pickle.dumps({"a": [1, Facts(2)], "b": OrderedDict(c=(1, 2, 3))})
    for length in range(len(data)):
        with pytest.raises(CheckpointCorruptError):
            parse_pickle(data[:length], "it")


def test_deep_and_long_pickles_end(monkeypatch):
    depth = 50_000
    # Python itself could not print, compare or hash these; to make and to free them is all that happens here.
    parse_pickle(b")" + b"\x85" * depth + b".", "it")
    parse_pickle(b"]" * depth + b"a" * (depth - 1) + b".", "it")
    parse_pickle(b"cos\nsystem\nq\0" + b"h\0" * depth + b")" + b"R\x85" * depth + b"R.", "it")
    # A key that would take 2**1000 steps to hash.
    parse_pickle(b"}" + b")" + b"2\x86" * 1000 + b"Ns.", "it")
    # A memo of four billion entries, and a memo with gaps, as in an optimized pickle.
    with pytest.raises(CheckpointCorruptError, match="object 4294967295 of 13 bytes"):
        parse_pickle(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.", "it")
    assert parse_pickle(b"Nq\x070h\x07.", "it") is None
    with pytest.raises(CheckpointCorruptError, match="at byte 6"):
        parse_pickle(b"Nq\x070h\x06.", "it")
    monkeypatch.setattr(pickle_syntax, "MAX_PICKLE_NBYTES", 10)
    with pytest.raises(CheckpointCorruptError, match="it has 20 bytes, expected at most 10"):
        parse_pickle(bytes(20), "it")


AMPLIFIED = {
    "empty sets": b"\x8f",
    "names": b"h\1h\1\x93",
}


@pytest.mark.parametrize("opcodes", AMPLIFIED.values(), ids=AMPLIFIED)
def test_opcodes_cost_the_bytes_of_their_objects(opcodes):
    """A megabyte may make a hundred, and here it would make far more."""
    program = b"cos\nsystem\nq\0X\0\4\0\0" + b"a" * 1024 + b"q\1(" + opcodes * ((1 << 20) // len(opcodes)) + b"l."
    with limit_memory(256 << 20), pytest.raises(CheckpointCorruptError, match="describes too much"):
        parse_pickle(program, "it")
    parse_pickle(b"cos\nsystem\nq\0X\1\0\0\0aq\1(" + opcodes * 10_000 + b"l.", "it")


def test_long_lists_of_short_values_are_read(monkeypatch):
    """What costs most of the budget in honest pickles, without the part of it that any pickle has."""
    monkeypatch.setattr(pickle_syntax, "FLOOR_NBYTES", 1 << 20)
    for value in (
        list(range(1 << 18)),
        [None] * (1 << 18),
        [(number, number) for number in range(1 << 16)],
        {number: number for number in range(1 << 17)},
        [{"a": number} for number in range(1 << 16)],
        [number / 3 for number in range(1 << 17)],
    ):
        for protocol in (2, 4):
            assert len(parse_pickle(pickle.dumps(value, protocol), "it")) == len(value)


def test_a_value_may_contain_itself():
    value = parse_pickle(b"]q\0h\0a.", "it")
    assert value[0] is value
