"""What other runtimes get silently wrong, or hang at, is right here: on devices of one process, and over clients."""

from __future__ import annotations

import pytest
import torch

import dtckpt
from dtckpt import Layout, Mesh, Partial, Replicate, Shard, abstract_mesh, pack
from dtckpt.dtensor import DTensor, distribute_tensor, init_device_mesh, ones, rand
from dtckpt.errors import LayoutError, ReplicaMismatchError

from . import silent_faults

DEVICES = silent_faults.DEVICES


@pytest.mark.parametrize("group", silent_faults.GROUPS)
def test_one_process(group):
    assert silent_faults.faults_of_group(group) == []


@pytest.mark.share(3)
@pytest.mark.processes
@pytest.mark.parametrize("group", silent_faults.GROUPS)
def test_clients(pool, group):
    assert pool.values(silent_faults.faults_of_group, group, clients=DEVICES, group=True) == [[]] * DEVICES


# --- meshes -------------------------------------------------------------------------------------------------------


def test_redistribute_to_another_mesh_with_the_same_placements():
    values = silent_faults.numbers(5, 3)
    other = abstract_mesh({"y": 2})
    moved = distribute_tensor(values, silent_faults.line(), [Shard(0)]).redistribute(other, [Shard(0)])
    assert moved.device_mesh == other
    assert [tuple(component.shape) for component in moved.components] == [(3, 3), (2, 3)]
    assert torch.equal(moved.full_tensor(), values)


def test_tensors_on_different_meshes_are_refused():
    one = ones(4, device_mesh=abstract_mesh({"x": 4}))
    other = ones(4, device_mesh=abstract_mesh({"y": 2}))
    with pytest.raises(LayoutError, match="different meshes"):
        one + other


def beside_another_tensor_than_others_have() -> object:
    client = dtckpt.client_id()
    tensor = ones(4, device_mesh=init_device_mesh("cpu", (2,)))
    same = (tensor + torch.arange(4.0)).full_tensor().tolist()
    try:
        return same, (tensor + torch.full((4,), float(client))).full_tensor().tolist()
    except ReplicaMismatchError as error:
        return same, str(error)


@pytest.mark.processes
def test_plain_tensors_beside_others_are_the_same_on_every_client_or_refused(pool):
    (same, refused), (_, other) = pool.values(beside_another_tensor_than_others_have, clients=2, group=True)
    assert same == [1.0, 2.0, 3.0, 4.0]
    assert isinstance(refused, str), refused
    assert refused == other


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda mesh, x: distribute_tensor(x, mesh, [Shard(2)]), "dim"),
        (lambda mesh, x: distribute_tensor(x, mesh, [Shard(-3)]), "dim"),
        (lambda mesh, x: distribute_tensor(x, mesh, [Shard(0), Shard(1)]), "got 2"),
        (lambda mesh, x: DTensor.from_local(x, mesh, []), "got 0"),
        (lambda mesh, x: distribute_tensor(x, mesh).redistribute(placements=[Shard(2)]), "dim"),
        (lambda mesh, x: distribute_tensor(x, mesh, [Partial("total")]), "total"),
    ],
)
def test_wrong_placements_are_refused(make, text):
    with pytest.raises(LayoutError, match=text):
        make(silent_faults.line(), silent_faults.numbers(3, 3))


def compare_on_slices() -> list[object]:
    client = dtckpt.client_id()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    values = silent_faults.numbers(5, 3)
    shared = distribute_tensor(values, mesh, [Shard(0)])
    # On one slice of the mesh the tensors differ, on the other they do not; neither may hear of the other.
    changed = distribute_tensor(values + (client >= 2), mesh, [Shard(0)])
    return [torch.equal(shared, changed), torch.allclose(shared, changed), bool((shared == changed).all())]


@pytest.mark.processes
def test_equal_asks_the_clients_of_its_mesh_alone(pool):
    values = pool.values(compare_on_slices, clients=4, group=True)
    assert values == [[True] * 3] * 2 + [[False] * 3] * 2


def compute_on_a_part_of_the_world() -> list[object]:
    from dtckpt.dtensor import DeviceMesh

    mesh = DeviceMesh("cpu", [2, 0])
    values = silent_faults.numbers(5, 3)
    placed = distribute_tensor(values, mesh, [Shard(0)])
    result = (placed * 2 + 1).softmax(1)
    if mesh.get_coordinate() is None:
        return [tuple(result.shape)]
    return [tuple(result.shape), torch.allclose(result.full_tensor(), (values * 2 + 1).softmax(1))]


@pytest.mark.processes
def test_clients_outside_the_mesh_go_on(pool):
    values = pool.values(compute_on_a_part_of_the_world, clients=3, group=True)
    assert values == [[(5, 3), True], [(5, 3)], [(5, 3), True]]


def compare_sizes_with_own_values() -> list[object]:
    from dtckpt.dtensor.debug import CommDebugMode

    clients = dtckpt.num_clients()
    placed = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (clients,)), [Shard(0)])
    own = torch.full((4, 3), float(dtckpt.client_id()))
    with CommDebugMode() as mode:
        found = [own.is_same_size(placed), placed.is_same_size(own), placed.is_same_size(own[1:])]
    return [*found, mode.get_total_counts()]


@pytest.mark.processes
def test_sizes_are_compared_without_values(pool):
    assert pool.values(compare_sizes_with_own_values, clients=2, group=True) == [[True, True, False, 0]] * 2


# --- random numbers -----------------------------------------------------------------------------------------------

RANDOM = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(2, 3),
    "exponential_": lambda x: x.clone().exponential_(),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}
LAYOUTS = ([Shard(0)], [Shard(1)], [Partial()], [Replicate()])


def random_numbers(make, mesh: Mesh, placements) -> list[object]:
    torch.manual_seed(3)
    tensor = distribute_tensor(silent_faults.numbers(7, 5), mesh, placements)
    return [make(tensor).full_tensor().tolist() for _ in range(2)]


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_do_not_depend_on_the_layout(name):
    alone = random_numbers(RANDOM[name], abstract_mesh({"x": 1}), [Replicate()])
    assert alone[0] != alone[1]
    for placements in LAYOUTS:
        assert random_numbers(RANDOM[name], silent_faults.line(), placements) == alone
    grid = abstract_mesh({"x": 2, "y": 2})
    assert random_numbers(RANDOM[name], grid, [Shard(0), Shard(1)]) == alone
    assert random_numbers(RANDOM[name], grid, [Partial(), Shard(0)]) == alone


def test_gradients_pass_where_dropout_left_elements():
    values = distribute_tensor(torch.ones(7, 5), silent_faults.line(), [Shard(0)]).requires_grad_()
    kept = torch.nn.functional.dropout(values, 0.4)
    kept.sum().backward()
    assert torch.equal(values.grad.full_tensor(), kept.full_tensor().detach())


def random_numbers_over_clients() -> list[object]:
    mesh = silent_faults.line()
    made = [random_numbers(make, mesh, placements) for make in RANDOM.values() for placements in LAYOUTS]
    torch.manual_seed(5)
    return [*made, rand(7, 5, device_mesh=mesh, placements=[Shard(0)]).full_tensor().tolist()]


@pytest.mark.processes
def test_random_numbers_are_the_same_over_clients(pool):
    wanted = random_numbers_over_clients()
    assert pool.values(random_numbers_over_clients, clients=DEVICES, group=True) == [wanted] * DEVICES


# --- layouts that PyTorch cannot describe -------------------------------------------------------------------------


def test_splits_in_any_order_of_the_axes():
    mesh = abstract_mesh({"x": 2, "y": 2})
    values = silent_faults.numbers(7, 6)
    results = []
    for axes in (("x", "y"), ("y", "x")):
        layout = Layout([axes, "unsharded"], mesh)
        parts = [values[layout.region(device, (7, 6)).slices()].clone() for device in mesh.local_device_ids()]
        results.append((pack(parts, layout, (7, 6)) @ distribute_tensor(values.T.contiguous(), mesh)).softmax(0))
    for result in results:
        assert torch.allclose(result.full_tensor(), (values @ values.T).softmax(0), atol=1e-6)
    assert torch.allclose((results[0] + results[1]).full_tensor(), 2 * (values @ values.T).softmax(0), atol=1e-6)
