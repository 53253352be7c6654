"""Values and modules to create and distribute, and what client processes do with them."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
import torch.distributed as dist
from redistribution import redistribution_cases
from support.states import cluster_mesh
from torch import nn

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Partial, Replicate, Shard, abstract_mesh, pack
from dtckpt.comm import observers
from dtckpt.dtensor import distribute_module, distribute_tensor, empty, full, init_device_mesh, ones, rand, randn, zeros
from dtckpt.dtensor.random.keys import FIRST_COMPARED
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, MeshTypeError

WHOLE = torch.arange(42.0).reshape(6, 7)


FILLED = [(zeros, 0.0), (ones, 1.0), (lambda *size, **options: full(size, 2.5, **options), 2.5)]


RANDOM = [rand, randn]


def random_placements(rng, mesh, rank):
    kinds = [
        Replicate(),
        *(Partial(op) for op in redistribution_cases.REDUCE),
        *(Shard(dim) for dim in range(-rank, rank)),
    ]
    return [rng.choice(kinds) for _ in range(mesh.ndim)]


REFUSED = [
    (
        LayoutError,
        "only dense tensors are made; got layout",
        lambda mesh: zeros(2, layout=torch.sparse_coo, device_mesh=mesh),
    ),
    (LayoutError, "got 1 for axes", lambda mesh: ones(2, device_mesh=mesh, placements=[Shard(0)])),
    (LayoutError, "got 3 for axes", lambda mesh: rand(2, device_mesh=mesh, placements=[Replicate()] * 3)),
    (LayoutError, "expected a dim below 1", lambda mesh: empty(2, device_mesh=mesh, placements=[Shard(1), Shard(0)])),
    (LayoutError, "expected a dim below 0", lambda mesh: zeros((), device_mesh=mesh, placements=[Shard(0)] * 2)),
    (LayoutTypeError, "expected a sequence", lambda mesh: zeros(2, device_mesh=mesh, placements=Shard(0))),
    (LayoutTypeError, "expected a Placement", lambda mesh: zeros(2, device_mesh=mesh, placements=[0, 1])),
    (
        LayoutTypeError,
        r"zeros\(\) got an unexpected .*'foo', expected one of dtype, ",
        lambda mesh: zeros(2, foo=1, device_mesh=mesh),
    ),
    (LayoutTypeError, r"ones\(\) got an unexpected .*'size'", lambda mesh: ones(size=2)),
    (LayoutTypeError, r"full\(\) got an unexpected .*'make_fill'", lambda mesh: full(2, 3, make_fill=1)),
    (LayoutTypeError, r"empty\(\) got an unexpected .*'foo'", lambda mesh: empty(2, foo=1)),
    (LayoutTypeError, r"rand\(\) got an unexpected .*'generator'", lambda mesh: rand(2, generator=None)),
    (LayoutTypeError, r"randn\(\) got an unexpected .*'make_fill'", lambda mesh: randn(2, make_fill=1)),
    (LayoutTypeError, r"got \(-1,\)", lambda mesh: zeros(-1, device_mesh=mesh)),
    (LayoutTypeError, r"got \(2.5,\)", lambda mesh: randn(2.5, device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: ones("ab", device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: ones((2, 2), 3, device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: full(None, 3, device_mesh=mesh)),
    (MeshError, "no mesh was given and no mesh is active", lambda mesh: zeros(2)),
    (MeshError, "no mesh was given and no mesh is active", lambda mesh: distribute_tensor(WHOLE)),
    (MeshError, "no mesh was given and no mesh is active", lambda mesh: distribute_module(nn.Linear(1, 1))),
    (MeshError, "no mesh was given and no mesh is active", lambda mesh: DTensor.from_local(WHOLE)),
    (MeshTypeError, "got str, expected Mesh", lambda mesh: zeros(2, device_mesh="x")),
    (MeshTypeError, "got int, expected Mesh", lambda mesh: distribute_tensor(WHOLE, 0, [Shard(0)])),
    (MeshTypeError, "got list, expected Mesh", lambda mesh: distribute_module(nn.Linear(1, 1), [])),
    (MeshTypeError, "got str, expected Mesh", lambda mesh: zeros(2, device_mesh=mesh).redistribute("x", [Shard(0)])),
    (LayoutError, "got 1 for axes", lambda mesh: distribute_tensor(WHOLE, mesh, [Shard(0)])),
    (LayoutError, "expected a dim below 2", lambda mesh: distribute_tensor(WHOLE, mesh, [Shard(2)] * 2)),
    (LayoutTypeError, "needs a tensor; got list", lambda mesh: distribute_tensor([1.0], mesh)),
    (LayoutError, "expected a leaf", lambda mesh: distribute_tensor(WHOLE.clone().requires_grad_() * 2, mesh)),
    (LayoutError, "got layout torch.sparse_coo", lambda mesh: distribute_tensor(WHOLE.to_sparse(), mesh)),
    (LayoutError, "grid of devices", lambda mesh: distribute_tensor(WHOLE, Mesh.empty())),
    (LayoutError, "grid of devices", lambda mesh: zeros(2, device_mesh=Mesh.from_device("CPU:0"))),
    (LayoutError, "grid of devices", lambda mesh: DTensor.from_local(WHOLE, Mesh.from_device("CPU:0"))),
    (LayoutError, "bitwise", lambda mesh: distribute_tensor(WHOLE, mesh, [Partial("band"), Shard(0)])),
    (LayoutError, "bitwise", lambda mesh: ones(2, device_mesh=mesh, placements=[Shard(0), Partial("bxor")])),
    (MeshError, "src_data_rank is 2", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank=2)),
    (MeshError, "src_data_rank is -1", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank=-1)),
    (MeshError, "src_data_rank is '0'", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank="0")),
    (
        LayoutError,
        "distributed already",
        lambda mesh: distribute_tensor(zeros(2, device_mesh=mesh), mesh, [Shard(0)] * 2),
    ),
]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(WHOLE.clone())
        self.fixed = nn.Parameter(WHOLE.clone(), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, first, second):
        return first + second


def line():
    return init_device_mesh("cpu", (dtckpt.num_clients(),))


def source_values():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    found = []
    for sizes in ({"x": clients}, {"x": 2, "y": clients}):  # the second one has two devices per client
        mesh = cluster_mesh(sizes, clients, client)
        for source in range(min(mesh.shape)):
            owner = mesh.client_of(int(np.ravel_multi_index((source,) * mesh.ndim, mesh.shape)))
            for seed in range(10):
                rng = random.Random(seed)
                placements = random_placements(rng, mesh, 2)
                tensor = distribute_tensor(WHOLE + 100 * client, mesh, placements, src_data_rank=source)
                if not torch.allclose(tensor.full_tensor(), WHOLE + 100 * owner):
                    found.append(f"{placements} from {source}: {tensor.full_tensor()}")
    return found


def without_communication():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client)
    own, found = WHOLE + 100 * client, []
    torch.manual_seed(5)
    makers = [zeros, ones, empty, *((rand, randn) if dist.is_initialized() else ())]  # random keys are compared
    for _ in range(FIRST_COMPARED if dist.is_initialized() else 0):
        rand(1, device_mesh=mesh)
    with observers.observed_by(found.append):
        for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()], None):
            tensor = distribute_tensor(own, mesh, placements, src_data_rank=None)
            for make in makers:
                make(6, 7, device_mesh=mesh, placements=placements)
            region = tensor.layout.region(client, (6, 7))
            wanted = own[region.slices()] if placements != [Partial()] or not client else torch.zeros(6, 7)
            if not torch.equal(tensor.to_local(), wanted):
                found.append(f"{placements}: {tensor.to_local()}")
    return found


def create_over_clients():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        mesh = cluster_mesh(redistribution_cases.random_axes(rng, 2 * clients), clients, client)
        shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
        placements = random_placements(rng, mesh, len(shape))
        for make, value in FILLED:
            tensor = make(*shape, dtype=torch.float64, device_mesh=mesh, placements=placements)
            if not torch.allclose(tensor.full_tensor(), torch.full(shape, value, dtype=torch.float64)):
                found.append(f"{make} {shape} {placements}")
    torch.manual_seed(11)
    mesh = line()
    copies = [make(4, 5, device_mesh=mesh) for make in RANDOM]
    shards = [make(4 * clients, 5, device_mesh=mesh, placements=[Shard(0)]) for make in RANDOM]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in copies:
            pack([each.to_local()], each.layout, run_check=True)
    whole = tuple(tuple(each.full_tensor().flatten().tolist()) for each in (*copies, *shards))
    return found, whole, tuple(tuple(each.to_local().flatten().tolist()) for each in shards)


def distribute_modules_over_clients():
    client, found, mesh = dtckpt.client_id(), [], line()
    model = Inner()
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(100 * client)

    def partition(name, module, on):
        module.weight = nn.Parameter(distribute_tensor(module.weight, on, [Shard(0)]))

    distribute_module(model, mesh, partition)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        wanted = dict(Inner().named_parameters()) | dict(Inner().named_buffers())
        if not torch.equal(each.full_tensor(), wanted[name]):
            found.append(f"{name}: {each.full_tensor()}")
    if (
        model.weight.to_local().shape
        != Layout(["x", UNSHARDED], cluster_mesh({"x": 3}, 3, client)).region(client, (6, 7)).shape
    ):
        found.append(f"weight: {model.weight.to_local().shape}")
    return found


def distribute_wrongly(wrong, guilty):
    tensor, placements, source = WHOLE, [Shard(0)], 0
    if dtckpt.client_id() in guilty:
        tensor = {
            "shape": WHOLE[1:],
            "rank": WHOLE[0],
            "dtype": WHOLE.double(),
            "no tensor": None,
            "no leaf": WHOLE.clone().requires_grad_() * 2,
        }.get(wrong, WHOLE)
        placements = {"placements": [Shard(1)], "dim": [Shard(2)], "count": [Shard(0)] * 2}.get(wrong, placements)
        source = {"source": 1, "source beyond": 3}.get(wrong, source)
    distribute_tensor(tensor, line(), placements, src_data_rank=source)


def from_local_wrongly(wrong, guilty):
    tensor, placements, gradient = WHOLE, [Shard(0)], None
    if dtckpt.client_id() in guilty:
        tensor = {
            "shape": WHOLE[:4],
            "dtype": WHOLE.double(),
            "no tensor": None,
            "dtensor": ones(6, 7, device_mesh=abstract_mesh({"z": 1})),
        }.get(wrong, WHOLE)
        placements = {
            "placements": [Shard(1)],
            "rank": [Shard(-1)],
            "partial": [Partial()],
            "dim": [Shard(2)],
            "count": [Shard(0)] * 2,
        }.get(wrong, placements)
        gradient = [] if wrong == "gradient" else None
    DTensor.from_local(tensor, line(), placements, grad_placements=gradient)


def refuse(number):
    REFUSED[number][2](cluster_mesh({"x": 2, "y": 3}, 2, dtckpt.client_id()))


def outside():
    from dtckpt.dtensor import DeviceMesh

    mesh = DeviceMesh("cpu", [2, 0])
    tensor = distribute_tensor(WHOLE + dtckpt.client_id(), mesh, [Shard(0)], src_data_rank=1)
    if mesh.get_coordinate() is not None:
        assert torch.equal(tensor.full_tensor(), WHOLE)
        assert torch.equal(tensor.to_local(), WHOLE.chunk(2)[mesh.get_local_rank()])
    part = WHOLE.double().chunk(2)[mesh.get_local_rank() if mesh.get_coordinate() else 0]
    given = DTensor.from_local(part, mesh, [Shard(0)], shape=(6, 7), stride=(7, 1), run_check=True)
    assert torch.equal(given.redistribute(line(), [Replicate()]).to_local(), WHOLE.double())
    return tuple(tensor.shape), tuple(tensor.to_local().shape)
