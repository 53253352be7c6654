"""Models in safetensors files are opened as they are: facts, regions, restores, damage, and files that are no
checkpoint."""

import json
import os

import fsspec
import pytest
import safetensors.torch
import torch
from support.states import differences

import dtckpt
from checkpoint.foreign import safetensors_cases
from dtckpt import Layout, Region, RestoreOptions, errors
from dtckpt.checkpoint.foreign import piece_files

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64)


def model(scale=1):
    weights = {f"layers.{number}.w": scale * torch.arange(48.0).reshape(6, 8) + number for number in range(4)}
    kinds = {f"kind.{number}": torch.arange(6).reshape(2, 3).to(dtype) for number, dtype in enumerate(DTYPES)}
    return {**weights, **kinds, "none": torch.zeros(0, 3), "step": torch.tensor(7)}


def save_sharded(folder, tensors, *, files=3):
    """Save a model in several files with an index, as transformers does."""
    folder.mkdir()
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number::files]
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(params=["file", "folder", "sharded", "index", "plain folder"])
def stored(request, tmp_path):
    path = tmp_path / "model"
    if request.param in ("sharded", "index"):
        save_sharded(path, model())
        return path / "model.safetensors.index.json" if request.param == "index" else path
    path.mkdir()
    names = list(model())
    if request.param == "plain folder":
        safetensors.torch.save_file({name: model()[name] for name in names[:5]}, path / "b.safetensors")
        safetensors.torch.save_file({name: model()[name] for name in names[5:]}, path / "a.safetensors")
        (path / "config.json").write_text("{}")
        return path
    safetensors.torch.save_file(model(), path / "model.safetensors", metadata={"format": "pt"})
    # Not of this model: a directory often holds the weights of the authors, too.
    safetensors.torch.save_file(model(2), path / "consolidated.safetensors")
    return path / "model.safetensors" if request.param == "file" else path


def test_open_read_restore_verify(stored):
    expected = model()
    with dtckpt.open_checkpoint(stored) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            info = checkpoint.tensors[name]
            assert (info.shape, info.dtype, info.layout) == (tuple(tensor.shape), tensor.dtype, None)
            assert info.is_whole
            assert info.content_digest is None
            assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(checkpoint.read("layers.2.w", Region((1, 2), (3, 4))), expected["layers.2.w"][1:4, 2:6])
        report = checkpoint.verify()
        assert (report.is_sound, report.num_unverified, report.num_contents) == (True, len(expected) - 1, 0)
        with pytest.raises(errors.CheckpointError, match="no manifest"):
            _ = checkpoint.manifest
        with pytest.raises(errors.TensorNotFoundError, match="no tensor 'x'"):
            checkpoint.read("x")
    restored = dtckpt.restore(stored)
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items())


def test_restore_into_targets_and_onto_meshes(stored):
    mesh = dtckpt.create_mesh({"x": 2, "y": 3}, devices=[f"CPU:{number}" for number in range(6)])
    restored = dtckpt.restore(stored, mesh=mesh, layouts={"layers.*": Layout(["y", "x"], mesh)})
    for name, tensor in model().items():
        assert not differences(restored[name], tensor)
    assert restored["layers.0.w"].layout.sharding_specs == ["y", "x"]
    target = {"model": {"layers.1.w": torch.zeros(6, 8, dtype=torch.float64)}, "step": torch.tensor(0)}
    options = RestoreOptions(rename={"layers.1.w": "model/layers.1.w"}, allow_unexpected=True, cast="any")
    dtckpt.restore(stored, target, options=options)
    assert torch.equal(target["model"]["layers.1.w"], model()["layers.1.w"].double())
    assert target["step"] == 7


def test_reshard(stored, tmp_path):
    mesh = dtckpt.abstract_mesh({"x": 4})
    layouts = {"layers.*": Layout(["unsharded", "x"], mesh)}
    # Some of the directories hold other files, too.
    dtckpt.reshard(stored, tmp_path / "s", mesh=mesh, layouts=layouts, ignore_rest=True)
    restored = dtckpt.restore(tmp_path / "s")
    assert restored.keys() == model().keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in model().items())
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.tensors["layers.0.w"].num_chunks == 4
        assert checkpoint.verify().is_sound


def test_a_module_by_its_own_names(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    expected = {name: torch.full_like(tensor, 3.0) for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file(expected, tmp_path / "weights.safetensors")
    dtckpt.restore(tmp_path / "weights.safetensors", module)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_tied_tensors_of_save_model(tmp_path):
    module = torch.nn.ModuleDict({"in": torch.nn.Embedding(5, 4), "out": torch.nn.Linear(4, 5, bias=False)})
    module["out"].weight = module["in"].weight
    safetensors.torch.save_model(module, tmp_path / "m.safetensors")
    restored = dtckpt.restore(tmp_path / "m.safetensors")
    assert sorted(restored) == ["in.weight", "out.weight"]
    assert all(torch.equal(tensor, module["in"].weight) for tensor in restored.values())


@pytest.mark.parametrize("note", ["author", "best", "best.w", "layers.0.bias"])
def test_a_text_that_equals_a_name_is_no_tensor(tmp_path, note):
    tensors = {"layers.0.weight": torch.ones(2), "w": torch.zeros(3)}
    text = "layers.0.weight" if note == "layers.0.bias" else "w" if note != "best.w" else "layers.0.weight"
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={note: text, "format": "pt"})
    assert list(dtckpt.restore(tmp_path / "m.safetensors")) == list(
        safetensors.torch.load_file(tmp_path / "m.safetensors")
    )
    with dtckpt.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.unread == (f"m.safetensors: __metadata__/{note}",)


def test_the_file_that_transformers_chooses(tmp_path):
    folder = save_sharded(tmp_path / "m", model())
    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["w"]
        assert checkpoint.unread == (
            *(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)),
            "model.safetensors.index.json",
        )
    # diffusers looks for an index first.
    for file in folder.iterdir():
        file.rename(file.with_name(file.name.replace("model.", "diffusion_pytorch_model.")))
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(model())
        assert checkpoint.unread == ("diffusion_pytorch_model.safetensors",)


def test_an_index_with_dotted_paths(tmp_path):
    folder = save_sharded(tmp_path / "m", model())
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"./model-'))
    assert set(dtckpt.restore(folder)) == set(model())


def test_one_tensor_of_an_unknown_dtype(tmp_path):
    entries = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "new": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [8, 14]},
    }
    text = json.dumps(entries).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(14))
    with dtckpt.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.zeros(2))
        with pytest.raises(errors.CheckpointVersionError, match=r"'new' of m.safetensors has dtype F6_E2M3"):
            checkpoint.read("new")
        report = checkpoint.verify()
        assert (report.is_sound, report.unread) == (True, ("new",))
    with pytest.raises(errors.CheckpointVersionError, match="'new'"):
        dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "s")
    report = dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "s", ignore_rest=True)
    assert list(report.account.left_keys) == ["new"]
    assert list(dtckpt.restore(tmp_path / "s")) == ["w"]


def test_many_spans_in_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(piece_files, "spare_threads", lambda: 3)
    monkeypatch.setattr(piece_files, "BATCH_NBYTES", 2 << 10)
    monkeypatch.setattr(piece_files, "LOCAL_SPAN_NBYTES", 1 << 10)
    monkeypatch.setattr(piece_files, "LOCAL_GAP_NBYTES", 16)
    tensors = {f"w{number}": torch.randn(64, 33) for number in range(3)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    with dtckpt.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert torch.equal(checkpoint.read(name, Region((3, 5), (60, 20))), tensor[3:63, 5:25])
        (tmp_path / "m.safetensors").write_bytes((tmp_path / "m.safetensors").read_bytes()[:9000])
        with pytest.raises(errors.CheckpointConflictError, match=r"m.safetensors was replaced or changed"):
            checkpoint.read("w0")


def test_each_client_reads_its_slices_only(pool, tmp_path):
    tensors = {"rows": torch.randn(64, 1000), "columns": torch.randn(6, 1 << 16), "both": torch.randn(4, 1 << 16)}
    path = str(tmp_path / "m.safetensors")
    safetensors.torch.save_file(tensors, path)
    specs = {"rows": [("x", "y"), "unsharded"], "columns": ["unsharded", ("x", "y")], "both": ["x", "y"]}
    answers = pool.run(safetensors_cases.restore_slices, path, specs, {"x": 2, "y": 2}, clients=4, group=True)
    share = sum(tensor.nbytes for tensor in tensors.values()) // 4
    assert [answer.value for answer in answers] == [([], share)] * 4, answers


# --- damage -------------------------------------------------------------------------------------------------------


def test_files_that_are_cut_short_or_missing(tmp_path):
    folder = save_sharded(tmp_path / "m", model())
    file = folder / "model-00002-of-00003.safetensors"
    data = file.read_bytes()
    for length in (0, 7, 8, 60, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(errors.CheckpointCorruptError, match=file.name):
            dtckpt.restore(folder)
    for more in (b"\0", bytes(100_000)):
        file.write_bytes(data + more)
        with pytest.raises(errors.CheckpointCorruptError, match="bytes behind its last tensor"):
            dtckpt.open_checkpoint(folder)
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(file)
    file.unlink()
    with pytest.raises(errors.CheckpointCorruptError, match=f"{file.name} is missing"):
        dtckpt.restore(folder)
    os.mkfifo(file)
    with pytest.raises(errors.CheckpointCorruptError, match="a fifo"):
        dtckpt.restore(folder)


def test_an_index_that_does_not_fit(tmp_path):
    folder = save_sharded(tmp_path / "m", model())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["other"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(model())
        assert list(checkpoint.refused) == ["other"]
        with pytest.raises(errors.CheckpointCorruptError, match="'other' is in model-00001"):
            checkpoint.read("other")
    with pytest.raises(errors.CheckpointCorruptError, match="'other' is in model-00001"):
        dtckpt.restore(folder)
    index.write_text("{")
    with pytest.raises(errors.CheckpointCorruptError, match="JSON cannot be read"):
        dtckpt.open_checkpoint(folder)


def test_files_that_contradict_each_other(tmp_path):
    for file in ("a", "b"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(errors.CheckpointCorruptError, match=r"'w' is in a.safetensors and in b.safetensors"):
        dtckpt.open_checkpoint(tmp_path)
    assert dtckpt.restore(tmp_path / "a.safetensors")["w"].sum() == 2
    for index in ("a", "b"):
        (tmp_path / f"{index}.safetensors.index.json").write_text("{}")
    with pytest.raises(errors.CheckpointCorruptError, match=r"several models: a.safetensors.index.json, b"):
        dtckpt.open_checkpoint(tmp_path)


def test_a_replaced_file_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2000)}, path)
    with dtckpt.open_checkpoint(path) as checkpoint, dtckpt.open_checkpoint(path) as same:
        assert checkpoint.identity == same.identity
        # The very same header, but another state of the training.
        safetensors.torch.save_file({"w": torch.zeros(2000)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
        with pytest.raises(errors.CheckpointConflictError):
            checkpoint.read("w")
        with dtckpt.open_checkpoint(path) as other:
            assert other.identity != checkpoint.identity


def test_more_memory_than_the_file_has_bytes_is_not_taken(tmp_path):
    """Every tensor is an alias of the same bytes."""
    tensor = torch.ones(1 << 16)
    notes = {"dtckpt.content": "{}", **{f"alias {number}": "w" for number in range(3000)}}
    safetensors.torch.save_file({"w": tensor}, tmp_path / "m.safetensors", metadata=notes)
    with pytest.raises(errors.CheckpointCorruptError, match="would be made of"):
        dtckpt.restore(tmp_path / "m.safetensors")


# --- files that are no checkpoint ---------------------------------------------------------------------------------


def test_what_is_not_understood(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(errors.CheckpointNotFoundError, match="it is a file of no format that dtckpt reads; expected"):
        dtckpt.open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"it holds notes.txt; expected a checkpoint of dtckpt, a"):
        dtckpt.open_checkpoint(tmp_path)
    (tmp_path / "client_0").mkdir()
    with pytest.raises(errors.CheckpointIncompleteError, match="the save did not complete"):
        dtckpt.open_checkpoint(tmp_path)


def test_our_own_comes_first(tmp_path):
    dtckpt.save(tmp_path / "s", {"w": torch.ones(3)})
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "s" / "model.safetensors")
    assert dtckpt.restore(tmp_path / "s")["w"].sum() == 3


def test_files_are_recognized_by_content(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "weights")
    assert dtckpt.restore(tmp_path / "weights")["w"].sum() == 2
    (tmp_path / "x.safetensors").write_bytes(b"PK")
    with pytest.raises(errors.CheckpointCorruptError, match="no safetensors file"):
        dtckpt.open_checkpoint(tmp_path / "x.safetensors")


# --- storage elsewhere --------------------------------------------------------------------------------------------


def put(url, tensors):
    """Put a model at a URL of fsspec."""
    for name, part in tensors.items():
        with fsspec.open(f"{url}/{name}", "wb") as file:
            file.write(safetensors.torch.save(part))


def test_fsspec_urls(monkeypatch):
    monkeypatch.setattr(piece_files, "REMOTE_SPAN_NBYTES", 64)
    monkeypatch.setattr(piece_files, "REMOTE_GAP_NBYTES", 8)
    put("memory://zoo/m", {"model.safetensors": model()})
    for url in ("memory://zoo/m", "memory://zoo/m/model.safetensors"):
        restored = dtckpt.restore(url)
        assert all(torch.equal(restored[name], tensor) for name, tensor in model().items())
        with dtckpt.open_checkpoint(url) as checkpoint:
            assert checkpoint.is_remote
            assert torch.equal(checkpoint.read("layers.0.w", Region((1, 2), (5, 3))), model()["layers.0.w"][1:6, 2:5])
    with fsspec.open("memory://zoo/m/model.safetensors", "rb") as file:
        data = file.read()
    with fsspec.open("memory://zoo/m/model.safetensors", "wb") as file:
        file.write(data[:-3])
    with pytest.raises(errors.CheckpointCorruptError, match="cut short"):
        dtckpt.restore("memory://zoo/m")
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.restore("memory://zoo/none")
