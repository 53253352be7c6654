import os
import signal

import pytest
import torch
import zarr
from support.states import bits_of

import dtckpt
from dtckpt import UNSHARDED
from dtckpt.cli.reshard_progress import ProgressReporter

MESH = ("--mesh", "data=2,x=3")
LAYOUTS = ("--layout", "*/w=data+x,unsharded", "--layout", "optim/a=b=x", "--layout", "optim/scale=")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new"


def test_every_element_is_kept_in_the_layouts_asked_for(run, source, target, tensors):
    result = run("reshard", source, target, *MESH, *LAYOUTS)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"resharded {source} to {target}: 9 tensors, ")
    assert result.out.count("\n") == 1
    with dtckpt.open_checkpoint(source) as old, dtckpt.open_checkpoint(target) as new:
        assert new.verify().damages == ()
        assert {name: bits_of(new.read(name)) for name in new.tensors} == {k: bits_of(v) for k, v in tensors.items()}
        assert new.structure == old.structure
        layouts = {name: info.layout for name, info in new.tensors.items()}
        assert {tuple(layout.mesh.axis_sizes.items()) for layout in layouts.values()} == {(("data", 2), ("x", 3))}
        assert layouts["model/w"].sharding_specs == [("data", "x"), UNSHARDED]
        assert layouts["optim/a=b"].sharding_specs == ["x"]
        assert layouts["optim/scale"].sharding_specs == []
        # A tensor that no pattern matches keeps its specs, without the axes that the mesh lacks.
        assert layouts["model/uneven"].sharding_specs == ["x", UNSHARDED]
        assert layouts["optim/ids"].sharding_specs == [UNSHARDED, UNSHARDED]
        assert new.tensors["model/uneven"].num_chunks == 3
    assert os.listdir(target.parent) == ["new"]


def test_the_first_match_wins_and_the_command_line_comes_before_the_file(run, source, target, tmp_path):
    file = tmp_path / "layouts"
    file.write_text("model/*=data,unsharded  # except two\nmodel/w=unsharded,x\n")
    result = run(
        "reshard",
        source,
        target,
        *MESH,
        "--layout",
        "model/w=x,data",
        "--layout",
        "model/tiny=x",
        "--layout-file",
        file,
    )
    assert result.code == 0, result
    with dtckpt.open_checkpoint(target) as new:
        assert new.tensors["model/w"].layout.sharding_specs == ["x", "data"]
        assert new.tensors["model/tiny"].layout.sharding_specs == ["x"]
        assert new.tensors["model/half"].layout.sharding_specs == ["data", UNSHARDED]


def test_dtype_changes_the_floating_point_tensors(run, source, target, tensors):
    assert run("reshard", source, target, *MESH, "--dtype", "bfloat16").code == 0
    with dtckpt.open_checkpoint(target) as new:
        for name, tensor in tensors.items():
            expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            assert torch.equal(
                new.read(name).nan_to_num().to(torch.float64), expected.nan_to_num().to(torch.float64)
            ), name
            assert new.tensors[name].dtype == new.tensors[name].stored_dtype == expected.dtype


def test_zarr_opens_with_zarr_python(run, source, target, tensors):
    assert run("reshard", source, target, *MESH, "--format", "zarr").code == 0
    group = zarr.open_group(str(target), mode="r")
    for name in ("model/w", "model/uneven", "optim/ids", "optim/flags"):
        assert torch.equal(torch.from_numpy(group[name][...]), tensors[name])
    assert group["model/w"].attrs["dtckpt"]["sharding_specs"] == ["x", "unsharded"]


def test_json_lines_tell_start_tensors_and_result(run, source, target, tensors):
    result = run("reshard", source, target, *MESH, "--json")
    assert (result.code, result.err) == (0, "")
    start, *middle, done = result.events
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert start["event"] == "start"
    assert start["mesh"] == {"data": 2, "x": 3}
    assert [event["event"] for event in middle] == ["tensor"] * len(tensors)
    assert {event["name"]: event["bytes"] for event in middle} == {k: v.nbytes for k, v in tensors.items()}
    assert [event["name"] for event in middle] == sorted(tensors)
    by_name = {event["name"]: event for event in middle}
    assert by_name["model/uneven"]["sharding_specs"] == [["y", "x"], "unsharded"]
    assert by_name["model/uneven"]["new_sharding_specs"] == ["x", "unsharded"]
    assert done == {
        "event": "done",
        "source": str(source),
        "target": str(target),
        "tensors": len(tensors),
        "bytes": nbytes,
        "dry_run": False,
        "seconds": done["seconds"],
    }
    seconds = [event["seconds"] for event in (*middle, done)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_dry_run_shows_the_plan_and_writes_nothing(run, source, target, tensors, flags):
    result = run("reshard", source, target, *MESH, *LAYOUTS, "--dry-run", *flags)
    assert (result.code, result.err) == (0, "")
    assert os.listdir(target.parent) == []
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if flags:
        assert result.events[0]["read_bytes"] == nbytes
        assert [result.events[0]["dry_run"], result.events[-1]["dry_run"]] == [True, True]
    else:
        assert "model/w       8x6     float32        x,y -> data+x,unsharded" in result.out
        assert f"would read {nbytes} B, and write 9 tensors, {nbytes} B to {target}; " in result.out
        assert result.out.endswith("this was a dry run, nothing was written\n")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        ((*MESH, "--layout", "model/w=z,unsharded"), ("'model/w=z,unsharded'", "got 'z'", "['data', 'x']")),
        ((*MESH, "--layout", "model/w=x"), ("'model/w=x'", "(8, 6)", "got 1 specs, expected 2")),
        ((*MESH, "--layout", "model/*=x,unsharded"), ("'model/tiny'", "got 2 specs, expected 1")),
        ((*MESH, "--layout", "model/w=x,x"), ("x more than once",)),
        ((*MESH, "--layout", "modle/w=x,data"), ("no tensor matches", "'modle/w=x,data'")),
        ((*MESH, "--layout", "model/w"), ("expected PATTERN=SPEC",)),
        ((*MESH, "--layout-file", "/nowhere/f"), ("layout file /nowhere/f", "No such file")),
        ((*MESH, "--dtype", "int8"), ("'int8'", "bfloat16")),
        ((*MESH, "--max-memory", "lots"), ("'lots'", "KiB")),
        ((*MESH, "--max-memory", "100"), ("--max-memory is too small", "expected at least")),
        ((*MESH, "--format", "hdf5"), ("hdf5", "see 'dtckpt reshard --help'")),
        (("--mesh", "data=0"), ("mesh 'data=0'",)),
        (("--mesh", "x=999999999999999999"), ("too large",)),
        ((), ("--mesh", "see 'dtckpt reshard --help'")),
        ((*MESH, "--turbo"), ("--turbo",)),
    ],
)
def test_usage_errors(run, source, target, args, texts):
    run("reshard", source, target, *args).fails(2, *texts)
    assert os.listdir(target.parent) == []


def test_a_bound_that_one_chunk_breaks_is_refused_at_once(run, tmp_path):
    dtckpt.save(tmp_path / "old", {"w": torch.zeros(4096, 1024)})
    result = run("reshard", tmp_path / "old", tmp_path / "new", "--mesh", "x=2", "--max-memory", "1")
    result.fails(2, "got 1 bytes, expected at least", "'w'")
    assert os.listdir(tmp_path) == ["old"]


def test_source_not_found(run, tmp_path, target):
    run("reshard", tmp_path / "none", target, *MESH).fails(3, f"no checkpoint at {tmp_path / 'none'}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "client_0").mkdir()
    run("reshard", tmp_path / "half", target, *MESH).fails(3, "did not complete")
    run("reshard", "nowhere://bucket/step", target, *MESH).fails(2, "nowhere")
    assert not target.exists()


def test_an_existing_destination_is_left_alone(run, source, target, tensors):
    dtckpt.save(target, {"other": 1})
    for flags in ((), ("--dry-run",)):
        run("reshard", source, target, *MESH, *flags).fails(4, str(target), "pass --overwrite")
        assert dtckpt.restore(target) == {"other": 1}
    assert run("reshard", source, target, *MESH, "--overwrite").code == 0
    with dtckpt.open_checkpoint(target) as new:
        assert set(new.tensors) == set(tensors)
    assert os.listdir(target.parent) == ["new"]


def test_a_folder_of_the_users_is_not_overwritten(run, source, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear").write_text("x")
    run("reshard", source, tmp_path / "letters", *MESH, "--overwrite").fails(4, "is not a checkpoint")
    assert (tmp_path / "letters" / "dear").read_text() == "x"


def test_a_checkpoint_may_replace_itself_but_not_lie_inside_another(run, tmp_path):
    path = tmp_path / "step"
    dtckpt.save(path, {"w": torch.arange(6)})
    run("reshard", path, path / "new", "--mesh", "x=2").fails(2, "one inside the other")
    assert run("reshard", path, path, "--mesh", "x=2", "--layout", "w=x", "--overwrite").code == 0
    with dtckpt.open_checkpoint(path) as new:
        assert new.read("w").tolist() == [0, 1, 2, 3, 4, 5]
        assert new.tensors["w"].num_chunks == 2


def _damage(path):
    for file in path.rglob("d/*"):
        data = bytearray(file.read_bytes())
        data[: len(data) // 2] = bytes(byte ^ 1 for byte in data[: len(data) // 2])
        file.write_bytes(data)


def test_damage_is_a_failed_check_and_leaves_nothing(run, tmp_path):
    dtckpt.save(tmp_path / "old", {"w": torch.rand(64, 64)})
    _damage(tmp_path / "old")
    result = run("reshard", tmp_path / "old", tmp_path / "new", "--mesh", "x=2", "--json").fails(1, "'w'")
    assert result.events[-1]["code"] == "CheckpointCorruptError"
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_denied(run, source, tmp_path):
    tmp_path.chmod(0o500)
    run("reshard", source, tmp_path / "new", *MESH).fails(69, "Permission denied")


def test_storage_that_refuses_may_be_tried_again(run, source, tmp_path):
    (tmp_path / "file").write_text("")
    run("reshard", source, tmp_path / "file" / "a" / "new", *MESH).fails(75, "Not a directory")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_signals_end_it_and_leave_nothing(run, source, target, monkeypatch, number, code, kvstore):
    names = []

    def advance(self, name, nbytes):
        names.append(name)
        if len(names) == 5:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ProgressReporter, "advance", advance)
    before = signal.getsignal(number)
    result = run("reshard", source, target, *MESH, "--format", kvstore)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert "; to go on: dtckpt reshard " in result.err
    assert len(names) == 5
    assert os.listdir(target.parent) == []
    assert signal.getsignal(number) is before
