"""Attributes of a `DTensorCheckpoint` that are assigned, bound anew and deleted, before and after a restore."""

import gc
import weakref

import pytest
import torch
from support.states import differences, packed, tensor_of

from checkpoint.saving import save_async_cases
from dtckpt import DTensorCheckpoint, DVariable, Layout, RestoreOptions, SaveOptions, abstract_mesh, errors

MESH = abstract_mesh({"x": 2, "y": 2})
WHOLE = tensor_of("w", (6, 4), "float32").nan_to_num(0.5)
ZEROS = torch.zeros(6, 4)


def variable(whole=ZEROS):
    return DVariable(packed(whole, Layout(["x", "y"], MESH)))


def saved(tmp_path, **objects):
    return DTensorCheckpoint(MESH, **objects).save(tmp_path / "ckpt")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)


# --- saved values ----


def test_saved_is_what_the_attributes_are(tmp_path):
    checkpoint = DTensorCheckpoint(MESH, v=variable(), gone=variable())
    checkpoint.v, checkpoint.w, checkpoint.epoch = variable(WHOLE), variable(WHOLE * 2), 3
    del checkpoint.gone
    path = checkpoint.save(tmp_path / "ckpt")
    other = DTensorCheckpoint(MESH, v=variable(), w=variable(), epoch=0)
    other.restore(path).assert_consumed()
    assert differences(other.v, WHOLE) == differences(other.w, WHOLE * 2) == []
    assert other.epoch == 3
    with pytest.raises(AttributeError, match="no object 'gone'"):
        del checkpoint.gone


def test_what_is_put_into_lists_dicts_modules_and_checkpoints_is_saved(tmp_path):
    checkpoint = DTensorCheckpoint(MESH, d={}, k=[], net=torch.nn.Module(), child=DTensorCheckpoint(MESH))
    checkpoint.d["v"], checkpoint.child.v = variable(WHOLE), variable(WHOLE)
    checkpoint.k.append(variable(WHOLE))
    checkpoint.net.v = torch.nn.Parameter(WHOLE)
    assert checkpoint.child.save(tmp_path / "child") == f"{tmp_path}/child-1"
    path = checkpoint.save(tmp_path / "ckpt")
    net = torch.nn.Module()
    net.v = torch.nn.Parameter(torch.zeros(6, 4))
    child = DTensorCheckpoint(MESH, v=variable())
    other = DTensorCheckpoint(MESH, d={"v": variable()}, k=[variable()], net=net, child=child)
    other.restore(path).assert_consumed()
    for found in (other.d["v"], other.k[0], other.child.v):
        assert differences(found, WHOLE) == []
    assert torch.equal(net.v, WHOLE)
    assert (other.save_counter, child.save_counter) == (1, 1)


def test_names_that_are_taken():
    checkpoint = DTensorCheckpoint(MESH, {"w": variable()})
    for name in ("w", "save", "save_counter", "restore"):
        with pytest.raises(errors.ConfigError, match=f"{name} is taken"):
            setattr(checkpoint, name, variable())
    with pytest.raises(errors.ConfigError, match="restore is taken"):
        DTensorCheckpoint(MESH, restore=variable())
    with pytest.raises(errors.ConfigError, match="_mesh is taken"):
        DTensorCheckpoint(MESH, _mesh=variable())


def test_write_and_read_do_not_count(tmp_path):
    checkpoint = DTensorCheckpoint(MESH, v=variable(WHOLE))
    assert checkpoint.write(tmp_path / "s") == f"{tmp_path}/s"
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.v = variable()
    checkpoint.read(tmp_path / "s").assert_consumed()
    assert checkpoint.save_counter == 1
    assert differences(checkpoint.v, WHOLE) == []


# --- restored values, and the status --------------


def test_what_was_bound_anew_before_a_restore_is_restored(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH, v=variable())
    checkpoint.v = new = variable()
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.v is new
    assert differences(new, WHOLE) == []


def test_what_was_deleted_is_not_restored(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE), w=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH, v=variable(), w=variable())
    v = checkpoint.v
    del checkpoint.v
    status = checkpoint.restore(path).assert_existing_objects_matched()
    assert status.unexpected == ("v",)
    assert differences(v, ZEROS) == []


def test_what_is_assigned_after_a_restore_gets_its_value(tmp_path):
    net = Net()
    path = saved(tmp_path, v=variable(WHOLE), net=net, d={"w": variable(WHOLE), "n": 3}, epoch=4)
    checkpoint = DTensorCheckpoint(MESH)
    status = checkpoint.restore(path).assert_existing_objects_matched()
    assert checkpoint.save_counter == 1
    with pytest.raises(AssertionError, match=r"no object has its 'd/n', 'd/w', 'epoch', 'net/layer\.bias'"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="no object has got anything"):
        status.assert_nontrivial_match()
    checkpoint.v = None  # keeps the place
    checkpoint.v = v = variable()
    assert status.assert_nontrivial_match() is status
    checkpoint.d, checkpoint.epoch = {"w": variable(), "n": 0}, 0
    assert status.unexpected == ("net/layer.bias", "net/layer.weight")
    checkpoint.net = Net()
    status.assert_consumed()
    assert checkpoint.v is v
    assert differences(v, WHOLE) == differences(checkpoint.d["w"], WHOLE) == []
    assert (checkpoint.d["n"], checkpoint.epoch) == (3, 4)
    assert torch.equal(checkpoint.net.layer.weight, net.layer.weight)


def test_only_the_first_object_of_a_name_gets_the_value(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE), epoch=4)
    checkpoint = DTensorCheckpoint(MESH, v=variable(), epoch=0)
    status = checkpoint.restore(path).assert_consumed()
    checkpoint.epoch += 1
    assert (checkpoint.epoch, status.assert_consumed()) == (5, status)
    checkpoint.v = variable()
    assert differences(checkpoint.v, ZEROS) == []
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match="it lacks 'v'"):
            check()
    status.assert_nontrivial_match()
    checkpoint.save(tmp_path / "other")  # nothing of the checkpoint is lost without the user's knowledge


def test_objects_that_come_after_a_restore_and_are_new_do_not_hinder_a_save(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH, v=variable())
    status = checkpoint.restore(path)
    checkpoint.w = variable()
    assert status.missing == ("w",)
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-2")


def test_a_save_needs_what_waits(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE), w=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH, v=variable())
    checkpoint.restore(path)
    with pytest.raises(errors.RestoreMismatchError, match=r"would drop restored data.*no object has its 'w'"):
        checkpoint.save(tmp_path / "other")
    checkpoint.w = variable()
    checkpoint.save(tmp_path / "other")


def test_nested_checkpoints(tmp_path):
    child = DTensorCheckpoint(MESH, v=variable(WHOLE), k=[DTensorCheckpoint(MESH, w=variable(WHOLE))])
    path = saved(tmp_path, child=child, late=DTensorCheckpoint(MESH, v=variable(WHOLE)))
    checkpoint = DTensorCheckpoint(MESH, child=DTensorCheckpoint(MESH, k=[DTensorCheckpoint(MESH)]))
    status = checkpoint.restore(path)
    assert status.unexpected == ("child/k/0/w", "child/v", "late/save_counter", "late/v")
    checkpoint.child.v, checkpoint.child.k[0].w = variable(), variable()
    checkpoint.late = DTensorCheckpoint(MESH)
    checkpoint.late.v = variable()
    status.assert_consumed()
    for found in (checkpoint.child.v, checkpoint.child.k[0].w, checkpoint.late.v):
        assert differences(found, WHOLE) == []
    checkpoint.child = DTensorCheckpoint(MESH, v=variable())
    assert status.missing == ("child", "child/v")


def test_what_comes_into_a_dict_or_module_after_a_restore_keeps_its_value_and_is_told(tmp_path):
    path = saved(tmp_path, d={"v": variable(WHOLE), "w": variable(WHOLE)}, net=torch.nn.Module())
    checkpoint = DTensorCheckpoint(MESH, d={"v": variable()}, net=torch.nn.Module())
    status = checkpoint.restore(path)
    trained = checkpoint.d["v"].assign(WHOLE + 1)
    checkpoint.d["w"], checkpoint.net.bias = variable(), torch.nn.Parameter(torch.zeros(2))
    assert (status.missing, status.unexpected) == (("d/w", "net/bias"), ("d/w",))
    checkpoint.d = dict(checkpoint.d)
    assert differences(trained, WHOLE + 1) == []
    assert (status.missing, status.unexpected) == (("d/w", "net/bias"), ("d/w",))


def test_an_object_that_does_not_fit_is_not_assigned(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH)
    status = checkpoint.restore(path)
    with pytest.raises(errors.ShapeMismatchError, match="'v'"):
        checkpoint.v = torch.zeros(2)
    with pytest.raises(AttributeError):
        print(checkpoint.v)
    checkpoint.v = variable()
    status.assert_consumed()


def test_a_checkpoint_that_was_replaced_fills_nothing(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH)
    checkpoint.restore(path)
    DTensorCheckpoint(MESH, v=variable()).write(path, options=SaveOptions(overwrite=True))
    with pytest.raises(errors.CheckpointConflictError, match="was replaced since it was restored"):
        checkpoint.v = variable()


def test_renamed(tmp_path):
    path = saved(tmp_path, old=variable(WHOLE), d={"old": variable(WHOLE)})
    checkpoint = DTensorCheckpoint(MESH)
    status = checkpoint.restore(path, options=RestoreOptions(rename={"old": "new", "d/old": "d/new"}))
    assert status.unexpected == ("d/new", "new")
    checkpoint.new, checkpoint.d = variable(), {"new": variable()}
    status.assert_consumed()
    assert differences(checkpoint.new, WHOLE) == differences(checkpoint.d["new"], WHOLE) == []


def test_the_next_restore_counts(tmp_path):
    first = saved(tmp_path, v=variable(WHOLE))
    second = DTensorCheckpoint(MESH, v=variable(WHOLE * 2)).save(tmp_path / "second")
    checkpoint = DTensorCheckpoint(MESH)
    checkpoint.restore(first).expect_partial()
    status = checkpoint.restore(second)
    checkpoint.v = variable()
    status.assert_consumed()
    assert differences(checkpoint.v, WHOLE * 2) == []


def test_a_status_does_not_keep_objects_alive(tmp_path):
    path = saved(tmp_path, v=variable(WHOLE))
    checkpoint = DTensorCheckpoint(MESH, v=variable())
    status = checkpoint.restore(path)
    before = weakref.ref(checkpoint.v)
    checkpoint.v = variable()
    gc.collect()
    assert before() is None
    assert status.missing == ("v",)


# --- several clients ---


def test_over_clients(pool, tmp_path, meeting):
    found = pool.values(save_async_cases.assign_after_restore, f"{tmp_path}/ckpt", clients=2, **meeting)
    assert found == [[]] * 2
