"""Programs for the client processes of `test_mesh_clients`: process groups of meshes, and PyTorch's meshes."""

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

from dtckpt.comm import process_groups
from dtckpt.errors import DtckptError
from dtckpt.layout import device_mesh
from dtckpt.layout.device_mesh import DeviceMesh, init_device_mesh
from dtckpt.layout.mesh import Mesh


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


def sum_over(group):
    """Return the sum of 10**rank over the members: a digit 1 per member."""
    tensor = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def error_of(call):
    """Return class and message of the error that a call raises, None without one."""
    try:
        call()
    except DtckptError as error:
        return type(error).__name__, str(error)
    return None


def members_with_different_numbers_of_groups():
    """Client 0 makes three groups before the group with client 3, which has no tensors."""
    sums = []
    for members in ([0, 1], [0, 2], [0, 1, 2], [3, 0]):
        if dist.get_rank() in members:
            group = process_groups.process_group_of(members)
            assert group is process_groups.process_group_of(reversed(members))
            sums.append((sum_over(group), dist.get_process_group_ranks(group)))
    return sums


def groups_are_made_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = num_groups()
    first = mesh.get_all_groups()
    for again in (mesh, init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))):
        assert [one is other for one, other in zip(first, again.get_all_groups(), strict=True)] == [True, True]
    assert mesh["tp"].get_group() is first[1]
    assert mesh["tp", "dp"].get_all_groups() == first[::-1]
    assert mesh.flatten().get_group() is dist.group.WORLD
    assert DeviceMesh("cpu", [3, 2, 1, 0]).get_group() is dist.group.WORLD
    return num_groups() - before


def threads_after_default_groups():
    """Adopt a mesh of PyTorch in several default groups, one after the other; return Gloo's threads after each."""
    seen = []
    for _ in range(4):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        Mesh.from_device_mesh(init_torch_mesh("cpu", (1,))).to_device_mesh()
        dist.destroy_process_group()
        gc.collect()
        names = [Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        seen.append(names.count("gloo_tcp_loop"))
    return seen


def groups_end_with_the_default_group(token):
    gc.collect()
    # PyTorch's caches keep meshes of earlier cases, and these keep their groups.
    before, worlds_before = len(process_groups._groups), len(process_groups._generations)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    old_group = mesh.get_group("dp")
    first = sum_over(mesh.get_group("tp"))
    dist.destroy_process_group()
    gc.collect()
    num_left = len(process_groups._groups) - before
    error = error_of(lambda: mesh.get_group("dp"))
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(token, store), rank=mesh.get_rank(), world_size=4)
    assert mesh.get_group("dp") is not old_group
    return (
        first,
        num_left,
        error,
        sum_over(mesh.get_group("dp")),
        sum_over(mesh.get_group("tp")),
        len(process_groups._generations) - worlds_before,
    )


def a_group_that_was_destroyed_is_made_again():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    before = mesh.get_group("dp")
    dist.destroy_process_group(before)
    after = mesh.get_group("dp")
    return before is after, sum_over(after)


def clients_outside_the_mesh():
    mesh = DeviceMesh("cpu", [2, 0], mesh_dim_names=("dp",))
    facts = mesh.get_coordinate(), mesh.get_rank(), mesh.mesh.tolist()
    if mesh.get_coordinate() is None:
        calls = (
            mesh.get_group,
            mesh.get_all_groups,
            mesh.get_local_rank,
            lambda: process_groups.process_group_of([0, 2]),
        )
        refusals = [error_of(call) for call in calls]
        return facts, [kind for kind, _ in refusals], mesh.to_device_mesh().get_coordinate()
    return facts, sum_over(mesh.get_group()), mesh.to_device_mesh().get_coordinate()


def errors_of_bad_meshes():
    return [
        error_of(lambda: DeviceMesh("cpu", [0, 1, 1])),
        error_of(lambda: DeviceMesh("cpu", [0, 3])),
        error_of(lambda: init_device_mesh("cpu", (4,))),
        error_of(lambda: DeviceMesh.from_group(dist.group.WORLD, "cpu", [0, 1])),
        error_of(lambda: process_groups.process_group_of([0, 3])),
    ]


def make_the_default_group(port):
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 serves the store, which no client has used yet
    os.environ["MASTER_PORT"] = str(port)
    mesh = init_device_mesh("cpu", (2,))
    return dist.get_backend(), sum_over(mesh.get_group()), mesh.clients


def from_pytorch():
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = Mesh.from_device_mesh(theirs)
    count = num_groups()
    assert ours == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) == device_mesh.mesh_of(theirs)
    assert [ours.get_group(axis) is theirs.get_group(axis) for axis in ("dp", "tp")] == [True, True]
    assert ours["tp"] == Mesh.from_device_mesh(theirs["tp"])
    assert num_groups() == count
    unnamed = Mesh.from_device_mesh(TorchMesh("cpu", [[0, 1, 2, 3]]))
    return unnamed.mesh_dim_names, unnamed.get_coordinate()


def to_pytorch():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = ours.to_device_mesh()
    assert isinstance(theirs, TorchMesh)
    assert [ours.get_group(axis) is theirs.get_group(axis) for axis in ("dp", "tp")] == [True, True]
    assert Mesh.from_device_mesh(theirs) == ours
    assert Mesh.from_device_mesh(ours["tp"].to_device_mesh()) == ours["tp"]
    tensor = distribute_tensor(torch.arange(8), theirs, [Replicate(), Shard(0)])
    assert isinstance(tensor, DTensor)
    wide = Mesh(
        ["x"],
        ours.mesh.numpy().reshape(-1),
        [0],
        ["/job:a/task:0/device:CPU:0"],
        "",
        ["/job:a/task:0/device:CPU:0"] * 4,
    )
    return tensor.full_tensor().tolist(), theirs.get_coordinate(), error_of(wide.to_device_mesh)


def pytorch_meshes_are_accepted():
    from torch import nn

    from dtckpt import DTensor, Replicate, Shard, run_on
    from dtckpt.dtensor import distribute_module, distribute_tensor, full, ones, rand

    # New names: layouts that were kept in an earlier case would bring that case's mesh.
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    ours, rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")), [Shard(0), Replicate()]
    meshes = []
    tensors = [
        distribute_tensor(torch.ones(4, 3), theirs, rows),
        DTensor.from_local(torch.ones(2, 3), theirs, rows),
        ones(4, 3, device_mesh=theirs, placements=rows),
        full((4, 3), 1.0, device_mesh=ours).redistribute(theirs, rows),
        distribute_module(nn.Linear(2, 2), theirs, lambda name, module, mesh: meshes.append(mesh)).weight,
    ]
    with run_on(theirs) as active:
        tensors.append(rand(4, 3))
        assert active == ours
    line = theirs["columns"]
    on_line = ones(2, device_mesh=line, placements=[Shard(0)])
    assert [type(tensor.device_mesh) for tensor in tensors] == [Mesh] * len(tensors)
    assert {tensor.device_mesh for tensor in tensors} == {ours, *meshes}
    assert len({id(tensor.device_mesh) for tensor in tensors}) == 1
    assert on_line.device_mesh == ours["columns"]
    assert ones(2, device_mesh=line).device_mesh is on_line.device_mesh
    return [tensor.full_tensor().sum().item() for tensor in tensors[:4]]
