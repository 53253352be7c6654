"""Targets that share memory, processes that forked, checkpoints replaced while they are read, what saves hold."""

import multiprocessing
import threading
from collections import namedtuple
from concurrent.futures import Future

import numpy as np
import pytest
import torch

import dtckpt
from dtckpt import SaveOptions
from dtckpt.checkpoint import open as reader
from dtckpt.checkpoint.saving import digests as chunk_digests
from dtckpt.checkpoint.saving import write
from dtckpt.errors import CheckpointConflictError, CheckpointCorruptError, LayoutError, ReplicaMismatchError
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

OVERWRITE = SaveOptions(overwrite=True, chunk_nbytes=4096)


def saved(tmp_path, tree):
    dtckpt.save(tmp_path / "s", tree)
    return tmp_path / "s"


def test_tied_tensors_are_filled_once(tmp_path):
    path = saved(tmp_path, {"a": torch.arange(6.0), "b": torch.arange(6.0)})
    shared = torch.zeros(6)
    dtckpt.restore(path, {"a": shared, "b": shared.view(6)})
    assert torch.equal(shared, torch.arange(6.0))


def test_tied_tensors_that_were_saved_with_different_values(tmp_path):
    path = saved(tmp_path, {"a": torch.arange(6.0), "b": torch.ones(6)})
    shared = torch.zeros(6)
    with pytest.raises(ReplicaMismatchError, match="'b' and 'a' share memory"):
        dtckpt.restore(path, {"a": shared, "b": shared})


@pytest.mark.parametrize(
    "views",
    [
        lambda z: (z[:6], z[2:8]),
        lambda z: (z[:6], z.view(torch.int32)[5:11].view(torch.float32)),
        lambda z: (z[::2][:6], z[4:10]),
        lambda z: (z.as_strided((6,), (1,), 0), z.as_strided((6,), (2,), 1)),
    ],
)
def test_overlapping_targets_are_refused_before_anything_is_written(tmp_path, views):
    path = saved(tmp_path, {"a": torch.ones(6), "b": torch.ones(6)})
    memory = torch.zeros(16)
    first, second = views(memory)
    with pytest.raises(LayoutError, match="overlap in memory"):
        dtckpt.restore(path, {"a": first, "b": second})
    assert not memory.any()


def test_a_target_that_overlaps_itself(tmp_path):
    path = saved(tmp_path, {"a": torch.ones(6, 8)})
    with pytest.raises(LayoutError, match="overlap in memory"):
        dtckpt.restore(path, {"a": torch.zeros(13).as_strided((6, 8), (1, 1))})


def test_interleaved_views_do_not_overlap(tmp_path):
    tree = {"even": torch.arange(12.0).view(4, 3), "odd": -torch.arange(12.0).view(4, 3)}
    path = saved(tmp_path, tree)
    memory = torch.zeros(4, 6)
    dtckpt.restore(path, {"even": memory[:, ::2], "odd": memory[:, 1::2]})
    assert torch.equal(memory[:, ::2], tree["even"])
    assert torch.equal(memory[:, 1::2], tree["odd"])


def test_a_named_tuple_stays_one(tmp_path):
    pair = namedtuple("pair", "left right")
    path = saved(tmp_path, {"p": pair(torch.ones(2), 5)})
    target = {"p": pair(torch.zeros(2), 0)}
    dtckpt.restore(path, target)
    assert type(target["p"]) is pair
    assert target["p"].right == 5
    assert torch.equal(target["p"].left, torch.ones(2))


def test_a_checkpoint_that_was_replaced_is_not_called_damaged(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(4)})
    with dtckpt.open_checkpoint(path) as checkpoint:
        dtckpt.save(path, {"w": torch.zeros(4)}, options=OVERWRITE)
        with pytest.raises(CheckpointConflictError, match="replaced or removed while it was being read"):
            checkpoint.read("w")


def test_a_local_restore_begins_anew_when_the_checkpoint_is_replaced(tmp_path, monkeypatch):
    path = saved(tmp_path, {"w": torch.ones(4)})
    opened = []

    def open_then_replace(where, **options):
        checkpoint = reader.open_checkpoint(where, **options)
        opened.append(checkpoint)
        if len(opened) == 1:
            dtckpt.save(path, {"w": torch.full((4,), 7.0)}, options=OVERWRITE)
        return checkpoint

    monkeypatch.setattr("dtckpt.checkpoint.restoring.restore.open_checkpoint", open_then_replace)
    assert torch.equal(dtckpt.restore(path)["w"], torch.full((4,), 7.0))
    assert len(opened) == 2


def test_damage_is_still_called_damage(tmp_path):
    path = tmp_path / "s"
    dtckpt.save(path, {"w": torch.ones(400)}, options=SaveOptions(kvstore="zarr"))
    chunk = path / "w" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        dtckpt.restore(path)


def test_readers_beside_a_writer_see_whole_versions(tmp_path):
    path = tmp_path / "s"
    dtckpt.save(path, {"w": torch.zeros(5000)}, options=OVERWRITE)
    done = threading.Event()
    seen, failures = set(), []

    def read():
        while not done.is_set():
            try:
                values = dtckpt.restore(path)["w"].unique().tolist()
            except CheckpointConflictError:
                continue
            except Exception as error:
                failures.append(error)
                return
            seen.update(values)
            if len(values) != 1:
                failures.append(values)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        for version in range(1, 20):
            dtckpt.save(path, {"w": torch.full((5000,), float(version))}, options=OVERWRITE)
    finally:
        done.set()
        reading.join(60)
    assert not failures
    assert seen


def restore_in_child(path, answers):
    try:
        dtckpt.restore(path)
        answers.put("restored")
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_says_what_to_do(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(4)})
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=restore_in_child, args=(path, answers))
    child.start()
    try:
        answer = answers.get(timeout=60)
    finally:
        child.join(60)
    assert answer.startswith("ForkedProcessError: this process was forked")


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize(
    ("size", "options", "is_made"),
    [(512, {}, False), (64, {}, True), (512, {"save_as_bf16": True}, True), (512, {"codec": "zstd"}, True)],
    ids=["as it lies in memory", "small", "rounded", "compressed"],
)
def test_what_is_made_for_a_save_is_written_out_before_it_is_much(
    tmp_path, monkeypatch, kvstore, size, options, is_made
):
    tree = {f"t{number}": torch.randn(size, 1024).bfloat16().float() for number in range(12)}
    nbytes = tree["t0"].nbytes
    times = []
    write_out = TensorStoreWriter._write_out
    monkeypatch.setattr(TensorStoreWriter, "_write_out", lambda *args: times.append(0) or write_out(*args))
    monkeypatch.setattr(write, "PENDING_NBYTES", 2 * nbytes)
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore, **options))
    assert len(times) > 3 if is_made else len(times) == 1
    for name, restored in dtckpt.restore(tmp_path / "s").items():
        assert restored.equal(tree[name])
    assert dtckpt.open_checkpoint(tmp_path / "s").verify().is_sound


class Late:
    """Does all work only when a caller waits for it."""

    def __init__(self):
        self.waiting = self.most = 0

    def submit(self, work, plan, number, elements, **options):
        self.waiting += elements.nbytes
        self.most = max(self.most, self.waiting)
        future = Future()

        def result():
            if not future.done():
                self.waiting -= elements.nbytes
                future.set_result(chunk_digests.ChunkDigests(number, [], number))
            return Future.result(future)

        future.result = result
        return future


def test_what_is_made_for_a_save_waits_for_its_digests_until_it_is_much():
    late, elements = Late(), np.zeros(8 << 20, np.uint8)
    digests = chunk_digests.ChunkDigester(late, with_content=True)
    for number in range(20):
        digests.add(0, None, number, elements)
    assert elements.nbytes < late.most <= chunk_digests.WAITING_NBYTES + elements.nbytes
    for number in range(20, 40):  # these stay in memory anyway
        digests.add(0, None, number, elements, is_kept=True)
    assert late.waiting >= 20 * elements.nbytes
    assert list(digests.results()[0].chunks.items()) == [(number, number) for number in range(40)]
    assert late.waiting == 0
