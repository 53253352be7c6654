"""Saves and loads of one rank through DCP: items, planners, errors, and all methods that DCP calls."""

import collections
import copy
import datetime
import enum
import errno
import gc
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

import dtckpt
from dtckpt import RestoreOptions, SaveOptions, abstract_mesh
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    DTypeError,
    ReplicaMismatchError,
    SaveDisagreementError,
    StorageError,
    TensorNameError,
    TreeError,
)
from dtckpt.interop import DtckptStorageReader, DtckptStorageWriter
from dtckpt.interop.dcp import columns
from dtckpt.storage import commit_by_rename

from . import plugin_cases

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state, path, planner=None, **options):
    return dcp.save(state, storage_writer=DtckptStorageWriter(path, **options), planner=planner)


def load(state, path, planner=None, **options):
    dcp.load(state, storage_reader=DtckptStorageReader(path, **options), planner=planner)
    return state


def cause_of(error):
    ((cause, _),) = error.value.failures.values()
    return cause


def working_folders(path):
    return [entry.name for entry in path.parent.iterdir() if entry != path]


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        7,
        0.5,
        True,
        "text",
        b"\0bytes",
        None,
        1 + 2j,
        range(3),
        (1, (2, "x"), [None]),
        [1, 2, [3]],
        {1, 2},
        torch.float16,
        torch.Size([1, 2]),
        np.float32(0.5),
        datetime.datetime(2026, 1, 2, 3, 4),
        collections.deque([1, 2], 3),
    ],
    ids=str,
)
def test_plain_values(tmp_path, value):
    save({"a": {"value": value}}, tmp_path / "saved")
    loaded = load({"a": {"value": "other"}}, tmp_path / "saved")["a"]["value"]
    assert loaded == value
    assert type(loaded) is type(value)
    assert dtckpt.restore(tmp_path / "saved")["a"]["value"] == value


def test_streams_and_arrays(tmp_path):
    stream = io.BytesIO(b"abcdef")
    stream.seek(2)
    state = {"stream": stream, "random": ("MT19937", np.arange(5, dtype=np.uint32), 3), "parts": (torch.ones(2), 1)}
    save(state, tmp_path / "saved")
    loaded = load(dict.fromkeys(state), tmp_path / "saved")
    assert (loaded["stream"].read(), loaded["stream"].getvalue()) == (b"cdef", b"abcdef")
    assert loaded["random"][1].dtype == np.uint32
    assert loaded["random"][1].tolist() == [0, 1, 2, 3, 4]
    assert loaded["parts"][0].tolist() == [1.0, 1.0]
    assert set(dtckpt.open_checkpoint(tmp_path / "saved").tensors) == {"random/1", "parts/0"}


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"a": {"b": object()}}, TreeError, "item 'a.b': cannot save object at 'a/b'"),
        ({"f": len}, TreeError, "item 'f'"),
        ({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}, TreeError, "both be named 'a/b'"),
        ({"x" * 2000: torch.ones(1)}, TensorNameError, "too long"),
        ({"a": torch.ones(2).to_sparse()}, DTypeError, "sparse"),
        ({"a": {"b": (np.ones(1),)}, "a/b": torch.ones(1)}, TensorNameError, "lead through 'a/b'"),
    ],
)
def test_what_cannot_be_saved(tmp_path, state, error, text):
    save({"old": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(dcp.CheckpointException) as raised:
        save(state, tmp_path / "saved")
    assert isinstance(cause_of(raised), error)
    assert text in str(cause_of(raised))
    del raised
    gc.collect()
    assert working_folders(tmp_path / "saved") == []
    assert list(dtckpt.restore(tmp_path / "saved")) == ["old"]


def test_a_checkpoint_of_save(tmp_path):
    state = {
        "model": {"layer.w": torch.rand(3, 4), "layer.b": torch.rand(4).bfloat16()},
        "list": [torch.ones(1), {"x": 1}],
        "tuple": (torch.ones(2), Color.RED),
        "ints": {0: torch.ones(1)},
        "empty": {},
    }
    dtckpt.save(tmp_path / "saved", state)
    target = {
        "model": {"layer.w": torch.zeros(3, 4), "layer.b": torch.zeros(4)},  # the second as float32
        "list": [torch.zeros(1), {"x": 0}],
        "tuple": None,
        "ints": {0: torch.zeros(1)},
    }
    load(target, tmp_path / "saved")
    assert torch.equal(target["model"]["layer.w"], state["model"]["layer.w"])
    assert torch.equal(target["model"]["layer.b"], state["model"]["layer.b"].float())
    assert target["list"] == [torch.ones(1), {"x": 1}]
    assert target["tuple"][0].tolist() == [1.0, 1.0]
    assert target["ints"][0].item() == 1.0


def test_metadata_describes_items_as_dcp_does(tmp_path):
    dtckpt.save(tmp_path / "saved", {"a": {"w": torch.zeros(2, 3).half()}, "b": [1, 2]})
    metadata = DtckptStorageReader(tmp_path / "saved").read_metadata()
    tensor = metadata.state_dict_metadata["a.w"]
    assert (tensor.size, tensor.properties.dtype) == (torch.Size([2, 3]), torch.float16)
    assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [(torch.Size([0, 0]), torch.Size([2, 3]))]
    assert metadata.planner_data == {"a.w": ("a", "w"), "b": ("b",)}
    assert metadata.storage_meta.checkpoint_id == tmp_path / "saved"
    assert metadata.version == dcp.filesystem.CURRENT_DCP_VERSION
    assert pickle.loads(pickle.dumps(metadata)).state_dict_metadata == metadata.state_dict_metadata


def test_without_a_state_dict_everything_is_loaded(tmp_path):
    save({"a": {"w": torch.ones(2)}, "l": [torch.zeros(1), {"x": 3}]}, tmp_path / "saved")
    state = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=DtckptStorageReader(tmp_path / "saved"), planner=planner, no_dist=True)
    assert state["a"]["w"].tolist() == [1.0, 1.0]
    assert state["l"] == [torch.zeros(1), {"x": 3}]


def test_state_dicts_that_are_not_flattened(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    save({"w": torch.ones(2), "nested": {"x": [1, {"y": torch.zeros(1)}]}}, tmp_path / "saved", planner)
    state = {"w": torch.zeros(2), "nested": None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _load_state_dict(state, storage_reader=DtckptStorageReader(tmp_path / "saved"), planner=planner, no_dist=True)
    assert state["w"].tolist() == [1.0, 1.0]
    assert state["nested"]["x"][0] == 1
    assert load({"nested": {"x": [0, {"y": torch.ones(1)}]}}, tmp_path / "saved")["nested"]["x"][1]["y"].item() == 0.0


def test_partial_loads(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "saved")
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: b"):
        load(state, tmp_path / "saved")
    load(state, tmp_path / "saved", dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert (state["a"].tolist(), state["b"].tolist()) == ([1.0, 1.0], [0.0, 0.0])


@pytest.mark.parametrize(
    ("cast", "dtype", "is_allowed"),
    [
        ("any", torch.int32, True),
        ("lossless", torch.float64, True),
        ("lossless", torch.bfloat16, False),
        ("exact", torch.float64, False),
        ("exact", torch.float32, True),
    ],
)
def test_conversions(tmp_path, cast, dtype, is_allowed):
    save({"a": torch.ones(2)}, tmp_path / "saved")
    state = {"a": torch.zeros(2, dtype=dtype)}
    if is_allowed:
        assert load(state, tmp_path / "saved", cast=cast)["a"].tolist() == [1, 1]
    else:
        with pytest.raises(dcp.CheckpointException) as raised:
            load(state, tmp_path / "saved", cast=cast)
        assert isinstance(cause_of(raised), DTypeError)


class HalfPlanner(dcp.DefaultSavePlanner):
    """As in DCP's own documentation: stores tensors as float16."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data if isinstance(data, io.BytesIO) else data.to(torch.float16)


class OddBytesPlanner(dcp.DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002  (DCP's)
        return object if isinstance(object, torch.Tensor) else io.BytesIO(b"odd")


def test_planners_of_users(tmp_path):
    save({"a": torch.ones(3), "v": [1, 2]}, tmp_path / "saved", HalfPlanner())
    checkpoint = dtckpt.open_checkpoint(tmp_path / "saved")
    assert checkpoint.tensors["a"].dtype == torch.float16
    assert checkpoint.values == {"v/0": 1, "v/1": 2}
    with pytest.raises(dcp.CheckpointException, match="OddBytesPlanner makes bytes of it"):
        save({"v": 1}, tmp_path / "other", OddBytesPlanner())


def test_options(tmp_path):
    options = SaveOptions(kvstore="zarr", codec="zstd", save_as_bf16=True, chunk_nbytes=64, content_digest=False)
    save({"a": torch.rand(32, 8)}, tmp_path / "saved", options=options)
    info = dtckpt.open_checkpoint(tmp_path / "saved").tensors["a"]
    assert (info.stored_dtype, info.codec, info.content_digest) == (torch.bfloat16, "zstd", None)
    assert info.num_chunks == 8
    with pytest.raises(ConfigError, match="keys='same'"):
        DtckptStorageWriter(tmp_path, options=SaveOptions(keys="same"))


@pytest.mark.parametrize(
    ("arguments", "is_replaced"),
    [
        ({}, True),
        ({"overwrite": False}, False),
        ({"options": SaveOptions()}, False),
        ({"options": SaveOptions(), "overwrite": True}, True),
    ],
)
def test_overwrite(tmp_path, arguments, is_replaced):
    save({"a": torch.ones(1)}, tmp_path / "saved")
    if is_replaced:
        save({"a": torch.zeros(1)}, tmp_path / "saved", **arguments)
    else:
        with pytest.raises(dcp.CheckpointException) as raised:
            save({"a": torch.zeros(1)}, tmp_path / "saved", **arguments)
        assert isinstance(cause_of(raised), CheckpointExistsError)
    assert dtckpt.restore(tmp_path / "saved")["a"].item() == (0.0 if is_replaced else 1.0)


@pytest.mark.parametrize("where", ["saved", "memory://words/saved"])
def test_a_refused_overwrite_has_the_words_of_dcp(tmp_path, where):
    place = where if "memory:" in where else tmp_path / where
    options = SaveOptions(kvstore="zarr")
    save({"a": torch.ones(1)}, place, options=options, overwrite=True)
    words = r"Checkpoint already exists at .*DtckptStorageWriter\(overwrite=True\)"
    with pytest.raises(dcp.CheckpointException, match=words):
        save({"a": torch.zeros(1)}, place, options=options, overwrite=False)


@pytest.mark.parametrize("overwrite", [True, False])
def test_other_files_are_left_alone(tmp_path, overwrite):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(dcp.CheckpointException, match="exists and is not a checkpoint") as raised:
        save({"a": torch.ones(1)}, tmp_path, overwrite=overwrite)
    assert isinstance(cause_of(raised), CheckpointExistsError)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_ids_of_saves_and_loads(tmp_path):
    writer, reader = DtckptStorageWriter(tmp_path / "saved"), DtckptStorageReader(tmp_path / "saved")
    ids = writer.save_id, reader.load_id
    metadata = dcp.save({"a": torch.ones(1)}, storage_writer=writer)
    assert metadata.storage_meta.save_id == writer.save_id == ids[0]
    assert reader.read_metadata().storage_meta.load_id == ids[1]
    writer.reset()
    reader.reset()
    assert writer.save_id != ids[0]
    assert reader.load_id != ids[1]


def test_checkpoint_ids(tmp_path):
    writer, reader = DtckptStorageWriter(), DtckptStorageReader()
    assert writer.checkpoint_id is None
    for step in range(2):
        dcp.save({"a": torch.tensor(float(step))}, checkpoint_id=tmp_path / str(step), storage_writer=writer)
        assert writer.checkpoint_id == tmp_path / str(step)
    for step in range(2):
        state = {"a": torch.tensor(-1.0)}
        dcp.load(state, checkpoint_id=str(tmp_path / str(step)), storage_reader=reader)
        assert state["a"].item() == step
    with pytest.raises(dcp.CheckpointException, match="there is no path to save to"):
        dcp.save({}, storage_writer=DtckptStorageWriter())
    for kind in (DtckptStorageWriter, DtckptStorageReader):
        assert kind.validate_checkpoint_id(tmp_path / "any")
        assert kind.validate_checkpoint_id("s3://bucket/step")
        assert not kind.validate_checkpoint_id("s3://bucket")


@pytest.mark.parametrize("is_async", [False, True])
def test_object_stores_of_this_process(is_async):
    MemoryFileSystem.store.clear()
    writer = DtckptStorageWriter("memory://dcp/saved", options=SaveOptions(kvstore="zarr", overwrite=True))
    for step in range(2):
        state = {"a": torch.full((3,), float(step)), "step": step}
        if is_async:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
    found = load({"a": torch.zeros(3), "step": 0}, "memory://dcp/saved")
    assert (found["a"].tolist(), found["step"]) == ([1.0] * 3, 1)
    assert dtckpt.restore("memory://dcp/saved")["step"] == 1
    MemoryFileSystem.store.clear()


def test_damage_is_found(tmp_path):
    save({"a": torch.rand(1000)}, tmp_path / "saved")
    data = max((tmp_path / "saved").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(dcp.CheckpointException) as raised:
        load({"a": torch.zeros(1000)}, tmp_path / "saved")
    assert isinstance(cause_of(raised), CheckpointCorruptError)


def test_a_writer_is_used_by_several_threads(tmp_path):
    writer, states = DtckptStorageWriter(), [{"a": torch.full((1000,), float(step))} for step in range(4)]
    futures = []
    for step, state in enumerate(states):
        futures.append(dcp.async_save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer))
        state["a"].fill_(-1.0)
    for step, future in enumerate(futures):
        future.result()
        found = dtckpt.restore(tmp_path / str(step))["a"]
        assert found.unique().tolist() == [step]


def test_a_failed_commit_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise StorageError("no commit")

    save({"a": torch.ones(1)}, tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(commit_by_rename, "commit", fail)
        with pytest.raises(dcp.CheckpointException, match="no commit"):
            save({"a": torch.zeros(1)}, tmp_path / "saved")
    assert working_folders(tmp_path / "saved") == []
    assert dtckpt.restore(tmp_path / "saved")["a"].item() == 1.0


def test_a_failure_right_after_the_rename_is_told_as_it_is(tmp_path, monkeypatch):
    """Then the folder under construction is gone, as if another attempt had taken it away."""

    def fail(path):
        raise OSError(errno.EIO, "the disk is gone", str(path))

    monkeypatch.setattr(commit_by_rename, "sync", fail)
    with pytest.raises(dcp.CheckpointException) as error:
        save({"w": torch.ones(2)}, tmp_path / "s")
    assert isinstance(cause_of(error), StorageError)
    assert "the disk is gone" in str(cause_of(error))
    assert dtckpt.restore(tmp_path / "s")["w"].equal(torch.ones(2))


@pytest.mark.parametrize("has_written", [False, True])
def test_a_newer_attempt_takes_over(tmp_path, has_written):
    """Two savers to one path: the older one, which still runs, cannot commit."""
    older, newer = (DtckptStorageWriter(tmp_path / "saved") for _ in range(2))
    planner = dcp.DefaultSavePlanner()
    plan, metadata = begun(older, planner, {"a": torch.zeros(1)})
    results = older.write_data(plan, planner).value() if has_written else []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, {"a": torch.ones(1)}, storage_writer=newer).result()
    goes_on = partial(older.finish, metadata, [results]) if has_written else partial(older.write_data, plan, planner)
    with pytest.raises(StorageError, match="took over"):
        goes_on()
    older.reset()
    assert working_folders(tmp_path / "saved") == []
    assert dtckpt.restore(tmp_path / "saved")["a"].item() == 1.0


def begun(writer, planner, state):
    """Go through a save up to the global plan, as DCP does."""
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    return planner.finish_plan(plan), metadata


def test_what_is_not_committed_goes_with_its_writer(tmp_path):
    writer = DtckptStorageWriter(tmp_path / "saved")
    begun(writer, dcp.DefaultSavePlanner(), {"a": torch.zeros(1)})
    assert len(working_folders(tmp_path / "saved")) == 1
    writer.reset()
    assert working_folders(tmp_path / "saved") == []
    thread = threading.Thread(target=begun, args=(writer, dcp.DefaultSavePlanner(), {"a": torch.zeros(1)}))
    thread.start()
    thread.join()
    gc.collect()
    assert working_folders(tmp_path / "saved") == []


def test_methods_in_the_wrong_order(tmp_path):
    writer, reader = DtckptStorageWriter(tmp_path / "saved"), DtckptStorageReader(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="set_up_storage_writer must be called first"):
        writer.prepare_global_plan([])
    with pytest.raises(CheckpointError, match="read_metadata must be called first"):
        reader.read_data(dcp.LoadPlan([]), dcp.DefaultLoadPlanner())
    planner = dcp.DefaultSavePlanner()
    plan, metadata = begun(writer, planner, {"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="storage_data"):
        writer.write_data(replace(plan, storage_data=None), planner)
    with pytest.raises(SaveDisagreementError, match="no rank has written"):
        writer.finish(metadata, [[]])


def test_writers_and_readers_are_pickled(tmp_path):
    writer, reader = DtckptStorageWriter(tmp_path / "saved"), DtckptStorageReader(tmp_path / "saved")
    dcp.save({"a": torch.ones(1)}, storage_writer=copy.deepcopy(pickle.loads(pickle.dumps(writer))))
    reader.read_metadata()
    state = {"a": torch.zeros(1)}
    dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert state["a"].item() == 1.0


def test_messages_are_pickled_by_columns():
    assert columns.IS_KNOWN
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(2, 3), "b": 1, "s": torch.tensor(1.0), "c": torch.ones(2, 3)}, None, True)
    plan = planner.create_local_plan()
    items = columns.WriteItems(plan.items)
    again = pickle.loads(pickle.dumps(items))
    assert again == plan.items
    assert len({id(item.tensor_data.properties) for item in again if item.tensor_data}) == 3
    assert len(pickle.dumps(columns.WriteItems(plan.items * 50))) < len(pickle.dumps(plan.items * 50))
    local, short = DtckptStorageWriter().prepare_local_plan(plan), replace(plan, items=columns.WriteItems(plan.items))
    assert len(pickle.dumps(local)) < len(pickle.dumps(short)) + 50  # the items are sent once
    _, metadata = planner.create_global_plan([plan])
    items, size = metadata.state_dict_metadata, len(pickle.dumps(metadata))
    columns.ShortMetadata.shorten(metadata)
    described = pickle.loads(pickle.dumps(metadata))
    assert "state_dict_metadata" not in vars(described)
    assert pickle.loads(pickle.dumps(described)) == described == metadata
    assert (described.state_dict_metadata, described.planner_data) == (items, metadata.planner_data)
    assert len(pickle.dumps(described)) < size
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = described.other
    loader = dcp.DefaultLoadPlanner()
    loader.set_up_planner({"a": torch.ones(2, 3), "b": 1, "s": torch.tensor(1.0)}, metadata, True)
    reads = loader.create_local_plan().items
    assert pickle.loads(pickle.dumps(columns.ReadItems(reads))) == reads


def test_results_are_made_when_asked_for():
    index = dcp.metadata.MetadataIndex
    results = [WriteResult(index("a", torch.Size([0, 2])), 8, "part"), WriteResult(index("b"), 4, None)]
    received = pickle.loads(pickle.dumps(columns.WriteResults(results)))
    assert (list(received), received[-1], received[:1]) == (results, results[-1], results[:1])
    assert list(columns.places_of(received)) == list(columns.places_of(results)) == [("a", (0, 2)), ("b", None)]


def test_items_of_other_classes_are_pickled_as_they_are():
    @dataclass(frozen=True)
    class Item(dcp.WriteItem):
        more: int = 0

    items = columns.WriteItems([Item(dcp.metadata.MetadataIndex("a"), dcp.planner.WriteItemType.BYTE_IO, more=1)])
    kind, (plain,) = items.__reduce__()
    assert (kind, plain) == (columns.WriteItems, list(items))


def test_casts_are_those_of_restore():
    with pytest.raises(ConfigError):
        DtckptStorageReader(cast="some")
    assert RestoreOptions(cast="any").cast == "any"


def test_a_save_of_another_thread_does_not_change_the_path(tmp_path):
    writer = DtckptStorageWriter()
    writer.reset(tmp_path / "own")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, {"a": torch.ones(1)}, checkpoint_id=tmp_path / "other", storage_writer=writer).result()
    assert writer.checkpoint_id == tmp_path / "own"
    begun(writer, dcp.DefaultSavePlanner(), {"a": torch.zeros(1)})
    assert len(working_folders(tmp_path / "other")) == 1
    writer.reset()
    assert writer.checkpoint_id == tmp_path / "other"


class ForgetfulPlanner(dcp.DefaultSavePlanner):
    """Plans as a planner of a user may, which knows nothing of the writer's data."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plan, storage_data=None) for plan in plans], metadata


def test_a_planner_without_the_writers_data(tmp_path):
    save({"a": torch.ones(1)}, tmp_path / "saved", ForgetfulPlanner())  # one rank has no copies to compare
    writer, plans = DtckptStorageWriter(tmp_path / "other"), [dcp.SavePlan([]), dcp.SavePlan([])]
    writer.set_up_storage_writer(is_coordinator=True)
    with pytest.raises(SaveDisagreementError, match="check_replicas=False"):
        writer.prepare_global_plan(plans)
    writer = DtckptStorageWriter(tmp_path / "other", options=SaveOptions(check_replicas=False))
    writer.set_up_storage_writer(is_coordinator=True)
    assert len(writer.prepare_global_plan(plans)) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": {"b.c": torch.ones(1)}}, {"a.b": {"c": torch.ones(1)}}),
        ({"groups": [{"lr": 0.1}]}, {"groups": {"0": {"lr": 0.1}}}),
    ],
)
def test_cached_plans_of_other_paths_are_refused(tmp_path, before, after):
    plugin_cases.forget_plans()
    save(before, tmp_path / "0", dcp.DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(dcp.CheckpointException) as raised:
        save(after, tmp_path / "1", dcp.DefaultSavePlanner(enable_plan_caching=True))
    assert isinstance(cause_of(raised), SaveDisagreementError)
    plugin_cases.forget_plans()
    save(after, tmp_path / "1")
    assert dtckpt.restore(tmp_path / "1").keys() == after.keys()


@pytest.mark.parametrize("options", [{}, {"save_as_bf16": True}, {"chunk_nbytes": 12}], ids=str)
def test_copies_of_one_rank_are_compared(tmp_path, options):
    layout = dtckpt.Layout(["x", "unsharded"], abstract_mesh({"x": 2, "y": 2}))
    parts = [torch.zeros(2, 3) for _ in range(4)]
    parts[3][0, 0] = 1
    tree = {"w": dtckpt.pack(parts, layout)}
    with pytest.raises(ReplicaMismatchError) as raised:
        dtckpt.save(tmp_path / "0", tree, options=SaveOptions(**options))
    with pytest.raises(dcp.CheckpointException) as wrapped:
        save(tree, tmp_path / "1", options=SaveOptions(**options))
    assert isinstance(cause_of(wrapped), ReplicaMismatchError)
    assert str(cause_of(wrapped)) in str(raised.value)
    save(tree, tmp_path / "1", options=SaveOptions(check_replicas=False, **options))
