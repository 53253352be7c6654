"""Tensors that repeat a few stored bytes: small ones are read, and of huge ones nothing is begun, by no command."""

import struct
import time

import pytest
import torch

import dtckpt
from dtckpt.cli.main import main
from dtckpt.errors import CheckpointCorruptError, StorageFullError, TreeError
from dtckpt.storage import new_files

from .hostile_pickles import chunk, described, metadata, place, size, tensor, text, zip_of
from .untrusted_checkpoints import limit_memory

HUGE = 1 << 20


@pytest.fixture
def huge(tmp_path):
    """A file of some hundred bytes, with a tensor of 4 TiB and a sound one."""
    state = {"huge": torch.ones(1).expand(HUGE, HUGE), "sound": torch.ones(3)}
    torch.save(state, tmp_path / "huge.pt")
    assert (tmp_path / "huge.pt").stat().st_size < 2000
    return tmp_path / "huge.pt"


def commands(path, target):
    """Return every command that reads elements."""
    return [
        ["verify", path],
        ["inspect", path],
        ["cat", "--stats", path, "huge"],
        ["cat", path, "huge[0, 0]"],
        ["diff", path, path],
        ["convert", path, f"{target}.safetensors"],
        ["convert", path, target, "--to", "dcp"],
        ["reshard", path, target, "--mesh", "x=2"],
    ]


@pytest.mark.parametrize("position", range(8))
def test_no_command_begins(huge, position):
    command = commands(str(huge), str(huge.with_name("new")))[position]
    start = time.process_time()
    with limit_memory(1 << 30):
        code = main(command)
    assert time.process_time() - start < 10
    assert code == (0 if command[0] in ("verify", "inspect") else 1)
    assert [file.name for file in huge.parent.iterdir()] == [huge.name]


def test_the_rest_of_the_file_is_read(huge):
    with dtckpt.open_checkpoint(huge) as checkpoint:
        assert checkpoint.read("sound").equal(torch.ones(3))
        assert "it was expanded to 4398046511104 bytes, of 4 that are stored" in checkpoint.refused["huge"].message
        with pytest.raises(TreeError, match="was expanded"):
            checkpoint.read("huge")
    with pytest.raises(TreeError, match="was expanded"):
        dtckpt.restore(huge)


def test_expanded_tensors_of_common_sizes_are_read(tmp_path):
    """Every command reads them."""
    state = {"mask": torch.ones(1).expand(1 << 11, 1 << 11), "bias": torch.arange(64.0)[:, None].expand(64, 4096)}
    torch.save(state, tmp_path / "m.pt")
    restored = dtckpt.restore(tmp_path / "m.pt")
    assert all(restored[name].equal(each) for name, each in state.items())
    with dtckpt.open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert checkpoint.verify().is_sound
    assert main(["convert", str(tmp_path / "m.pt"), str(tmp_path / "m.safetensors")]) == 0
    assert main(["reshard", str(tmp_path / "m.pt"), str(tmp_path / "m"), "--mesh", "x=2"]) == 0
    assert main(["diff", str(tmp_path / "m.pt"), str(tmp_path / "m.safetensors")]) == 0


def test_many_tensors_of_the_same_bytes(tmp_path):
    """Each is as large as one may be, and none is refused by itself."""
    one = torch.ones(1).expand(1 << 26)
    torch.save({f"w{number}": one for number in range(1000)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointCorruptError, match="bytes of tensors would be made of"):
        dtckpt.open_checkpoint(tmp_path / "m.pt")


def test_a_directory_of_pytorch_that_claims_more_than_its_streams_have(tmp_path):
    stream = zip_of(tensor((HUGE, HUGE), (0, 0)), {"0": bytes(4)})
    shape = size(HUGE, HUGE)
    tensors = text("huge") + described(shape, b"](" + chunk(size(0, 0), shape) + b"e")
    (tmp_path / ".metadata").write_bytes(metadata(tensors, place("huge", size(0, 0), len(stream))))
    (tmp_path / "__0_0.distcp").write_bytes(stream)
    start = time.process_time()
    for command in commands(str(tmp_path), str(tmp_path.with_name("new"))):
        main(command)
    assert time.process_time() - start < 20
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert "of its 4398046511104 bytes" in checkpoint.refused["huge"].message


def test_values_that_share_their_bytes(tmp_path):
    """A thousand values of one stream would take a thousand times as long as the stream."""
    stream = zip_of(b"(" + b"K\1" * 1000 + b"l", {})
    names = [f"n{number}" for number in range(1000)]
    kind = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)\x81"
    tensors = b"".join(text(name) + kind for name in names)
    stored = b"".join(place(name, b"N", len(stream)) for name in names)
    (tmp_path / ".metadata").write_bytes(metadata(tensors, stored))
    (tmp_path / "__0_0.distcp").write_bytes(stream)
    with pytest.raises(CheckpointCorruptError, match=r"share bytes of __0_0\.distcp"):
        dtckpt.open_checkpoint(tmp_path)


def test_a_shape_of_many_sizes_is_not_multiplied(tmp_path):
    shape = b",".join([b"%d" % (1 << 61)] * 100_000)
    header = b'{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % shape
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    start = time.process_time()
    with pytest.raises(CheckpointCorruptError):
        dtckpt.open_checkpoint(tmp_path / "m.safetensors")
    assert time.process_time() - start < 2


def test_a_conversion_that_does_not_fit_writes_nothing(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(1 << 20)})
    usage = new_files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(new_files.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    written = []
    monkeypatch.setattr("dtckpt.checkpoint.converting.files_target.FileWriter", written.append)
    with pytest.raises(StorageFullError, match=r"1\.0 MiB are free, and 4\.0 MiB are needed"):
        dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors")
    assert not written
    assert [each.name for each in tmp_path.iterdir()] == ["s"]
