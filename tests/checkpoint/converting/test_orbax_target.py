"""Folders of Orbax that `convert` writes, restored by Orbax itself."""

import numpy as np
import pytest
import torch

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES
from dtckpt import errors
from dtckpt.checkpoint.converting import orbax_target

TREE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4).bfloat16(), "s": torch.tensor(3), "f": torch.ones(2).double()},
    "opt": [{"m": torch.arange(15.0).reshape(5, 3)}, {}, (torch.ones(1, dtype=torch.bool),)],
    "a.b/c": np.arange(3, dtype=np.uint16),
    "step": 7,
    "lr": 0.5,
    "big": float("inf"),
    "on": True,
    "name": "hé",
    "none": None,
    "empty": [],
}


@pytest.fixture
def source(tmp_path):
    dtckpt.save(tmp_path / "own", TREE)
    return tmp_path / "own"


def same(found, saved):
    """Whether Orbax's tree has the saved values, in Orbax's containers."""
    if isinstance(saved, dict):
        return found.keys() == saved.keys() and all(same(found[key], saved[key]) for key in saved)
    if isinstance(saved, list | tuple):
        return len(found) == len(saved) and all(map(same, found, saved))
    if torch.is_tensor(saved) or isinstance(saved, np.ndarray):
        saved = torch.as_tensor(saved)
        is_alike = str(found.dtype) == str(saved.dtype).removeprefix("torch.") and found.shape == tuple(saved.shape)
        return is_alike and np.asarray(found).tobytes() == saved.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found == saved


@pytest.mark.together("orbax")  # each worker would import it
def test_orbax_restores_it(source, tmp_path, monkeypatch):
    """Also tensors in several chunks, of which the last is padded."""
    import orbax.checkpoint as ocp

    monkeypatch.setattr(orbax_target, "CHUNK_NBYTES", 24)
    report = dtckpt.convert(source, tmp_path / "new", to="orbax")
    assert {"opt.0.m/0.0", "opt.0.m/1.0", "opt.0.m/2.0", "a.b/c/0"} <= report.files.keys()
    with ocp.StandardCheckpointer() as reader:
        assert same(reader.restore(tmp_path / "new"), TREE)
    assert dtckpt.restore(tmp_path / "new")["opt"][2][0].tolist() == [True]


@pytest.mark.together("orbax")  # each worker would import it
def test_orbax_restores_it_to_devices(source, tmp_path):
    import jax
    import orbax.checkpoint as ocp

    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))
    dtckpt.convert(source, tmp_path / "new", to="orbax", select="model/w")
    target = {"model": {"w": jax.ShapeDtypeStruct((3, 4), "bfloat16", sharding=sharding)}}
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(tmp_path / "new", target)["model"]["w"]
    assert restored.sharding == sharding
    assert same(restored, TREE["model"]["w"])


def test_there_and_back(tmp_path):
    sample = SAMPLES / "orbax" / "v0_ocdbt_zarr2_mesh2x2"
    dtckpt.convert(sample, tmp_path / "own")
    dtckpt.convert(tmp_path / "own", tmp_path / "new", to="orbax")
    before, after = dtckpt.restore(sample), dtckpt.restore(tmp_path / "new")
    assert after.keys() == before.keys()
    assert torch.equal(
        after["opt_state"][0]["mu"]["layers_0"]["kernel"], before["opt_state"][0]["mu"]["layers_0"]["kernel"]
    )
    assert (after["note"], after["step"]) == ("héllo", 10)


def test_overwriting(source, tmp_path):
    for overwrite in (False, True):
        dtckpt.convert(source, tmp_path / "new", to="orbax", overwrite=overwrite)
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.convert(source, tmp_path / "new", to="orbax")
    (tmp_path / "new" / "config.json").write_text("{}")
    with pytest.raises(errors.CheckpointExistsError, match=r"config\.json"):
        dtckpt.convert(source, tmp_path / "new", to="orbax", overwrite=True)


@pytest.mark.parametrize(
    ("tree", "error", "reason"),
    [
        ({"x": b"raw"}, errors.TreeError, "got bytes at 'x'"),
        ({"x": 1 << 70}, errors.TreeError, "numbers of 64 bits"),
        ({"a.b": 1, "a": {"b": 2}}, errors.TensorNameError, "the name 'a.b'"),
        ({"a": torch.ones(2), "a/0": torch.ones(2)}, errors.TensorNameError, "as a file and as a folder"),
        ({"d": torch.ones(2)}, errors.TensorNameError, "cannot have the name 'd'"),
        ({"x:y": torch.ones(2)}, errors.TensorNameError, "cannot have the name 'x:y'"),
        ({"x": torch.ones(2, dtype=torch.complex32)}, errors.DTypeError, "of dtype complex32"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_orbax_cannot_hold(tree, error, reason, tmp_path):
    dtckpt.save(tmp_path / "own", tree)
    with pytest.raises(error, match=reason):
        dtckpt.convert(tmp_path / "own", tmp_path / "new", to="orbax")
    assert not (tmp_path / "new").exists()
