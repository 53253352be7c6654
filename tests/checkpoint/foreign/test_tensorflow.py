"""TensorFlow V2 checkpoints: samples against the digests of what TensorFlow loads, tables against its bytes, damage."""

import random
import shutil

import fsspec
import pytest
import torch
from awscrt.checksums import crc32c
from storage.untrusted.hostile_files import mutated

import dtckpt
from checkpoint.foreign.sample_files import SAMPLES, content, entry
from dtckpt import DTensorCheckpoint, DVariable, Layout, Region, abstract_mesh, errors
from dtckpt.checkpoint.foreign import object_graph, tensor_bundle
from dtckpt.checkpoint.foreign.sstable import mask, read_table, table_bytes, unmask
from dtckpt.checkpoint.foreign.tensor_bundle import OBJECT_GRAPH, BundleEntry, path_of, slice_key

TENSORFLOW = SAMPLES / "tensorflow"
PREFIXES = {file.parent.name: file.with_suffix("") for file in sorted(TENSORFLOW.glob("*/*.index"))}
EXPECTED = sorted(file.name.removesuffix(".expected.json") for file in TENSORFLOW.glob("*.expected.json"))
GRAPH = OBJECT_GRAPH.encode()
MESH = abstract_mesh({"x": 2, "y": 2})


@pytest.mark.parametrize("name", EXPECTED)
def test_samples(name):
    wanted, _ = content(TENSORFLOW, name)
    has_graph = OBJECT_GRAPH in wanted
    with dtckpt.open_checkpoint(PREFIXES[name]) as checkpoint:
        assert checkpoint.format == "tensorflow"
        assert (checkpoint.refused, checkpoint.unread) == ({}, ())
        for key, each in wanted.items():
            if "sha256" in each:
                assert entry(checkpoint.read("/".join(path_of(key)) if has_graph else key)) == each
        report = checkpoint.verify()
        assert (report.damages, report.num_unverified) == ((), 0)


def test_objects_strings_and_names():
    model = dtckpt.restore(PREFIXES["object"])["model"]
    assert model["names"] == [b"a", "héé".encode(), b""]
    assert model["d"]["x.y/z"].item() == 1.5
    assert model["layers"]["0"].tolist() == [0, 1, 2]
    assert path_of("model/w/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE") is None


@pytest.mark.parametrize("path", ["object/ckpt-1", "object/ckpt-1.index", "object", "dtensor_2x2_obj"])
def test_paths(path):
    """The prefix, the index, a folder with one checkpoint, and one whose newest is named."""
    assert dtckpt.restore(TENSORFLOW / path)["model"]["w"].shape == (6, 4)


def test_a_folder_of_several_checkpoints(tmp_path):
    for name in ("a", "b"):
        for file in (TENSORFLOW / "object").iterdir():
            shutil.copy(file, tmp_path / file.name.replace("ckpt-1", name))
    with pytest.raises(errors.CheckpointNotFoundError, match="several checkpoints of TensorFlow: a, b"):
        dtckpt.open_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/b"\nall_model_checkpoint_paths: "a"\n')
    assert dtckpt.restore(tmp_path)["model"]["step"] == 7


def test_remote():
    remote = fsspec.filesystem("memory")
    for file in (TENSORFLOW / "slices").iterdir():
        remote.pipe(f"/tf/{file.name}", file.read_bytes())
    whole = dtckpt.restore(PREFIXES["slices"])["w"]
    for path in ("memory://tf/merged", "memory://tf/merged.index"):
        assert torch.equal(dtckpt.restore(path)["w"], whole)


def test_slices_onto_other_meshes():
    whole = dtckpt.restore(PREFIXES["dtensor_2x2"])["w"]
    with dtckpt.open_checkpoint(PREFIXES["dtensor_2x2"]) as checkpoint:
        assert len(checkpoint.info("w").chunks) == 4
        assert torch.equal(checkpoint.read("w", Region((2, 1), (3, 2))), whole[2:5, 1:3])
    template = dtckpt.restore(PREFIXES["dtensor_2x2"], mesh=MESH, layouts={"w": Layout(["y", "x"], MESH)})
    restored = dtckpt.name_based_restore(MESH, PREFIXES["dtensor_4x1_nbs"], {"w": template["w"]})
    assert torch.equal(restored["w"].full_tensor(), whole)


@pytest.mark.parametrize("name", ["dtensor_2x2_obj", "dtensor_4x1_obj"])
def test_objects_of_a_dtensor_checkpoint(name):
    """The counter of saves is restored, too, and everything finds its object."""
    whole = dtckpt.restore(PREFIXES[name])["model"]
    weight = DVariable(torch.zeros(6, 4), Layout(["x", "y"], MESH))
    bias = DVariable(torch.zeros(4), Layout(["y"], MESH))
    checkpoint = DTensorCheckpoint(MESH, model={"w": weight, "b": bias})
    checkpoint.restore(PREFIXES[name]).assert_consumed()
    assert checkpoint.save_counter == 1
    assert torch.equal(weight.full_tensor(), whole["w"])


def test_bfloat16_is_restored_to_float32():
    weight = DVariable(torch.zeros(6, 4), Layout(["x", "y"], MESH))
    DTensorCheckpoint(MESH, model={"w": weight}).restore(PREFIXES["dtensor_bf16"]).assert_consumed()
    assert torch.equal(weight.full_tensor(), dtckpt.restore(PREFIXES["dtensor_bf16"])["model"]["w"].float())


@pytest.mark.parametrize("form", ["dtckpt", "safetensors", "torch"])
def test_convert(form, tmp_path):
    target = tmp_path / ("new.pt" if form == "torch" else "new")
    dtckpt.convert(PREFIXES["object"], target, to=form)
    before, after = dtckpt.restore(PREFIXES["object"]), dtckpt.restore(target)
    assert torch.equal(before["model"]["w"], after["model"]["w"])
    assert before["model"]["names"] == after["model"]["names"]


@pytest.mark.parametrize("name", sorted(PREFIXES))
def test_our_tables_have_the_bytes_of_tensorflow(name):
    data = PREFIXES[name].with_name(f"{PREFIXES[name].name}.index").read_bytes()
    table = read_table(data, "it")
    assert table_bytes(table) == data
    whole = {key: each for key, each in table[1:] if not (parsed := BundleEntry.parse(each)).slices and parsed.crc}
    for value in whole.values():
        assert BundleEntry.parse(value).to_bytes() == value


# --- the graph of objects ---------------------------------------------------------------------------------------------


def test_the_graph_tells_the_paths_of_tensorflow():
    """By the graph of a real checkpoint, the keys of all values are their paths."""
    with dtckpt.open_checkpoint(TENSORFLOW / "object") as checkpoint:
        names = {name for name in checkpoint.tensors if not name.startswith("_")}
    paths = object_graph.paths_of(graph_of(PREFIXES["object"]))
    assert {path_of(key) for key in paths if path_of(key)} == {path for key, path in paths.items() if path_of(key)}
    assert {"/".join(path).replace("x.y/z", "x.y/z") for path in paths.values()} >= names - {"save_counter"}


def graph_of(prefix):
    entry = BundleEntry.parse(dict(read_table(prefix.with_name(f"{prefix.name}.index").read_bytes(), "it"))[GRAPH])
    data = prefix.with_name(f"{prefix.name}.data-00000-of-00001").read_bytes()
    return tensor_bundle.parse_strings(data[entry.offset : entry.offset + entry.nbytes], 1, None, crc32c)[0]


def test_the_output_has_a_graph_of_objects(tmp_path):
    """TensorFlow 2.21 restores this output by its graph, into variables at the same paths."""
    tree = {
        "model": {"w": torch.ones(2), "a.b/c": torch.zeros(3), "layers": [torch.ones(1), 5]},
        "note": "x",
        "no": None,
    }
    dtckpt.save(tmp_path / "ours", tree)
    dtckpt.convert(tmp_path / "ours", tmp_path / "tf", to="tensorflow")
    paths = object_graph.paths_of(graph_of(tmp_path / "tf" / "ckpt"))
    assert set(paths.values()) == {
        ("model", "w"),
        ("model", "a.b/c"),
        ("model", "layers", "0"),
        ("model", "layers", "1"),
        ("note",),
    }
    with dtckpt.open_checkpoint(tmp_path / "tf") as checkpoint:
        assert not checkpoint.refused
        assert torch.equal(checkpoint.read("model/a.b/c"), torch.zeros(3))


def test_bytes_of_a_graph():
    """As protobuf writes TrackableObjectGraph: the children of a node, its value, and that there are values below."""
    data = object_graph.graph_bytes([(("m", "w"), "m/w")])
    assert data.hex(" ") == (
        "0a 0b 0a 05 08 01 12 01 6d 2a 02 08 01 0a 0b 0a 05 08 02 12 01 77 2a 02 08 01 "
        "0a 20 12 1a 0a 0e 56 41 52 49 41 42 4c 45 5f 56 41 4c 55 45 12 03 6d 2f 77 1a 03 6d 2f 77 2a 02 08 01"
    )
    assert object_graph.paths_of(data) == {"m/w": ("m", "w")}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\x08\x02\x1a\x04\x08\x02\x10\x02", "for readers of version 2 and later, expected 1"),
        (b"\x08\x02\x10\x01\x1a\x02\x08\x01", "of a big endian machine"),
    ],
)
def test_newer_and_big_endian_formats_are_no_damage(slices, header, reason):
    change_entries(slices, lambda table: table.update({b"": header}))
    with pytest.raises(errors.CheckpointVersionError, match=reason):
        dtckpt.open_checkpoint(slices)


def test_codes_of_slices():
    """As OrderedCode writes them: numbers of 6 bits in a byte, larger ones with their length in front."""
    codes = {(0, 63): "80 bf", (64, 8191): "c0 40 df ff", (8192, -1): "e0 20 00 7f", (-64, -65): "40 3f bf"}
    for extent, code in codes.items():
        assert slice_key(b"a\0\xff", [extent]).hex(" ") == f"00 61 00 ff ff 00 00 01 01 01 {code}"
    assert unmask(mask(0x12345678)) == 0x12345678


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slices(tmp_path):
    shutil.copytree(TENSORFLOW / "slices", tmp_path / "s")
    return tmp_path / "s" / "merged"


def change_entries(prefix, change):
    file = prefix.with_name("merged.index")
    table = dict(read_table(file.read_bytes(), "it"))
    change(table)
    file.write_bytes(table_bytes(sorted(table.items())))


def test_a_changed_byte_is_found_by_verify(slices):
    file = slices.with_name("merged.data-00000-of-00002")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with dtckpt.open_checkpoint(slices) as checkpoint:
        assert [damage.tensor for damage in checkpoint.verify().damages] == ["w"]


def test_a_missing_data_file(slices):
    slices.with_name("merged.data-00001-of-00002").unlink()
    with pytest.raises(errors.CheckpointCorruptError, match=r"merged\.data-00001-of-00002 is missing"):
        dtckpt.open_checkpoint(slices)


def test_a_missing_slice(slices):
    change_entries(slices, lambda table: table.pop(slice_key(b"w", [(3, 3), (0, -1)])))
    with pytest.raises(errors.CheckpointCorruptError, match="lacks its slice"):
        dtckpt.restore(slices)


def test_dtypes_and_compression_that_are_not_read(slices):
    def make_variant(table):
        table[b"b"] = table[b"b"].replace(b"\x08\x01", b"\x08\x15", 1)

    change_entries(slices, make_variant)
    with dtckpt.open_checkpoint(slices) as checkpoint:
        assert checkpoint.read("w").shape == (6, 4)
        with pytest.raises(errors.CheckpointVersionError, match="TensorFlow's dtype 21"):
            checkpoint.read("b")


@pytest.mark.parametrize("name", ["object", "slices", "dtensor_2x2_obj"])
def test_mutations(name, tmp_path):
    """Each gives the same, other values, or an error of this library; tables with sums that match are changed, too."""
    draw = random.Random(name)
    root = tmp_path / "changed"
    for number in range(200):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(TENSORFLOW / name, root)
        file = draw.choice(sorted(root.iterdir()))
        if number % 2 and file.name.endswith(".index"):
            table = dict(read_table(file.read_bytes(), "it"))
            key = draw.choice(sorted(table))
            table[key] = mutated(table[key], draw)
            file.write_bytes(table_bytes(sorted(table.items())))
        else:
            file.write_bytes(mutated(file.read_bytes(), draw))
        try:
            dtckpt.restore(root / PREFIXES[name].name)
        except (errors.CheckpointError, errors.TreeError):
            continue


def test_many_strings_are_refused_by_name(slices, monkeypatch):
    monkeypatch.setattr("dtckpt.checkpoint.foreign.bundle_files.MAX_STRINGS_NBYTES", 100)
    with dtckpt.open_checkpoint(PREFIXES["object"]) as checkpoint:
        assert list(checkpoint.refused) == ["model/names"]
        assert checkpoint.read("model/w").shape == (6, 4)
    assert tensor_bundle.DTYPE_NUMBERS["bfloat16"] == 14
