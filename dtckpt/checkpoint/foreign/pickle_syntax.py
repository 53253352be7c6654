"""`parse_pickle`: a pickle as the calls that it asks for, none of which is made.

A pickle is a program for a stack machine. Python's own machine imports the functions that the program names, and calls
them, so it is safe only for trusted files. This one imports nothing and calls nothing. The result has numbers, strings,
lists and tuples as they are, and stand-ins for the rest::

    c torch.Size  K2 K3 \\x86  R      ->   Call(Global("torch.Size"), ((2, 3),))

The reader of the stand-ins says what a name means, by a closed table
(`dtckpt.checkpoint.foreign.pickle_names`).

Objects that the program refers to twice are one object here, too. So the result may contain itself, and a walk along
all of its paths may never end: a caller that walks it counts levels and steps. An opcode of one byte can make an object
of a hundred, so a `ReadBudget` bounds the bytes of the objects.

The parser reads the opcodes of protocols 2 to 5, as Python writes them (documented in Python's `pickletools`). Refused
are the opcodes of Python's extension registry, of buffers outside the pickle, and of protocols 0 and 1 alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from dtckpt.errors import CheckpointCorruptError

FLOOR_NBYTES = 16 << 20
"""Bytes of objects that a file of any size may ask for."""
MULTIPLE = 64
"""Bytes of objects per byte of a file. Long lists of short numbers need most of it: a node takes `NODE_NBYTES`."""
NODE_NBYTES = 160
"""Bytes of a node of a state tree, about."""
STEP_NBYTES = 32
"""Bytes that are counted for a value without memory, as None: to look at it takes time."""
TENSOR_NBYTES = 1024
"""Bytes of the description of a tensor, or of a piece of a tensor, about."""


class ReadBudget:
    """The bytes of objects that parsers may still make of one checkpoint's files. Thread-safe.

    A file of a few hundred bytes can describe more objects than any memory holds, as with a list that contains itself
    many times, or a text in a million names. So everything that is made is counted, before it is made, against the
    bytes that were read::

        bytes made  <=  FLOOR_NBYTES + MULTIPLE * bytes read

    Two more bounds need no counting. `dtckpt.checkpoint.reading.pieces.is_expanded_too_far` compares the elements of
    tensors with the bytes that they are made of, and `dtckpt.format.hash_work` bounds the time that dicts and sets of
    untrusted keys take.

    Args:
        where: The file or checkpoint, for messages.
    """

    __slots__ = ("_left", "_lock", "_nbytes", "_where")

    def __init__(self, where: str) -> None:
        self._where = where
        self._nbytes = 0
        self._left = FLOOR_NBYTES
        self._lock = Lock()

    @classmethod
    def of(cls, nbytes: int, where: str) -> ReadBudget:
        """Return the budget of a file of ``nbytes`` bytes."""
        budget = cls(where)
        budget.grow(nbytes)
        return budget

    def grow(self, nbytes: int) -> None:
        """Add the objects that ``nbytes`` more bytes may make; the bytes must have been read, not only claimed."""
        with self._lock:
            self._nbytes += nbytes
            self._left += MULTIPLE * nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be made.

        Raises:
            CheckpointCorruptError: The budget has fewer bytes left.
        """
        with self._lock:
            self._left -= nbytes
            is_spent = self._left < 0
        if is_spent:
            raise CheckpointCorruptError(
                f"{self._where} describes too much; got objects of more than {FLOOR_NBYTES + MULTIPLE * self._nbytes} "
                f"bytes, expected at most that for the {self._nbytes} bytes that were read; does it contain itself? "
                "restore another checkpoint"
            )


MAX_PICKLE_NBYTES = 512 << 20
"""Longest pickle that is read; the metadata of a million chunks has a tenth of that."""
_BATCH_NBYTES = 64 << 10
"""Bytes of objects that are drawn from the budget at a time."""
_SLOT_NBYTES = 16
"""Bytes of a place on the stack, and of one in a container."""
_PAIR_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class, a function or a constant.

    Args:
        name: Name of the module, a dot, and the name in the module.
    """

    name: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """An object that only a call would make.

    Args:
        function: The function or class; a `Global`, unless the pickle is hostile.
        arguments: The arguments of the call.
        keywords: Its keyword arguments.
        state: The state that the object would be told to take; None without such a step.
        items: Items that would be appended to it.
        pairs: Keys and values that would be set in it.
    """

    function: Any
    arguments: tuple[Any, ...] = ()
    keywords: Any = None
    state: Any = None
    items: Sequence[Any] = ()
    pairs: Sequence[tuple[Any, Any]] = ()

    @property
    def name(self) -> str:
        """The name of the function or class; empty if the pickle would call something else."""
        return self.function.name if type(self.function) is Global else ""


class Pairs(list[tuple[Any, Any]]):
    """A dict as its keys and values. Keys are not hashed: the hash of a hostile tuple takes for ever."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object outside the pickle, such as a tensor's storage.

    Args:
        key: The key by which the pickle refers to it.
    """

    key: Any


def parse_pickle(data: bytes | memoryview, where: str, budget: ReadBudget | None = None) -> Any:
    """Return the value of a pickle, with stand-ins for all that only code could make.

    Args:
        data: The pickle.
        where: The file, for messages.
        budget: Bounds the bytes of the objects that the parser makes, and grows by the bytes of the pickle. Default: a
            budget for this pickle alone.

    Raises:
        CheckpointCorruptError: The pickle is cut short or malformed, uses opcodes that PyTorch does not, or is too
            long; or it makes far more than its bytes.
    """
    if len(data) > MAX_PICKLE_NBYTES:
        raise _malformed(where, f"it has {len(data)} bytes, expected at most {MAX_PICKLE_NBYTES}")
    budget = ReadBudget(where) if budget is None else budget
    budget.grow(len(data))
    machine = _Machine(bytes(data), budget)
    try:
        return machine.run()
    except CheckpointCorruptError:
        raise
    except (IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error) as error:
        raise _malformed(where, f"at byte {machine.position}: {error}") from error


def _malformed(where: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the pickle in {where} cannot be read: {reason[:300]}; restore another checkpoint")


class _Machine:
    """The stack machine; each method that `_OPERATIONS` names runs one opcode, and `run` the frequent ones."""

    __slots__ = ("budget", "data", "made", "marks", "memo", "position", "stack")

    def __init__(self, data: bytes, budget: ReadBudget) -> None:
        self.data = data
        self.budget = budget
        self.made = 0
        """Bytes that the last method made, without the bytes of its opcode."""
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """Positions in the stack where a series of items begins."""
        self.memo: list[Any] = []
        """By number, the objects that later opcodes refer to. No dict: the pickle chooses the numbers."""

    def run(self) -> Any:  # noqa: PLR0912, PLR0915  (to call functions would take longer than to run an opcode)
        """Run the program to its end; return the value on the stack."""
        data, operations, sizes = self.data, _OPERATIONS, _NBYTES
        stack, memo, marks = self.stack, self.memo, self.marks
        position = made = 0
        try:
            while True:
                code = data[position]
                position += 1
                made += sizes[code]
                if made > _BATCH_NBYTES or code == _STOP:
                    self.budget.take(made)
                    made = 0
                # The opcodes that most programs consist of, the most frequent first: to call a method takes longer than
                # to run one of them.
                if code == _MEMOIZE:
                    memo.append(stack[-1])
                elif code == _BINGET:
                    number = data[position]
                    position += 1
                    if (value := memo[number]) is _ABSENT:
                        raise KeyError(number)
                    stack.append(value)
                elif code == _LONG_BINGET:
                    number = int.from_bytes(data[position : position + 4], "little")
                    position += 4
                    if (value := memo[number]) is _ABSENT:
                        raise KeyError(number)
                    stack.append(value)
                elif code == _BININT1:
                    stack.append(data[position])
                    position += 1
                elif code == _MARK:
                    marks.append(len(stack))
                elif code == _EMPTY_TUPLE:
                    stack.append(())
                elif code == _NEWOBJ or code == _REDUCE:  # noqa: PLR1714, SIM109  (faster than a tuple)
                    arguments = stack.pop()
                    stack[-1] = _call(stack[-1], arguments)
                elif code == _TUPLE1:
                    stack[-1] = (stack[-1],)
                elif code == _BUILD:
                    state = stack.pop()
                    if type(stack[-1]) is not PickledCall:
                        raise TypeError(f"{type(stack[-1]).__name__} takes no state")
                    stack[-1].state = state
                elif code == _EMPTY_DICT:
                    stack.append(Pairs())
                elif code == _BINPUT and data[position] == len(memo):
                    memo.append(stack[-1])
                    position += 1
                elif code == _LONG_BINPUT and data[position : position + 4] == len(memo).to_bytes(4, "little"):
                    memo.append(stack[-1])
                    position += 4
                elif code == _TUPLE2:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                elif code == _STOP:
                    return stack.pop()
                else:
                    self.position = position
                    operations[code](self)
                    position = self.position
                    made += self.made
                    self.made = 0
        finally:
            self.position = max(self.position, position)  # for the message of an error

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise ValueError("it is cut short")
        return self.data[start : self.position]

    def take_number(self, format_: struct.Struct) -> Any:
        """Return the number that follows."""
        (number,) = format_.unpack_from(self.data, self.position)
        self.position += format_.size
        return number

    def take_line(self) -> str:
        """Return the text up to the next line end."""
        line = self.take(self.data.index(b"\n", self.position) + 1 - self.position)
        return line[:-1].decode()

    def pop_marked(self) -> list[Any]:
        """Take the items behind the last mark off the stack, and return them."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        self.made += _SLOT_NBYTES * len(items)
        return items

    def drop_marked(self) -> None:
        self.pop_marked()

    def skip_frame(self) -> None:
        """Pass over the length of a frame, which only helps a reader of a file."""
        self.position += 8

    def pop(self) -> None:
        self.stack.pop()

    def duplicate(self) -> None:
        self.stack.append(self.stack[-1])

    def append(self) -> None:
        self.extend([self.stack.pop()])

    def extend(self, items: list[Any] | None = None) -> None:
        added = self.pop_marked() if items is None else items
        target = self.stack[-1]
        if type(target) is PickledCall:
            call, target = target, target.items if type(target.items) is list else []
            call.items = target
        if type(target) is not list:
            raise TypeError(f"items cannot be appended to {type(target).__name__}")
        target.extend(added)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_items(self, items: list[Any] | None = None) -> None:
        flat = self.pop_marked() if items is None else items
        self.made += _PAIR_NBYTES * len(flat) // 2
        target = self.stack[-1]
        if type(target) is PickledCall:
            call, target = target, target.pairs if type(target.pairs) is Pairs else Pairs()
            call.pairs = target
        if type(target) is Pairs:
            target.extend(_paired(flat))
        else:
            raise TypeError(f"keys cannot be set in {type(target).__name__}")

    def make_tuple(self) -> None:
        self.stack.append(tuple(self.pop_marked()))

    def make_list(self) -> None:
        self.stack.append(self.pop_marked())

    def make_dict(self) -> None:
        items = self.pop_marked()
        self.stack.append(Pairs())
        self.set_items(items)

    def make_set(self) -> None:
        self.stack.append(PickledCall(_SET))

    def make_frozenset(self) -> None:
        self.stack.append(PickledCall(_FROZENSET, (self.pop_marked(),)))

    def call_with_keywords(self) -> None:
        keywords, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(_call(function, arguments, keywords))

    def name_global(self) -> None:
        module = self.take_line()
        self.stack.append(Global(f"{module}.{self.take_line()}"))

    def name_global_of_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (type(name) is type(module) is str):
            raise TypeError("a name is no string")
        self.made += len(module) + len(name)
        self.stack.append(Global(f"{module}.{name}"))

    def refer_outside(self) -> None:
        self.stack.append(Persistent(self.stack.pop()))

    def memoize_as(self, number: int) -> None:
        """Note an object under a number. Python counts up; a pickle that was optimized leaves numbers out."""
        if number > len(self.data):
            raise ValueError(f"object {number} of {len(self.data)} bytes")
        self.memo.extend([_ABSENT] * (number + 1 - len(self.memo)))
        self.memo[number] = self.stack[-1]


def _call(function: Any, arguments: Any, keywords: Any = None) -> PickledCall:
    if type(arguments) is not tuple:
        raise TypeError(f"the arguments of a call are {type(arguments).__name__}")
    return PickledCall(function, arguments, keywords)


def _paired(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


_BYTE, _SHORT, _INT, _UINT = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")
_ULONG, _DOUBLE = struct.Struct("<Q"), struct.Struct(">d")
_STOP, _MARK, _MEMOIZE, _BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT, _BININT1, _TUPLE2 = b".(\x94hjqrK\x86"
_EMPTY_TUPLE, _NEWOBJ, _REDUCE, _TUPLE1, _BUILD, _EMPTY_DICT = b")\x81R\x85b}"
_SET, _FROZENSET, _BYTEARRAY = (Global(f"builtins.{name}") for name in ("set", "frozenset", "bytearray"))
_ABSENT = object()
"""In place of an object that has no number."""


def _constant(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


def _number(format_: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take_number(format_))


def _counted(length: struct.Struct, decode: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Return the operation that pushes bytes whose number comes first, decoded."""
    return lambda machine: machine.stack.append(decode(machine.take(machine.take_number(length))))


def _put(length: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.memoize_as(machine.take_number(length))


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]

    return make


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _unknown(machine: _Machine) -> None:
    raise ValueError(f"opcode {machine.data[machine.position - 1 : machine.position]!r}, which PyTorch does not write")


_NAMED: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda machine: machine.take_number(_BYTE),  # the protocol
    b"\x95": _Machine.skip_frame,
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b"J": _number(_INT),
    b"K": _number(_BYTE),
    b"M": _number(_SHORT),
    b"G": _number(_DOUBLE),
    b"\x8a": _counted(_BYTE, _integer),
    b"\x8b": _counted(_UINT, _integer),
    b"X": _counted(_UINT, _text),
    b"\x8c": _counted(_BYTE, _text),
    b"\x8d": _counted(_ULONG, _text),
    b"C": _counted(_BYTE, bytes),
    b"B": _counted(_UINT, bytes),
    b"\x8e": _counted(_ULONG, bytes),
    b"\x96": _counted(_ULONG, lambda data: PickledCall(_BYTEARRAY, (data,))),
    b"]": _constant(list),
    b"a": _Machine.append,
    b"e": _Machine.extend,
    b"l": _Machine.make_list,
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"d": _Machine.make_dict,
    b"\x8f": _Machine.make_set,
    b"\x90": _Machine.extend,
    b"\x91": _Machine.make_frozenset,
    b"t": _Machine.make_tuple,
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"0": _Machine.pop,
    b"1": _Machine.drop_marked,
    b"2": _Machine.duplicate,
    b"q": _put(_BYTE),
    b"r": _put(_UINT),
    b"c": _Machine.name_global,
    b"\x93": _Machine.name_global_of_stack,
    b"\x92": _Machine.call_with_keywords,
    b"Q": _Machine.refer_outside,
}
_OPERATIONS = [_NAMED.get(bytes([code]), _unknown) for code in range(256)]

_MADE: dict[int, bytes] = {
    24: b"JG",
    48: b"(\x8a\x8bQ",
    64: b"XC\x8c\x8d\x8eB]lt\x85\x86\x87c\x93",
    88: b"}ds",
    256: b"R\x81\x92\x8f\x91\x96",
}
"""Bytes of the object that an opcode makes, about, without its slot and without its bytes in the pickle."""
_NBYTES = [_SLOT_NBYTES + next((size for size, codes in _MADE.items() if code in codes), 0) for code in range(256)]
