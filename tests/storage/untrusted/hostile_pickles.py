"""Pickles of a few bytes that ask for far more, and files of PyTorch that hold them; see `hostile_files`."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from .hash_attacks import colliding_numbers

Program = bytes
"""A pickle without its end."""
MODULUS = (1 << 61) - 1
DCP = "torch.distributed.checkpoint"


def text(value: str) -> Program:
    """Return the program that pushes a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> Program:
    """Return the program that pushes a number."""
    return pickle.dumps(value, 2)[2:-1]


def call(name: str, *arguments: Program) -> Program:
    """Return the program that calls a function."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def fields(name: str, **values: Program) -> Program:
    """Return the program that makes a dataclass."""
    pairs = b"".join(text(field) + value for field, value in values.items())
    return _empty(name) + b"}(" + pairs + b"ub"


def _empty(name: str) -> Program:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b")\x81"


def storage(key: str, numel: int) -> Program:
    """Return the program that refers to a storage of float32."""
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(numel) + b"tQ"


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], numel: int = 1) -> Program:
    """Return the program that makes a view of storage ``0``."""
    sizes, steps = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    return call("torch._utils._rebuild_tensor_v2", storage("0", numel), number(0), sizes, steps, b"\x89", b"N")


def _hashed(draw: random.Random) -> list[int]:
    count = draw.choice((2_000, 10_000, 40_000))
    return draw.choice(
        ([1 + each * MODULUS for each in range(count)], colliding_numbers(count), [each << 52 for each in range(count)])
    )


def _sets(draw: random.Random) -> Program:
    return b"(" + b"\x8f" * draw.choice((10_000, 1 << 20, 4 << 20)) + b"l"


def _one_text(draw: random.Random) -> Program:
    long = text("a" * draw.choice((1 << 12, 1 << 16, 1 << 20))) + b"q\0"
    return long + b"0(" + b"}(h\0h\0u" * draw.choice((1000, 12_000)) + b"l"


def _laughs(draw: random.Random) -> Program:
    push = draw.choice((b"2\x86", b"2\x87", b"2\x862\x86"))
    return draw.choice((b"]", b")", b"\x8f", text("a" * 1000))) + push * draw.choice((12, 24, 60))


def _laughing_dicts(draw: random.Random) -> Program:
    levels = (b"}(%sh%c%sh%cuq%c" % (text("a"), n, text("b"), n, n + 1) for n in range(draw.choice((10, 20, 60))))
    return b"}q\0" + b"".join(levels)


def _hashes(draw: random.Random) -> Program:
    numbers = _hashed(draw)
    if draw.random() < 0.5:
        return b"}(" + b"".join(number(each) + b"N" for each in numbers) + b"u"
    pushed = b"(" + b"".join(map(number, numbers)) + b"l"
    return call(draw.choice(("builtins.set", "builtins.frozenset")), pushed)


def _hashed_tuples(draw: random.Random) -> Program:
    return b"}(" + b"".join(text("a") + number(each) + b"\x86N" for each in _hashed(draw)) + b"u"


def _one_shape(draw: random.Random) -> Program:
    sizes = b"(" + b"K\1" * draw.choice((33, 10_000, 1 << 20)) + b"tq\0"
    head = sizes + storage("0", 1) + b"q\1ctorch._utils\n_rebuild_tensor\nq\x020"
    return head + b"(" + b"h\2(h\1K\0h\0h\0tR" * draw.choice((100, 10_000)) + b"l"


def _one_state(draw: random.Random) -> Program:
    """Many DTensors whose state is one object of many fields."""
    state = b"}(" + b"".join(text(f"f{each}") + b"N" for each in range(draw.choice((100, 100_000)))) + b"uq\0"
    head = state + b"ctorch._tensor\n_rebuild_from_type_v2\nq\1"
    one = b"h\1(ctorch._utils\n_rebuild_tensor_v2\nctorch.distributed.tensor\nDTensor\n)h\0tR"
    return head + b"0(" + b"".join(text(f"k{each}") + one for each in range(draw.choice((100, 3000)))) + b"d"


def _names(draw: random.Random) -> Program:
    return text("a" * draw.choice((1000, 100_000))) + b"q\0(" + b"h\0h\0\x93" * draw.choice((1000, 20_000)) + b"l"


def _memo(draw: random.Random) -> Program:
    puts = [each % (1 << 32) for each in draw.choice(([(1 << 32) - 1], colliding_numbers(40_000)))]
    return b"N" + b"".join(b"r" + struct.pack("<I", each) for each in puts)


def _deep(draw: random.Random) -> Program:
    depth = draw.choice((70, 10_000, 1 << 20))
    return draw.choice((b"]" * depth + b"a" * (depth - 1), b")" + b"\x85" * depth))


def _expanded(draw: random.Random) -> Program:
    size = 1 << draw.choice((12, 13, 16, 20, 28))
    return b"}(" + text("w") + tensor((size, size), (0, 0)) + text("v") + tensor((1,), (1,)) + b"u"


def _aliases(draw: random.Random) -> Program:
    """Many tensors, each as large as may be, of one element."""
    head = tensor((1 << draw.choice((16, 26)),), (0,)) + b"q\0"
    count = draw.choice((10, 1000, 20_000))
    return head + b"0}(" + b"".join(text(f"w{each}") + b"h\0" for each in range(count)) + b"u"


def _long_number(draw: random.Random) -> Program:
    value = b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20)
    return draw.choice((b"](" + value + b"e", b"}(" + value + b"Nu", call("builtins.range", value)))


def _arrays(draw: random.Random) -> Program:
    """Many arrays of numpy made of the same bytes."""
    dtype = (
        call("numpy.dtype", text("u1"), b"K\0", b"K\1")
        + b"(K\3"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    nbytes = draw.choice((1000, 1 << 20))
    state = b"(K\1(" + number(nbytes) + b"t" + dtype + b"\x89B" + struct.pack("<I", nbytes) + bytes(nbytes) + b"tq\0"
    one = call("numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", b"(K\0t", b"C\1b") + b"h\0b"
    return state + b"0(" + one * draw.choice((10, 2000)) + b"l"


def _calls(draw: random.Random) -> Program:
    many = b"](" + b"N" * draw.choice((1000, 1 << 20)) + b"e"
    name = draw.choice(
        ("collections.deque", "collections.OrderedDict", "torch.Size", "builtins.complex", "datetime.date")
    )
    return b"(" + call(name, many) + b"q\0" + b"h\0" * draw.choice((10, 10_000)) + b"l"


TREES: list[Callable[[random.Random], Program]] = [
    *(
        _sets,
        _one_text,
        _laughs,
        _laughing_dicts,
        _hashes,
        _hashed_tuples,
        _one_shape,
        _one_state,
        _names,
        _memo,
        _deep,
    ),
    *(_expanded, _aliases, _long_number, _arrays, _calls),
]
"""Functions that make the pickles of trees."""


def zip_of(program: Program, records: Mapping[str, bytes]) -> bytes:
    """Return a file of ``torch.save`` with this program as its pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + program + b".")
        archive.writestr("archive/byteorder", b"little")
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return file.getvalue()


def size(*sizes: int) -> Program:
    """Return the program that makes a ``torch.Size``."""
    return call("torch.Size", b"(" + b"".join(map(number, sizes)) + b"t")


def metadata(tensors: Program, stored: Program, paths: Program = b"N") -> bytes:
    """Return a ``.metadata`` file, given the pairs of its dicts."""
    made = {"state_dict_metadata": b"}(" + tensors + b"u", "storage_data": b"}(" + stored + b"u", "planner_data": paths}
    return b"\x80\2" + fields(f"{DCP}.metadata.Metadata", **made) + b"."


def described(shape: Program, chunks: Program) -> Program:
    """Return the program that describes a tensor of float32."""
    properties = _empty(f"{DCP}.metadata.TensorProperties") + b"(ctorch\nfloat32\nNNNNtb"
    return fields(f"{DCP}.metadata.TensorStorageMetadata", properties=properties, size=shape, chunks=chunks)


def chunk(offsets: Program, sizes: Program) -> Program:
    """Return the program that describes a chunk."""
    return fields(f"{DCP}.metadata.ChunkStorageMetadata", offsets=offsets, sizes=sizes)


def place(name: str, offset: Program, nbytes: int, start: int = 0) -> Program:
    """Return the program of a key and a value of ``storage_data``."""
    key = fields(f"{DCP}.metadata.MetadataIndex", fqn=text(name), offset=offset, index=b"N")
    info = {"relative_path": text("__0_0.distcp"), "offset": number(start), "length": number(nbytes)}
    return key + fields(f"{DCP}.filesystem._StorageInfo", **info)


def dcp_bomb(folder: Path, draw: random.Random) -> None:
    """Write a directory of ``torch.distributed.checkpoint`` that asks for far more than it has."""
    stream = zip_of(tensor((2,), (1,), 2), {"0": bytes(8)})
    kind = draw.choice(("values", "one value", "chunks", "claim", "paths", "numbers", "offsets", "pickle", "fields"))
    one_value = _empty(f"{DCP}.metadata.BytesStorageMetadata")
    count = draw.choice((100, 3000, 20_000))
    names = [f"n{each}" for each in range(count)]
    whole = b"](" + chunk(size(0), size(2)) + b"e"
    tensors = stored = b""
    paths: Program = b"N"
    if kind in ("values", "one value"):
        stream = zip_of(draw.choice(TREES)(draw), {"0": bytes(4)})
        count = count if kind == "one value" and len(stream) < 1 << 16 else 1
        tensors = b"".join(text(name) + one_value for name in names[:count])
        stored = b"".join(place(name, b"N", len(stream)) for name in names[:count])
    elif kind == "chunks":
        many = b"(" + chunk(size(0), size(2)) + b"q\0" + b"h\0" * 10 * count + b"l"
        tensors, stored = text("w") + described(size(2), many), place("w", size(0), len(stream))
    elif kind == "claim":
        shape = size(1 << draw.choice((24, 40, 57)))
        tensors = text("w") + described(shape, b"](" + chunk(size(0), shape) + b"e")
        stored = place("w", size(0), len(stream))
    elif kind in ("paths", "numbers"):
        tensors = b"".join(text(name) + described(size(2), whole) for name in names[:5000])
        stored = b"".join(place(name, size(0), len(stream)) for name in names[:5000])
        long = b"(" + (text("a" * 10_000) + b"q\1" + b"h\1" * 40) + b"tq\0"
        numbers = [1 + each * MODULUS for each in range(5000)]
        keys = [number(each) + b"\x85" if kind == "numbers" else b"h\0" for each in numbers[: len(names)]]
        pairs = b"".join(text(name) + key for name, key in zip(names, keys, strict=False))
        paths = (long + b"0" if kind == "paths" else b"") + b"}(" + pairs + b"u"
    elif kind == "offsets":
        places = [place("w", size(1 + each * MODULUS), len(stream)) for each in range(2)]
        tensors, stored = text("w") + described(size(2), whole), b"".join(places * count)
    elif kind == "fields":
        state = b"}(" + b"".join(text(name) + b"N" for name in names) + b"uq\0"
        tensors = (
            state
            + b"0"
            + b"".join(text(name) + _empty(f"{DCP}.metadata.TensorStorageMetadata") + b"h\0b" for name in names)
        )
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(stream)
    program = b"\x80\2" + draw.choice(TREES)(draw) + b"." if kind == "pickle" else metadata(tensors, stored, paths)
    (folder / ".metadata").write_bytes(program)
