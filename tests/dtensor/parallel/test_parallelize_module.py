"""`parallelize_module`: the modules that a plan names, their mesh, and refusals."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from dtckpt import abstract_mesh
from dtckpt.dtensor import DTensor, Replicate, Shard, distribute_tensor, run_on
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, UnsupportedModuleError

MESH = abstract_mesh({"tp": 4})


class Marked(ParallelStyle):
    """Notes the modules that it is applied to, and its arguments."""

    def __init__(self):
        self.seen = []

    def _apply(self, module, device_mesh):
        self.seen.append((module.name, device_mesh, self.src_data_rank))
        return module


def named(name):
    module = nn.Module()
    module.name = name
    return module


def tree():
    """Return a module with two layers of an attention and two experts; the second layer has a norm, too."""
    root = named("root")
    root.layers = nn.ModuleList()
    for number in range(2):
        layer = named(f"layer {number}")
        layer.attention = named(f"attention {number}")
        layer.expert_0, layer.expert_1 = named(f"expert {number} 0"), named(f"expert {number} 1")
        root.layers.append(layer)
    root.layers[1].norm = named("norm")
    return root


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ["root"]),
        ("layers.1", ["layer 1"]),
        ("layers.0.attention", ["attention 0"]),
        ("layers.*.attention", ["attention 0", "attention 1"]),
        ("layers.[!0].expert_?", ["expert 1 0", "expert 1 1"]),
        ("*.*.norm", ["norm"]),
        ("layers.0.", ["layer 0"]),
    ],
)
def test_paths_are_patterns(path, expected):
    style = Marked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(tree(), MESH, {path: style}, src_data_rank=2)
    assert style.seen == [(name, MESH, 2) for name in expected]


@pytest.mark.parametrize("path", ["layer", "layers.2", "layers.*.nothing", "layers.attention", "layers.0.attention.x"])
def test_a_path_without_modules_is_left_out_with_a_warning(path):
    style, other = Marked(), Marked()
    with pytest.warns(UserWarning, match=f"matches '{path.replace('*', '[*]')}'"):
        parallelize_module(tree(), MESH, {path: style, "layers.0": other})
    assert (style.seen, [name for name, *_ in other.seen]) == ([], ["layer 0"])


def test_plans_may_be_nested():
    style = Marked()
    parallelize_module(tree(), MESH, {"layers.*": {"attention": style, "": style}})
    assert [name for name, *_ in style.seen] == ["attention 0", "layer 0", "attention 1", "layer 1"]


def test_a_style_may_return_another_module():
    class Wrapped(ParallelStyle):
        def _apply(self, module, device_mesh):
            return nn.Sequential(module)

    assert isinstance(parallelize_module(nn.Identity(), MESH, Wrapped()), nn.Sequential)


def test_without_a_plan_nothing_happens():
    module = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="got no parallelize_plan"):
        assert parallelize_module(module, MESH) is module
    assert not isinstance(module.weight, DTensor)


def test_the_current_mesh_counts():
    module = nn.Linear(4, 4)
    with run_on(MESH):
        parallelize_module(module, parallelize_plan=ColwiseParallel())
    assert module.weight.device_mesh == MESH
    with pytest.raises(MeshError, match="no mesh was given and no mesh is active"):
        parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(),
        RowwiseParallel(),
        SequenceParallel(),
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
    ],
    ids=lambda style: type(style).__name__,
)
def test_styles_are_for_one_axis(style):
    grid = abstract_mesh({"dp": 2, "tp": 2})
    with pytest.raises(MeshError, match=r"expected one axis; pass a slice, such as mesh\['tp'\]"):
        parallelize_module(nn.Linear(4, 4), grid, style)


@pytest.mark.parametrize("plan", ["rows", {"": 3}, {"": {"": ColwiseParallel}}], ids=str)
def test_other_plans_are_refused(plan):
    with pytest.raises(LayoutTypeError, match="expected a ParallelStyle, or a dict of them by the path of a module"):
        parallelize_module(nn.Linear(4, 4), MESH, plan)


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()], ids=lambda style: type(style).__name__)
def test_other_modules_are_refused(style):
    with pytest.raises(UnsupportedModuleError, match="got Conv1d, expected Linear or Embedding") as caught:
        parallelize_module(nn.Conv1d(4, 4, 1), MESH, style)
    assert isinstance(caught.value, NotImplementedError)


def test_a_module_is_parallelized_once():
    module = parallelize_module(nn.Linear(4, 4), MESH, ColwiseParallel())
    with pytest.raises(LayoutError, match="a module can be distributed once"):
        parallelize_module(module, MESH, ColwiseParallel())


@pytest.mark.parametrize(
    ("style", "module", "placements"),
    [
        (ColwiseParallel(), nn.Linear(6, 5), {"weight": Shard(0), "bias": Shard(0)}),
        (RowwiseParallel(), nn.Linear(6, 5), {"weight": Shard(1), "bias": Replicate()}),
        (ColwiseParallel(), nn.Linear(6, 5, bias=False), {"weight": Shard(0)}),
        (ColwiseParallel(), nn.Embedding(6, 5), {"weight": Shard(1)}),
        (RowwiseParallel(), nn.Embedding(6, 5), {"weight": Shard(0)}),
        (SequenceParallel(), nn.LayerNorm(5), {"weight": Replicate(), "bias": Replicate()}),
        (SequenceParallel(), nn.Dropout(), {}),
    ],
    ids=str,
)
def test_parameters(style, module, placements):
    plain = copy.deepcopy(module)
    for parameter in (*plain.parameters(), *module.parameters()):
        parameter.requires_grad_(False)
    assert parallelize_module(module, MESH, style) is module
    parameters = dict(module.named_parameters())
    assert {name: parameter.placements for name, parameter in parameters.items()} == {
        name: (placement,) for name, placement in placements.items()
    }
    for name, parameter in plain.named_parameters():
        assert isinstance(parameters[name], nn.Parameter)
        assert not parameters[name].requires_grad
        torch.testing.assert_close(parameters[name].full_tensor(), parameter)


def test_a_distributed_parameter_keeps_its_layout():
    module = nn.Linear(8, 8, bias=False)
    module.weight = weight = nn.Parameter(distribute_tensor(module.weight.detach(), MESH, [Shard(0)]))
    assert parallelize_module(module, MESH, ColwiseParallel()).weight is weight
    other = nn.Linear(8, 8, bias=False)
    other.weight = weight
    with pytest.raises(LayoutError, match="parameter 'weight' of Linear was distributed before"):
        parallelize_module(other, MESH, RowwiseParallel())


def test_parametrized_weights_are_replicated():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    plain = copy.deepcopy(module)
    parallelize_module(module, MESH, ColwiseParallel(use_local_output=False))
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(distribute_tensor(x, MESH, [Shard(0)])).full_tensor(), plain(x))
