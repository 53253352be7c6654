"""PyTorch's own placements are taken wherever a placement is taken; its subclasses of them are refused."""

import pytest
import torch
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import dtckpt
from dtckpt import DTensor, Layout, Partial, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor, full, ones, placement_types, rand, zeros
from dtckpt.dtensor.experimental import local_map, register_sharding
from dtckpt.dtensor.operators.registry import PLANNERS
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from dtckpt.errors import LayoutTypeError

ONE, LINE, GRID = abstract_mesh({"x": 1}), abstract_mesh({"x": 2}), abstract_mesh({"x": 2, "y": 2})
WHOLE = torch.arange(12.0).reshape(4, 3)
PAIRS = [
    (theirs.Shard(1), Shard(1)),
    (theirs.Shard(-1), Shard(1)),
    (theirs.Replicate(), Replicate()),
    (theirs.Partial(), Partial()),
    (theirs.Partial("max"), Partial("max")),
]


@pytest.mark.parametrize(("given", "same"), PAIRS, ids=str)
def test_functions_of_tensors(given, same):
    made = distribute_tensor(WHOLE, LINE, [given])
    assert made.placements == (same,)
    assert distribute_tensor(made, LINE, [given]) is made
    for other in (
        distribute_tensor(WHOLE, LINE).redistribute(placements=[given]),
        *(make(4, 3, device_mesh=LINE, placements=[given]) for make in (zeros, ones, rand)),
        full([4, 3], 2.0, device_mesh=LINE, placements=[given]),
    ):
        assert other.placements == (same,)
    assert Layout.from_placements(LINE, [given], 2) == Layout.from_placements(LINE, [same], 2)


@pytest.mark.parametrize(("given", "same"), PAIRS, ids=str)
def test_local_tensors_and_gradients(given, same):
    made = DTensor.from_local(WHOLE, ONE, [given], grad_placements=[theirs.Replicate()])
    assert made.placements == (same,)
    assert made.to_local(grad_placements=[given]).shape == WHOLE.shape
    assert distribute_tensor(WHOLE, LINE).full_tensor(grad_placements=[theirs.Partial()]).equal(WHOLE)
    both = [theirs.Replicate(), Replicate()]
    assert distribute_tensor(WHOLE, GRID, both).full_tensor(grad_placements=both).equal(WHOLE)


def test_strided_shards():
    given = [_StridedShard(0, split_factor=2), theirs.Shard(0)]
    same = [placement_types._StridedShard(0, split_factor=2), Shard(0)]
    assert distribute_tensor(WHOLE, GRID, given).layout == Layout.from_placements(GRID, same, 2)


def test_local_map():
    function = local_map(
        lambda part: part * 2,
        [theirs.Shard(0)],
        ([theirs.Shard(0)],),
        ([theirs.Shard(0)],),
        redistribute_inputs=True,
    )
    made = function(distribute_tensor(WHOLE, LINE))
    assert made.placements == (Shard(0),)
    assert made.full_tensor().equal(WHOLE * 2)


def test_register_sharding():
    operator = torch.ops.aten.angle.default
    try:

        @register_sharding(operator)
        def _(x):
            return [([theirs.Shard(dim)], [theirs.Shard(dim)]) for dim in range(x.ndim)]

        made = torch.angle(distribute_tensor(WHOLE, LINE, [theirs.Shard(1)]))
        assert made.placements == (Shard(1),)
        assert made.full_tensor().equal(torch.angle(WHOLE))
    finally:
        PLANNERS.pop(operator, None)
        dtckpt.dtensor.operators.dispatch.clear_plans()


@pytest.mark.parametrize("module", [theirs, dtckpt], ids=["theirs", "ours"])
def test_styles(module):
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    wanted = plain(WHOLE).detach()
    shard, whole = module.Shard, module.Replicate
    plan = {
        "": PrepareModuleInputOutput(
            input_layouts=whole(),
            desired_input_layouts=(shard(0),),
            input_kwarg_layouts={"mask": shard(0)},
            desired_input_kwarg_layouts={"mask": whole()},
            output_layouts=(shard(0),),
            desired_output_layouts=whole(),
        ),
        "0": ColwiseParallel(input_layouts=shard(0), output_layouts=shard(-1), use_local_output=False),
        "1": RowwiseParallel(input_layouts=shard(-1), output_layouts=shard(0), use_local_output=False),
    }
    made = parallelize_module(plain, ONE, plan)(WHOLE)
    torch.testing.assert_close(made.detach(), wanted)


def test_styles_convert_them_when_they_are_made():
    for make in (
        lambda shard: ColwiseParallel(input_layouts=shard, output_layouts=shard),
        lambda shard: PrepareModuleInput(input_layouts=(shard, None), desired_input_layouts=(shard, None)),
        lambda shard: PrepareModuleOutput(output_layouts=shard, desired_output_layouts=(None,)),
    ):
        assert repr(make(theirs.Shard(0))) == repr(make(Shard(0)))


@pytest.mark.parametrize("given", [_NormPartial(2), _MaskPartial("sum"), 0, "S(0)"], ids=str)
def test_what_has_no_counterpart_is_refused(given):
    """The terms of PyTorch's own kinds of Partial do not add up to the tensor: as a pending sum they would be wrong."""
    for make in (
        lambda: distribute_tensor(WHOLE, LINE, [given]),
        lambda: zeros(4, 3, device_mesh=LINE, placements=[given]),
        lambda: distribute_tensor(WHOLE, LINE).redistribute(placements=[given]),
        lambda: Layout.from_placements(LINE, [given], 2),
    ):
        with pytest.raises(LayoutTypeError, match="expected a Placement"):
            make()
