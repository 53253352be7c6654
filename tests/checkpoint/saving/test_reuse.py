"""Saves with a base: what has not changed is shared with it, whatever becomes of the base before and afterwards."""

import errno
import json
import logging
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
from support.shares import SEED
from support.states import bits_of, packed

import dtckpt
from dtckpt import CheckpointManager, Layout, SaveOptions, errors
from dtckpt.checkpoint.saving import digests as digests_module
from dtckpt.checkpoint.saving import reuse as reuse_module
from dtckpt.checkpoint.saving import save as save_module
from dtckpt.checkpoint.saving.plan import Holding, TensorSpec, plan_save
from dtckpt.cli.main import main
from dtckpt.format.manifest import MANIFEST_NAME, ArrayEntry, ArrayKind, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.zarr_tensorstore import BASE_FOLDER

from ..client_cases import mesh_over_all
from . import reuse_cases

KINDS = ("ocdbt", "zarr")
MIB = 1 << 20
GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-crc64"


def noise(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def lora(step):
    """A frozen base of 4 MiB, and 64 KiB that change."""
    frozen = {f"layer{number}": {"w": noise(number, 512, 512), "b": noise(-number + 99, 16)} for number in range(4)}
    return {"model": frozen, "adapter": noise(1000 + step, 64, 256), "step": step}


def assert_is(path, expected):
    restored = dtckpt.restore(path)
    assert flat(restored) == flat(expected)
    with dtckpt.open_checkpoint(path) as checkpoint:
        report = checkpoint.verify()
    assert report.is_sound, report.damages


def flat(tree, name=""):
    if isinstance(tree, dict):
        return {each: leaf for key, value in tree.items() for each, leaf in flat(value, f"{name}/{key}").items()}
    return {name: bits_of(tree) if isinstance(tree, torch.Tensor) else tree}


def inodes(path):
    """The files of a checkpoint that may be shared, by inode."""
    return {file.stat().st_ino for file in Path(path).rglob("*") if file.is_file()}


# --- the rule ---


def entry_of(plan, **changes):
    item = plan.tensors[0]
    facts = {"dtype": item.dtype, "stored_dtype": item.stored_dtype, "grid": item.grid, "codec": item.codec}
    kind = ArrayKind(**{**facts, **changes.pop("kind", {})}, writers=np.zeros(item.grid.num_chunks, np.int32))
    numbers = np.arange(item.grid.num_chunks, dtype=np.uint64)
    return ArrayEntry(
        **{"name": item.name, "path": item.path, "digests": numbers, "identities": numbers, **changes}, kind=kind
    )


def plan_of(shape=(4, 8), dtype="float32", chunk_nbytes=64, codec="none"):
    holding = Holding(Region.full(shape), (0,))
    return plan_save([TensorSpec("w", shape, dtype, dtype, (holding,), codec=codec)], chunk_nbytes)


def test_only_chunks_of_the_same_tensor_place_type_and_codec_are_candidates():
    plan = plan_of()
    manifest = Manifest("zarr", {"w": entry_of(plan)})
    assert [number for _, _, number, _ in reuse_module.candidates(plan, 0, manifest)] == [0, 1]
    assert not list(reuse_module.candidates(plan, 1, manifest))
    for other in (
        plan_of(shape=(8, 4)),
        plan_of(chunk_nbytes=32),
        plan_of(dtype="int32"),
        plan_of(codec="zstd"),
    ):
        assert not list(reuse_module.candidates(other, 0, manifest)), other
    assert not list(reuse_module.candidates(plan, 0, Manifest("zarr", {"w": entry_of(plan, path="other")})))
    assert not list(reuse_module.candidates(plan, 0, Manifest("zarr", {"w": entry_of(plan, identities=None)})))
    missing = entry_of(plan, kind={"missing": frozenset([1])})
    assert [each[2] for each in reuse_module.candidates(plan, 0, Manifest("zarr", {"w": missing}))] == [0]


@pytest.mark.parametrize("differing", ["digest", "identity"])
def test_64_equal_bits_are_not_enough(differing):
    entry = entry_of(plan_of())
    digests, saved = reuse_module.ChunkDigests(1, [], 1), reuse_module.saved_chunk(entry, 1)
    assert saved.is_equal(digests)
    assert not saved.is_equal(digests._replace(**{differing: 2}))


def test_a_chunk_whose_digest_collides_is_written(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "a", {"w": torch.zeros(64)})
    real = reuse_module.ChunkDigests.of.__func__

    def collide(cls, *arguments, **options):
        with dtckpt.open_checkpoint(tmp_path / "a") as checkpoint:
            digest = int(checkpoint.manifest.arrays["w"].digests[0])
        return real(cls, *arguments, **options)._replace(digest=digest)

    monkeypatch.setattr(reuse_module.ChunkDigests, "of", classmethod(collide))
    report = dtckpt.save(tmp_path / "b", {"w": torch.ones(64)}, base=tmp_path / "a")
    assert report.nbytes_reused == 0


# --- contents of tensors ---


@pytest.fixture
def digested(monkeypatch):
    """The bytes whose content is digested, one number per call."""
    counted, real = [], digests_module.content_share

    def count(elements, *facts):
        counted.append(elements.nbytes)
        return real(elements, *facts)

    monkeypatch.setattr(digests_module, "content_share", count)
    return counted


def contents(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
        return {name: each.content_digest for name, each in checkpoint.tensors.items()}


@pytest.mark.parametrize("chunk_nbytes", [16 * MIB, 64 << 10])
def test_the_content_of_chunks_that_have_not_changed_comes_from_the_base(tmp_path, digested, chunk_nbytes):
    options = SaveOptions(chunk_nbytes=chunk_nbytes)
    dtckpt.save(tmp_path / "1", lora(1), options=options)
    assert sum(digested) == 4 * MIB + 4 * 64 + 65536
    for step in (2, 3):
        digested.clear()
        dtckpt.save(tmp_path / f"{step}", lora(step), options=options, base=tmp_path / f"{step - 1}")
        assert sum(digested) == 65536
    dtckpt.save(tmp_path / "full", lora(3), options=options)
    assert None not in contents(tmp_path / "3").values()
    assert contents(tmp_path / "3") == contents(tmp_path / "full")


def test_of_a_tensor_only_the_content_of_changed_chunks_is_digested(tmp_path, digested):
    options = SaveOptions(chunk_nbytes=64 << 10)
    experts = noise(1, 64, 1024, 4)
    dtckpt.save(tmp_path / "a", {"e": experts}, options=options)
    experts[17, 500, 2] += 1
    digested.clear()
    dtckpt.save(tmp_path / "b", {"e": experts}, options=options, base=tmp_path / "a")
    assert digested == [64 << 10]
    dtckpt.save(tmp_path / "full", {"e": experts})
    assert contents(tmp_path / "b") == contents(tmp_path / "full")


@pytest.mark.parametrize("chunk_nbytes", [16 * MIB, 64 << 10])
def test_where_everything_changes_each_byte_is_digested_once(tmp_path, digested, monkeypatch, chunk_nbytes):
    """The base costs a look at one block of each chunk that has several."""
    options = SaveOptions(chunk_nbytes=chunk_nbytes)
    identified, looked_at = [], []
    identify, digest = digests_module.identify_chunk, reuse_module.bytes_digest
    monkeypatch.setattr(
        digests_module, "identify_chunk", lambda *facts: (identified.append(facts[2].nbytes), identify(*facts))[1]
    )
    dtckpt.save(tmp_path / "a", {"w": noise(1, 4096, 1024)}, options=options)
    for counted in (digested, identified):
        assert sum(counted) == 16 * MIB
        counted.clear()
    monkeypatch.setattr(reuse_module, "bytes_digest", lambda data: (looked_at.append(len(data)), digest(data))[1])
    report = dtckpt.save(tmp_path / "b", {"w": noise(2, 4096, 1024)}, options=options, base=tmp_path / "a")
    assert report.nbytes_written == sum(digested) == sum(identified) == 16 * MIB
    assert sum(each for each in looked_at if each > 1000) == (256 << 10 if chunk_nbytes > 256 << 10 else 0)


@pytest.mark.parametrize("how", ["older", "without contents", "gathered"])
def test_bases_that_do_not_tell_the_content_of_chunks(tmp_path, digested, how):
    options = SaveOptions(chunk_nbytes=64 << 10)
    tree = {"w": noise(1, 512, 512)}
    if how == "gathered":
        # A tensor this small is put together before its content is digested.
        tree = {"w": packed(noise(1, 64, 60), Layout(["unsharded", "x"], mesh_over_all({"x": 2}, 2)))}
    dtckpt.save(tmp_path / "a", tree, options=replace(options, content_digest=how != "without contents"))
    with dtckpt.open_checkpoint(tmp_path / "a") as checkpoint:
        manifest = checkpoint.manifest
    (entry,) = manifest.arrays.values()
    assert entry.grid.num_chunks > 1
    assert (entry.shares is not None) == (how == "older")
    older = manifest.with_arrays({"w": replace(entry, shares=None)}, manifest.documents)
    (tmp_path / "a" / MANIFEST_NAME).write_bytes(older.to_bytes())
    digested.clear()
    report = dtckpt.save(tmp_path / "b", tree, options=options, base=tmp_path / "a")
    assert report.nbytes_written == 0
    assert sum(digested) == report.nbytes
    dtckpt.save(tmp_path / "full", tree, options=options)
    assert contents(tmp_path / "b") == contents(tmp_path / "full")


# --- one client ---


@pytest.mark.parametrize("kvstore", KINDS)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_has_not_changed_is_shared(tmp_path, kvstore, codec):
    options = SaveOptions(kvstore=kvstore, codec=codec)
    first = dtckpt.save(tmp_path / "a", lora(1), options=options)
    second = dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    third = dtckpt.save_async(tmp_path / "c", lora(3), options=options, base=tmp_path / "b").result()
    assert first.nbytes_reused == 0
    assert first.nbytes == second.nbytes == 4 * MIB + 4 * 64 + 65536
    # Of a database, tensors of a few bytes lie in its nodes, which are new.
    tiny = 4 * 64 if kvstore == "ocdbt" else 0
    for report in (second, third):
        assert report.nbytes_written == 65536 + tiny
        assert report.client_nbytes == report.nbytes_written
    assert len(inodes(tmp_path / "a") & inodes(tmp_path / "b") & inodes(tmp_path / "c")) == (
        8 if kvstore == "zarr" else 1
    )
    for name, step in (("a", 1), ("b", 2), ("c", 3)):
        assert_is(tmp_path / name, lora(step))
        assert not (tmp_path / name / BASE_FOLDER).exists()
    # Any of them is whole alone.
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert_is(tmp_path / "c", lora(3))
    assert_read_by_tensorstore(tmp_path / "c", kvstore, lora(3)["model"]["layer2"]["w"])


def assert_read_by_tensorstore(path, kvstore, expected):
    base = {"driver": "file", "path": f"{path}/"}
    store = (
        {"driver": "ocdbt", "base": base, "path": "model/layer2/w/"}
        if kvstore == "ocdbt"
        else {
            **base,
            "path": f"{path}/model/layer2/w/",
        }
    )
    array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
    assert np.array_equal(array.read().result(), expected.numpy())


@pytest.mark.parametrize("kvstore", KINDS)
def test_of_a_tensor_only_the_changed_chunks_are_written(tmp_path, kvstore):
    options = SaveOptions(kvstore=kvstore, chunk_nbytes=64 << 10)
    experts = noise(1, 64, 1024, 4)
    dtckpt.save(tmp_path / "a", {"e": experts}, options=options)
    experts[17, 500, 2] += 1
    report = dtckpt.save(tmp_path / "b", {"e": experts}, options=options, base=tmp_path / "a")
    assert report.nbytes_written == 64 << 10
    assert_is(tmp_path / "b", {"e": experts})
    with dtckpt.open_checkpoint(tmp_path / "b") as checkpoint:
        origins = [chunk.origin for chunk in checkpoint.tensors["e"].chunks]
    assert origins.count("a") == 15
    assert origins.count(None) == 1


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_change_behind_the_first_block_is_noticed(tmp_path, kvstore):
    options = SaveOptions(kvstore=kvstore)
    w = noise(1, 1024, 1024)
    dtckpt.save(tmp_path / "a", {"w": w}, options=options)
    w[-1, -1] += 1
    report = dtckpt.save(tmp_path / "b", {"w": w}, options=options, base=tmp_path / "a")
    assert report.nbytes_reused == 0
    assert_is(tmp_path / "b", {"w": w})


@pytest.mark.parametrize("kvstore", KINDS)
def test_tensors_come_go_and_change_their_kind(tmp_path, kvstore):
    options = SaveOptions(kvstore=kvstore)
    dtckpt.save(
        tmp_path / "a", {"stays": noise(1, 300, 300), "goes": noise(2, 200, 300), "w": noise(3, 90)}, options=options
    )
    tree = {
        "stays": noise(1, 300, 300),
        "new": noise(2, 300, 300),
        "w": {"m": noise(3, 90)},
        "empty": torch.empty(0, 3),
    }
    report = dtckpt.save(tmp_path / "b", tree, options=options, base=tmp_path / "a")
    assert report.nbytes_reused == 360_000
    assert_is(tmp_path / "b", tree)
    tree["stays"] = tree["stays"].double()
    report = dtckpt.save(tmp_path / "c", tree, options=options, base=tmp_path / "b")
    assert_is(tmp_path / "c", tree)
    assert report.nbytes_reused >= 360_000


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_base_that_the_save_replaces(tmp_path, kvstore):
    options = SaveOptions(kvstore=kvstore, overwrite=True)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    for step in (2, 3):
        assert dtckpt.save(tmp_path / "a", lora(step), options=options, base=tmp_path / "a").nbytes_reused >= 4 * MIB
        assert_is(tmp_path / "a", lora(step))
    assert os.listdir(tmp_path) == ["a"]


def test_rounded_tensors_are_compared_as_they_are_stored(tmp_path):
    options = SaveOptions(save_as_bf16=True)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    report = dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    assert report.nbytes_reused == 2 * MIB
    assert flat(dtckpt.restore(tmp_path / "b")["model"]) == flat(dtckpt.restore(tmp_path / "a")["model"])


@pytest.mark.parametrize("staging_nbytes", [None, MIB])
def test_parts_that_have_not_changed_are_not_copied(tmp_path, staging_nbytes):
    options = SaveOptions(staging_nbytes=staging_nbytes)
    dtckpt.save(tmp_path / "a", lora(1))
    tree = lora(2)
    handle = dtckpt.save_async(tmp_path / "b", tree, options=options, base=tmp_path / "a")
    for leaf in (tree["adapter"], tree["model"]["layer0"]["w"]):
        leaf.zero_()
    report = handle.result()
    assert report.nbytes_reused >= 4 * MIB
    if staging_nbytes is None:
        assert report.phases["stage"].nbytes < 80_000
    assert_is(tmp_path / "b", lora(2))


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_database_keeps_no_more_than_twice_the_bytes_that_it_uses(tmp_path, kvstore):
    """A file that mixes what changes with what stays is left behind; the second time, what stays is apart."""

    def tree(step):
        return {
            f"{kind}{number}": noise(number + step * 100 * (kind == "moves"), 256, 256)
            for number in range(8)
            for kind in ("moves", "stays")
        } | {f"more{number}": noise(number + 1000 * step, 256, 256) for number in range(4)}

    options = SaveOptions(kvstore=kvstore)
    dtckpt.save(tmp_path / "0", tree(0), options=options)
    written = []
    for step in range(1, 5):
        report = dtckpt.save(tmp_path / f"{step}", tree(step), options=options, base=tmp_path / f"{step - 1}")
        written.append(report.nbytes_written)
        assert_is(tmp_path / f"{step}", tree(step))
        assert du(tmp_path / f"{step}") < 2.1 * report.nbytes
    moving = 12 * 256 * 256 * 4
    assert written[1:] == [moving] * 3
    assert written[0] == (20 * 256 * 256 * 4 if kvstore == "ocdbt" else moving)
    assert du(tmp_path) < 1.1 * (20 + 8 + 4 * 12) * 256 * 256 * 4


def du(path):
    return int(subprocess.run(["du", "-s", "-B1", path], check=True, capture_output=True, text=True).stdout.split()[0])


# --- no base ---


def spoil(path, how, monkeypatch):
    """Make the checkpoint at a path no base."""
    match how:
        case "missing":
            shutil.rmtree(path)
        case "uncommitted":
            (path / "dtckpt.manifest").unlink()
        case "damaged":
            (path / "dtckpt.manifest").write_bytes(b"nonsense")
        case "newer":
            monkeypatch.setattr(save_module, "open_base", refuse_newer)
        case "other kind":
            shutil.rmtree(path)
            dtckpt.save(path, lora(1), options=SaveOptions(kvstore="zarr"))
        case "foreign":
            shutil.rmtree(path)
            path.mkdir()
            torch.save({"w": torch.ones(3)}, path / "a.pt")
        case "64 bits":
            shutil.rmtree(path)
            shutil.copytree(GOLDEN / "ocdbt", path)
        case "blocks":
            (path / "client_0" / "dtckpt.blocks").write_bytes(b"")
        case "short data":
            for file in (path / "client_0" / "d").iterdir():
                os.truncate(file, 100)
        case "a link":
            for file in (path / "client_0" / "d").iterdir():
                shutil.move(file, path.parent / "elsewhere")
                file.symlink_to(path.parent / "elsewhere")


def refuse_newer(where, kvstore):
    raise errors.CheckpointVersionError("of a newer format")


SPOILT = (
    "missing",
    "uncommitted",
    "damaged",
    "newer",
    "other kind",
    "foreign",
    "64 bits",
    "blocks",
    "short data",
    "a link",
)


@pytest.mark.parametrize("how", SPOILT)
def test_a_base_that_is_none_costs_no_save(tmp_path, monkeypatch, caplog, how):
    path = tmp_path / "a"
    dtckpt.save(path, lora(1))
    spoil(path, how, monkeypatch)
    with caplog.at_level(logging.WARNING):
        report = dtckpt.save(tmp_path / "b", lora(2), base=path)
    assert report.nbytes_reused == 0
    told = [record.getMessage() for record in caplog.records if "nothing is reused" in record.getMessage()]
    # Where blocks are missing, every chunk may have changed: there is nothing to tell.
    assert len(told) == (how != "blocks"), told
    monkeypatch.undo()
    assert_is(tmp_path / "b", lora(2))
    assert not (tmp_path / "b" / BASE_FOLDER).exists()


@pytest.mark.parametrize("kvstore", KINDS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_base_that_vanishes_before_it_is_shared(tmp_path, monkeypatch, caplog, kvstore, is_async):
    options = SaveOptions(kvstore=kvstore)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    real = reuse_module.find_reuse

    def find(*arguments, **facts):
        found = real(*arguments, **facts)
        shutil.rmtree(tmp_path / "a")
        dtckpt_like = tmp_path / "a"
        dtckpt_like.mkdir()  # another checkpoint takes its place
        return found

    monkeypatch.setattr(save_module, "find_reuse", find)
    tree = lora(2)
    if is_async:
        handle = dtckpt.save_async(tmp_path / "b", tree, options=options, base=tmp_path / "a")
        tree["model"]["layer0"]["w"].zero_()
        report = handle.result()
    else:
        report = dtckpt.save(tmp_path / "b", tree, options=options, base=tmp_path / "a")
    assert report.nbytes_reused == 0
    assert "was removed meanwhile" in caplog.text
    assert_is(tmp_path / "b", lora(2))


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_checkpoint_that_takes_the_place_of_the_base(tmp_path, monkeypatch, kvstore):
    """The files come from the directory whose manifest was read, whatever has its path later."""
    options = SaveOptions(kvstore=kvstore, overwrite=True)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    dtckpt.save(tmp_path / "other", {**lora(7), "model": lora(7)["adapter"]}, options=options)
    real = reuse_module.find_reuse

    def find(*arguments, **facts):
        found = real(*arguments, **facts)
        os.rename(tmp_path / "a", tmp_path / "aside")
        os.rename(tmp_path / "other", tmp_path / "a")
        return found

    monkeypatch.setattr(save_module, "find_reuse", find)
    report = dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    assert report.nbytes_reused >= 4 * MIB
    assert_is(tmp_path / "b", lora(2))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
@pytest.mark.parametrize("kvstore", KINDS)
def test_where_links_are_refused_files_are_copied(tmp_path, monkeypatch, caplog, kvstore, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    dtckpt.save(tmp_path / "a", lora(1), options=SaveOptions(kvstore=kvstore))
    monkeypatch.setattr(os, "link", refuse)
    report = dtckpt.save(tmp_path / "b", lora(2), options=SaveOptions(kvstore=kvstore), base=tmp_path / "a")
    assert report.nbytes_reused >= 4 * MIB
    assert not inodes(tmp_path / "a") & inodes(tmp_path / "b")
    assert sum("are copied, not linked" in record.getMessage() for record in caplog.records) == 1
    assert_is(tmp_path / "b", lora(2))


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_save_that_fails_leaves_the_base_alone(tmp_path, monkeypatch, kvstore):
    options = SaveOptions(kvstore=kvstore)
    dtckpt.save(tmp_path / "a", lora(1), options=options)

    def fail(*_, **__):
        raise errors.StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(save_module.ClientWriter, "write", fail)
        with pytest.raises(errors.StorageError, match="disk is gone"):
            dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert_is(tmp_path / "a", lora(1))


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_chunk_that_got_lost_is_no_hole(tmp_path, monkeypatch, kvstore):
    """The leader looks for every chunk that no client wrote, before it commits."""
    options = SaveOptions(kvstore=kvstore, fsync=False)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    monkeypatch.setattr(reuse_module.Reuse, "share", lambda *_: None)
    with pytest.raises(errors.CheckpointCorruptError, match=r"did not get into|does not see"):
        dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kvstore", KINDS)
def test_damage_in_a_shared_file_is_told_for_every_checkpoint_that_has_it(tmp_path, kvstore):
    options = SaveOptions(kvstore=kvstore)
    dtckpt.save(tmp_path / "a", lora(1), options=options)
    dtckpt.save(tmp_path / "b", lora(2), options=options, base=tmp_path / "a")
    dtckpt.save(tmp_path / "c", lora(3), options=options)
    shared = next(
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and file.stat().st_nlink > 1 and file.stat().st_size > MIB // 2
    )
    with open(shared, "r+b") as file:
        file.seek(MIB // 4)
        file.write(b"?")
    for name, is_sound in (("a", False), ("b", False), ("c", True)):
        with dtckpt.open_checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.verify().is_sound == is_sound


# --- several clients ---


@pytest.mark.parametrize("kvstore", KINDS)
def test_two_clients(pool, tmp_path, kvstore):
    found = pool.values(reuse_cases.save_steps, str(tmp_path), kvstore, clients=2)
    assert found == [found[0]] * 2
    for step, (nbytes, reused) in enumerate(found[0]):
        assert reused == (0 if not step else nbytes - reuse_cases.CHANGED_NBYTES), step
    for step in range(3):
        assert flat(dtckpt.restore(tmp_path / f"{step}")) == flat(reuse_cases.whole(step))
        # Also of a tensor of which one client's chunk comes from the base, and the other client's is new.
        dtckpt.save(tmp_path / f"full {step}", reuse_cases.whole(step))
        assert contents(tmp_path / f"{step}") == contents(tmp_path / f"full {step}")


@pytest.mark.parametrize("kvstore", KINDS)
def test_another_number_of_clients_takes_what_fits(pool, tmp_path, kvstore):
    pool.values(reuse_cases.save_steps, str(tmp_path), kvstore, clients=2)
    found = pool.values(reuse_cases.save_step, str(tmp_path), kvstore, 3, clients=1)
    assert found[0][1] > 0  # replicated tensors have the same chunks
    assert flat(dtckpt.restore(tmp_path / "3")) == flat(reuse_cases.whole(3))
    shutil.rmtree(tmp_path / "2")
    assert flat(dtckpt.restore(tmp_path / "3")) == flat(reuse_cases.whole(3))


@pytest.mark.parametrize("kvstore", KINDS)
@pytest.mark.parametrize("how", ["leader sees none", "other sees none", "other sees another", "other cannot share"])
def test_clients_that_see_different_bases_share_nothing_that_is_not_agreed(pool, tmp_path, kvstore, how):
    pool.values(reuse_cases.save_steps, str(tmp_path), kvstore, clients=2)
    found = pool.values(reuse_cases.save_with_other_base, str(tmp_path), kvstore, how, clients=2)
    assert found == [found[0]] * 2
    assert (found[0] > 0) == (how == "other cannot share")
    assert flat(dtckpt.restore(tmp_path / "3")) == flat(reuse_cases.whole(3))
    assert not (tmp_path / "3" / BASE_FOLDER).exists()


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_client_that_leaves_to_the_base_what_it_lacks(pool, tmp_path, kvstore):
    pool.values(reuse_cases.save_steps, str(tmp_path), kvstore, clients=2)
    found = pool.values(reuse_cases.lie, str(tmp_path), kvstore, clients=2)
    assert found == [found[0]] * 2
    assert "'new' were left to a base that lacks them" in found[0]
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


# --- object stores ---


def test_a_store_copies_by_itself(caplog):
    where = f"memory://reuse-{SEED}-{random.random()}"
    options = SaveOptions(kvstore="zarr")
    dtckpt.save(f"{where}/a", lora(1), options=options)
    report = dtckpt.save(f"{where}/b", lora(2), options=options, base=f"{where}/a")
    assert report.nbytes_reused >= 4 * MIB
    assert_is(f"{where}/b", lora(2))
    with CheckpointManager(f"{where}/run", options=options, reuse=True, keep=1, is_async=False) as manager:
        for step in range(3):
            manager.save(step, lora(step))
        assert_is(manager.path(2), lora(2))


# --- a run ---


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_manager_takes_the_step_before(tmp_path, kvstore, capsys):
    options = SaveOptions(kvstore=kvstore)
    with CheckpointManager(tmp_path, options=options, reuse=True, keep=2) as manager:
        for step in range(4):
            handle = manager.save(step, lora(step))
        assert handle.result().nbytes_reused >= 4 * MIB
    assert manager.all_steps() == [2, 3]
    # A manager of another process finds the newest step; after a restore it is the restored one.
    with CheckpointManager(tmp_path, options=options, reuse=True) as manager:
        assert manager.save(4, lora(4)).result().nbytes_reused >= 4 * MIB
        assert_is(manager.path(4), manager.restore(4).tree)
        report = manager.save(5, lora(5)).result()
    assert report.nbytes_reused >= 4 * MIB
    shown(tmp_path, capsys)


def shown(root, capsys):
    assert main(["ls", str(root), "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()][:-1]
    assert [each["step"] for each in listed] == [2, 3, 4, 5]
    for each in listed:
        assert each["shared_bytes"] >= 4 * MIB
        assert du(each["path"]) == each["own_bytes"] + each["shared_bytes"]
    assert main(["ls", str(root)]) == 0
    assert "OWN" in capsys.readouterr().out
    assert main(["inspect", str(root / "step_00000005"), "--chunks"]) == 0
    out = capsys.readouterr().out
    assert "reused      4.0 MiB of step_00000000" in out, out


@pytest.mark.parametrize("kvstore", KINDS)
def test_a_run_goes_on_in_a_copy_of_its_root(tmp_path, kvstore):
    """The copies are bases as good as the steps, also where they have the links, and need the old root no more."""
    options = SaveOptions(kvstore=kvstore)
    with CheckpointManager(tmp_path / "run", options=options, reuse=True, is_async=False) as manager:
        for step in range(3):
            manager.save(step, lora(step))
    dtckpt.copy(tmp_path / "run", tmp_path / "copies", keep_links=True)
    shutil.rmtree(tmp_path / "run")
    with CheckpointManager(tmp_path / "copies", options=options, reuse=True, is_async=False) as manager:
        assert manager.save(3, lora(3)).result().nbytes_reused >= 4 * MIB
        for step in range(4):
            assert_is(manager.path(step), lora(step))


@pytest.mark.parametrize("kvstore", KINDS)
@pytest.mark.parametrize(
    "of_base", [{"codec": "zstd"}, {"chunk_nbytes": 64 << 10}, {"save_as_bf16": True}], ids=["codec", "chunks", "dtype"]
)
def test_a_base_that_stores_its_tensors_in_another_way(tmp_path, kvstore, of_base):
    """Also where the base is in another root: nothing of the large tensors is shared, and all is right."""
    dtckpt.save(tmp_path / "other" / "a", lora(1), options=SaveOptions(kvstore=kvstore, **of_base))
    report = dtckpt.save(
        tmp_path / "run" / "b", lora(2), options=SaveOptions(kvstore=kvstore), base=tmp_path / "other" / "a"
    )
    assert report.nbytes_reused <= 4 * 64
    assert_is(tmp_path / "run" / "b", lora(2))


@pytest.mark.parametrize("kvstore", KINDS)
def test_two_managers_of_one_root(tmp_path, kvstore):
    """One of them saves; the other is refused until that has ended."""
    options = SaveOptions(kvstore=kvstore)
    facts = {"options": options, "reuse": True, "is_async": False, "keep": 1}
    with CheckpointManager(tmp_path, **facts) as first, CheckpointManager(tmp_path, **facts) as second:
        first.save(0, lora(0))
        with pytest.raises(errors.CheckpointConflictError):
            second.save(1, lora(1))
        first.save(1, lora(1))
        first.close()
        second.save(2, lora(2))
    assert CheckpointManager(tmp_path).all_steps() == [2]
    assert_is(tmp_path / "step_00000002", lora(2))


def test_tools_that_write_in_place_change_all_steps_that_share_a_file(tmp_path):
    """Each of these steps tells it, a step that shares nothing is sound, and a scrub mends them all from a copy."""
    with CheckpointManager(tmp_path / "run", reuse=True, is_async=False) as manager:
        for step in range(3):
            manager.save(step, lora(step))
    dtckpt.save(tmp_path / "run" / "step_00000003", lora(3))
    dtckpt.copy(tmp_path / "run", tmp_path / "copies")
    (shared,) = (file for file in (tmp_path / "run").rglob("*") if is_shared_by(file, 3))
    with open(shared, "r+b") as file:
        file.seek(shared.stat().st_size // 2)  # in the frozen tensors, which all three steps have
        file.write(b"?" * 100)

    def sound_steps():
        steps = [dtckpt.open_checkpoint(tmp_path / "run" / f"step_{step:08d}") for step in range(4)]
        return [step for step, checkpoint in enumerate(steps) if checkpoint.verify().is_sound]

    assert sound_steps() == [3]
    assert len(dtckpt.scrub(tmp_path / "run").damaged) == 3
    assert dtckpt.scrub(tmp_path / "run", source=tmp_path / "copies").is_sound
    assert sound_steps() == [0, 1, 2, 3]
    assert shared.stat().st_nlink == 3


def is_shared_by(file, count):
    """Whether this is the name of a file in step 0, of which so many steps have names."""
    is_file = file.is_file() and file.stat().st_size > MIB
    return is_file and "step_00000000" in file.parts and file.stat().st_nlink == count
