"""The metadata of PyTorch's distributed checkpoints: of real ones, of damaged ones, and of hostile ones."""

import contextlib
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dtckpt.checkpoint.foreign.dcp_metadata import StoredItem, parse_metadata
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, DtckptError
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.layout.region import Region

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


def chunk(offset, shape):
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


def metadata(**changes):
    """Return the metadata of a tensor in two chunks (the second one empty), a scalar, and a value."""
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16), torch.Size([4, 3]), [chunk([0, 0], [4, 3]), chunk([4, 0], [0, 3])]
    )
    whole = Metadata(
        {
            "model.w": tensor,
            "step": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([]), [chunk([], [])]),
            "lr": BytesStorageMetadata(),
        },
        {"model.w": ("model", "w"), "step": ("step",), "lr": ("groups", 0, "lr")},
        {
            MetadataIndex("model.w", [0, 0], 5): _StorageInfo("__0_0.distcp", 7, 9),
            MetadataIndex("model.w", [4, 0]): _StorageInfo("__1_0.distcp", 0, 3),
            MetadataIndex("step", []): _StorageInfo("sub/__0_1.distcp", 1, 2),
            MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 0, 7),
        },
        StorageMeta("/path", "id"),
        "1.0.0",
    )
    return replace(whole, **changes)


def parsed(value, protocol=pickle.DEFAULT_PROTOCOL):
    return parse_metadata(pickle.dumps(value, protocol), "some/.metadata")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata(protocol):
    found = parsed(metadata(), protocol)
    assert found.tensors["model.w"].dtype == "bfloat16"
    assert found.tensors["model.w"].shape == (4, 3)
    assert found.tensors["model.w"].chunks == ((Region((0, 0), (4, 3)), StoredItem("__0_0.distcp", 7, 9)),)
    assert found.tensors["step"].chunks == ((Region((), ()), StoredItem("sub/__0_1.distcp", 1, 2)),)
    assert found.values == {"lr": StoredItem("__0_0.distcp", 0, 7)}
    assert found.paths == {"model.w": ("model", "w"), "step": ("step",), "lr": ("groups", 0, "lr")}
    assert found.refused == {}


def test_a_state_dict_that_was_not_flattened_has_names_only():
    assert parsed(metadata(planner_data=None)).paths == {name: (name,) for name in ("model.w", "step", "lr")}


def test_metadata_of_a_real_save(tmp_path):
    state = {"model": {"w": torch.ones(3, 4), "b": torch.empty(0, 2)}, "step": 3, "list": [torch.ones(2), {"a": 1}]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = parse_metadata((tmp_path / DCP_METADATA_NAME).read_bytes(), "it")
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        "model.w": (3, 4),
        "model.b": (0, 2),
        "list.0": (2,),
    }
    assert found.paths["list.1.a"] == ("list", 1, "a")
    assert found.tensors["model.b"].chunks == ()
    for item in [*found.values.values(), *(item for t in found.tensors.values() for _, item in t.chunks)]:
        data = (tmp_path / item.file).read_bytes()[item.offset : item.offset + item.nbytes]
        assert data.startswith(b"PK\3\4")
        assert data[-22:].startswith(b"PK\5\6")


def test_what_cannot_be_read_is_refused_by_name():
    transformed = dict(metadata().storage_data)
    transformed[MetadataIndex("lr")] = _StorageInfo("__0_0.distcp", 0, 7, ["zstd"])
    quantized = dict(metadata().state_dict_metadata)
    quantized["step"] = TensorStorageMetadata(TensorProperties(torch.qint8), torch.Size([]), [chunk([], [])])
    found = parsed(metadata(storage_data=transformed, state_dict_metadata=quantized))
    assert "extensions of the writer" in found.refused["lr"].message
    assert "its dtype is qint8" in found.refused["step"].message
    assert list(found.tensors) == ["model.w"]
    assert found.paths["lr"] == ("groups", 0, "lr")


class Unknown(Metadata):
    pass


def without(name):
    """Return the places of all chunks but the chunks of one tensor."""
    return {index: info for index, info in metadata().storage_data.items() if index.fqn != name}


def placed(**facts):
    return {**metadata().storage_data, MetadataIndex("lr"): replace(_StorageInfo("a", 0, 7), **facts)}


def laughs():
    value = "a"
    for _ in range(60):
        value = (value, value)
    return value


MALFORMED = {
    "no file for a value": metadata(storage_data=without("lr")),
    "no file for a chunk": metadata(storage_data=without("step")),
    "no files at all": metadata(storage_data=None),
    "a file elsewhere": metadata(storage_data=placed(relative_path="../a")),
    "an absolute file": metadata(storage_data=placed(relative_path="/etc/passwd")),
    "a file that is no text": metadata(storage_data=placed(relative_path=laughs())),
    "a negative offset": metadata(storage_data=placed(offset=-1)),
    "a length that is no number": metadata(storage_data=placed(length=laughs())),
    "a huge length": metadata(storage_data=placed(length=1 << 70)),
    "a name that is no text": metadata(state_dict_metadata={3: BytesStorageMetadata()}),
    "a path that is no tuple": metadata(planner_data={"lr": ["a"]}),
    "an empty path": metadata(planner_data={"lr": ()}),
    "a path of odd keys": metadata(planner_data={"lr": (laughs(),)}),
    "metadata that is no dict": metadata(state_dict_metadata=laughs()),
    "a shape of texts": metadata(state_dict_metadata={"step": TensorStorageMetadata(TensorProperties(), ("a",), [])}),
    "chunks that are none": metadata(
        state_dict_metadata={"step": TensorStorageMetadata(TensorProperties(), torch.Size([]), [laughs()])}
    ),
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_malformed_metadata_is_refused(value):
    with pytest.raises((CheckpointCorruptError, CheckpointVersionError), match="metadata"):
        parsed(value)


@pytest.mark.parametrize("value", [Unknown({}), {"a": 1}, 3, None, torch.Size([1])], ids=str)
def test_metadata_of_another_class_is_refused_by_its_name(value):
    with pytest.raises(CheckpointVersionError, match=r"expected torch\.distributed\.checkpoint\.metadata\.Metadata"):
        parsed(value)


def test_changed_bytes_give_an_error_or_metadata():
    data = pickle.dumps(metadata())
    for position in range(len(data)):
        for flip in (0x01, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            with contextlib.suppress(DtckptError):
                parse_metadata(bytes(damaged), "it")
