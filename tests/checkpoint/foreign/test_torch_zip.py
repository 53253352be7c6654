"""Files of ``torch.save``: where the elements are, and what becomes of damaged and foreign files."""

import io
import struct
import zipfile

import pytest
import torch

from checkpoint.foreign.torch_files import saved, zip_of
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_zip import read_zip
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, DtckptError


def elements(data, view, start):
    """Return the tensor that a view of a file's bytes from a position is."""
    content = bytearray(data[start : start + view.stop - view.start])
    return torch.frombuffer(content, dtype=getattr(torch, view.dtype)).as_strided(view.shape, view.strides)


def test_elements_are_where_the_file_has_them():
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    state = {
        "base": base,
        "part": base[1:3, 2:],
        "turned": base.t(),
        "other": torch.ones(3, dtype=torch.bfloat16),
        "scalar": base[3, 3],
    }
    data = saved(state)
    file = zip_of(data)
    leaves = read_tree(file.value).leaves
    for name, tensor in state.items():
        assert torch.equal(elements(data, leaves[name], file.element_start(leaves[name])), tensor), name


def test_many_records():
    state = [torch.full((3,), number) for number in range(300)]
    data = saved(state)
    file = zip_of(data)
    leaves = read_tree(file.value).leaves
    assert all(
        torch.equal(elements(data, view, file.element_start(view)), state[int(name)]) for name, view in leaves.items()
    )


def test_a_file_of_more_than_four_gigabytes(tmp_path):
    path = tmp_path / "large"
    with torch.serialization.skip_data():  # a sparse file
        torch.save([torch.empty(5 << 30, dtype=torch.uint8), torch.ones(3)], path)
    with open(path, "rb") as stream:

        def read(start, stop):
            stream.seek(start)
            return stream.read(stop - start)

        file = read_zip(read, path.stat().st_size, "large")
        views = read_tree(file.value).leaves
    reader = torch._C.PyTorchFileReader(str(path))
    for name, view in views.items():
        with open(path, "rb") as stream:
            assert file.element_start(view) == reader.get_record_offset(f"data/{name}")


def rewritten(data, *, compression=zipfile.ZIP_STORED, change=lambda name, content: content, names=lambda names: names):
    """Return a zip of the same records, written by Python."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(result, "w", compression) as target:
        for name in names(source.namelist()):
            if (content := change(name, source.read(name) if name in source.namelist() else b"")) is not None:
                target.writestr(name, content)
    return result.getvalue()


def test_a_zip_that_python_wrote_is_read():
    data = rewritten(saved({"a": torch.arange(5)}))
    file = zip_of(data)
    (view,) = read_tree(file.value).leaves.values()
    assert torch.equal(elements(data, view, file.element_start(view)), torch.arange(5))


FOREIGN = {
    "compressed": (rewritten(saved(torch.ones(99)), compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "big-endian": (
        rewritten(saved(torch.ones(1)), change=lambda name, content: b"big" if "byteorder" in name else content),
        "byte order b'big'",
    ),
    "another zip": (rewritten(saved(1), names=lambda _: ["a/b"]), "it has no data.pkl"),
    "a program": (rewritten(saved(1), names=lambda names: [*names, "archive/constants.pkl"]), "TorchScript"),
}


@pytest.mark.parametrize(("data", "text"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_zips_are_refused(data, text):
    with pytest.raises(CheckpointVersionError, match=text):
        zip_of(data)


def test_old_files_are_refused():
    with pytest.raises(CheckpointVersionError, match=r"before PyTorch 1\.6.*weights_only"):
        zip_of(saved(torch.ones(1), _use_new_zipfile_serialization=False))


def test_files_that_are_cut_short_are_refused():
    data = saved({"a": torch.ones(30)})
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointCorruptError):
            zip_of(data[:length])


def test_changed_bytes_give_an_error_or_the_same_tree_and_places():
    data = saved({"a": torch.ones(30), "b": [1, "text"]})
    sound = zip_of(data)
    (view,) = read_tree(sound.value).leaves.values()
    start, tree = sound.element_start(view), read_tree(sound.value).node
    for position in [*range(start), *range(start + 120, len(data))]:
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        try:
            file = zip_of(bytes(damaged))
            found = read_tree(file.value)
            assert found.node == tree
            assert [file.element_start(each) for each in found.leaves.values()] == [start]
        except DtckptError:
            pass


def test_a_storage_that_is_missing_or_short():
    data = saved({"a": torch.ones(30)})
    for change, text in [
        (lambda name, content: None if name.endswith("data/0") else content, "is missing"),
        (lambda name, content: content[:-1] if name.endswith("data/0") else content, "119 bytes, expected 120"),
    ]:
        file = zip_of(rewritten(data, change=change))
        (view,) = read_tree(file.value).leaves.values()
        with pytest.raises(CheckpointCorruptError, match=text):
            file.element_start(view)


def test_a_view_beyond_its_storage_is_refused():
    data = saved(torch.ones(30))
    pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    assert pickled.count(b"K\x1e\x85") == 1
    for shape in (b"K\x1f\x85", b"J\xff\xff\xff\x7f\x85", b"J\xff\xff\xff\xff\x85"):
        file = zip_of(rewritten(data, change=lambda _, content, shape=shape: content.replace(b"K\x1e\x85", shape)))
        with pytest.raises(CheckpointCorruptError, match=r"would end|malformed"):
            read_tree(file.value)


def test_a_directory_that_claims_much_is_not_read():
    data = bytearray(saved(torch.ones(1)))
    struct.pack_into("<I", data, len(data) - 10, 0x7FFFFFFF)
    with pytest.raises(CheckpointCorruptError, match="its end is damaged"):
        zip_of(bytes(data).replace(b"PK\6\7", b"PK\0\0"))
