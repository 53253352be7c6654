"""Headers of safetensors files: dtckpt reads the headers that safetensors writes, and refuses hostile headers and
headers that safetensors refuses."""

import json

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import load, save

from dtckpt.checkpoint.foreign.safetensors_index import (
    LENGTH_NBYTES,
    NAMES,
    WeightIndex,
    header_bytes,
    parse_header,
    parse_length,
    parse_weight_map,
)
from dtckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointVersionError
from dtckpt.format.dtypes import DTYPES


def parse(data):
    stop = LENGTH_NBYTES + parse_length(data, "f")
    return parse_header(data[LENGTH_NBYTES:stop], "f", len(data))


def file_of(header, nbytes=8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def entry(begin=0, end=8, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def test_every_dtype_that_safetensors_writes():
    tensors = {
        name: torch.zeros(3, 8, dtype=torch.uint8).view(getattr(torch, name)) for name in NAMES if name != "bool"
    }
    tensors |= {"bool": torch.ones(2, dtype=torch.bool), "none": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    data = save(tensors, metadata={"format": "pt"})
    header = parse(data)
    assert header.metadata == {"format": "pt"}
    assert header.nbytes == len(data)
    for name, tensor in tensors.items():
        read = header.tensors[name]
        assert (read.shape, read.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    (piece,) = header.tensors["scalar"].pieces
    assert data[piece.offset : piece.stop(4)] == torch.tensor(1.5).numpy().tobytes()


def test_what_is_written_is_what_safetensors_reads():
    sizes = dict.fromkeys(NAMES, (2, 4))
    head = header_bytes([(name, name, shape) for name, shape in sizes.items()], {"format": "pt", "ü": "\U0001f600"})
    assert len(head) % 8 == 0
    nbytes = sum(8 * DTYPES[name].itemsize for name in NAMES)
    header = parse(head + bytes(nbytes))
    assert header.metadata["ü"] == "\U0001f600"
    for name, theirs in deserialize(head + bytes(nbytes)):
        assert theirs["dtype"] == NAMES[name]
        assert header.tensors[name].nbytes == len(theirs["data"])
        assert list(header.tensors[name].shape) == (theirs["shape"] if theirs["dtype"] != "F4" else [2, 4])


MALFORMED = {
    "no JSON": b"{",
    "not UTF-8": b'{"\xff": 1}',
    "a list": b"[]",
    "deep": b'{"a":' + b"[" * 100_000,
    "twice": b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
    "entry": {"w": 1},
    "no shape": {"w": {"dtype": "F32", "data_offsets": [0, 8]}},
    "bool as size": {"w": entry(shape=(True, 2))},
    "negative": {"w": entry(shape=(-2, -1))},
    "float": {"w": entry(shape=(2.0,))},
    "huge": {"w": entry(shape=(1 << 61, 2))},
    "too many dims": {"w": entry(shape=(1,) * 40 + (2,))},
    "huge offset": {"w": entry(0, 1 << 80)},
    "three offsets": {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}},
    "backwards": {"w": entry(8, 0)},
    "shape": {"w": entry(shape=(3,))},
    "gap": {"w": entry(4, 8, (1,))},
    "hole": {"v": entry(0, 4, (1,)), "w": entry(5, 9, (1,))},
    "overlap": {"v": entry(0, 8), "w": entry(4, 8, (1,))},
    "longer than the file": {"w": entry(0, 16, (4,))},
    "shorter than the file": {"w": entry(0, 4, (1,))},
    "odd F4": {"w": entry(0, 8, (15,), "F4")},
    "metadata": {"__metadata__": {"a": 1}, "w": entry()},
    "metadata is a list": {"__metadata__": [], "w": entry()},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case):
    data = file_of(MALFORMED[case])
    with pytest.raises(CheckpointCorruptError, match=r"^f is|^tensor 'w'"):
        parse(data)
    # safetensors takes these two.
    if case not in ("twice", "too many dims"):
        with pytest.raises((SafetensorError, ValueError)):
            load(data)


def test_unknown_dtype():
    header = parse(file_of({"w": entry(0, 6, (8,), "F6_E2M3"), "v": entry(6, 14)}, 14))
    assert list(header.tensors) == ["v"]
    with pytest.raises(CheckpointVersionError, match="'w' of f has dtype F6_E2M3"):
        raise header.refused["w"]


def test_null_as_metadata():
    data = file_of({"__metadata__": None, "w": entry()})
    assert parse(data).metadata == {}
    assert list(load(data)) == ["w"]


def test_lengths():
    for data in (b"", b"\1\0\0", (1).to_bytes(8, "little") + b"{", (1 << 62).to_bytes(8, "little") + b"{}"):
        with pytest.raises(CheckpointCorruptError):
            parse_length(data, "f")


def test_every_cut_and_every_changed_byte_gives_a_header_or_an_error():
    data = save({"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, metadata={"k": "v"})
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            parse(data[:length])
    for position in range(len(data)):
        for value in (0, 0x22, 0x31, 0x7D, 0xFF):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            try:
                header = parse(changed)
            except CheckpointError:
                continue
            assert sum(tensor.nbytes for tensor in header.tensors.values()) <= len(data)


def test_weight_maps():
    data = json.dumps({"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}).encode()
    assert parse_weight_map(data, "i") == WeightIndex("i", {"w": "a.safetensors"}, {"total_size": 8})
    for text in ("./a", ".//a", "b/../a"):
        data = json.dumps({"weight_map": {"w": text}}).encode()
        assert parse_weight_map(data, "i").weight_map == {"w": "a"}
    for content in (
        [],
        {},
        {"weight_map": 1},
        {"weight_map": {"w": 1}},
        {"weight_map": {"w": "../a"}},
        {"weight_map": {"w": "./../a"}},
        {"weight_map": {"w": "."}},
        {"weight_map": {"w": "/a"}},
        {"weight_map": {"w": "b/a"}},
        {"weight_map": {"w": ""}},
        {"weight_map": {}, "metadata": 3},
    ):
        with pytest.raises(CheckpointCorruptError):
            parse_weight_map(json.dumps(content).encode(), "i")
