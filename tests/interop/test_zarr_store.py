"""The store of a checkpoint: every tensor by zarr-python and xarray, beside zarr-python's own stores, and damage."""

import asyncio
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
import xarray
import zarr
from checkpoint.golden import ERAS, FOLDER, KVSTORES
from support.states import packed, tensor_of
from zarr.core.buffer import default_buffer_prototype

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.reading.verified_reads import UNCHECKED_NBYTES
from dtckpt.errors import CheckpointConflictError, CheckpointCorruptError, CheckpointNotFoundError, ConfigError
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import MANIFEST_NAME, ArrayEntry, ArrayKind, Manifest
from dtckpt.interop import CheckpointStore, zarr_store

MESH = abstract_mesh({"x": 2, "y": 2})
LARGE = (torch.arange(600 * 500) % 1000).float().reshape(600, 500)  # 1.1 MiB: several blocks a chunk
TREE = {
    "layer": {"w": packed(LARGE, Layout([("y", "x"), "unsharded"], MESH)), "w/m": torch.arange(7) - 3},
    "dtypes": {name: tensor_of(name, (5, 3), name) for name in DTYPES},
    "é c": {"c": {"0": torch.tensor(12)}},  # segments that look like segments of chunks
    "none": torch.zeros(0, 3),
    "zeros": torch.zeros(40, 40),
    "n": 5,
}


def save(path, tree=TREE, **options):
    dtckpt.save(path, tree, options=SaveOptions(**options))
    return path


def collected(iterator):
    async def collect():
        return sorted([item async for item in iterator])

    return asyncio.run(collect())


def value_of(store, key):
    buffer = asyncio.run(store.get(key, default_buffer_prototype()))
    return None if buffer is None else buffer.to_bytes()


def assert_reads(store, path):
    """Assert that zarr-python reads by the store what dtckpt reads, bit for bit."""
    group = zarr.open_group(store, mode="r")
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert len(checkpoint.tensors) > 20
        for name, entry in checkpoint.manifest.arrays.items():
            whole = checkpoint.read(name)
            array = group[entry.path]
            assert array.attrs["dtckpt"]["name"] == name
            assert (array.shape, array.dtype) == (tuple(whole.shape), DTYPES[entry.stored_dtype]), name
            if entry.dtype == entry.stored_dtype:
                assert array[...].tobytes() == whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
@pytest.mark.parametrize("kvstore", KVSTORES)
def test_every_tensor_whatever_the_storage(tmp_path, kvstore, codec):
    path = save(tmp_path / "s", kvstore=kvstore, codec=codec, chunk_nbytes=256 << 10)
    with dtckpt.zarr_store(path) as store:
        assert_reads(store, path)
        rows = zarr.open_array(store, path="layer/w/%self", mode="r")[100:103, 7:9]
        np.testing.assert_array_equal(rows, LARGE[100:103, 7:9].numpy())


@pytest.mark.parametrize("kvstore", KVSTORES)
@pytest.mark.parametrize("era", ERAS)
def test_checkpoints_of_earlier_versions(era, kvstore):
    path = FOLDER / era / kvstore
    assert_reads(dtckpt.zarr_store(path), path)
    # The stored ``zarr.json`` have no names of dims; the store adds them.
    assert xarray.open_zarr(dtckpt.zarr_store(path), group="model")["w"].dims == ("model:w:0", "model:w:1")


def test_xarray_opens_every_group(tmp_path):
    path = save(tmp_path / "s")
    tree = xarray.open_datatree(dtckpt.zarr_store(path), engine="zarr")
    assert tree["layer/w"]["%self"].dims == ("layer:w:%self:0", "layer:w:%self:1")
    np.testing.assert_array_equal(tree["layer/w"]["%self"][:, 3].to_numpy(), LARGE[:, 3].numpy())
    low = tree["dtypes"]["bfloat16"]
    assert low.astype("float32").equals(xarray.DataArray(TREE["dtypes"]["bfloat16"].float().numpy(), dims=low.dims))


def test_documents_and_chunks_are_those_on_storage(tmp_path):
    for raw_bits in (False, True):
        path = save(tmp_path / f"raw {raw_bits}", kvstore="zarr", raw_bits=raw_bits, chunk_nbytes=300_000)
        store = dtckpt.zarr_store(path)
        keys = collected(store.list())
        files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert {*keys} == {file for file in files if not file.startswith(("dtckpt.", "client_"))}
        for key in keys:
            assert value_of(store, key) == (path / key).read_bytes(), key
            assert asyncio.run(store.getsize(key)) == (path / key).stat().st_size


def test_lists_are_those_of_zarrs_own_stores(tmp_path):
    store = dtckpt.zarr_store(save(tmp_path / "s", chunk_nbytes=100_000))
    keys = collected(store.list())
    other = zarr.storage.MemoryStore({key: default_buffer_prototype().buffer.from_bytes(b"") for key in keys})
    folders = {"/".join(key.split("/")[:depth]) for key in keys for depth in range(key.count("/") + 2)}
    for prefix in sorted({*folders, *(f"{folder}/" for folder in folders), "lay", "layer/w/c", "zarr", "nothing", "c"}):
        assert collected(store.list_prefix(prefix)) == collected(other.list_prefix(prefix)), prefix
        if prefix not in keys:
            assert collected(store.list_dir(prefix)) == collected(other.list_dir(prefix)), prefix
        assert asyncio.run(store.exists(prefix)) == asyncio.run(other.exists(prefix)) == (prefix in keys), prefix
    assert keys
    assert not keys[0].startswith("dtckpt")


NO_KEYS = (
    *("", "/zarr.json", "layer/zarr.json/", "../s/zarr.json", "dtckpt.manifest", "client_0/dtckpt.blocks", "c/0"),
    *("zeros/c", "zeros/c/0", "zeros/c/0/1/0", "zeros/c/1/0", "zeros/c/00/0", "zeros/c/-1/0", "zeros/c/٠/0"),
    *(f"zeros/c/{'9' * 5000}/0", "none/c/0/0"),
)


@pytest.mark.parametrize("key", NO_KEYS, ids=range(len(NO_KEYS)))
def test_what_is_no_key(tmp_path, key):
    store = dtckpt.zarr_store(save(tmp_path / "s"))
    assert value_of(store, "zeros/c/0/0") == bytes(40 * 40 * 4)
    assert value_of(store, key) is None
    assert not asyncio.run(store.exists(key))
    with pytest.raises(FileNotFoundError):
        asyncio.run(store.getsize(key))


def test_what_was_not_saved_is_filled(tmp_path):
    dtckpt.sharded_save(MESH, str(tmp_path / "s"), ["w"], ["4 3 2,2:0,3"], [torch.ones(2, 3)])
    store = dtckpt.zarr_store(tmp_path / "s")
    assert collected(store.list_prefix("w/c")) == ["w/c/1/0"]
    assert zarr.open_array(store, path="w", mode="r")[...].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2


def test_files_of_other_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_store, "PLAIN_CHUNK_NBYTES", 512)
    tensors = {f"layer/{name}": tensor_of(name, (90, 7), name) for name in ("float32", "bfloat16", "float8_e4m3fn")}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    store = dtckpt.zarr_store(path)
    group = zarr.open_group(store, mode="r")
    for name, whole in tensors.items():
        assert group[name].nchunks > 1
        assert group[name][...].tobytes() == whole.view(torch.uint8).numpy().tobytes()
    assert xarray.open_datatree(store, engine="zarr")["layer/float32"].shape == (90, 7)
    data = pickle.dumps(store)
    assert pickle.loads(data) == store
    safetensors.torch.save_file({**tensors, "more": torch.ones(3)}, path)
    with pytest.raises(CheckpointConflictError, match="replaced since its store was pickled"):
        pickle.loads(data)


# --- damage, and what happens meanwhile -------------------------------------------------------------------------------


def test_damage_is_an_error(tmp_path):
    path = save(tmp_path / "s", kvstore="zarr")
    array = zarr.open_array(dtckpt.zarr_store(path), path="layer/w/%self", mode="r")
    chunk = path / "layer/w/%self/c/1/0"
    data = bytearray(chunk.read_bytes())
    data[5000] ^= 1
    chunk.write_bytes(data)
    assert array[:150].shape == (150, 500)  # another chunk
    with pytest.raises(CheckpointCorruptError, match="its digest does not match"):
        array[150:300]
    # zarr-python's own stores give zeros for a chunk that is lost.
    chunk.unlink()
    assert not zarr.open_array(path / "layer/w/%self", mode="r")[150:300].any()
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        array[150:300]


def test_damaged_documents_do_not_matter(tmp_path):
    path = save(tmp_path / "s", kvstore="zarr")
    for document in path.rglob("zarr.json"):
        document.write_text("{}")
    assert_reads(dtckpt.zarr_store(path), path)


def test_a_claim_of_any_size_takes_no_memory(tmp_path):
    grid = ChunkGrid((1 << 50,), (1 << 50,))
    entry = ArrayEntry("w", "w", ArrayKind("int8", "int8", grid, np.zeros(1, np.int32)), np.zeros(1, np.uint64))
    assert UNCHECKED_NBYTES < 1 << 50
    (tmp_path / "s" / "w" / "c").mkdir(parents=True)
    (tmp_path / "s" / "w" / "c" / "0").write_bytes(b"short")
    (tmp_path / "s" / MANIFEST_NAME).write_bytes(Manifest(kvstore="zarr", arrays={"w": entry}).to_bytes())
    with pytest.raises(CheckpointCorruptError, match="is missing, or too short"):
        value_of(dtckpt.zarr_store(tmp_path / "s"), "w/c/0")


def test_a_store_is_of_one_checkpoint(tmp_path):
    path = save(tmp_path / "s", {"w": torch.ones(300, 300)})
    store = dtckpt.zarr_store(path)
    array = zarr.open_array(store, path="w", mode="r")
    data = pickle.dumps(array)
    again = pickle.loads(data)
    assert (again.store, hash(again.store), again.store.read_only) == (store, hash(store), True)
    assert again[...].all()
    assert again.store != dtckpt.zarr_store(save(tmp_path / "other", {"w": torch.ones(300, 300)}))
    assert store != path
    save(path, {"w": torch.zeros(300, 300)}, overwrite=True)
    with pytest.raises(CheckpointConflictError, match="replaced since its store was pickled"):
        pickle.loads(data)
    with pytest.raises(CheckpointConflictError, match="replaced or removed while it was being read"):
        array[...]
    assert dtckpt.zarr_store(path) != store


def test_it_goes_on_after_close(tmp_path):
    store = dtckpt.zarr_store(save(tmp_path / "s", {"w": torch.ones(4)}))
    array = zarr.open_array(store, path="w", mode="r")
    store.close()
    assert array[...].tolist() == [1, 1, 1, 1]


def test_refusals(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        dtckpt.zarr_store(tmp_path / "s")
    path = save(tmp_path / "s")
    with pytest.raises(ConfigError, match="read-only"):
        CheckpointStore(path, read_only=False)
    store = dtckpt.zarr_store(path)
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(store)
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_array(store, path="zeros", mode="r")[0] = 1
    assert zarr.open_array(store, path="zeros", mode="r")[0].tolist() == [0] * 40
