"""Content digests of checkpoints: whatever the layout, the key-value store or the chunks."""

import numpy as np
import pytest
import torch
from support.states import packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.resharding.checkpoint_source import CheckpointSource
from dtckpt.errors import CheckpointCorruptError

MESH = abstract_mesh({"x": 3, "y": 2})
WHOLE = {"w": tensor_of("w", (50, 33), "float32"), "v": tensor_of("v", (1001,), "bfloat16"), "s": torch.tensor(3)}
SPECS = [
    None,
    {"w": ["x", "y"], "v": ["x"], "s": []},
    {"w": ["unsharded", ("x", "y")], "v": [("y", "x")], "s": []},
    {"w": ["unsharded", "unsharded"], "v": ["y"], "s": []},
]


def contents(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().num_contents == len(checkpoint.tensors)
        return {name: info.content_digest for name, info in checkpoint.tensors.items()}


def saved(path, specs=None, whole=None, **options):
    tree = {
        name: packed(tensor, Layout(specs[name], MESH)) if specs else tensor
        for name, tensor in (whole or WHOLE).items()
    }
    dtckpt.save(path, tree, options=SaveOptions(**options))
    return contents(path)


def test_equal_states_have_equal_contents(tmp_path):
    found = [
        saved(tmp_path / f"{number}-{kvstore}-{size}", specs, kvstore=kvstore, chunk_nbytes=size)
        for number, specs in enumerate(SPECS)
        for kvstore in ("ocdbt", "zarr")
        for size in (16 << 20, 100)
    ]
    assert all(each == found[0] for each in found)
    assert len(set(found[0].values())) == 3


def test_any_other_state_has_another(tmp_path):
    first = saved(tmp_path / "a")["w"]
    changes = {
        "bit": lambda w: w.view(torch.int32).bitwise_xor(torch.eye(50, 33, dtype=torch.int32)).view(torch.float32),
        "rows": lambda w: w[torch.arange(49, -1, -1)],
        "transposed": lambda w: w.T,
        "shift": lambda w: w.roll(1, 1),
    }
    for name, change in changes.items():
        assert saved(tmp_path / name, whole={"w": change(WHOLE["w"]).contiguous()})["w"] != first, name


def test_reshard_keeps_contents_or_does_not_commit(tmp_path, monkeypatch):
    expected = saved(tmp_path / "a", SPECS[1])
    mesh = abstract_mesh({"x": 4})
    report = dtckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=mesh, layouts={"w": Layout(["unsharded", "x"], mesh)})
    assert contents(tmp_path / "b") == expected == {item.name: item.content_digest for item in report.tensors}
    fetch = CheckpointSource.fetch

    def fetch_wrongly(self, plan, region):
        elements = np.array(fetch(self, plan, region))
        if plan.spec.name == "w":
            elements.reshape(-1)[:2] = elements.reshape(-1)[1::-1]
        return elements

    monkeypatch.setattr(CheckpointSource, "fetch", fetch_wrongly)
    # Where the dtype changes, the new tensor must have the digest of the elements as they are read and converted.
    for dtype in (None, torch.float16):
        with pytest.raises(CheckpointCorruptError, match="tensor 'w' would get other elements; got content"):
            dtckpt.reshard(tmp_path / "a", tmp_path / "c", mesh=mesh, dtype=dtype)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]


def test_tensors_saved_in_part(tmp_path):
    mesh = abstract_mesh({"x": 1})
    parts = ["6 4 0,2:0,4", "6 4 4,2:0,4"]
    dtckpt.sharded_save(mesh, tmp_path / "a", ["w", "w"], parts, [torch.ones(2, 4), torch.full((2, 4), 2.0)])
    before = contents(tmp_path / "a")
    dtckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=abstract_mesh({"x": 3}))
    assert contents(tmp_path / "b") == before


def test_without(tmp_path):
    dtckpt.save(tmp_path / "a", WHOLE, options=SaveOptions(content_digest=False))
    with dtckpt.open_checkpoint(tmp_path / "a") as checkpoint:
        report = checkpoint.verify()
        assert (report.is_sound, report.num_contents) == (True, 0)
        assert checkpoint.info("w").content_digest is None
    dtckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=abstract_mesh({"x": 2}))
    assert contents(tmp_path / "b") == saved(tmp_path / "c")
