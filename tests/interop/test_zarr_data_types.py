"""bfloat16 and the float8 types in zarr-python: written and read, beside TensorStore, and found by entry point."""

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from support.states import tensor_of
from zarr.dtype import data_type_registry

from dtckpt.format.dtypes import DTYPES, EXTENSIONS
from dtckpt.interop.zarr_data_types import DATA_TYPES, BFloat16, Float8E4M3FN, register_data_types

ROOT = Path(__file__).parents[2]
BY_NAME = {data_type._zarr_v3_name: data_type for data_type in DATA_TYPES}


def elements(name):
    bits = tensor_of(name, (7, 3), "uint8" if DTYPES[name].itemsize == 1 else "uint16").numpy()
    return bits.view(DTYPES[name])


def is_same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_zarr_python_and_tensorstore_read_what_the_other_wrote(tmp_path, name, zarr_format):
    driver = {2: "zarr", 3: "zarr3"}[zarr_format]
    whole = elements(name)
    group = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
    # The compressors of version 2 get arrays, and refuse arrays whose dtypes are not numpy's.
    group.create_array("ours", data=whole, chunks=(4, 2), compressors=None if zarr_format == 2 else "auto")
    other = {"driver": driver, "kvstore": f"file://{tmp_path}/theirs"}
    ts.open(other, create=True, dtype=whole.dtype, shape=whole.shape).result().write(whole).result()
    own = {"driver": driver, "kvstore": f"file://{tmp_path}/ours"}
    assert is_same(ts.open(own, read=True).result().read().result(), whole)
    group = zarr.open_group(tmp_path, mode="r")
    assert is_same(group["ours"][...], whole)
    assert is_same(group["theirs"][2:, 1], whole[2:, 1])
    assert sorted(group.keys()) == ["ours", "theirs"]


@pytest.mark.parametrize("name", EXTENSIONS)
def test_by_name_by_dtype_and_pickled(name):
    dtype = DTYPES[name]
    for asked in (name, dtype, dtype.type, BY_NAME[name]()):
        array = zarr.create_array(zarr.storage.MemoryStore(), shape=(3,), dtype=asked, fill_value=1)
        assert (array.dtype, array.metadata.data_type) == (dtype, BY_NAME[name]())
        array[1] = 2
        assert array[...].astype(float).tolist() == [1, 2, 1]
        assert pickle.loads(pickle.dumps(array))[...].astype(float).tolist() == [1, 2, 1]
    assert BY_NAME[name]().item_size == dtype.itemsize


@pytest.mark.parametrize(
    ("scalar", "expected", "as_json"),
    [
        (1.5, 1.5, 1.5),
        (True, 1, 1),
        ("2.5", 2.5, 2.5),
        (np.float64(-3), -3, -3),
        (ml_dtypes.bfloat16(4), 4, 4),
        ("Infinity", np.inf, "Infinity"),
        ("-Infinity", -np.inf, "-Infinity"),
        ("NaN", np.nan, "NaN"),
        (float("nan"), np.nan, "NaN"),
    ],
)
def test_fill_values(scalar, expected, as_json):
    data_type = BFloat16()
    for zarr_format in (2, 3):
        np.testing.assert_equal(float(data_type.cast_scalar(scalar)), expected)
        assert data_type.to_json_scalar(scalar, zarr_format=zarr_format) == as_json
        back = data_type.from_json_scalar(as_json, zarr_format=zarr_format)
        assert back.dtype == data_type.to_native_dtype()
        np.testing.assert_equal(float(back), expected)


def test_fill_values_by_their_bits():
    (value,) = np.array([0x7FC1], np.uint16).view(ml_dtypes.bfloat16)
    assert BFloat16().from_json_scalar("0x7fc1", zarr_format=3).tobytes() == value.tobytes()
    assert float(Float8E4M3FN().from_json_scalar("0x38", zarr_format=3)) == 1


@pytest.mark.parametrize("scalar", [None, [1], 1j, "abc", "0x", "0x12345"])
def test_what_is_no_fill_value(scalar):
    for data_type in DATA_TYPES:
        with pytest.raises((TypeError, ValueError, OverflowError)):
            data_type().from_json_scalar(scalar, zarr_format=3)


def test_the_other_order_of_bytes_is_refused():
    document = zarr.create_array(zarr.storage.MemoryStore(), shape=(2,), dtype="bfloat16").metadata.to_dict()
    (codec, *_) = document["codecs"]
    assert codec == {"name": "bytes", "configuration": {"endian": "little"}}
    store = zarr.storage.MemoryStore()
    codecs = [zarr.codecs.BytesCodec(endian="big")]
    array = zarr.create_array(store, shape=(2,), dtype="uint16", serializer=codecs[0], compressors=None)
    array[...] = 1
    text = store._store_dict["zarr.json"].to_bytes().replace(b'"uint16"', b'"bfloat16"')
    store._store_dict["zarr.json"] = zarr.core.buffer.cpu.Buffer.from_bytes(text)
    with pytest.raises(ValueError, match="little-endian order only; got big"):
        zarr.open_array(store, mode="r")[...]


def test_a_type_that_another_package_registered_stays(monkeypatch):
    other = type("Other", (BFloat16,), {})
    monkeypatch.setitem(data_type_registry.contents, "bfloat16", other)
    register_data_types()
    assert data_type_registry.contents["bfloat16"] is other


# --- entry points -----------------------------------------------------------------------------------------------------

READ = """
import sys, zarr
from zarr.dtype import data_type_registry
assert not [name for name in sys.modules if name.startswith("dtckpt")]  # collected, and not loaded
data_type_registry._lazy_load()  # zarr-python calls it nowhere yet
array = zarr.create_array(zarr.storage.MemoryStore(), shape=(2,), dtype="bfloat16", fill_value=3)
assert str(array[...]) == "[3 3]"
heavy = "torch", "tensorstore", "grpc", "dtckpt.checkpoint", "dtckpt.storage"
print(sorted(data_type_registry.contents), [name for name in heavy if name in sys.modules])
"""


def test_the_entry_points(tmp_path):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["zarr.data_type"]
    assert declared == {name: f"dtckpt.interop.zarr_data_types:{BY_NAME[name].__name__}" for name in EXTENSIONS}
    # As the wheel has them, first on the path: the environment may hold an older dtckpt.
    info = tmp_path / "dtckpt-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dtckpt\nVersion: 0\n")
    lines = [f"{name} = {where}" for name, where in declared.items()]
    (info / "entry_points.txt").write_text("\n".join(["[zarr.data_type]", *lines, ""]))
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    command = [sys.executable, "-W", "error", "-c", READ]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    names, _, heavy = done.stdout.strip().partition("] ")
    assert heavy == "[]"
    assert all(f"'{name}'" in names for name in EXTENSIONS)


MOVED = """
import zarr.dtype, zarr.errors
if not hasattr(zarr.errors, "DataTypeValidationError"):
    zarr.errors.DataTypeValidationError = zarr.dtype.DataTypeValidationError
vars(zarr.dtype).pop("DataTypeValidationError", None)
import dtckpt.interop.zarr_data_types
"""


def test_names_that_newer_versions_have_moved_are_taken_from_their_new_place():
    subprocess.run([sys.executable, "-W", "error", "-c", MOVED], check=True, timeout=180)
