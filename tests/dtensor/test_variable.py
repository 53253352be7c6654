"""`DVariable`: making one, assigning to it, using it as a tensor, saving it."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from support.states import cluster_mesh
from torch import nn

import dtckpt
from dtckpt import (
    UNSHARDED,
    DTensor,
    DVariable,
    Layout,
    abstract_mesh,
    copy_to_mesh,
    enable_save_as_bf16,
    fetch_layout,
    unpack,
)
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError

MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", UNSHARDED], MESH)
COLUMNS = Layout([UNSHARDED, "y"], MESH)
COPIES = Layout.replicated(MESH, 2)
WHOLE = torch.arange(15.0).reshape(5, 3)


def of(value):
    return value.full_tensor().detach()


def test_values_of_all_kinds_become_variables():
    placed = copy_to_mesh(WHOLE, ROWS)
    for value in (WHOLE, WHOLE.numpy(), WHOLE.tolist(), placed, lambda: WHOLE, lambda: placed, DVariable(placed)):
        variable = DVariable(value, ROWS)
        assert isinstance(variable, DTensor)
        assert variable.layout == fetch_layout(variable) == ROWS
        assert (variable.shape, variable.dtype) == (torch.Size([5, 3]), torch.float32)
        assert torch.equal(of(variable), WHOLE)
    assert DVariable(placed).layout == ROWS
    assert DVariable([[1, 2]], COPIES, dtype=torch.int16).dtype == torch.int16
    assert DVariable(1.5, Layout([], MESH)).numpy() == 1.5


def test_a_variable_has_memory_of_its_own():
    whole = WHOLE.clone()
    placed = copy_to_mesh(whole, COPIES)
    one, other = DVariable(placed), DVariable(whole, COPIES)
    for variable in (one, other):
        variable.assign(torch.zeros(5, 3))
        assert len({part.data_ptr() for part in unpack(variable)}) == 4
    assert torch.equal(of(placed), WHOLE)
    assert torch.equal(whole, WHOLE)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DVariable(WHOLE), LayoutError, "DVariable 'Variable': got no layout"),
        (lambda: DVariable(copy_to_mesh(WHOLE, ROWS), COLUMNS), LayoutError, "layout of the tensor differs"),
        (lambda: DVariable(WHOLE, ROWS, dtype=torch.float64), ComponentError, "got a value of torch.float32"),
        (lambda: DVariable(copy_to_mesh(WHOLE, ROWS), dtype=torch.int8), ComponentError, "expected torch.int8"),
        (lambda: DVariable(WHOLE, Layout(["x"], MESH)), LayoutError, "got rank 1, expected 2"),
        (lambda: DVariable("abc", ROWS), LayoutTypeError, "got str that is no value"),
        (lambda: DVariable([[1], [1, 2]], ROWS), LayoutTypeError, "got list that is no value"),
        (
            lambda: DVariable(dtckpt.pack([WHOLE] * 4, Layout([UNSHARDED] * 2, MESH, {"x": "sum"}))),
            LayoutError,
            "got pending reductions",
        ),
    ],
)
def test_what_makes_no_variable(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_values_are_brought_into_the_layout():
    variable = DVariable(torch.zeros(5, 3), ROWS)
    memory = [part.data_ptr() for part in unpack(variable)]
    elsewhere = Layout(["z", UNSHARDED], abstract_mesh({"z": 3}))
    for value in (*(copy_to_mesh(WHOLE, layout) for layout in (ROWS, COLUMNS, COPIES, elsewhere)), WHOLE):
        assert variable.assign(torch.zeros(5, 3)) is variable
        assert torch.equal(of(variable.assign(value)), WHOLE)
        assert torch.equal(of(variable.assign_add(value)), 2 * WHOLE)
        assert torch.equal(of(variable.assign_sub(value).assign_sub(value)), 0 * WHOLE)
    assert torch.equal(of(variable.assign(WHOLE.double().numpy())), WHOLE)
    assert torch.equal(of(variable.assign(variable)), WHOLE)
    assert variable.layout == ROWS
    assert [part.data_ptr() for part in unpack(variable)] == memory
    assert variable.is_leaf


@pytest.mark.parametrize("value", [WHOLE[:4], WHOLE.T, WHOLE.double(), 3.0, copy_to_mesh(WHOLE[:2], ROWS), WHOLE.int()])
def test_values_that_do_not_fit_leave_the_variable_as_it_was(value):
    variable = DVariable(WHOLE, ROWS, name="weight")
    for write in (variable.assign, variable.assign_add, variable.assign_sub):
        with pytest.raises(ComponentError, match=r"DVariable 'weight': got a value of .*expected shape \(5, 3\)"):
            write(value)
    assert torch.equal(of(variable), WHOLE)


def test_what_was_read_stays():
    variable = DVariable(WHOLE, ROWS)
    read = variable.read_value(), variable.value(), variable.full_tensor()
    variable.assign(torch.zeros(5, 3))
    assert type(read[0]) is DTensor
    for value in read[:2]:
        assert torch.equal(of(value), WHOLE)
    assert torch.equal(read[2].detach(), WHOLE)


def test_as_array():
    assert np.array_equal(DVariable(WHOLE, COPIES).numpy(), WHOLE.numpy())
    assert np.array_equal(DVariable(WHOLE, Layout(["x", UNSHARDED], abstract_mesh({"x": 1}))).numpy(), WHOLE.numpy())
    with pytest.raises(LayoutError, match=r"'w' as array: got a value in parts, .*full_tensor\(\) gathers it"):
        DVariable(WHOLE, ROWS, name="w").numpy()


def test_trainable_ones_are_parameters():
    variable, fixed = DVariable(WHOLE, ROWS), DVariable(WHOLE, ROWS, trainable=False)
    assert (variable.requires_grad, fixed.requires_grad) == (variable.trainable, fixed.trainable) == (True, False)
    assert not DVariable(WHOLE.int(), ROWS).requires_grad
    module = nn.Module()
    module.weight, module.fixed = variable, fixed
    assert dict(module.named_parameters()) == {"weight": variable}
    (variable.read_value().full_tensor() ** 2).sum().backward()
    assert torch.equal(of(variable.grad), 2 * WHOLE)
    assert variable.grad.layout == ROWS
    variable.assign_sub(variable.grad)
    assert torch.equal(of(variable), -WHOLE)


def test_copies_and_pickles_are_variables():
    variable = DVariable(WHOLE, ROWS, name="weight")
    variable.save_as_bf16 = True
    file = io.BytesIO()
    torch.save(variable, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for again in (copy.copy(variable), copy.deepcopy(variable), pickle.loads(pickle.dumps(variable)), loaded):
        assert type(again) is DVariable
        assert (again.name, again.trainable, again.save_as_bf16) == ("weight", True, True)
        assert isinstance(again, nn.Parameter)
        assert torch.equal(of(again), WHOLE)


def test_only_float32_is_saved_as_bf16():
    variables = [DVariable(WHOLE.to(dtype), ROWS) for dtype in (torch.float32, torch.float64, torch.int32)]
    enable_save_as_bf16([*variables, WHOLE, None])
    assert [variable.save_as_bf16 for variable in variables] == [True, False, False]
    variables[0].save_as_bf16 = False
    assert not variables[0].save_as_bf16


@pytest.mark.parametrize("is_rounded", [False, True])
def test_checkpoints(tmp_path, is_rounded):
    exact = torch.tensor([[3.1415927, 257.5, 65504.0]] * 5)
    rounded = torch.tensor([[3.140625, 258.0, 65536.0]] * 5)
    variable, counter = DVariable(exact, ROWS), DVariable(torch.tensor(7), Layout([], MESH))
    if is_rounded:
        enable_save_as_bf16([variable, counter])
    dtckpt.save(tmp_path / "tree", {"v": variable, "n": [counter]})
    dtckpt.name_based_save(MESH, tmp_path / "named", {"v": variable, "n/0": counter})
    for name in ("tree", "named"):
        info = dtckpt.open_checkpoint(tmp_path / name).tensors["v"]
        assert info.dtype == torch.float32
        assert info.stored_dtype == (torch.bfloat16 if is_rounded else torch.float32)
        assert info.layout == ROWS
    again = {"v": DVariable(torch.zeros(5, 3), COLUMNS), "n": [DVariable(0, Layout([], MESH))]}
    dtckpt.restore(tmp_path / "tree", again)
    assert torch.equal(of(again["v"]), rounded if is_rounded else exact)
    assert again["n"][0].numpy() == 7


def assign_between_clients():
    mesh = cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())
    variable = DVariable(torch.zeros(5, 3), Layout(["x", UNSHARDED], mesh), name="w")
    variable.assign(copy_to_mesh(WHOLE, Layout([UNSHARDED, "x"], mesh)))
    try:
        variable.assign(copy_to_mesh(WHOLE[:4], Layout([UNSHARDED, "x"], mesh)))
    except ComponentError as error:
        return of(variable).tolist(), str(error)
    return None


@pytest.mark.processes
def test_assigning_between_clients(pool):
    seen = pool.values(assign_between_clients, clients=3, group=True)
    assert [values for values, _ in seen] == [WHOLE.tolist()] * 3
    assert len({text for _, text in seen}) == 1
