"""Objects on a mesh that are saved and restored together, and variables in all ways to save."""

import pytest
import torch
from support.states import bits_of, differences, packed, tensor_of

import dtckpt
from checkpoint.saving import save_async_cases
from dtckpt import DTensorCheckpoint, DVariable, Layout, SaveOptions, abstract_mesh, errors

MESH = abstract_mesh({"x": 2, "y": 2})
WHOLE = tensor_of("w", (6, 4), "float32").nan_to_num(0.5)


def variable(specs=("x", "y"), whole=WHOLE, mesh=MESH):
    return DVariable(packed(whole, Layout(list(specs), mesh)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)


def test_saves_are_counted(tmp_path):
    weight = variable()
    checkpoint = DTensorCheckpoint(MESH, weight=weight, epoch=1)
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    assert paths == [f"{tmp_path}/ckpt-1", f"{tmp_path}/ckpt-2"]
    assert checkpoint.save_counter == 2
    weight.assign(torch.zeros(6, 4))
    again = DTensorCheckpoint(MESH, weight=weight, epoch=0)
    again.restore(paths[1]).assert_consumed().assert_existing_objects_matched()
    assert differences(weight, WHOLE) == []
    assert (again.save_counter, again.epoch, again.weight) == (2, 1, weight)
    assert again.save(tmp_path / "ckpt") == f"{tmp_path}/ckpt-3"


def test_a_failed_save_does_not_count(tmp_path):
    checkpoint = DTensorCheckpoint(MESH, weight=variable())
    (tmp_path / "ckpt-1").write_text("in the way")
    with pytest.raises(errors.CheckpointExistsError):
        checkpoint.save(tmp_path / "ckpt")
    assert checkpoint.save_counter == 0
    assert checkpoint.save(tmp_path / "other") == f"{tmp_path}/other-1"


def test_a_run_that_was_not_restored_does_not_overwrite(tmp_path):
    DTensorCheckpoint(MESH, weight=variable()).save(tmp_path / "ckpt")
    other = DTensorCheckpoint(MESH, weight=variable(whole=torch.zeros(6, 4)))
    with pytest.raises(errors.CheckpointExistsError):
        other.save(tmp_path / "ckpt")
    other.save(tmp_path / "ckpt", options=SaveOptions(overwrite=True))


@pytest.mark.parametrize("specs", [("y", "x"), ("unsharded", ("x", "y")), ("unsharded", "unsharded")])
def test_any_layout_on_any_mesh(tmp_path, specs):
    path = DTensorCheckpoint(MESH, weight=variable()).save(tmp_path / "ckpt")
    mesh = abstract_mesh({"x": 3, "y": 1})
    weight = variable(specs, torch.zeros(6, 4), mesh)
    DTensorCheckpoint(mesh, weight=weight).restore(path).assert_consumed()
    assert differences(weight, WHOLE) == []


def test_modules_optimizers_and_dicts(tmp_path):
    torch.manual_seed(0)
    net, more = Net(), {"scale": torch.full((2,), 3.0), "names": ["a", "b"]}
    optimizer = torch.optim.Adam(net.parameters())
    net.layer(torch.ones(3)).sum().backward()
    optimizer.step()
    path = DTensorCheckpoint(MESH, net, optimizer=optimizer, more=more).save(tmp_path / "ckpt")
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    target = {"scale": torch.zeros(2), "names": ["", ""]}
    DTensorCheckpoint(MESH, other, optimizer=fresh, more=target).restore(path).assert_consumed()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert (target["scale"].tolist(), target["names"]) == ([3, 3], ["a", "b"])


def test_a_root_that_is_a_dict(tmp_path):
    root = {"weight": variable(), "step": 3}
    path = DTensorCheckpoint(MESH, root).save(tmp_path / "ckpt")
    target = {"weight": variable(whole=torch.zeros(6, 4)), "step": 0}
    DTensorCheckpoint(MESH, target).restore(path).assert_consumed()
    assert target["step"] == 3
    assert differences(target["weight"], WHOLE) == []


def test_what_does_not_match_is_said_and_never_lost(tmp_path, caplog):
    path = DTensorCheckpoint(MESH, weight=variable(), moments={"m": variable()}).save(tmp_path / "ckpt")
    bias = torch.full((2,), 7.0)
    other = DTensorCheckpoint(MESH, weight=variable(whole=torch.zeros(6, 4)), bias=bias)
    status = other.restore(path)
    assert (status.missing, status.unexpected) == (("bias",), ("moments/m",))
    assert "it lacks 'bias' and no object has its 'moments/m'" in caplog.text
    assert bias.tolist() == [7, 7]
    assert differences(other.weight, WHOLE) == []
    with pytest.raises(AssertionError, match="it lacks 'bias' and no object has its 'moments/m'"):
        status.assert_consumed()
    with pytest.raises(errors.RestoreMismatchError, match="it lacks 'bias'; expect_partial"):
        status.assert_existing_objects_matched()
    with pytest.raises(errors.RestoreMismatchError, match=r"this save would drop restored data: .*moments/m") as caught:
        other.save(tmp_path / "other")
    assert (caught.value.missing, caught.value.unexpected) == (("bias",), ("moments/m",))
    status.expect_partial()
    assert other.save(tmp_path / "other") == f"{tmp_path}/other-2"


def test_existing_objects_may_be_fewer(tmp_path):
    path = DTensorCheckpoint(MESH, weight=variable(), more=torch.ones(2)).save(tmp_path / "ckpt")
    fewer = DTensorCheckpoint(MESH, weight=variable())
    fewer.restore(path).assert_existing_objects_matched()
    fewer.save(tmp_path / "other")


def test_other_checkpoints_have_no_counter(tmp_path):
    dtckpt.save(tmp_path / "s", {"weight": WHOLE})
    checkpoint = DTensorCheckpoint(MESH, weight=variable(whole=torch.zeros(6, 4)))
    checkpoint.restore(tmp_path / "s").assert_consumed()
    assert checkpoint.save_counter == 0


def test_nothing_to_restore():
    status = DTensorCheckpoint(MESH).restore(None)
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match="nothing was restored"):
            check()
    assert status.expect_partial() is status


def test_another_shape_fails_and_touches_nothing(tmp_path):
    path = DTensorCheckpoint(MESH, a=torch.ones(2), weight=variable()).save(tmp_path / "ckpt")
    first = torch.zeros(2)
    wrong = DTensorCheckpoint(MESH, a=first, weight=variable(("unsharded", "unsharded"), torch.zeros(4, 6)))
    with pytest.raises(errors.ShapeMismatchError, match="'weight'"):
        wrong.restore(path)
    assert first.tolist() == [0, 0]
    assert wrong.save_counter == 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DTensorCheckpoint("mesh"), errors.MeshTypeError, "must be a Mesh"),
        (lambda: DTensorCheckpoint(MESH, {"w": 1}, w=2), errors.ConfigError, "w is taken"),
        (lambda: DTensorCheckpoint(MESH, save_counter=2), errors.ConfigError, "save_counter is taken"),
        (lambda: DTensorCheckpoint(MESH, {"save_counter": 2}), errors.ConfigError, "save_counter is taken"),
        (lambda: DTensorCheckpoint(MESH, 3), errors.TreeError, "root must be a dict"),
        (lambda: DTensorCheckpoint(MESH, w=1).v, AttributeError, "no object 'v'"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_tensors_on_other_meshes_are_refused(tmp_path):
    checkpoint = DTensorCheckpoint(abstract_mesh({"z": 2}), weight=variable())
    with pytest.raises(errors.MeshError, match="'weight' is on another mesh"):
        checkpoint.save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


# --- variables, as bfloat16 and not ---

ROUNDED = torch.tensor([3.1415927, 257.5, 65504.0, -1.0078125])
AS_BF16 = [3.140625, 258.0, 65536.0, -1.0078125]


def saved_variables(path, way):
    layout = Layout(["x"], MESH)
    tensors = {"a": DVariable(packed(ROUNDED, layout)), "b": DVariable(packed(ROUNDED, layout))}
    tensors["n"] = DVariable(packed(torch.arange(4), layout), trainable=False)
    dtckpt.enable_save_as_bf16([tensors["a"], tensors["n"], "no variable"])
    if way == "sharded_save":
        dtckpt.sharded_save(MESH, path, list(tensors), [""] * 3, list(tensors.values()))
    elif way == "name_based_save":
        dtckpt.name_based_save(MESH, path, tensors)
    elif way == "save":
        dtckpt.save(path, tensors)
    elif way == "save_async":
        dtckpt.save_async(path, tensors).result(30)
    else:
        return DTensorCheckpoint(MESH, tensors).save(path)
    return path


@pytest.mark.parametrize("way", ["sharded_save", "name_based_save", "save", "save_async", "DTensorCheckpoint"])
def test_variables_in_all_ways_to_save(tmp_path, way):
    path = saved_variables(tmp_path / "s", way)
    with dtckpt.open_checkpoint(path) as checkpoint:
        stored = {name: info.stored_dtype for name, info in checkpoint.tensors.items()}
    assert stored == {"a": torch.bfloat16, "b": torch.float32, "n": torch.int64}
    layout = Layout(["y"], MESH)
    blank = {name: DVariable(packed(torch.zeros(4), layout)) for name in "ab"}  # the flag is off here
    blank["n"] = DVariable(packed(torch.zeros(4, dtype=torch.int64), layout), trainable=False)
    if way == "DTensorCheckpoint":
        DTensorCheckpoint(MESH, blank).restore(path).assert_consumed()
    elif way.endswith("_save"):
        blank = dtckpt.name_based_restore(MESH, path, blank)
    else:
        dtckpt.restore(path, blank)
    assert blank["a"].full_tensor().tolist() == AS_BF16
    assert bits_of(blank["b"].full_tensor()) == bits_of(ROUNDED)
    assert blank["n"].full_tensor().tolist() == [0, 1, 2, 3]


# --- several clients ---


def test_over_clients(pool, tmp_path, meeting):
    found = pool.values(save_async_cases.count_saves, f"{tmp_path}/ckpt", clients=3, **meeting)
    assert found == [(2, [])] * 3
    answers = pool.run(save_async_cases.lose_on_one_client, f"{tmp_path}/ckpt-2", clients=2, **meeting)
    assert {answer.error for answer in answers} == {"RestoreMismatchError"}, answers
    assert len({answer.text for answer in answers}) == 1
