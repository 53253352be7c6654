"""Orbax checkpoints: samples against the digests of what Orbax loads, new ones against Orbax itself, and damage."""

import json
import random
import shutil

import fsspec
import numpy as np
import pytest
import tensorstore as ts
import torch
from storage.untrusted.hostile_files import mutated
from support.states import differences

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES, content, entry
from dtckpt import Region, abstract_mesh, errors
from dtckpt.checkpoint.foreign import orbax_files

ORBAX = SAMPLES / "orbax"
NAMES = sorted(file.name.removesuffix(".expected.json") for file in ORBAX.glob("*.expected.json"))
PLAIN = ORBAX / "v0_plain_zarr2_mesh2x2"


def same_as_expected(found, wanted):
    """Whether a tensor, or a plain value, is what Orbax loads; its scalars come as arrays."""
    if "sha256" not in wanted:
        return found == wanted["value"]
    if not torch.is_tensor(found):
        found = torch.tensor(found, dtype=getattr(torch, wanted["dtype"]))
    return entry(found) == wanted


def named(tree, path=()):
    """Return the leaves of a tree by path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return {"/".join(path): tree}
    return {name: leaf for key, child in items for name, leaf in named(child, (*path, str(key))).items()}


@pytest.mark.parametrize("name", NAMES)
def test_samples(name):
    wanted, notes = content(ORBAX, name)
    with dtckpt.open_checkpoint(ORBAX / notes["folder"]) as checkpoint:
        assert checkpoint.format == "orbax"
        assert (checkpoint.refused, checkpoint.unread) == ({}, ())
        assert checkpoint.verify().damages == ()
    found = named(dtckpt.restore(ORBAX / notes["folder"]))
    assert all(same_as_expected(found[path], wanted[path]) for path in wanted)
    assert {path for path, leaf in found.items() if torch.is_tensor(leaf)} <= wanted.keys()


def test_values_and_containers():
    restored = dtckpt.restore(ORBAX / "v0_ocdbt_zarr3_mesh2x2")
    assert (restored["step"], restored["lr"], restored["note"]) == (10, 3e-4, "héllo")
    assert (restored["none"], restored["empty"]) == (None, {})
    assert isinstance(restored["opt_state"], list)
    assert restored["a.b/c"].tolist() == [1, 1]


def test_items_of_a_folder():
    """Items are keys, but an item without a given name is the tree itself."""
    managed = dtckpt.restore(ORBAX / "v0_manager" / "3")
    assert managed["extra"] == {"epoch": 2, "names": ["x"]}
    assert managed["state"]["opt_state"][0]["count"].item() == 7
    assert dtckpt.restore(ORBAX / "v1_state")["step"] == 10
    assert dtckpt.restore(ORBAX / "v1_checkpointables")["meta"] == {"k": 1}


def test_the_folder_of_all_steps():
    with pytest.raises(errors.CheckpointNotFoundError, match="checkpoints of Orbax, 3; open one of these"):
        dtckpt.open_checkpoint(ORBAX / "v0_manager")


def test_remote():
    remote = fsspec.filesystem("memory")
    for file in (ORBAX / "v0_manager" / "3").rglob("*"):
        if file.is_file():
            remote.pipe(f"/orbax/{file.relative_to(ORBAX / 'v0_manager')}", file.read_bytes())
    found, wanted = dtckpt.restore("memory://orbax/3"), dtckpt.restore(ORBAX / "v0_manager" / "3")
    assert found["extra"] == wanted["extra"]
    params = found["state"]["params"]["layers_0"]["kernel"]
    assert torch.equal(params, wanted["state"]["params"]["layers_0"]["kernel"])


def test_random_keys_are_named():
    with dtckpt.open_checkpoint(ORBAX / "nnx_pure_dict") as checkpoint:
        assert list(checkpoint.notes) == ["drop/rngs/key: the data of random keys of JAX (threefry2x32)"]
        assert checkpoint.read("drop/rngs/key").shape == (2,)
    assert dtckpt.open_checkpoint(PLAIN).notes == ()


@pytest.mark.parametrize("path", ["flax", "flax/checkpoint", "flax/checkpoint_10"])
def test_messagepack_of_flax_is_refused_by_name(tmp_path, path):
    (tmp_path / "flax").mkdir()
    for name in ("checkpoint", "checkpoint_10"):
        (tmp_path / "flax" / name).write_bytes(b"\x81\xa1w\x01")
    with pytest.raises(errors.CheckpointVersionError, match="a checkpoint of Flax in MessagePack"):
        dtckpt.open_checkpoint(tmp_path / path)


def test_layouts():
    with dtckpt.open_checkpoint(ORBAX / "v0_ocdbt_zarr2_mesh2x2") as checkpoint:
        layout = checkpoint.info("params/embed/embedding").layout
        assert (layout.sharding_specs, layout.mesh.dim_names) == (["unsharded", "data"], ["data", "model"])
        assert checkpoint.info("np").layout is None


@pytest.mark.parametrize("name", ["v0_plain_zarr2_mesh2x2", "v0_ocdbt_zarr3_mesh2x2"])
def test_regions_and_meshes(name):
    with dtckpt.open_checkpoint(ORBAX / name) as checkpoint:
        whole = checkpoint.read("params/layers_0/kernel")
        assert torch.equal(checkpoint.read("params/layers_0/kernel", Region((3, 5), (3, 4))), whole[3:6, 5:9])
        with pytest.raises(errors.RegionError, match="outside tensor"):
            checkpoint.read("params/layers_0/kernel", Region((3, 5), (6, 4)))
    mesh = dtckpt.create_mesh({"x": 3}, devices=[f"CPU:{each}" for each in range(3)])
    layouts = {"params/layers_0/kernel": dtckpt.Layout(["x", "unsharded"], mesh)}
    restored = dtckpt.restore(ORBAX / name, mesh=mesh, layouts=layouts)
    assert not differences(restored["params"]["layers_0"]["kernel"], whole)


@pytest.mark.parametrize("form", ["dtckpt", "safetensors", "torch"])
def test_convert(form, tmp_path):
    source = ORBAX / "v0_ocdbt_zarr2_mesh2x2"
    target = tmp_path / ("new.pt" if form == "torch" else "new")
    dtckpt.convert(source, target, to=form)
    before, after = named(dtckpt.restore(source)), named(dtckpt.restore(target))
    assert before.keys() == after.keys()
    assert all(torch.equal(a, after[n]) if torch.is_tensor(a) else a == after[n] for n, a in before.items())


@pytest.mark.together("orbax")  # each worker would import it
@pytest.mark.parametrize("is_zarr3", [False, True])
@pytest.mark.parametrize("has_database", [False, True])
def test_written_by_orbax_now(is_zarr3, has_database, tmp_path):
    """Values that lie in data files, inner chunks of shards, and every dtype that both know."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    draw = np.random.default_rng(0)
    tree = {str(np.dtype(each)): jnp.asarray(draw.integers(0, 2, (3, 5)), each) for each in (bool, "int8", "uint16")}
    tree["e4m3"] = jnp.asarray(draw.standard_normal(7), jnp.float8_e4m3fn)
    tree["large"] = [jnp.asarray(draw.standard_normal((64, 48)), jnp.float32), {"c": jnp.ones(2, jnp.float16)}]
    save_args = {key: ocp.SaveArgs() for key in tree}
    save_args["large"] = [ocp.SaveArgs(chunk_byte_size=2048), {"c": ocp.SaveArgs()}]
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=has_database, use_zarr3=is_zarr3)
    with ocp.Checkpointer(handler) as saver:
        saver.save(tmp_path / "new", args=ocp.args.PyTreeSave(tree, save_args=save_args))
    found = named(dtckpt.restore(tmp_path / "new"))
    wanted = named(tree)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert entry(tensor)["shape"] == list(wanted[name].shape)
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == np.asarray(wanted[name]).tobytes()


def test_several_processes(tmp_path):
    """Each process has a separate database, and the merged database refers to their files."""
    root = tmp_path / "new"
    shutil.copytree(ORBAX / "v0_ocdbt_zarr2_mesh2x2", root)
    for process in (0, 1):
        folder = f"ocdbt.process_{process}"
        shutil.rmtree(root / folder, ignore_errors=True)
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}/{folder}/"}).result()
        spec = {"driver": "zarr", "kvstore": store.spec().to_json() | {"path": "two/"}}
        spec["metadata"] = {"shape": [4], "chunks": [2], "dtype": "<i4", "compressor": {"id": "zstd"}}
        part = ts.open(spec, create=True).result()
        part[2 * process : 2 * process + 2].write(np.array([process, 7], np.int32)).result()
    context = ts.Context()
    merged = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}/"}, context=context).result()
    for process in (0, 1):
        base = f"file://{root}/ocdbt.process_{process}/"
        part = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
        part.experimental_copy_range_to(merged).result()
    metadata = json.loads((root / "_METADATA").read_text())
    leaf = {"key_metadata": [{"key": "two", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    metadata["tree_metadata"] = {"two": leaf}
    (root / "_METADATA").write_text(json.dumps(metadata))
    assert dtckpt.restore(root)["two"].tolist() == [0, 7, 1, 7]


# --- missing and unknown values ---------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    shutil.copytree(PLAIN, tmp_path / "plain")
    return tmp_path / "plain"


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_missing_chunks_are_zeros_where_orbax_left_zeros_out(plain):
    (plain / "np" / "0.0").unlink()
    with pytest.raises(errors.CheckpointCorruptError, match="missing"):
        dtckpt.restore(plain)
    change(plain / "_METADATA", store_array_data_equal_to_fill_value=False)
    assert dtckpt.restore(plain)["np"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_zeros_of_any_size_are_refused(plain):
    change(plain / "_METADATA", store_array_data_equal_to_fill_value=False)
    change(plain / "np" / ".zarray", shape=[1 << 20, 1 << 20], chunks=[1 << 20, 1 << 10])
    (plain / "np" / "0.0").unlink()
    with pytest.raises(errors.CheckpointCorruptError, match="may not all be zeros"):
        dtckpt.open_checkpoint(plain)


@pytest.mark.parametrize("chunks", [[1 << 40, 1024], [1 << 30, 1024]])
def test_shapes_that_the_files_cannot_hold_are_refused_before_anything_is_planned(plain, tmp_path, chunks):
    change(plain / "np" / ".zarray", shape=[1 << 40, 1024], chunks=chunks)
    with pytest.raises(errors.CheckpointCorruptError, match=r"np/0\.0"):
        dtckpt.reshard(plain, tmp_path / "new", mesh=abstract_mesh({"x": 2}))


def test_a_save_that_orbax_did_not_complete(plain):
    unfinished = plain.rename(plain.with_name("7.orbax-checkpoint-tmp"))
    with pytest.raises(errors.CheckpointIncompleteError, match="did not complete"):
        dtckpt.open_checkpoint(unfinished)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "int4"}, "dtype 'int4', which dtckpt does not know"),
        ({"compressor": {"id": "blosc"}}, "'blosc' as compressor, expected 'none' or 'zstd'"),
        ({"order": "F"}, "'F' as order"),
        ({"chunks": [1, 1 << 40]}, "is damaged"),
        ({"shape": [1 << 60, 3]}, "is damaged"),
        ({"shape": "x"}, "is damaged"),
    ],
)
def test_arrays_that_cannot_be_read_are_refused_by_name(plain, fields, reason):
    change(plain / "np" / ".zarray", **fields)
    with dtckpt.open_checkpoint(plain) as checkpoint:
        assert list(checkpoint.refused) == ["np"]
        assert checkpoint.read("params/layers_0/bias").shape == (12,)
        with pytest.raises(errors.CheckpointError, match=reason):
            checkpoint.read("np")


def test_names_that_lead_out_of_the_folder(plain):
    (plain.parent / "secret").mkdir()
    shutil.copytree(plain / "np", plain.parent / "secret" / "np")
    metadata = json.loads((plain / "_METADATA").read_text())
    metadata["tree_metadata"]["x"] = {
        "key_metadata": [{"key": "/../secret/np", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    (plain / "_METADATA").write_text(json.dumps(metadata))
    with dtckpt.open_checkpoint(plain) as checkpoint, pytest.raises(errors.CheckpointCorruptError, match="leads out"):
        checkpoint.validate_readable()


def test_other_files_and_unknown_items_are_named(plain, tmp_path):
    (plain / "notes.txt").write_text("x")
    with dtckpt.open_checkpoint(plain) as checkpoint:
        assert checkpoint.unread == ("notes.txt",)
    step = tmp_path / "3"
    shutil.copytree(ORBAX / "v0_manager" / "3", step)
    (step / "custom").mkdir()
    (step / "custom" / "blob.bin").write_bytes(b"1")
    with dtckpt.open_checkpoint(step) as checkpoint:
        assert checkpoint.unread == ("custom",)
    with pytest.raises(errors.CheckpointError, match="custom"):
        dtckpt.convert(step, tmp_path / "new")


def test_changed_bytes_are_no_tensors_of_another_shape(plain):
    file = plain / "params.layers_0.kernel" / "0.1"
    data = file.read_bytes()
    for changed in (data[:-1], data[:8], b"", data[:4] + b"\xff" * 40):
        file.write_bytes(changed)
        with pytest.raises(errors.CheckpointCorruptError):
            dtckpt.restore(plain)


@pytest.mark.parametrize("name", ["v0_plain_zarr2_mesh2x2", "v1_state", "v0_manager/3"])
def test_mutations(name, tmp_path):
    """Each gives the same, other values, or an error of this library."""
    draw = random.Random(name)
    root = tmp_path / "changed"
    for _ in range(60):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(ORBAX / name, root)
        files = sorted(each for each in root.rglob("*") if each.is_file())
        documents = [each for each in files if each.name.startswith(("_", ".z")) or "manifest" in each.name]
        file = draw.choice(documents if draw.random() < 0.6 else files)
        file.write_bytes(mutated(file.read_bytes(), draw))
        try:
            dtckpt.restore(root)
        except errors.CheckpointError:
            continue
        except errors.TreeError as error:
            assert "named" in str(error) or "items" in str(error)  # noqa: PT017


def test_the_metadata_is_the_mark_of_the_format():
    assert orbax_files.is_folder(["_METADATA"])
    assert not orbax_files.is_folder(["manifest.ocdbt", "d"])
