"""Programs on four ranks, written for PyTorch's `DeviceMesh`: each runs as it is, and with its imports changed."""

SLICES = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
tp, dp = mesh["tp"], mesh["dp"]
sums = []
for group in (tp.get_group(), dp.get_group(), mesh.get_group("tp"), mesh.get_group(0), *mesh.get_all_groups()):
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    sums.append((tensor.item(), dist.get_process_group_ranks(group), dist.get_rank(group), group.size()))
seen = [
    sums,
    isinstance(mesh, DeviceMesh), isinstance(tp, DeviceMesh),
    mesh["dp", "tp"] is mesh, mesh["tp"] == tp, tp == dp, hash(mesh["tp"]) == hash(tp),
    mesh.ndim, mesh.shape, mesh.size(), mesh.size(0), mesh.size(-1), mesh.mesh_dim_names, mesh.device_type,
    mesh.mesh.tolist(), tp.mesh.tolist(), dp.mesh.tolist(), tp.mesh_dim_names, mesh.mesh.dtype,
    mesh.get_rank(), mesh.get_coordinate(), tp.get_coordinate(),
    mesh.get_local_rank("tp"), mesh.get_local_rank(0), tp.get_local_rank(),
    mesh.get_group("tp") is tp.get_group(), mesh.get_group(0) is mesh.get_group("dp"),
]
"""

FLATTENING = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
flat = mesh["dp", "cp"]._flatten()
everyone = mesh._flatten("world")
total = torch.ones(1)
dist.all_reduce(total, group=flat.get_group())
seen = [
    flat.mesh.tolist(), flat.mesh_dim_names, flat.get_local_rank(), total.item(),
    everyone.mesh.tolist(), everyone.get_group().size(), mesh.get_local_rank("world"),
    mesh["dp", "cp"]._flatten() == flat, mesh["dp_cp"] == flat, mesh["tp"]._flatten() == mesh["tp"],
    mesh.get_group("dp_cp").size(), mesh["dp", "tp"]["tp"] == mesh["tp"],
]
"""

PART_OF_THE_WORLD = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

one = DeviceMesh("cpu", [1, 3])
grid = DeviceMesh("cpu", torch.tensor([[0], [2]]), mesh_dim_names=("dp", "tp"))
seen = [one.get_coordinate(), grid.get_coordinate(), one.mesh.tolist(), grid.mesh.tolist(), one.get_rank(), one.size()]
for mesh in (one, grid):
    if mesh.get_coordinate() is not None:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=mesh.get_group(0))
        seen.append((total.item(), mesh.get_local_rank(0), [group.size() for group in mesh.get_all_groups()]))
"""

GROUPS_GIVEN = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
row, column = rows[dist.get_rank() // 2], columns[dist.get_rank() % 2]
mesh = DeviceMesh.from_group([column, row], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
line = DeviceMesh.from_group(row, "cpu", mesh_dim_names=("tp",))
seen = [
    mesh.get_group("dp") is column, mesh["tp"].get_group() is row, line.get_group() is row,
    line.mesh.tolist(), mesh.mesh.tolist(), mesh.get_coordinate(), line.get_local_rank(),
]
"""

ERRORS = """
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

def raises(call):
    try:
        call()
    except Exception:
        return True
    return False

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
seen = [
    raises(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp"))),
    raises(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",))),
    raises(lambda: init_device_mesh("cuda:0", (2, 2))),
    raises(lambda: init_device_mesh("cpu", (5,))),
    raises(lambda: DeviceMesh("cpu", list(range(5)))),
    raises(lambda: mesh["pp"]),
    raises(lambda: mesh["dp", "pp"]),
    raises(lambda: mesh["dp", "dp"]),
    raises(lambda: mesh["tp"]["dp"]),
    raises(lambda: mesh.get_group()),
    raises(lambda: mesh.get_local_rank()),
    raises(lambda: mesh.get_group("pp")),
    raises(lambda: mesh.get_group(2)),
    raises(lambda: mesh._flatten("tp")),
    raises(lambda: mesh.size(2)),
]
"""

PROGRAMS = {
    "slices": SLICES,
    "flattening": FLATTENING,
    "part_of_the_world": PART_OF_THE_WORLD,
    "groups_given": GROUPS_GIVEN,
    "errors": ERRORS,
}


def run(name, module):
    """Run a program that imports from another module; return what it has seen."""
    names = {}
    exec(PROGRAMS[name].replace("torch.distributed.device_mesh", module), names)
    return names["seen"]
