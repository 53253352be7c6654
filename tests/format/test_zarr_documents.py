import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt import Layout, abstract_mesh
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import ArrayEntry, ArrayKind
from dtckpt.format.names import array_paths
from dtckpt.format.zarr_documents import array_document, array_metadata, dimension_names, documents

LAYOUT = Layout([("y", "x"), "unsharded"], abstract_mesh({"x": 2, "y": 2}, "train"))


def entry(name, dtype="float32", stored_dtype=None, shape=(50, 6), layout=None):
    grid = ChunkGrid(shape, shape)
    kind = ArrayKind(dtype, stored_dtype or dtype, grid, np.zeros(grid.num_chunks, np.int32), layout, codec="zstd")
    return ArrayEntry(name, array_paths([name])[name], kind, np.zeros(grid.num_chunks, np.uint64))


def facts(*args, raw_bits=False, **kwargs):
    document = json.loads(array_document(entry(*args, **kwargs), raw_bits=raw_bits))
    return document, document["attributes"]["dtckpt"]


def test_what_a_document_says():
    document, ours = facts('a/"b', layout=LAYOUT)
    assert (document["shape"], document["data_type"], document["fill_value"]) == ([50, 6], "float32", 0.0)
    assert [codec["name"] for codec in document["codecs"]] == ["bytes", "zstd"]
    assert document["dimension_names"] == ["a:%22b:0", "a:%22b:1"]
    assert ours == {
        "name": 'a/"b',
        "dtype": "float32",
        "mesh": {"name": "train", "axes": {"x": 2, "y": 2}},
        "sharding_specs": [["y", "x"], "unsharded"],
    }
    scalar, _ = facts("s", shape=())
    assert scalar["dimension_names"] == []


@pytest.mark.parametrize(
    ("shape", "dtype", "shuffle", "blocksize"),
    [
        ((128 << 10,), "bfloat16", "shuffle", 512 << 10),
        (((128 << 10) - 1,), "bfloat16", "bitshuffle", 0),
        ((512, 512), "float32", "shuffle", 1 << 20),
        ((512, 512), "float8_e4m3fn", "shuffle", 256 << 10),
        ((), "float32", "bitshuffle", 0),
    ],
)
def test_blosc_shuffles_bytes_where_each_gets_a_code_of_its_own(shape, dtype, shuffle, blocksize):
    (_, blosc) = array_metadata(ChunkGrid(shape, shape), dtype, "blosc")["codecs"]
    settings = {"cname": "zstd", "clevel": 1, "typesize": DTYPES[dtype].itemsize}
    assert blosc == {"name": "blosc", "configuration": settings | {"shuffle": shuffle, "blocksize": blocksize}}


def test_another_codec():
    assert json.loads(array_document(entry("w"), codec="none"))["codecs"] == [
        {"name": "bytes", "configuration": {"endian": "little"}}
    ]


def test_bits_name_their_dtype():
    for dtype, stored, data_type in [
        ("bfloat16", "bfloat16", "uint16"),
        ("float32", "bfloat16", "uint16"),
        ("float8_e4m3fn", "float8_e4m3fn", "uint8"),
        ("float8_e8m0fnu", "float8_e8m0fnu", "uint8"),
    ]:
        plain, ours = facts("w", dtype, stored)
        assert (plain["data_type"], ours) == (stored, {"name": "w", "dtype": dtype})
        raw, ours = facts("w", dtype, stored, raw_bits=True)
        assert (raw["data_type"], raw["fill_value"]) == (data_type, 0)
        assert ours == {"name": "w", "dtype": dtype, "stored_dtype": stored}
    # Zarr has no such types in any case.
    for dtype, data_type in {"float4_e2m1fn_x2": "uint8", "complex32": "uint32"}.items():
        for raw_bits in (False, True):
            document, ours = facts("w", dtype, raw_bits=raw_bits)
            assert (document["data_type"], ours["stored_dtype"]) == (data_type, dtype)
    assert facts("w", "float16", raw_bits=True) == facts("w", "float16")


def test_documents_of_arrays_and_groups():
    by_key = documents([entry("b/w"), entry("a"), entry("b/c/w")])
    assert list(by_key) == [f"{path}zarr.json" for path in ("", "a/", "b/", "b/c/", "b/c/w/", "b/w/")]
    kinds = [json.loads(document)["node_type"] for document in by_key.values()]
    assert kinds == ["group", "array", "group", "group", "array", "array"]


segments = st.text(st.sampled_from("ab:/0%_é"), min_size=1, max_size=6).filter(
    lambda name: all(part for part in name.split("/"))
)


@given(st.lists(segments, min_size=1, max_size=6, unique=True))
def test_dimension_names_differ_from_each_other_and_from_names_in_every_group(names):
    paths = array_paths(names).values()
    dims = [dim for path in paths for dim in dimension_names(path, 3)]
    assert len(set(dims)) == len(dims)
    # xarray would take a dim for the variable of that name.
    assert not {segment for path in paths for segment in path.split("/")}.intersection(dims)
