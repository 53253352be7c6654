"""TensorFlow V2 checkpoints that `convert` writes, read by our reader, and compared with the bytes of TensorFlow.

TensorFlow is not installed here. That its index is what we write follows from `checkpoint.foreign.test_tensorflow`,
where our tables and entries of its samples have its bytes.
"""

import pytest
import torch

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES
from dtckpt import errors
from dtckpt.checkpoint.foreign.sstable import read_table
from dtckpt.checkpoint.foreign.tensor_bundle import OBJECT_GRAPH, BundleEntry, path_of

TREE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4).bfloat16(), "s": torch.tensor(3), "e": torch.zeros(0, 3)},
    "opt": [{"m": torch.ones(5)}, {}],
    "step": 7,
    "lr": 0.5,
    "on": True,
    "name": "hé",
    "raw": b"x" * 300,
    "none": None,
}


@pytest.fixture
def source(tmp_path):
    dtckpt.save(tmp_path / "own", TREE)
    return tmp_path / "own"


@pytest.mark.parametrize("max_shard_size", [30, 1 << 30])
def test_there_and_back(source, tmp_path, max_shard_size):
    report = dtckpt.convert(source, tmp_path / "new", to="tensorflow", max_shard_size=max_shard_size)
    assert report.account.left_keys.keys() == {"none", "opt/1"}
    for path in (tmp_path / "new", tmp_path / "new" / "ckpt"):
        restored = dtckpt.restore(path)
        assert torch.equal(restored["model"]["w"], TREE["model"]["w"])
        assert restored["model"]["e"].shape == (0, 3)
        assert torch.equal(restored["opt"]["0"]["m"], torch.ones(5))
        numbers = [restored[name] for name in ("step", "lr", "on")]
        assert [number.dtype for number in numbers] == [torch.int64, torch.float64, torch.bool]
        assert [number.item() for number in numbers] == [7, 0.5, True]
        assert (restored["name"], restored["raw"]) == ("hé".encode(), b"x" * 300)
    with dtckpt.open_checkpoint(tmp_path / "new") as checkpoint:
        verified = checkpoint.verify()
        assert (verified.damages, verified.num_unverified) == ((), 0)
    assert 'model_checkpoint_path: "ckpt"\n' in (tmp_path / "new" / "checkpoint").read_text()


def test_entries_are_those_that_tensorflow_wrote(tmp_path):
    """But for the place of the elements, as ours are aligned."""
    sample = SAMPLES / "tensorflow" / "many"
    dtckpt.convert(sample, tmp_path / "new", to="tensorflow", select=["*0000*", "*5*"])
    theirs = dict(read_table((sample / "ck.index").read_bytes(), "theirs"))
    ours = dict(read_table((tmp_path / "new" / "ckpt.index").read_bytes(), "ours"))
    assert ours[b""] == theirs[b""]
    for name, value in ours.items():
        if name and name != OBJECT_GRAPH.encode():
            (plain,) = path_of(name.decode())
            one, other = BundleEntry.parse(value), BundleEntry.parse(theirs[plain.encode()])
            assert (one.dtype, one.shape, one.nbytes, one.crc) == (other.dtype, other.shape, other.nbytes, other.crc)


def test_slices_become_one_tensor(tmp_path):
    sample = SAMPLES / "tensorflow" / "dtensor_2x2"
    dtckpt.convert(sample / "ck", tmp_path / "new", to="tensorflow")
    assert torch.equal(dtckpt.restore(tmp_path / "new")["w"], dtckpt.restore(sample)["w"])


def test_overwriting(source, tmp_path):
    for overwrite in (False, True):
        dtckpt.convert(source, tmp_path / "new", to="tensorflow", overwrite=overwrite)
    (tmp_path / "new" / "notes").write_text("x")
    with pytest.raises(errors.CheckpointExistsError, match="notes"):
        dtckpt.convert(source, tmp_path / "new", to="tensorflow", overwrite=True)


@pytest.mark.parametrize(
    ("tree", "error", "reason"),
    [
        ({"x": 1 << 70}, errors.TreeError, "numbers of 64 bits"),
        ({"x": {1, 2}}, errors.TreeError, "got set at 'x'"),
        ({"x": torch.ones(2, dtype=torch.complex32)}, errors.DTypeError, "of dtype complex32"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_tensorflow_cannot_hold(tree, error, reason, tmp_path):
    dtckpt.save(tmp_path / "own", tree)
    with pytest.raises(error, match=reason):
        dtckpt.convert(tmp_path / "own", tmp_path / "new", to="tensorflow")
    assert not (tmp_path / "new").exists()
