"""Restores that read each byte from storage once, for all clients that need it."""

import itertools

import pytest
import torch
from support.states import cluster_mesh, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.restoring.shared_rows import reads_per_byte, rows_layout
from dtckpt.errors import ConfigError
from dtckpt.storage import location

from . import read_once_cases as cases
from .read_once_cases import DTYPE, SHAPES

pytestmark = pytest.mark.processes
WHOLE = {name: ["unsharded"] * len(shape) for name, shape in SHAPES.items()}
COLUMNS = {name: [*("unsharded",) * (len(shape) - 1), "x"] for name, shape in SHAPES.items()}
MIXED = {"even": ["y", "x"], "uneven": ["x", "unsharded"], "few rows": [("y", "x"), "unsharded"]}


@pytest.fixture(scope="module", params=["ocdbt", "zarr"])
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "s"
    tree = {name: tensor_of(name, shape, DTYPE) for name, shape in SHAPES.items()} | {"plain": torch.ones(3)}
    dtckpt.save(path, tree, options=SaveOptions(kvstore=request.param, chunk_nbytes=1024))
    return path


@pytest.mark.parametrize(
    ("clients", "devices", "axes", "specs"),
    [
        (2, 1, {"x": 2}, WHOLE),
        (4, 1, {"x": 4}, WHOLE),
        (4, 1, {"x": 4}, COLUMNS),
        (4, 1, {"x": 2, "y": 2}, MIXED),
        (2, 3, {"y": 3, "x": 2}, MIXED),
        (3, 1, {"x": 3}, COLUMNS),
    ],
)
def test_every_tensor_comes_back(pool, saved, clients, devices, axes, specs):
    answers = pool.values(
        cases.restore, str(saved), axes, specs, devices=devices, read_once=True, clients=clients, group=True
    )
    assert [wrong for wrong, _ in answers] == [[]] * clients


def test_each_byte_is_read_once(pool, saved):
    needed = sum(tensor_of(name, shape, DTYPE).nbytes for name, shape in SHAPES.items())

    def taken(**options):
        answers = pool.values(cases.restore, str(saved), {"x": 4}, WHOLE, clients=4, group=True, **options)
        assert [wrong for wrong, _ in answers] == [[]] * 4
        return sum(nbytes for _, nbytes in answers)

    assert taken(read_once=False) == 4 * needed
    assert taken(read_once=None) == 4 * needed, "the storage is this machine's"
    # Rows that two clients share a chunk of are read by both.
    assert needed <= taken(read_once=True) <= 1.6 * needed
    assert taken(read_once=True, min_nbytes=1 << 20) == 4 * needed, "small tensors are not worth it"


def test_clients_that_want_different_tensors_read_apart(pool, saved):
    answers = pool.values(cases.restore, str(saved), {"x": 3}, WHOLE, read_once=True, extra=True, clients=3, group=True)
    assert [wrong for wrong, _ in answers] == [[]] * 3


@pytest.mark.parametrize("odd", [0, 2])
def test_a_client_that_cannot_read_fails_all(pool, saved, odd):
    answers = pool.run(cases.fail, str(saved), WHOLE, odd, clients=3, group=True)
    assert all("no read today" in answer.text for answer in answers), answers


def test_damage_that_one_client_meets_fails_all(pool, tmp_path):
    path = tmp_path / "s"
    dtckpt.save(
        path,
        {name: tensor_of(name, shape, DTYPE) for name, shape in SHAPES.items()},
        options=SaveOptions(kvstore="zarr", chunk_nbytes=1024),
    )
    chunk = max((path / "even" / "c").rglob("*"), key=lambda file: (file.is_file(), str(file)))
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    answers = pool.run(cases.restore, str(path), {"x": 4}, WHOLE, read_once=True, clients=4, group=True)
    assert [answer.error for answer in answers] == ["CheckpointCorruptError"] * 4, answers
    assert all("'even'" in answer.text for answer in answers)


def test_rows_are_those_that_a_device_wants_if_it_wants_any():
    mesh = abstract_mesh({"x": 2, "y": 3})
    assert rows_layout(Layout(["y", "x"], mesh), 0).sharding_specs == [("y", "x"), "unsharded"]
    assert rows_layout(Layout(["unsharded", "unsharded"], mesh), 1).sharding_specs == ["unsharded", ("x", "y")]


def test_how_often_bytes_are_read(tmp_path):
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(512, 1024)})
    info = dtckpt.open_checkpoint(tmp_path / "s").info("w")
    mesh = cluster_mesh({"x": 4}, 4, 0)
    found = {
        spec: reads_per_byte(info, Layout(list(spec), mesh)) for spec in itertools.permutations(["x", "unsharded"])
    }
    assert found == {("x", "unsharded"): 1.0, ("unsharded", "x"): 4.0}
    assert reads_per_byte(info, Layout(["unsharded", "unsharded"], mesh)) == 4.0


def test_what_is_this_machines_storage(tmp_path, monkeypatch):
    file = tmp_path / "mounts"
    file.write_text(
        "disk / ext4 rw 0 0\n"
        "server:/a /data nfs4 rw 0 0\n"
        "lustre /data/fast\\040disk lustre rw 0 0\n"
        "tmpfs /data/local tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(location, "_MOUNTS", file)
    found = ["/x", "/data", "/data/a/b", "/data/fast disk/a", "/data/local/x", "/database", "s3://b/c"]
    assert [location.is_remote(path) for path in found] == [False, True, True, True, False, False, True]
    monkeypatch.setattr(location, "_MOUNTS", tmp_path / "none")
    assert not location.is_remote("/data")


def test_the_option_is_a_flag():
    with pytest.raises(ConfigError, match="read_once"):
        dtckpt.RestoreOptions(read_once="always")


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}" * 60, "\N{CYRILLIC SMALL LETTER ZHE}" * 120])
def test_long_paths_of_any_letters_fit_what_clients_tell_each_other(pool, tmp_path, name):
    path = tmp_path.joinpath(*[name] * 8, "s")
    dtckpt.save(path, {key: tensor_of(key, shape, DTYPE) for key, shape in SHAPES.items()})
    answers = pool.values(cases.restore, str(path), {"x": 2}, WHOLE, read_once=True, clients=2, group=True)
    assert [wrong for wrong, _ in answers] == [[]] * 2
