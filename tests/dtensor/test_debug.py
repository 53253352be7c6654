"""Explanations of plans, the plan cache, and counts of communication."""

import inspect
import itertools
import json
import logging
import random

import numpy as np
import pytest
import torch
from redistribution import redistribution_cases
from support.states import cluster_mesh, packed
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils.checkpoint import checkpoint

import dtckpt
from dtckpt import MATCH, UNSHARDED, DTensor, Layout, Mesh, Partial, Replicate, Shard, abstract_mesh
from dtckpt.comm import observers
from dtckpt.dtensor.debug import CommDebugMode, clear_plan_cache, explain, plan_cache_info
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.redistribution.exchange_plan import plan_exchange

LINE = cluster_mesh({"x": 4}, 4, 0)
F32 = torch.float32


def placed(mesh, placements, rank=2):
    return Layout.from_placements(mesh, placements, rank)


# --- explain ------------------------------------------------------------------------------------------------------


def test_an_exchange_brings_each_device_what_its_client_lacks():
    found = explain(placed(LINE, [Shard(0)]), placed(LINE, [Shard(1)]), (8, 8), F32)
    (step,) = found.steps
    assert step.kind == "exchange"
    # A device keeps 2 x 2 of its new 8 x 2.
    assert [(each.client, each.received, each.copied, each.lower_bound) for each in found.devices] == [
        (client, 48, 16, 48) for client in range(4)
    ]
    assert (found.received, found.copied, found.lower_bound) == (192, 64, 192)


@pytest.mark.parametrize(
    ("source", "target", "received"),
    [
        (Shard(0), Replicate(), 4 * 3 * 64),
        (Replicate(), Shard(0), 0),
        (Partial(), Shard(0), 4 * 3 * 64),
    ],
)
def test_what_the_usual_changes_cost(source, target, received):
    found = explain(placed(LINE, [source]), placed(LINE, [target]), (8, 8), F32)
    assert [step.kind for step in found.steps] == ["exchange" if received else "copy"]
    assert found.received == received


def test_a_reduction_for_all_is_scattered_and_gathered():
    found = explain(placed(LINE, [Partial()]), placed(LINE, [Replicate()]), (8, 8), F32)
    assert [step.kind for step in found.steps] == ["exchange", "exchange"]
    assert {each.received for each in found.devices} == {2 * 3 * 256 // 4}
    assert {each.lower_bound for each in found.devices} == {256}


def test_two_hops_add_up():
    found = explain(placed(LINE, [Partial()], 1), placed(LINE, [Replicate()], 1), (1 << 20,), torch.bfloat16)
    assert found.steps[0].target == found.steps[1].source == placed(LINE, [Shard(0)], 1)
    assert (
        found.received == sum(each.received for step in found.steps for each in step.devices) == 4 * 6 * (1 << 18) * 2
    )


def test_equal_layouts_need_nothing_and_new_terms_no_communication():
    whole = placed(LINE, [Replicate()])
    assert explain(whole, whole, (8, 8), F32).steps == ()
    found = explain(whole, placed(LINE, [Partial()]), (8, 8), F32)
    assert [step.kind for step in found.steps] == ["terms"]
    assert found.received == found.copied == 0


def test_a_box_for_two_devices_of_a_client_comes_once():
    mesh = cluster_mesh({"x": 2, "y": 2}, 2, 1)
    found = explain(Layout(["x"], mesh), Layout([UNSHARDED], mesh), (8,), F32)
    assert [each.received for each in found.devices] == [each.lower_bound for each in found.devices] == [16, 0, 16, 0]
    assert found.copied == 4 * 32 - 32  # all but what came in place


def test_devices_of_one_client_only_copy():
    mesh = abstract_mesh({"x": 4})
    found = explain(placed(mesh, [Shard(0)]), placed(mesh, [Shard(1)]), (8, 8), F32)
    assert [step.kind for step in found.steps] == ["copy"]
    assert (found.received, found.copied, found.lower_bound) == (0, 256, 0)
    same = placed(abstract_mesh({"x": 2, "y": 2}), [Shard(0), Shard(0)])
    assert explain(placed(mesh, [Shard(0)]), same, (8, 8), F32).copied == 0, "components stay as they are"


def test_all_clients_explain_alike_without_touching_the_cache():
    def seen_by(client):
        meshes = cluster_mesh({"x": 2, "y": 2}, 4, client), cluster_mesh({"z": 4}, 2, client % 2)
        return explain(Layout(["x", "y"], meshes[0]), Layout([MATCH, "z"], meshes[1]), (6, 7), torch.int16)

    with pytest.raises(LayoutError):
        seen_by(0)  # the matched axis is on no axis of the other mesh

    def found_by(client):
        mesh, other = cluster_mesh({"x": 2, "y": 2}, 4, client), cluster_mesh({"z": 4}, 2, client % 2)
        return explain(Layout(["x", "y"], mesh), Layout([UNSHARDED, "z"], other), (6, 7), torch.int16)

    before = plan_cache_info()
    found = [found_by(client) for client in range(4)]
    assert plan_cache_info() == before
    assert len(set(found)) == 1
    assert len({str(each) for each in found}) == 1


@pytest.mark.parametrize("seed", range(60))
def test_single_steps_without_reductions_meet_the_lower_bound(seed):
    rng = random.Random(seed)
    clients = rng.choice([1, 2, 3, 4])
    axes = [redistribution_cases.random_axes(rng, clients * rng.choice([1, 2, 3])) for _ in range(2)]
    source, target = (
        Layout(layout.sharding_specs, layout.mesh)
        for layout in (redistribution_cases.random_layout(rng, cluster_mesh(each, clients, 0), 2) for each in axes)
    )
    shape = rng.randint(0, 9), rng.randint(0, 9)
    found = explain(source, target, shape, torch.float64)
    assert [each.received for each in found.devices] == [each.lower_bound for each in found.devices]
    for client in target.mesh.clients:
        plan = plan_exchange(source, target, shape, client)
        assert plan.num_received * 8 == sum(each.received for each in found.devices if each.client == client)


def test_what_takes_part_in_between_only_is_listed_too():
    big, small = cluster_mesh({"x": 4, "y": 2}, 8, 0), cluster_mesh({"z": 2}, 2, 0)
    found = explain(Layout([UNSHARDED], big, {"x": "sum", "y": "max"}), Layout(["z"], small), (8,), F32)
    # The maximum; the sum, each piece once; then what the small mesh wants.
    assert len(found.steps) == 3
    assert [each.lower_bound for each in found.devices] == [16, 16] + [0] * 6
    assert found.received == sum(each.received for step in found.steps for each in step.devices)


def test_meshes_of_other_clients_need_everything():
    names = [f"/job:worker/replica:0/task:{client}/device:CPU:0" for client in (4, 5)]
    far = Mesh(["x"], np.arange(2), [], [], "far", names)
    found = explain(placed(LINE, [Shard(0)]), placed(far, [Shard(0)]), (8, 8), F32)
    assert [(each.client, each.received, each.lower_bound) for each in found.devices] == [(4, 128, 128), (5, 128, 128)]
    back = explain(placed(far, [Partial()]), placed(LINE, [Replicate()]), (8, 8), F32)
    # Its own clients reduce half of it each, so that no term travels to all the others.
    assert [(each.client, each.received, each.lower_bound) for each in back.devices] == [
        *((client, 256, 256) for client in range(4)),
        *((client, 128, 0) for client in (4, 5)),
    ]


def test_the_text_names_steps_devices_and_totals():
    text = str(explain(placed(LINE, [Shard(0)]), placed(LINE, [Shard(1)]), (8, 8), F32))
    lines = text.splitlines()
    assert lines[0] == "(8, 8) of torch.float32: [x, -] on x=4 -> [-, x] on x=4"
    assert lines[1] == "  1. exchange   [x, -] on x=4 -> [-, x] on x=4: 192 bytes received, 64 copied"
    assert lines[2].split() == ["device", "client", "received", "copied", "lower", "bound"]
    assert lines[4].split() == ["/job:worker/replica:0/task:1/device:CPU:0", "1", "48", "16", "48"]
    assert lines[-1].split() == ["total", "192", "64", "192"]
    many = abstract_mesh({"x": 100})
    assert "and 36 more" in str(explain(placed(many, [Shard(0)]), placed(many, [Shard(1)]), (8, 8), F32))


def test_bad_input_is_refused():
    layout = placed(LINE, [Shard(0)])
    with pytest.raises(LayoutTypeError, match="explain needs layouts; got int"):
        explain(layout, 3, (8, 8), F32)
    with pytest.raises(LayoutError):
        explain(layout, layout, (8,), F32)
    with pytest.raises(LayoutError, match=r"got shape \(8, 8\), expected 1 sizes"):
        explain(layout, placed(LINE, [Shard(0)], 1), (8, 8), F32)
    with pytest.raises(LayoutError, match="grid of devices"):
        explain(Layout.from_single_device_mesh(Mesh.from_device("CPU:0")), layout, (8, 8), F32)


# --- plan cache ---------------------------------------------------------------------------------------------------


def test_the_plan_cache_counts_and_forgets():
    mesh = abstract_mesh({"x": 2})
    tensor = packed(torch.arange(16.0).reshape(4, 4), placed(mesh, [Shard(0)]))
    clear_plan_cache()
    redistribute(tensor, placed(mesh, [Shard(1)]))
    redistribute(tensor, placed(mesh, [Shard(1)]))
    info = plan_cache_info()
    assert (info.misses, info.size) == (1, 1)
    assert info.hits >= 1
    assert info.max_size == 4096
    clear_plan_cache()
    assert (plan_cache_info().hits, plan_cache_info().size) == (0, 0)


# --- observers and log --------------------------------------------------------------------------------------------


def test_observers_hear_while_they_listen():
    heard, twice = [], []
    assert not observers.is_observed()
    with observers.observed_by(heard.append), observers.observed_by(twice.append), observers.observed_by(twice.append):
        assert observers.is_observed()
        observers.report("exchange", 8, [0, 1])
    assert not observers.is_observed()
    assert heard == [observers.Communication("exchange", 8, (0, 1))]
    assert len(twice) == 2


def test_the_log_tells_communications_and_steps(caplog):
    mesh = abstract_mesh({"x": 2})
    tensor = packed(torch.zeros(4, 4), placed(mesh, [Shard(0)]))
    with caplog.at_level(logging.DEBUG, "dtckpt.dtensor"):
        redistribute(tensor, placed(mesh, [Shard(1)]))
        observers.report("all_reduce", 4, range(100))
    step, communication = (record.getMessage() for record in caplog.records)
    assert step.startswith("redistribute (4, 4) of torch.float32: Layout.from_string(")
    assert communication == "all_reduce: got 4 bytes, clients 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"


# --- CommDebugMode ------------------------------------------------------------------------------------------------


class Noisy(torch.autograd.Function):
    """Communicates, as far as observers can tell."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)  # so that recomputing goes as far as here
        observers.report("all_reduce", 4, [0, 1])
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 1
        observers.report("all_gather", 16, [0, 1])
        return gradient * 2


class Talking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return Noisy.apply(x * self.weight)


class Net(torch.nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.first, self.last = Talking(), torch.nn.Sequential(torch.nn.ReLU(), Talking())
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.last, x, use_reentrant=False) if self.is_checkpointed else self.last(x)


def trained(net, mode):
    with mode:
        net(torch.ones(2)).sum().backward()
    return mode


def counted(forward=0, backward=0):
    return {
        "forward": {"all_reduce": forward} if forward else {},
        "backward": {"all_gather": backward} if backward else {},
    }


def test_it_has_the_methods_of_pytorchs():
    for name, theirs in inspect.getmembers(TorchCommDebugMode, inspect.isfunction):
        if name.startswith(("get_", "generate_", "log_")):
            ours = inspect.signature(getattr(CommDebugMode, name)).parameters.values()
            wanted = inspect.signature(theirs).parameters.values()
            assert [(each.name, each.default) for each in ours][: len(wanted)] == [
                (each.name, each.default) for each in wanted
            ], name


def test_modules_get_what_runs_in_them_forward_and_backward():
    mode = trained(Net(), CommDebugMode())
    assert mode.get_comm_counts() == {"all_reduce": 2, "all_gather": 2}
    assert mode.get_comm_nbytes() == {"all_reduce": 8, "all_gather": 32}
    assert mode.get_total_counts() == 4
    assert repr(mode) == "CommDebugMode(get_total_counts()=4)"
    assert mode.get_module_counts() == {
        "Global": counted(2, 2),
        "Net": counted(2, 2),
        "Net.first": counted(1, 1),
        "Net.last": counted(1, 1),
        "Net.last.1": counted(1, 1),
    }


def test_what_is_recomputed_counts_as_backward():
    mode = trained(Net(is_checkpointed=True), CommDebugMode())
    last = mode.get_module_counts()["Net.last.1"]
    assert last == {"forward": {"all_reduce": 1}, "backward": {"all_reduce": 1, "all_gather": 1}}
    assert mode.get_module_counts()["Net"]["backward"] == {"all_reduce": 1, "all_gather": 2}
    assert "ACTIVATION CHECKPOINTING\n" in mode.generate_comm_debug_tracing_table()


def test_entering_anew_forgets_and_leaving_stops():
    mode = trained(Net(), CommDebugMode())
    observers.report("exchange", 1, [0])
    assert mode.get_total_counts() == 4
    with mode:
        assert mode.get_total_counts() == 0
        observers.report("exchange", 1, [0])
    assert mode.get_comm_counts() == {"exchange": 1}
    assert mode.get_comm_counts()["all_gather"] == 0
    assert set(mode.get_module_counts()) == {"Global"}
    assert mode.get_parameter_info() == {}


def test_nested_modes_each_count():
    outer, inner = CommDebugMode(), CommDebugMode()
    with outer:
        observers.report("exchange", 1, [0])
        trained(Net(), inner)
        with outer:
            observers.report("exchange", 1, [0])
        observers.report("exchange", 1, [0])
    assert inner.get_comm_counts() == {"all_reduce": 2, "all_gather": 2}
    assert outer.get_comm_counts() == {"exchange": 3, "all_reduce": 2, "all_gather": 2}
    assert outer.get_module_counts()["Net"] == inner.get_module_counts()["Net"]
    assert not observers.is_observed()


def test_an_error_leaves_nothing_behind():
    mode = CommDebugMode()
    with pytest.raises(RuntimeError), mode:
        torch.nn.Linear(2, 2)(torch.ones(3))
    with mode:
        with pytest.raises(RuntimeError):
            torch.nn.Linear(2, 2)(torch.ones(3))
        observers.report("exchange", 1, [0])
    assert set(mode.get_module_counts()) == {"Global"}, "the module that failed has been left"
    assert not observers.is_observed()
    net = Net()
    loss = trained(net, CommDebugMode())
    net(torch.ones(2)).sum().backward()
    assert loss.get_total_counts() == 4


def test_parameters_and_their_placements():
    mesh = abstract_mesh({"x": 2})
    net = Net()
    sharded = packed(torch.ones(2), placed(mesh, [Shard(0)], 1))

    class Held(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net
            self.held = torch.nn.Parameter(sharded, requires_grad=False)

        def forward(self, x):
            return self.inner(x)

    with CommDebugMode() as mode:
        Held()(torch.ones(2))
        torch.nn.Linear(2, 2)(torch.ones(2))
        torch.nn.Linear(2, 2)(torch.ones(2))
    info = mode.get_parameter_info()
    assert set(info) == {"Held", "Held.inner.first", "Held.inner.last.1", "Linear", "Linear_1"}
    assert isinstance(info["Held"]["held"], DTensor)
    assert torch.equal(info["Held.inner.first"]["weight"], net.first.weight)
    assert mode.get_sharding_info() == {"Held.held": (Shard(0),)}


def test_tables_show_more_at_each_noise_level():
    mesh = abstract_mesh({"x": 2})
    tensor = packed(torch.ones(2, 2), placed(mesh, [Shard(0)]))
    with CommDebugMode() as mode:
        tensor.clone()
        Net()(torch.ones(2)).sum().backward()
        torch.ones(2).detach()
    tables = [mode.generate_comm_debug_tracing_table(level) for level in range(4)]
    for less, more in itertools.pairwise(tables):
        assert set(less.splitlines()) < set(more.splitlines())
    assert tables[0].splitlines()[:8] == [
        "Global",
        "  FORWARD PASS",
        "    *all_reduce: 2",
        "  BACKWARD PASS",
        "    *all_gather: 2",
        "  Net",
        "    FORWARD PASS",
        "      *all_reduce: 2",
    ]
    assert "aten" not in tables[0]
    assert "**aten.clone.default\n      shape: [(2, 2)]\n      sharding: [(Shard(dim=0),)]\n" in tables[1]
    assert "aten.mul.Tensor" in tables[2]
    assert "aten.detach.default" not in tables[2]
    assert "aten.detach.default" in tables[3]


def test_files_hold_the_table_and_its_tree(tmp_path):
    mode = trained(Net(), CommDebugMode())
    mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=1)
    assert (tmp_path / "log.txt").read_text() == mode.generate_comm_debug_tracing_table(1)
    mode.generate_json_dump(str(tmp_path / "log.json"), noise_level=2)
    tree = json.loads((tmp_path / "log.json").read_text())
    assert tree["fqn"] == "Global"
    assert tree["collectives_forward"] == [["all_reduce", 2]]
    (net,) = tree["children"]
    assert [child["fqn"] for child in net["children"]] == ["Net.first", "Net.last"]
    first = net["children"][0]
    assert (first["module_type"], first["collectives_backward"]) == ("Talking", [["all_gather", 1]])
    assert "aten.mul.Tensor" in {operation["name"] for operation in first["operations_forward"]}


# --- over clients -------------------------------------------------------------------------------------------------


def counts_over_clients():
    mesh = cluster_mesh({"x": 2}, 2, dtckpt.client_id())
    whole = torch.arange(48.0).reshape(6, 8)
    rows, term = packed(whole, placed(mesh, [Shard(0)])), packed(whole, placed(mesh, [Partial()]))
    found = []
    for tensor, placements in ((rows, [Shard(1)]), (term, [Replicate()]), (rows, [Replicate()]), (rows, [Shard(0)])):
        with CommDebugMode() as mode:
            tensor.redistribute(placements=placements)
        found.append((mode.get_comm_counts(), mode.get_comm_nbytes()))
    with CommDebugMode() as mode:
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    return [*found, mode.get_comm_counts()]


@pytest.mark.processes
def test_communications_of_clients_count_with_the_bytes_that_came(pool):
    for found in pool.values(counts_over_clients, clients=2, group=True):
        assert found == [
            ({"exchange": 1}, {"exchange": 3 * 4 * 4}),
            ({"exchange": 1}, {"exchange": 48 * 4}),
            ({"exchange": 1}, {"exchange": 24 * 4}),
            ({}, {}),
            {"exchange": 1},
        ]


class Gathering(torch.nn.Module):
    """Gathers its sharded weight, and splits its result by columns."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = torch.nn.Parameter(packed(torch.ones(6, 8), placed(mesh, [Shard(0)])))

    def forward(self, x):
        weight = self.weight.redistribute(placements=[Replicate()]).to_local()
        result = DTensor.from_local(x * weight[: len(x)], self.mesh, [Shard(0)], shape=(6, 8))
        return result.redistribute(placements=[Shard(1)]).to_local()


def modules_over_clients():
    mesh = cluster_mesh({"x": 2}, 2, dtckpt.client_id())
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), Gathering(mesh), torch.nn.ReLU())
    with CommDebugMode() as mode:
        net(torch.ones(3, 8)).sum().backward()
    return mode.get_module_counts(), mode.get_sharding_info(), mode.get_comm_nbytes()


@pytest.mark.processes
def test_modules_of_clients_get_their_communications(pool):
    # Backward, the columns go back to rows; each client has its weight's whole gradient, and keeps its part.
    wanted = {"forward": {"exchange": 2}, "backward": {"exchange": 1}}
    for counts, sharding, nbytes in pool.values(modules_over_clients, clients=2, group=True):
        assert counts == {"Global": wanted, "Sequential": wanted, "Sequential.1": wanted}
        assert sharding == {"Sequential.1.weight": (Shard(0),)}
        assert nbytes == {"exchange": (24 + 12 + 12) * 4}
