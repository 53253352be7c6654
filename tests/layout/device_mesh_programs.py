"""Programs on four ranks for PyTorch's `DeviceMesh`, which also run with its imports replaced by ours.

Each leaves its observations in the variable ``seen``; the test compares the two runs.
"""

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

SOME_RANKS = """
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

FROM_GROUP = """
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

UNFLATTENING = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

def total(group):
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()

world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
cut = world._unflatten(0, (2, 2), ("dp", "tp"))
same = world._unflatten("world", (2, 2), ("dp", "tp"))
other = world._unflatten(0, (1, 2, 2), ("pp", "ep", "etp"))
joined = DeviceMesh._concatenate([cut["dp"], other["etp"]])
pair = DeviceMesh._concatenate([cut["tp"]])
seen = [
    cut == same, cut.mesh.tolist(), cut.mesh_dim_names, cut["tp"].mesh.tolist(), cut.get_coordinate(),
    [total(group) for group in cut.get_all_groups()], other.mesh.tolist(), other["ep", "etp"].mesh.tolist(),
    joined.mesh.tolist(), joined.mesh_dim_names, joined.get_coordinate(),
    [total(group) for group in joined.get_all_groups()], pair.mesh.tolist(), pair == cut["tp"],
    world.mesh.tolist(), world.mesh_dim_names,
]
"""

BACKENDS = """
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "fake"})
by_place = DeviceMesh("cpu", [[0, 1], [2, 3]], backend_override=(("fake", None), (None, None)))
line = init_device_mesh("cpu", (4,), mesh_dim_names=("world",), backend_override={0: "fake"})
cut = line._unflatten(0, (2, 2), ("dp", "tp"), backend_override={"dp": "fake"})
both = DeviceMesh._concatenate([cut["tp"], cut["dp"]])
flat = mesh._flatten("all", "fake")
seen = [
    [dist.get_backend(group) for group in each.get_all_groups()]
    for each in (mesh, mesh["tp"], mesh["dp"], by_place, line, cut, cut["dp"], both, flat, mesh["all"])
]
plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
seen += [mesh.get_group("tp") is mesh["tp"].get_group(), mesh == plain, dist.get_backend(plain.get_group("tp"))]
"""

ERRORS = """
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False

names, twice = ("dp", "tp"), {0: "gloo", "a": "gloo"}
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
every = mesh.get_all_groups()
seen = [
    raises(RuntimeError, lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp"))),
    raises(RuntimeError, lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",))),
    raises(RuntimeError, lambda: init_device_mesh("cuda:0", (2, 2))),
    raises(RuntimeError, lambda: init_device_mesh("cpu", (5,))),
    raises(RuntimeError, lambda: DeviceMesh("cpu", list(range(5)))),
    raises(KeyError, lambda: mesh["pp"]),
    raises(KeyError, lambda: mesh["dp", "pp"]),
    raises(RuntimeError, lambda: mesh["dp", "dp"]),
    raises(KeyError, lambda: mesh["tp"]["dp"]),
    raises(RuntimeError, lambda: mesh.get_group()),
    raises(RuntimeError, lambda: mesh.get_local_rank()),
    raises(KeyError, lambda: mesh.get_group("pp")),
    raises(IndexError, lambda: mesh.get_group(2)),
    raises(ValueError, lambda: mesh._flatten("tp")),
    raises(IndexError, lambda: mesh.size(2)),
    raises(ValueError, lambda: mesh._unflatten(2, (2, 1), ("a", "b"))),
    raises(ValueError, lambda: mesh._unflatten("pp", (2, 1), ("a", "b"))),
    raises(ValueError, lambda: mesh._unflatten(0, (2, 2), ("a", "b"))),
    raises(RuntimeError, lambda: mesh._unflatten(0, (2, 1), ("a",))),
    raises(RuntimeError, lambda: DeviceMesh._concatenate([mesh["tp"], mesh["tp"]])),
    raises(RuntimeError, lambda: DeviceMesh._concatenate([mesh, mesh["dp"]])),
    raises(ValueError, lambda: DeviceMesh.from_group([], "cpu")),
    raises(ValueError, lambda: DeviceMesh.from_group(every, "cpu")),
    raises(ValueError, lambda: DeviceMesh.from_group(mesh.get_group("tp"), "cpu", [0, 3])),
    raises(ValueError, lambda: DeviceMesh.from_group(every, "cpu", [0, 1, 2, 3], mesh_dim_names=("x",))),
    raises(RuntimeError, lambda: init_device_mesh("cpu", (4,), backend_override={"pp": "gloo"})),
    raises(RuntimeError, lambda: init_device_mesh("cpu", (2, 2), backend_override={2: "gloo"})),
    raises(RuntimeError, lambda: init_device_mesh("cpu", (4,), mesh_dim_names="a", backend_override=twice)),
]
"""

PROGRAMS = {
    "slices": SLICES,
    "flattening": FLATTENING,
    "some_ranks": SOME_RANKS,
    "from_group": FROM_GROUP,
    "unflattening": UNFLATTENING,
    "backends": BACKENDS,
    "errors": ERRORS,
}


def run(name, module):
    """Run a program with `torch.distributed.device_mesh` replaced by another module; return its observations."""
    names = {}
    exec(PROGRAMS[name].replace("torch.distributed.device_mesh", module), names)
    return names["seen"]
