"""zarr-python's own tests of stores, on the store of a checkpoint."""

import pytest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.store import StoreTests

import dtckpt
from dtckpt import SaveOptions
from dtckpt.errors import ConfigError
from dtckpt.interop import CheckpointStore

from .populated_store import PopulatedStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class TestCheckpointStore(StoreTests[PopulatedStore, cpu.Buffer]):
    """The suite as it is, but for tests of writing, which the store refuses; tests that only fill a store remain."""

    store_cls = PopulatedStore
    buffer_cls = cpu.Buffer

    @pytest.fixture(params=["ocdbt", "zarr"])
    def store_kwargs(self, request, tmp_path):
        dtckpt.save(tmp_path / "s", {}, options=SaveOptions(kvstore=request.param))
        return {"path": str(tmp_path / "s")}

    @pytest.fixture
    def store(self, store_kwargs):
        return self.store_cls(**store_kwargs)

    @pytest.fixture
    def store_not_open(self, store_kwargs):
        return self.store_cls(**store_kwargs)

    async def set(self, store, key: str, value: Buffer):
        store.put({key: value.to_bytes()})

    async def get(self, store, key: str) -> Buffer:
        return cpu.Buffer.from_bytes(dtckpt.restore(store.checkpoint.path)[key.encode().hex()].numpy().tobytes())

    test_set = test_set_not_open = test_set_many = test_set_if_not_exists = None
    test_delete = test_delete_dir = test_delete_nonexistent_key_does_not_raise = None
    test_set_sync = test_delete_sync = test_delete_sync_missing = None

    def test_store_repr(self, store):
        assert repr(store) == f"CheckpointStore({str(store.checkpoint.path)!r})"
        assert str(store) == f"dtckpt://{store.checkpoint.path}"

    def test_store_supports_writes(self, store):
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store):
        assert store.supports_listing

    def test_store_read_only(self, store):
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False

    async def test_store_open_read_only(self, open_kwargs):
        store = await self.store_cls.open(**open_kwargs, read_only=True)
        assert store._is_open
        assert store.read_only
        with pytest.raises(ConfigError, match="the store of a checkpoint is read-only"):
            await self.store_cls.open(**open_kwargs, read_only=False)

    async def test_read_only_store_raises(self, open_kwargs):
        self.store_cls = CheckpointStore
        await super().test_read_only_store_raises(open_kwargs)

    async def test_with_read_only_store(self, open_kwargs):
        self.store_cls = CheckpointStore
        await super().test_with_read_only_store(open_kwargs)
        store = CheckpointStore(**open_kwargs)
        assert store.with_read_only(True) == store

    async def test_clear(self, store):
        await self.set(store, "key", self.buffer_cls.from_bytes(b"something"))
        with pytest.raises(NotImplementedError):
            await store.clear()
        assert (await store.get("key", default_buffer_prototype())).to_bytes() == b"something"
