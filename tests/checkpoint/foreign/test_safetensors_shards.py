"""Parts of models, and shards of tensors, in safetensors files: dtckpt reads whole models, and names missing files."""

import json

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import dtckpt
from dtckpt import errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


def tensors():
    return {"rows": torch.arange(30.0).reshape(10, 3), "columns": torch.arange(28).reshape(4, 7), "one": torch.ones(2)}


def save_shards(folder, *, clients=3):
    """Save as the Hugging Face writer of DCP does on several clients: cut along the rows, and along the columns."""
    folder.mkdir()
    rows, columns = tensors()["rows"].chunk(clients), tensors()["columns"].chunk(clients, 1)
    for client in range(clients):
        boxes = {"rows": (rows[client], [4 * client, 0]), "columns": (columns[client], [0, 3 * client])}
        boxes |= {"one": (tensors()["one"], [0])} if client == 1 else {}
        offsets = {name: {"saved_offsets": offset} for name, (_, offset) in boxes.items()}
        safetensors.torch.save_file(
            {name: box.contiguous() for name, (box, _) in boxes.items()},
            folder / f"shard-{client + 1:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"},
        )
    return folder


def test_shards_are_whole_tensors(tmp_path):
    folder = save_shards(tmp_path / "s")
    theirs = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    restored = dtckpt.restore(folder)
    assert restored.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(restored[name], tensor)
        assert torch.equal(theirs[name], tensor)
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == ()
        assert torch.equal(checkpoint.read("rows", dtckpt.Region((3, 1), (4, 2))), tensors()["rows"][3:7, 1:])
    dtckpt.convert(folder, tmp_path / "new.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "new.safetensors")["columns"], tensors()["columns"])


def test_what_the_writer_of_one_process_writes(tmp_path):
    writer = HuggingFaceStorageWriter(str(tmp_path / "s"), save_distributed=True)
    dcp.save(tensors(), storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "s").glob("shard-00001-*"))) == 1
    restored = dtckpt.restore(tmp_path / "s")
    assert all(torch.equal(restored[name], tensor) for name, tensor in tensors().items())


def test_a_shard_that_is_missing(tmp_path):
    folder = save_shards(tmp_path / "s")
    second = next(folder.glob("shard-00002-*"))
    second.unlink()
    with pytest.raises(errors.CheckpointIncompleteError, match=r"are in none of the files; missing: shard-00002-\*"):
        dtckpt.restore(folder)
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert (list(checkpoint.tensors), set(checkpoint.refused)) == ([], {"rows", "columns"})
        # Whole tensors may have been in it, too.
        assert checkpoint.unread == ("shard-00002-* (no such file)",)


def test_a_shard_alone_is_no_tensor(tmp_path):
    folder = save_shards(tmp_path / "s")
    for file in sorted(folder.iterdir()):
        with pytest.raises(errors.CheckpointIncompleteError, match="give the directory of all shards"):
            dtckpt.open_checkpoint(file)
    renamed = file.rename(folder / "model.safetensors")
    with pytest.raises(errors.CheckpointIncompleteError, match="holds shards of tensors; give the directory"):
        dtckpt.open_checkpoint(renamed)


@pytest.mark.parametrize(
    "note",
    [
        "{",
        "[]",
        "{}",
        "[" * 10_000,
        '{"rows": {"saved_offsets": [0]}}',
        '{"rows": {"saved_offsets": [-1, 0]}}',
        '{"rows": {"saved_offsets": [true, 0]}}',
        '{"rows": {"saved_offsets": 3}}',
    ],
)
def test_malformed_notes_of_shards(tmp_path, note):
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    safetensors.torch.save_file({"rows": torch.ones(2, 2)}, file, metadata={"DCP_SHARDING_INFO": note})
    with pytest.raises(errors.CheckpointCorruptError, match="DCP_SHARDING_INFO"):
        dtckpt.open_checkpoint(tmp_path)


def test_shards_that_overlap_or_differ(tmp_path):
    for number, (box, offset) in enumerate(((torch.ones(2), 0), (torch.ones(2), 1))):
        note = json.dumps({"w": {"saved_offsets": [offset]}})
        safetensors.torch.save_file(
            {"w": box}, tmp_path / f"shard-{number}-x.safetensors", metadata={"DCP_SHARDING_INFO": note}
        )
    with pytest.raises(errors.CheckpointCorruptError, match="overlap"):
        dtckpt.restore(tmp_path)
    note = json.dumps({"w": {"saved_offsets": [2]}})
    safetensors.torch.save_file(
        {"w": box.int()}, tmp_path / "shard-1-x.safetensors", metadata={"DCP_SHARDING_INFO": note}
    )
    with pytest.raises(errors.CheckpointCorruptError, match="differ in dtype"):
        dtckpt.restore(tmp_path)


def test_a_part_of_a_model_alone(tmp_path):
    files = [tmp_path / f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        safetensors.torch.save_file({f"w{number}": torch.ones(2)}, file)
    with pytest.raises(errors.CheckpointIncompleteError, match=r"part 2 of 3 of a model; give its directory, or the i"):
        dtckpt.restore(files[1])
    assert set(dtckpt.restore(tmp_path)) == {"w0", "w1", "w2"}
    files[1].unlink()
    with pytest.raises(errors.CheckpointIncompleteError, match=r"2 of the 3 files .* model-00002-of-00003.safetensors"):
        dtckpt.restore(tmp_path)
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    assert set(dtckpt.restore(tmp_path / "model-00001-of-00001.safetensors")) == {"w"}


def test_a_name_that_claims_too_many_parts(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model-1-of-999999999.safetensors")
    with pytest.raises(errors.CheckpointCorruptError, match="one of 999999999 by its name"):
        dtckpt.open_checkpoint(tmp_path)
