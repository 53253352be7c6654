"""Programs written for `torch.distributed.tensor`; each runs as it is, and on `dtckpt.dtensor` instead.

A program takes the module that it would import from, runs on 2 or 4 clients, and returns its observations as plain
values. Where the two are meant to differ a program does not look.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.optim.optimizer import _foreach_supported_types as optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as gradients_types

OURS = "dtckpt.dtensor"
TORCHS = "torch.distributed.tensor"


def whole_of(*shape: int) -> torch.Tensor:
    """Return a tensor of small whole numbers, which add and multiply exactly."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) % 11 - 3


def own_of(*shape: int) -> torch.Tensor:
    """Return a tensor of this client alone."""
    return whole_of(*shape) + 100 * dist.get_rank()


def grid(api: Any) -> Any:
    return api.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def line(api: Any) -> Any:
    return api.init_device_mesh("cpu", (dist.get_world_size(),))


# --- meshes -------------------------------------------------------------------------------------------------------


def meshes(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    listed = api.DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("world",))
    seen = []
    for one in (mesh, every, listed, mesh["tp"], mesh["dp"]):
        total = own_of(2)
        dist.all_reduce(total, group=one.get_group(0))
        seen.append((one.get_coordinate(), one.get_local_rank(0), one.size(), one.ndim, tuple(one.shape), total))
        seen.append((one.get_rank(), one.device_type, one.mesh, len(one.get_all_groups())))
    names = [mesh.mesh_dim_names, listed.mesh_dim_names, mesh["tp"].mesh_dim_names]
    same = [mesh["tp"] == mesh["tp"], mesh["tp"] == mesh["dp"], mesh == grid(api), hash(mesh) == hash(grid(api))]
    kinds = [isinstance(mesh, api.DeviceMesh), isinstance(mesh["tp"], api.DeviceMesh), mesh["dp", "tp"] == mesh]
    return seen, names, same, kinds, mesh.get_local_rank("tp"), mesh.get_group("dp").size(), bool(repr(mesh))


def tensors_on_slices(api: Any) -> Any:
    mesh = grid(api)
    rows = api.distribute_tensor(whole_of(5, 3), mesh["tp"], [api.Shard(0)])
    sums = api.DTensor.from_local(own_of(3), mesh["dp"], [api.Partial()])
    return [
        (rows.to_local(), rows.full_tensor(), rows.device_mesh == mesh["tp"]),
        (sums.full_tensor(), sums.redistribute(placements=[api.Shard(0)]).to_local()),
    ]


def meshes_of_groups(api: Any) -> Any:
    mesh, every = grid(api), dist.group.WORLD
    ranks = list(range(dist.get_world_size()))
    made = [
        api.DeviceMesh.from_group(every, "cpu"),
        api.DeviceMesh.from_group(every, "cpu", ranks, mesh_dim_names=("world",)),
        api.DeviceMesh.from_group(every, "cpu", torch.tensor(ranks)),
        api.DeviceMesh.from_group([every], "cpu", ranks, mesh_dim_names=("world",)),
        api.DeviceMesh.from_group(mesh.get_group("tp"), "cpu"),
        api.DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")),
        mesh.from_group(every, "cpu"),
    ]
    groups = [one.get_group(0) is every for one in made[:4]], made[5].get_group("dp") is mesh.get_group("dp")
    seen = [(tuple(one.shape), one.mesh, one.get_coordinate(), one.size(), one.device_type) for one in made]
    totals = [api.DTensor.from_local(own_of(2), one, [api.Partial()] * one.ndim).full_tensor() for one in made]
    return groups, seen, totals, made[5] == mesh


def meshes_on_some_clients(api: Any) -> Any:
    mesh = api.DeviceMesh("cpu", list(range(1, dist.get_world_size())))
    whole = api.distribute_tensor(whole_of(5, 3), mesh, [api.Shard(0)])
    copies = whole.redistribute(placements=[api.Replicate()])
    zeros = api.zeros(4, 2, device_mesh=mesh, placements=[api.Shard(1)])
    given = api.DTensor.from_local(own_of(2, 2), mesh, [api.Shard(0)], shape=(2 * mesh.size(), 2), stride=(2, 1))
    found = api.DTensor.from_local(own_of(2, 2).t(), mesh, [api.Shard(0)])
    is_member = mesh.get_coordinate() is not None
    return (
        [(tuple(each.shape), each.stride()) for each in (whole, copies, zeros, given, found)],
        [each.to_local() for each in (whole, copies, zeros, given, found)],
        whole.full_tensor(),
        is_member,
    )


# --- creating tensors ---------------------------------------------------------------------------------------------


def distribute_tensors(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    shard, whole, seen = api.Shard, api.Replicate(), []
    for placements in ([shard(0)], [shard(1)], [shard(-1)], [whole], None):
        for shape in ((5, 3), (2, 7), (0, 2)):
            made = api.distribute_tensor(own_of(*shape), every, placements)
            seen.append((made.to_local(), made.full_tensor(), tuple(made.shape), made.stride(), made.numel()))
    for placements in (
        [shard(0), shard(1)],
        [shard(1), shard(0)],
        [shard(0), whole],
        [whole, shard(0)],
        [whole, whole],
    ):
        made = api.distribute_tensor(own_of(5, 6), mesh, placements)
        seen.append((made.to_local(), made.full_tensor(), made.dtype, made.ndim))
    nested = api.distribute_tensor(own_of(5, 2), mesh, [shard(0), shard(0)])
    seen.append((nested.to_local(), nested.full_tensor()))
    for source in (1, None):
        made = api.distribute_tensor(own_of(5), every, [shard(0)], src_data_rank=source)
        seen.append(made.to_local())
    number = api.distribute_tensor(torch.tensor(3), every, [whole])
    seen.append((number.to_local(), number.full_tensor(), tuple(number.shape)))
    again = api.distribute_tensor(nested, mesh, [shard(0), shard(0)])
    return seen, again is nested


def leaves(api: Any) -> Any:
    every = line(api)
    seen = []
    for wanted in (False, True):
        made = api.distribute_tensor(whole_of(4).requires_grad_(wanted), every, [api.Shard(0)])
        seen.append((made.requires_grad, made.is_leaf, made.grad_fn is None))
        local = whole_of(4).requires_grad_(wanted)
        given = api.DTensor.from_local(local, every, [api.Shard(0)])
        seen.append((given.requires_grad, given.is_leaf, given.grad_fn is None))
        moved = made.redistribute(placements=[api.Replicate()])
        seen.append((moved.requires_grad, moved.is_leaf, moved.to_local().requires_grad))
        zeros = api.zeros(4, requires_grad=wanted, device_mesh=every, placements=[api.Shard(0)])
        seen.append((zeros.requires_grad, zeros.is_leaf, made.detach().requires_grad))
    parameter = nn.Parameter(api.distribute_tensor(whole_of(4), every, [api.Shard(0)]))
    kinds = [isinstance(parameter, kind) for kind in (nn.Parameter, api.DTensor, torch.Tensor)]
    return seen, kinds, parameter.requires_grad, parameter.is_leaf


def texts(api: Any) -> Any:
    every = line(api)
    made = api.distribute_tensor(whole_of(4), every, [api.Shard(0)])
    terms = api.DTensor.from_local(whole_of(2), every, [api.Partial("avg")])
    objects = (made, terms, nn.Parameter(made), made.requires_grad_(), made.redistribute(placements=[api.Replicate()]))
    placements = [repr(placement) for placement in (*made.placements, *terms.placements, api.Replicate())]
    return [bool(repr(each)) and bool(str(each)) for each in (*objects, every)], placements


def placements(api: Any) -> Any:
    every = line(api)
    made = api.distribute_tensor(whole_of(4, 2), every, [api.Shard(-2)])
    kinds = (api.Shard(0), api.Replicate(), api.Partial(), api.Partial("max"))
    return [
        made.placements == (api.Shard(0),),
        made.redistribute(placements=[api.Replicate()]).placements == (api.Replicate(),),
        made.device_mesh is every,
        [(kind.is_shard(), kind.is_shard(0), kind.is_shard(1), kind.is_replicate()) for kind in kinds],
        [(kind.is_partial(), kind.is_partial("max"), isinstance(kind, api.Placement)) for kind in kinds],
        api.Partial() == api.Partial("sum"),
        len({api.Shard(0), api.Shard(0), api.Shard(1), api.Replicate(), api.Partial()}),
        made.placements[0].dim,
        kinds[3].reduce_op,
    ]


def factories(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    shard, whole = api.Shard, api.Replicate()
    on_line = {"device_mesh": every, "placements": [shard(0)]}
    on_grid = {"device_mesh": mesh, "placements": [shard(1), shard(0)]}
    made = [
        api.zeros(5, 3, **on_line),
        api.ones((5, 3), **on_line),
        api.ones([5], dtype=torch.int32, **on_line),
        api.zeros(torch.Size([2, 3]), device_mesh=every),
        api.ones(5, 3, **on_grid),
        api.zeros(5, 3, dtype=torch.bfloat16, device_mesh=mesh, placements=[whole, shard(1)]),
        api.full((5, 3), 2.5, **on_grid),
        api.full((5,), 7, dtype=torch.int64, **on_line),
        api.full((5,), 7.0, **on_line),
        api.zeros(0, 3, **on_line),
        api.zeros((), device_mesh=every),
        api.ones(6, layout=torch.strided, requires_grad=True, **on_line),
    ]
    seen = [(tuple(each.shape), each.to_local(), each.full_tensor(), each.dtype, each.requires_grad) for each in made]
    bare = api.empty(5, 3, dtype=torch.float64, **on_line)
    return seen, (tuple(bare.shape), tuple(bare.to_local().shape), bare.dtype)


def from_local(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    shard, whole, rank, size = api.Shard, api.Replicate(), dist.get_rank(), dist.get_world_size()
    seen = []
    for on, wanted in (
        (every, [shard(0)]),
        (every, [shard(1)]),
        (every, [shard(-1)]),
        (mesh, [shard(0), shard(1)]),
        (mesh, [shard(0), shard(0)]),
        (mesh, [api.Partial(), shard(1)]),
        (every, [api.Partial("max")]),
        (every, [api.Partial("avg")]),
    ):
        made = api.DTensor.from_local(own_of(2, 3), on, wanted)
        seen.append((tuple(made.shape), made.to_local(), made.full_tensor(), made.stride()))
    short = own_of(3 if rank < size - 1 else 2, 2)
    made = api.DTensor.from_local(short, every, [shard(0)], shape=(3 * size - 1, 2), stride=(2, 1))
    seen.append((tuple(made.shape), made.to_local(), made.full_tensor()))
    made = api.DTensor.from_local(whole_of(2, 3), every, [whole], run_check=True)
    seen.append((tuple(made.shape), made.full_tensor()))
    made = api.DTensor.from_local(whole_of(2, 3), every)
    seen.append((tuple(made.shape), made.full_tensor(), made.placements == (whole,)))
    local = own_of(2)
    shared = api.DTensor.from_local(local, every, [shard(0)])
    local.add_(1)
    return seen, shared.to_local()


def copies_of_the_first(api: Any) -> Any:
    mesh, every, seen = grid(api), line(api), []
    whole, terms = api.Replicate(), api.Partial()
    for on, wanted in (
        (every, [whole]),
        (mesh, [whole, whole]),
        (mesh, [api.Shard(0), whole]),
        (mesh, [whole, api.Shard(1)]),
        (mesh, [terms, whole]),
        (mesh, [whole, terms]),
        (mesh, [api.Shard(0), terms]),
    ):
        made = api.DTensor.from_local(own_of(2, 3), on, wanted, run_check=True)
        seen.append((tuple(made.shape), made.to_local(), made.full_tensor()))
    local = own_of(2, 3).requires_grad_()
    made = api.DTensor.from_local(local * 2, every, [whole], run_check=True)
    (made.to_local() * (dist.get_rank() + 1)).sum().backward()
    return seen, made.to_local(), local.grad


def strides(api: Any) -> Any:
    mesh, every, seen = grid(api), line(api), []
    images = own_of(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for local, on, wanted in (
        (own_of(3, 2).t(), every, [api.Shard(0)]),
        (own_of(3, 2).t(), every, [api.Shard(1)]),
        (own_of(3, 2).t(), mesh, [api.Shard(1), api.Replicate()]),
        (own_of(2, 3, 4).permute(2, 0, 1), mesh, [api.Shard(1), api.Shard(0)]),
        (images, every, [api.Shard(0)]),
        (images, mesh, [api.Shard(2), api.Partial()]),
    ):
        made = api.DTensor.from_local(local, on, wanted)
        seen.append((tuple(made.shape), made.stride(), made.is_contiguous(), made.to_local(), made.full_tensor()))
    made = api.DTensor.from_local(images, every, [api.Shard(0)])
    is_last = made.is_contiguous(memory_format=torch.channels_last), (made + 1).stride()
    shape, stride = (3 * dist.get_world_size(), 2), (1, 3 * dist.get_world_size())
    given = api.DTensor.from_local(own_of(2, 3).t(), every, [api.Shard(0)], shape=shape, stride=stride)
    learns = api.DTensor.from_local(own_of(3, 2).t().requires_grad_(), every, [api.Shard(0)])
    return seen, is_last, given.stride(), given.full_tensor(), learns.stride()


# --- moving tensors -----------------------------------------------------------------------------------------------


def redistribute_tensors(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    shard, whole, seen = api.Shard, api.Replicate(), []
    for shape in ((8, 4), (5, 7), (3, 1)):
        for before, after in (
            ([shard(0)], [shard(1)]),
            ([shard(1)], [shard(0)]),
            ([shard(0)], [whole]),
            ([whole], [shard(-1)]),
            ([shard(0)], [shard(0)]),
        ):
            moved = api.distribute_tensor(own_of(*shape), every, before).redistribute(every, after)
            seen.append((moved.to_local(), moved.full_tensor(), tuple(moved.shape)))
        for reduce_op in ("sum", "avg", "min", "max", "product"):
            terms = api.DTensor.from_local(whole_of(*shape) + dist.get_rank(), every, [api.Partial(reduce_op)])
            seen.extend(terms.redistribute(placements=after).to_local() for after in ([whole], [shard(0)], [shard(1)]))
            seen.append(terms.full_tensor())
        pairs = ([shard(0), whole], [whole, shard(0)], [shard(0), shard(1)], [shard(1), shard(0)], [whole, whole])
        for before in pairs:
            for after in pairs:
                moved = api.distribute_tensor(own_of(*shape), mesh, before).redistribute(placements=after)
                seen.append(moved.to_local())
    same = api.distribute_tensor(own_of(4), every, [shard(0)])
    kept = same.redistribute(placements=[shard(0)])
    later = same.redistribute(placements=[whole], async_op=True)
    with torch.no_grad():
        is_kept = kept.to_local() is same.to_local()
    leaf = api.distribute_tensor(whole_of(5, 4).requires_grad_(), every, [shard(0)])
    doubled = leaf.redistribute(placements=[shard(0)])
    doubled.mul_(2)
    with torch.no_grad():
        leaf.redistribute(placements=[shard(0)]).requires_grad_(False)
    kinds = doubled is leaf, doubled.is_leaf, leaf.requires_grad, leaf.to_local()
    awaited = kept.redistribute(placements=[whole], async_op=True).to_local().wait()
    return seen, is_kept, later.full_tensor(), later.to_local() + 1, kinds, awaited, type(awaited + 1) is torch.Tensor


def redistribute_with_dtypes(api: Any) -> Any:
    every = line(api)
    made = api.distribute_tensor(whole_of(6, 2).requires_grad_(), every, [api.Shard(0)])
    moved = made.redistribute(placements=[api.Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    local = moved.to_local()
    local.float().pow(2).sum().backward()
    return moved.dtype, local, made.grad.dtype, made.grad.to_local(), made.grad.placements == (api.Shard(0),)


# --- modules ------------------------------------------------------------------------------------------------------


class Column(nn.Module):
    """A linear layer that multiplies by its rows of the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_of(outputs, inputs))
        self.bias = nn.Parameter(whole_of(outputs))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.weight.to_local().T + self.bias.to_local()) * self.scale.to_local()


def distribute_modules(api: Any) -> Any:
    every, calls = line(api), []

    def partition(name, module, mesh):
        calls.append((name, type(module).__name__, mesh is every))
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                placed = api.distribute_tensor(parameter, mesh, [api.Shard(0)])
                module.register_parameter(key, nn.Parameter(placed))

    def take(module, inputs, mesh):
        calls.append(("in", type(module).__name__, mesh is every))
        return tuple(each + 1 for each in inputs)

    def give(module, outputs, mesh):
        calls.append(("out", type(module).__name__, mesh is every))
        return api.DTensor.from_local(outputs, mesh, [api.Shard(-1)]).full_tensor()

    model = Column(3, 2 * dist.get_world_size())
    placed = api.distribute_module(model, every, partition, take, give)
    out = placed(whole_of(5, 3))
    (out**2).sum().backward()
    seen = [(name, each.to_local(), each.full_tensor()) for name, each in placed.state_dict().items()]
    grads = [(name, each.grad.placements == each.placements, each.grad.to_local()) for name, each in named(placed)]
    old = Column(3, 2 * dist.get_world_size())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        api.distribute_module(old, every, partition, lambda inputs, on: (inputs[0] + 1,), lambda out, on: out * 2)
    kinds = [warning.category for warning in warned if "two arguments" in str(warning.message)]
    refused = False
    try:
        api.distribute_module(Column(3, 2), every, None, lambda inputs: inputs)
    except ValueError:
        refused = True
    return placed is model, calls, out, seen, grads, kinds == [FutureWarning] * 2, old(whole_of(5, 3)), refused


def named(module: nn.Module) -> Any:
    return module.named_parameters()


def replicated_modules(api: Any) -> Any:
    mesh = grid(api)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    for parameter in model.parameters():
        parameter.data.copy_(own_of(*parameter.shape))
    model[2].weight.requires_grad_(False)
    api.distribute_module(model, mesh, lambda name, module, on: None)
    seen = [
        (name, isinstance(each, api.DTensor), each.placements == (api.Replicate(),) * 2, each.dtype, each.to_local())
        for name, each in model.state_dict().items()
    ]
    kinds = [(name, isinstance(each, nn.Parameter), each.requires_grad, each.is_leaf) for name, each in named(model)]
    return seen, kinds


def shared_state_dict(api: Any) -> Any:
    every, states = line(api), []
    for _ in range(2):
        model = api.distribute_module(Column(3, 5), every, shard_rows(api))
        states.append(model.state_dict())
    with torch.no_grad():
        for each in model.parameters():
            each.to_local().zero_()
    return [[(name, each.to_local()) for name, each in state.items()] for state in states]


def shard_rows(api: Any) -> Any:
    def partition(name, module, mesh):
        for key, parameter in list(module._parameters.items()):
            module.register_parameter(key, nn.Parameter(api.distribute_tensor(parameter, mesh, [api.Shard(0)])))

    return partition


# --- other functions of PyTorch ------------------------------------------------------------------------------------


def assert_close_and_equal(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    rows = api.distribute_tensor(whole_of(6, 5), every, [api.Shard(0)])
    whole = api.distribute_tensor(whole_of(6, 5), every, [api.Replicate()])
    close = api.distribute_tensor(whole_of(6, 5) + 1e-7, every, [api.Shard(0)])
    other = api.distribute_tensor(whole_of(6, 5) + 5, every, [api.Shard(0)])
    seen = []
    for one, two in ((rows, close), (rows, other), (rows, whole), (rows, whole_of(6, 5)), (whole_of(6, 5), rows)):
        try:
            torch.testing.assert_close(one, two)
        except (AssertionError, TypeError) as error:
            seen.append((type(error).__name__, "Mismatched" in str(error)))
        else:
            seen.append(("", False))
    torch.testing.assert_close([rows, {"a": whole}], [close, {"a": whole + 0}])
    # Here PyTorch looks at own elements only, and refuses uneven shards.
    differs = raises(Exception, lambda: torch.testing.assert_close([rows], [other]))
    seen.append(differs or not rows.to_local().numel())
    placed = api.distribute_tensor(whole_of(6, 5), mesh, [api.Shard(0), api.Shard(1)])
    return seen, placed._local_tensor, rows._local_tensor.requires_grad, mesh.size(mesh_dim=0), mesh.size(1)


def collectives_over_meshes(api: Any) -> Any:
    mesh, every = grid(api), line(api)

    def multiplied(on, left, right):
        return functional.all_reduce(left @ right, "sum", on)

    call = import_module(f"{api.__name__}.experimental").local_map(
        multiplied,
        out_placements=[api.Replicate()],
        in_placements=(None, [api.Shard(1)], [api.Shard(0)]),
        device_mesh=every,
    )
    left = api.distribute_tensor(whole_of(3, 8), every, [api.Shard(1)])
    right = api.distribute_tensor(whole_of(8, 2), every, [api.Shard(0)])
    with import_module(f"{api.__name__}.debug").CommDebugMode() as mode:
        summed = functional.all_reduce(own_of(2), "sum", (mesh, 1)) + 0
        largest = functional.all_reduce(own_of(2), "max", every) + 0
    return call(every, left, right).full_tensor(), summed, largest, mode.get_total_counts()


def foreach_types(api: Any) -> Any:
    every = line(api)
    weight = nn.Parameter(api.distribute_tensor(whole_of(4, 3), every, [api.Shard(0)]))
    (weight * weight).sum().backward()
    torch.optim.AdamW([weight], lr=0.5, foreach=True).step()
    return [api.DTensor in listed for listed in (optimizers_types, gradients_types)], weight.full_tensor()


# --- refusals of both ---------------------------------------------------------------------------------------------


def refusals(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    made = api.distribute_tensor(whole_of(4, 4), every, [api.Shard(0)])
    model = api.distribute_module(Column(3, 4), every)
    return [
        raises(ValueError, lambda: api.distribute_tensor(whole_of(4), mesh, [api.Shard(0)])),
        raises(ValueError, lambda: api.distribute_tensor(made, every, [api.Shard(1)])),
        raises(ValueError, lambda: api.distribute_tensor(made, mesh, [api.Shard(0), api.Replicate()])),
        raises(RuntimeError, lambda: api.distribute_module(model, every)),
        raises(
            Exception, lambda: api.zeros(4, layout=torch.sparse_coo, device_mesh=every, placements=[api.Replicate()])
        ),
        raises(Exception, lambda: api.zeros(4, device_mesh=mesh, placements=[api.Shard(0)])),
        raises(RuntimeError, lambda: api.DTensor.from_local(whole_of(4), every, [api.Shard(1)])),
        raises(Exception, lambda: made.redistribute(placements=[api.Shard(2)])),
        raises(RuntimeError, lambda: api.DTensor.from_local(made, every, [api.Shard(0)])),
        raises(RuntimeError, lambda: api.distribute_tensor(whole_of(4).requires_grad_() * 2, every, [api.Shard(0)])),
    ]


def raises(kind: type[Exception], call: Any) -> bool:
    try:
        call()
    except kind:
        return True
    return False


PROGRAMS = (
    meshes,
    tensors_on_slices,
    meshes_on_some_clients,
    meshes_of_groups,
    distribute_tensors,
    leaves,
    texts,
    placements,
    factories,
    from_local,
    copies_of_the_first,
    strides,
    redistribute_tensors,
    redistribute_with_dtypes,
    distribute_modules,
    replicated_modules,
    shared_state_dict,
    assert_close_and_equal,
    collectives_over_meshes,
    foreach_types,
    refusals,
)


def run_both(program: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run a program on this client with both imports; return what each saw. Ours may not even warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = plain(program(import_module(TORCHS)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = plain(program(import_module(OURS)))
    return ours, theirs


def plain(value: Any) -> Any:
    """Turn tensors into lists, with shape and dtype, so that a comparison shows them."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().tolist()
    if isinstance(value, torch.dtype):
        return str(value)
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value
