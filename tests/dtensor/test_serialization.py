"""DTensors that are copied, pickled, and saved with PyTorch's own means."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.states import cluster_mesh
from torch import nn

import dtckpt
from dtckpt import UNSHARDED, Layout, Replicate, Shard, abstract_mesh, copy_to_mesh, pack, unpack
from dtckpt.dtensor import DeviceMesh, distribute_module, distribute_tensor, zeros
from dtckpt.errors import ComponentError, LayoutError, OperatorError
from dtensor.operators.plain_programs import assert_as_plain

MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", UNSHARDED], MESH)
WHOLE = torch.arange(15.0).reshape(5, 3)

LAYOUTS = {
    "rows": ROWS,
    "columns, then rows": Layout(["y", "x"], MESH),
    "ordered": Layout([("y", "x"), UNSHARDED], MESH),
    "copies": Layout.replicated(MESH, 2),
    "terms": Layout([UNSHARDED, "x"], MESH, {"y": "max"}),
    "parted": ROWS.to_parted(),
}


def by_torch(value):
    """Save and load, the way that takes nothing but data."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def placed(layout, whole=WHOLE):
    parts = [whole[layout.region(device, whole.shape).slices()].clone() for device in layout.mesh.local_device_ids()]
    return pack(parts, layout, whole.shape)


def assert_same(one, other):
    assert type(one) is type(other)
    assert isinstance(one, nn.Parameter) == isinstance(other, nn.Parameter)
    assert (one.layout, one.shape, one.dtype) == (other.layout, other.shape, other.dtype)
    assert one.device_mesh.local_devices() == other.device_mesh.local_devices()
    assert (one.requires_grad, one.is_leaf, one.grad) == (other.requires_grad, other.is_leaf, None)
    for part, wanted in zip(unpack(one), unpack(other), strict=True):
        assert torch.equal(part, wanted)


# --- copies and pickles -------------------------------------------------------------------------------------------

WAYS = [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), by_torch]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_come_back(way, layout):
    plain = placed(layout)
    for tensor in (plain, placed(layout).requires_grad_(), nn.Parameter(plain), nn.Parameter(plain, False)):
        assert_same(way(tensor), tensor)


@pytest.mark.parametrize("way", WAYS)
def test_attributes_of_parameters_come_back(way):
    parameter = nn.Parameter(placed(ROWS))
    parameter.is_sequence_parallel = True
    assert way(parameter).is_sequence_parallel


@pytest.mark.parametrize("way", WAYS[2:])
def test_meshes_are_shared_again(way):
    tensor = placed(ROWS)
    one, other, mesh, layout = way((tensor, tensor.clone(), tensor.device_mesh, ROWS))
    assert one.device_mesh is other.device_mesh is mesh is layout.mesh


@pytest.mark.parametrize("way", [by_torch, copy.deepcopy])
def test_memory_is_shared_again(way):
    memory, layout = torch.arange(8.0), Layout(["x"], abstract_mesh({"x": 2}))
    one, other = way([pack([memory[:4], memory[4:]], layout), pack([memory[2:6]] * 2, layout)])
    unpack(one)[0].fill_(9)
    assert unpack(other)[1].tolist() == [9, 9, 4, 5]


def test_shallow_copies_share_memory_and_deep_ones_do_not():
    tensor = placed(ROWS)
    pointers = [part.data_ptr() for part in unpack(tensor)]
    assert [part.data_ptr() for part in unpack(copy.copy(tensor))] == pointers
    tied = copy.deepcopy([tensor, tensor, unpack(tensor)[0]])
    assert tied[0] is tied[1]
    assert not {part.data_ptr() for part in unpack(tied[0])} & set(pointers)
    assert tied[2].data_ptr() == unpack(tied[0])[0].data_ptr()


VIEWS = {
    "row": lambda x: x[1],
    "rows": lambda x: x[1:],
    "flat": lambda x: x.view(-1),
    "turned": lambda x: x.T,
    "column": lambda x: x[:, 2],
    "steps": lambda x: x[::2, 1::3],
    "part of flat": lambda x: x.view(-1)[3:15].view(3, 4),
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(0, 2, 1)[0],
    "of turned": lambda x: x.T.view(3, 2, 4)[1],
    "part of split": lambda x: x.split(3)[1],
    "detached": torch.detach,
}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: list(map(copy.copy, pair))], ids=["deep", "shallow"])
@pytest.mark.parametrize("is_first", [True, False], ids=["view first", "source first"])
@pytest.mark.parametrize("name", VIEWS)
def test_copies_of_views_are_views(name, way, is_first):
    """Writes to one copy reach the other, and reach the originals only if the copies are shallow."""

    def program(x, _):
        pair = [VIEWS[name](x), x]
        copied = way(pair if is_first else pair[::-1])
        view, source = copied if is_first else copied[::-1]
        places = [(one.stride(), one.storage_offset()) for one in (view, source)]
        source.add_(1)
        seen = view.clone()
        view.mul_(2)
        again = copy.deepcopy(view)
        view.select(0, 0).zero_()
        return places, seen, view, source, again, pair, torch._C._is_alias_of(view, source)

    assert_as_plain(program)


def test_copies_of_modules_with_views():
    class Module(nn.Module):
        def __init__(self, x):
            super().__init__()
            self.weight = self.tied = nn.Parameter(x.clone())
            self.register_buffer("whole", x)
            self.register_buffer("rows", x[1:])
            self.register_buffer("flat", x.view(-1)[2:14])
            self.register_buffer("part", self.weight.data.view(-1)[2:9])
            self.turned = nn.Parameter(self.weight.data.T)

    def program(x, _):
        module = Module(x)
        other = copy.deepcopy(module)
        other.whole.add_(1)
        other.flat.mul_(3)
        other.rows[0] = 7
        other.weight.data.add_(1)
        return other.tied is other.weight, list(other.parameters()), list(other.buffers()), list(module.buffers())

    assert_as_plain(program)


@pytest.mark.parametrize("way", WAYS)
def test_strides_and_offsets_come_back(way):
    def program(x, _):
        views = [x.T, x[1:], x[:, ::2], x.view(-1)[3:9], x[0].expand(2, 6)]
        return [way(one.detach()) for one in views] if way is not copy.deepcopy else way(views)

    assert_as_plain(program)


def test_files_keep_memory_that_components_share():
    """A view whose values had to move becomes a separate tensor."""
    tensor = placed(Layout([UNSHARDED, "x"], MESH))
    turned, columns, source = by_torch([tensor.T, tensor[:, 1:], tensor])
    source.add_(1)
    assert torch.equal(turned.full_tensor(), WHOLE.T + 1)
    assert torch.equal(columns.full_tensor(), WHOLE[:, 1:])
    moved = source.view(-1)
    turned.mul_(2)
    assert torch.equal(moved.full_tensor(), ((WHOLE + 1) * 2).view(-1))


def test_pickles_of_older_releases_are_read():
    rebuild, state = placed(ROWS).__reduce_ex__(2)
    assert_same(rebuild(*state[:7]), placed(ROWS))


def test_deep_copies_have_the_gradient_and_pickles_have_not():
    tensor = placed(ROWS).requires_grad_()
    tensor.full_tensor().sum().backward()
    again = copy.deepcopy(tensor)
    assert torch.equal(again.grad.full_tensor(), torch.ones(5, 3))
    assert unpack(again.grad)[0].data_ptr() != unpack(tensor.grad)[0].data_ptr()
    assert by_torch(tensor).grad is None


def test_computed_tensors():
    computed = placed(ROWS).requires_grad_().clone()
    with pytest.raises(OperatorError, match="deepcopy copies leaves only; got a DTensor that was computed"):
        copy.deepcopy(computed)
    assert by_torch(computed).is_leaf


def test_hooks_are_left_behind_with_a_warning():
    tensor = placed(ROWS).requires_grad_()
    tensor.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="backward hook"):
        by_torch(tensor)


def test_modules(tmp_path):
    model = distribute_module(nn.Linear(3, 5), MESH)
    again = copy.deepcopy(model)
    assert_same(again.weight, model.weight)
    with torch.no_grad():
        again.weight.zero_()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(again.weight, model.weight)


@pytest.mark.share(3, of="processes that start PyTorch")
def test_loading_needs_no_more_than_the_import(tmp_path):
    torch.save({"w": nn.Parameter(placed(ROWS)), "placements": placed(ROWS).placements}, tmp_path / "w.pt")
    script = (
        f"import torch, dtckpt.dtensor; print(torch.load({str(tmp_path / 'w.pt')!r})['w'].full_tensor().sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "105.0"


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------


def boxes(tensor):
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]


def test_chunks_are_the_boxes_of_this_client():
    assert boxes(placed(ROWS)) == [((0, 0), (3, 3)), ((3, 0), (2, 3))]
    assert boxes(placed(Layout.replicated(MESH, 2))) == [((0, 0), (5, 3))]
    # rows nested 2 x 2: the last device has none
    assert boxes(placed(Layout([("x", "y"), UNSHARDED], MESH), WHOLE[:3])) == [
        ((0, 0), (1, 3)),
        ((1, 0), (1, 3)),
        ((2, 0), (1, 3)),
    ]
    assert boxes(placed(ROWS, WHOLE[:0])) == [((0, 0), (0, 3))]
    assert boxes(placed(Layout([], MESH), torch.tensor(1.0))) == [((), ())]
    assert boxes(placed(Layout(["x", UNSHARDED], cluster_mesh({"x": 3}, 3, 1)))) == [((2, 0), (2, 3))]


def test_what_has_no_chunks():
    with pytest.raises(LayoutError, match="pending reductions has no values to save yet"):
        placed(LAYOUTS["terms"]).__create_chunk_list__()
    index = dcp.metadata.MetadataIndex("w", (1, 0))
    with pytest.raises(ComponentError, match=r"'w' has no chunk at \(1, 0\); got chunks \[0:3, 0:3\], \[3:5, 0:3\]"):
        placed(ROWS).__get_tensor_shard__(index)


@pytest.fixture
def quiet():
    """PyTorch's DCP warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in LAYOUTS if name not in ("terms", "parted")])
@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (1, 1), (0, 3)])
def test_dcp_in_one_process(tmp_path, layout, shape):
    whole = torch.randn(shape)
    saved = {"w": placed(layout, whole), "nested": {"p": nn.Parameter(placed(layout, whole))}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    for other in (LAYOUTS[name] for name in ("rows", "copies", "ordered", "columns, then rows")):
        wanted = placed(other, whole)
        tensor, parameter = placed(other, torch.zeros(shape)), nn.Parameter(placed(other, torch.zeros(shape)))
        dcp.load({"w": tensor, "nested": {"p": parameter}}, checkpoint_id=tmp_path, no_dist=True)
        for each in (tensor, parameter):
            for part, component in zip(unpack(each), unpack(wanted), strict=True):
                assert torch.equal(part, component)
    plain = torch.zeros(shape)
    dcp.load({"w": plain}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain, whole)


def dcp_between_clients(path):
    warnings.simplefilter("ignore")
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    line, wide = cluster_mesh({"x": clients}, clients, client), cluster_mesh({"x": 2, "y": clients}, clients, client)
    layouts = [
        Layout(["x", UNSHARDED], line),
        Layout([UNSHARDED, "x"], line),
        Layout.replicated(line, 2),
        Layout([("x", "y"), UNSHARDED], wide),
        Layout(["y", UNSHARDED], wide),
    ]
    part = DeviceMesh("cpu", list(range(1, clients)))
    made = {str(number): copy_to_mesh(WHOLE + number, layout) for number, layout in enumerate(layouts)}
    made["part"] = distribute_tensor(WHOLE, part, [Shard(0)])
    dcp.save(made, checkpoint_id=path)
    found = []
    for turn in range(len(layouts)):
        target = {
            str(number): copy_to_mesh(torch.zeros(5, 3), layouts[(number + turn) % len(layouts)])
            for number in range(len(layouts))
        }
        target["part"] = zeros(5, 3, device_mesh=part, placements=[Shard(1)])
        dcp.load(target, checkpoint_id=path)
        for number in range(len(layouts)):
            wanted = unpack(copy_to_mesh(WHOLE + number, target[str(number)].layout))
            if not all(map(torch.equal, unpack(target[str(number)]), wanted)):
                found.append((turn, number))
        columns = WHOLE.chunk(clients - 1, dim=1)
        if not torch.equal(target["part"].to_local(), columns[client - 1] if client else torch.empty(0)):
            found.append((turn, "part"))
    dist.barrier()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("clients", [2, 3])
def test_dcp_between_clients(pool, tmp_path, clients):
    assert pool.values(dcp_between_clients, str(tmp_path), clients=clients, group=True) == [[]] * clients


def dcp_with_pytorchs_tensors(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate as TheirReplicate
    from torch.distributed.tensor import Shard as TheirShard
    from torch.distributed.tensor import distribute_tensor as their_distribute
    from torch.distributed.tensor import zeros as their_zeros

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = distribute_tensor(WHOLE, mesh, [Shard(0)])
    theirs = their_distribute(WHOLE + 1, mesh, [TheirShard(1)])
    dcp.save({"ours": ours, "theirs": theirs}, checkpoint_id=path)
    loaded = {
        "ours": their_zeros(5, 3, device_mesh=mesh, placements=[TheirReplicate()]),
        "theirs": zeros(5, 3, device_mesh=mesh, placements=[Replicate()]),
    }
    dcp.load(loaded, checkpoint_id=path)
    dist.barrier()
    return [loaded[name].to_local().tolist() for name in ("ours", "theirs")]


@pytest.mark.processes
def test_pytorchs_tensors_and_ours_read_each_other(pool, tmp_path):
    seen = pool.values(dcp_with_pytorchs_tensors, str(tmp_path), clients=2, group=True)
    assert seen == [[WHOLE.tolist(), (WHOLE + 1).tolist()]] * 2


def dcp_in_the_background(path):
    warnings.simplefilter("ignore")
    clients = dtckpt.num_clients()
    mesh = cluster_mesh({"x": 2, "y": clients}, clients, dtckpt.client_id())
    saved = {"w": copy_to_mesh(WHOLE, Layout(["y", "x"], mesh)), "p": nn.Parameter(copy_to_mesh(WHOLE, ROWS))}
    staged = dcp.async_save(saved, checkpoint_id=path)
    staged.result()
    loaded = {name: copy_to_mesh(torch.zeros(5, 3), Layout(["x", UNSHARDED], mesh)) for name in saved}
    dcp.load(loaded, checkpoint_id=path)
    dist.barrier()
    return [tensor.full_tensor().tolist() for tensor in loaded.values()]


@pytest.mark.processes
def test_dcp_in_the_background(pool, tmp_path):
    seen = pool.values(dcp_in_the_background, str(tmp_path), clients=2, group=True)
    assert seen == [[WHOLE.tolist()] * 2] * 2
