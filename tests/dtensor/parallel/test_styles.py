"""Styles on a client of several devices, between DTensors, and what styles refuse; see also `test_programs`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dtckpt import abstract_mesh
from dtckpt.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dtckpt.errors import ComponentError, LayoutError, ParallelPlanError

ONE, MANY = abstract_mesh({"tp": 1}), abstract_mesh({"tp": 4})
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize("placement", [R, S0, Shard(2), Partial()], ids=str)
@pytest.mark.parametrize("length", [8, 5, 2])
def test_distributed_values_of_any_layout(placement, length):
    """A DTensor of any layout is brought to the layout that the module wants."""
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)).double()
    module = copy.deepcopy(plain)
    parallelize_module(
        module,
        MANY,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(use_local_output=False),
            "3": RowwiseParallel(output_layouts=S1, use_local_output=False),
        },
    )
    x = torch.randn(2, length, 6, dtype=torch.float64)
    wanted, made = plain(x), module(distribute_tensor(x, MANY, [placement]))
    assert made.placements == (S1,)
    torch.testing.assert_close(made.detach().full_tensor(), wanted.detach())
    wanted.square().sum().backward()
    made.square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad.placements == one.placements
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_a_client_of_several_devices_has_no_one_component():
    module = parallelize_module(nn.Linear(4, 4), MANY, ColwiseParallel())
    with pytest.raises(ComponentError, match="got 1, expected 4"):
        module(torch.ones(2, 4))
    with pytest.raises(ComponentError, match="to_local needs one local device; got 4"):
        module(distribute_tensor(torch.ones(2, 4), MANY, [R]))


def test_other_positional_arguments_are_kept():
    class Scaled(nn.Module):
        def forward(self, x, factor, *, shift):
            return x * factor + shift, factor

    module = parallelize_module(Scaled(), ONE, SequenceParallel())
    made, factor = module(torch.ones(2, 3), 4, shift=1)
    assert isinstance(made, DTensor)
    assert made.placements == (S1,)
    assert (made.full_tensor().tolist(), factor) == ([[5.0] * 3] * 2, 4)


def test_sequence_parallel_brings_outputs_to_the_sequence_dim():
    class Summed(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1)

    module = parallelize_module(Summed(), MANY, SequenceParallel())
    assert module(distribute_tensor(torch.ones(8, 4), MANY, [S0])).placements == (S1,)


def test_inputs_that_are_none():
    module = parallelize_module(
        nn.Bilinear(2, 2, 2),
        ONE,
        PrepareModuleInput(input_layouts=(R, None), desired_input_layouts=(None, None)),
    )
    seen = []
    module.register_forward_pre_hook(lambda _, inputs: seen.extend(map(type, inputs)))
    module(torch.ones(1, 2), torch.ones(1, 2))
    assert seen == [DTensor, torch.Tensor]


class Pair(nn.Module):
    def forward(self, x, y=None):
        return x, y


@pytest.mark.parametrize(
    ("style", "call", "text"),
    [
        (PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, R)), [1], "inputs: got 1, expected 2"),
        (PrepareModuleInput(input_layouts=R, desired_input_layouts=R), ["x"], "input 0: got str, expected a tensor"),
        (PrepareModuleOutput(output_layouts=R, desired_output_layouts=R), [1], "outputs: got 2, expected 1"),
        (SequenceParallel(), [[1.0]], "SequenceParallel: input: got list, expected a tensor"),
        (SequenceParallel(), [], "was called without positional arguments"),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_refused(style, call, text):
    module = parallelize_module(Pair(), ONE, style)
    with pytest.raises(ParallelPlanError, match=text):
        module(*call)


def test_arguments_by_name_that_are_no_tensors_are_refused():
    layouts = {"y": R}
    style = PrepareModuleInput(input_kwarg_layouts=layouts, desired_input_kwarg_layouts=layouts)
    module = parallelize_module(Pair(), ONE, style)
    with pytest.raises(ParallelPlanError, match="input 'y': got str, expected a tensor"):
        module(1, y="text")
    assert module(1) == (1, None)
    assert isinstance(module(1, y=torch.ones(2))[1], DTensor)


def test_a_dtensor_on_another_mesh_is_refused():
    module = parallelize_module(nn.Linear(4, 4), MANY, ColwiseParallel())
    with pytest.raises(ParallelPlanError, match="expected one on the mesh that the module was parallelized over"):
        module(distribute_tensor(torch.ones(2, 4), abstract_mesh({"tp": 2}), [R]))


def test_a_dim_that_a_tensor_lacks_is_refused():
    module = parallelize_module(nn.Identity(), ONE, SequenceParallel(sequence_dim=2))
    with pytest.raises(LayoutError):
        module(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PrepareModuleInput(input_layouts=R), "input_layouts and desired_input_layouts must be of one length"),
        (lambda: PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=R), "must be of one length"),
        (lambda: PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R)), "must be of one length"),
        (lambda: PrepareModuleInput(input_kwarg_layouts={"x": R}), r"got \['x'\] and \[\], expected the same"),
        (
            lambda: PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R}),
            r"got \['x'\] and \['y'\]",
        ),
    ],
)
def test_layouts_that_do_not_fit_each_other_are_refused(make, text):
    with pytest.raises(ParallelPlanError, match=text) as caught:
        make()
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (
            ColwiseParallel(),
            "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=True)",
        ),
        (
            RowwiseParallel(output_layouts=S1, use_local_output=False),
            "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Shard(dim=1),), use_local_output=False)",
        ),
        (SequenceParallel(sequence_dim=0), "SequenceParallel(sequence_dim=0, use_local_output=False)"),
        (
            PrepareModuleOutput(output_layouts=(R, None), desired_output_layouts=(S0, None)),
            "PrepareModuleOutput(output_layouts=(Replicate(), None), desired_output_layouts=(Shard(dim=0), None), "
            "use_local_output=True)",
        ),
        (
            PrepareModuleInput(input_layouts=R, desired_input_layouts=S0),
            "PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(dim=0),), "
            "input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=False)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_texts(style, text):
    assert repr(style) == text


def test_the_text_of_both_in_one():
    style = PrepareModuleInputOutput(output_layouts=R, desired_output_layouts=S0)
    assert repr(style.prepare_module_input) in repr(style)
    assert repr(style.prepare_module_output) in repr(style)
