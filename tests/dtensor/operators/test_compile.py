"""`torch.compile` around DTensors: the graph breaks with a reason, and what comes out is right."""

import contextlib
import copy
import gc
import operator
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import dynamo_tls
from torch._dynamo.utils import counters

from dtckpt import DTensor, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_module, distribute_tensor
from dtckpt.dtensor.torch_compile import REASON

from . import compiled_programs
from .compiled_programs import MESHES, PROGRAMS

pytestmark = [
    pytest.mark.together("compilers"),  # each worker would import them
    # PyTorch's compiler reads the gradients of tensors that it finds at the start of a graph. It hides the warning by a
    # way that another thread can undo.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
MESH = abstract_mesh({"x": 4})


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    counters.clear()
    dynamo_tls.traced_frame_infos.clear()
    yield
    torch.compiler.reset()


def sharded(*shape):
    plain = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    return distribute_tensor(plain, MESH, [Shard(0)])


STAND_INS = ("_total_norm ", "_clip_with_norm ", "_encode_padded ")
"""Functions in the place of PyTorch's, which are compiled for plain tensors as PyTorch's are."""


def traced_files():
    frames = (frame for frame in dynamo_tls.traced_frame_infos if "/dtckpt/dtensor/" in frame)
    return [frame for frame in frames if not frame.startswith(STAND_INS)]


def by_value(tensor):
    return tensor * 2 if tensor.sum() > 0 else tensor - 1


def by_shape(tensor):
    return tensor.reshape(-1, tensor.shape[0]).sum(0) * tensor.shape[1]


def in_place(tensor):
    copy = tensor.clone()
    copy.add_(1)
    copy[1:] = 3
    return copy * copy.numel()


def beside_plain(tensor):
    plain = torch.arange(3.0).sin().sum() * 2
    return tensor.sin() * plain


def with_numbers(tensor):
    return tensor * tensor.max().item()


@pytest.mark.share(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [by_value, by_shape, in_place, beside_plain, with_numbers])
def test_functions(function, backend):
    compiled = torch.compile(function, backend=backend)
    for shape, sign in (((6, 5), 1.0), ((6, 5), -1.0), ((4, 5), 1.0), ((7, 2), -1.0)):
        plain = sign * torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        for placement in (Shard(0), Replicate()):
            made = compiled(distribute_tensor(plain, MESH, [placement]))
            assert isinstance(made, DTensor)
            torch.testing.assert_close(made.full_tensor(), function(plain))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_trains(backend):
    torch.manual_seed(0)
    ours = distribute_module(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), MESH)
    plain = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    plain.load_state_dict({name: value.full_tensor() for name, value in ours.state_dict().items()})
    samples = torch.randn(10, 5)
    compiled = torch.compile(ours, backend=backend)
    for _ in range(3):
        losses = []
        for model, rows in ((compiled, distribute_tensor(samples, MESH, [Shard(0)])), (plain, samples)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = model(rows).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.placements == one.grad.placements == (Replicate(),)
        torch.testing.assert_close(one.full_tensor(), other)


def gathered(tensor):
    return tensor.full_tensor() + torch.ones(4).sin()


def test_a_break_of_the_graph_has_a_reason():
    tensor = distribute_tensor(torch.ones(4), MESH, [Shard(0)])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        torch.compile(gathered, backend="eager", fullgraph=True)(tensor)


@pytest.mark.share(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_train_as_in_eager(name, mesh, backend):
    axes, placements = MESHES[mesh]
    assert compiled_programs.differences(name, abstract_mesh(axes), placements, backend=backend) == []
    assert counters["recompile_limit"] == {}
    assert counters["stats"]["unique_graphs"] <= 20
    assert traced_files() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # of the compiler's own
@pytest.mark.parametrize("options", [{"backend": "inductor"}, {"mode": "reduce-overhead"}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("name", ["BesidePlain", "CountedSteps"])
def test_compilers_and_modes(name, options):
    axes, placements = MESHES["line"]
    if options.get("backend", "inductor") == "inductor":
        options = {**options, "dynamic": False}
    # Else inductor first compiles a program for each instruction set of the processor, to see whether it runs.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        assert compiled_programs.differences(name, abstract_mesh(axes), placements, **options) == []


@pytest.mark.share(1, of="programs that learn over clients")
@pytest.mark.processes
def test_clients(pool):
    names = ["CountedSteps", "BesidePlain", "perceptron"]
    found = pool.values(compiled_programs.differences_on_clients, names, clients=2, group=True)
    assert found == [{name: [] for name in names}] * 2


IN_PLACE = [
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.ipow),
]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda one: one.__name__)
def test_augmented_assignment(change):
    is_bitwise = change.__name__ in ("iand", "ior", "ixor", "ilshift", "irshift")
    tensor = sharded(6, 2).int() if is_bitwise else sharded(6, 2)
    expected = change(tensor.full_tensor().clone(), 2)

    def program(tensor):
        before = tensor
        tensor = change(tensor, 2)
        return before is tensor

    assert torch.compile(program, backend="eager")(tensor)
    assert torch.equal(tensor.full_tensor(), expected)


@pytest.mark.parametrize("number", [int, float, operator.index, bool, complex])
def test_numbers_of_tensors(number):
    total = distribute_tensor(torch.tensor(3), MESH, [Replicate()])
    compiled = torch.compile(lambda tensor: number(tensor + 1), backend="eager")
    assert compiled(total) == number(4)
    assert type(compiled(total)) is type(number(4))


def test_membership_and_hooks():
    tensor = sharded(6, 2).requires_grad_()

    def program(tensor):
        tensor.register_hook(lambda gradient: gradient * 2)
        tensor.register_post_accumulate_grad_hook(seen.append)
        return 5 in tensor.detach(), (tensor * 3).sum()

    seen = []
    is_in, total = torch.compile(program, backend="eager")(tensor)
    total.backward()
    assert is_in
    assert seen[0] is tensor
    assert torch.equal(tensor.grad.full_tensor(), torch.full((6, 2), 6.0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by the compiler
@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_a_whole_step(axes):
    mesh = abstract_mesh(axes)
    models = [distribute_module(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), mesh)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]

    def step(model, optimizer, rows):
        optimizer.zero_grad()
        made = model(rows).redistribute(placements=[Replicate()] * mesh.ndim)
        parts = torch.tensor_split(torch.atleast_2d(made), 2)
        loss = made.pow(2).mean() * parts[0].sum().sigmoid()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    for sizes in (8, 8, 12, 8):
        rows = distribute_tensor(torch.randn(sizes, 8), mesh, [Shard(0)] * mesh.ndim)
        losses = [one(*state, rows) for one, *state in zip((step, compiled), models, optimizers, strict=True)]
        # The compiler lets optimizers take another order of operations.
        torch.testing.assert_close(losses[1].full_tensor(), losses[0].full_tensor(), rtol=1e-4, atol=1e-6)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-3, atol=1e-5)
    assert traced_files() == []


def optimizer_of(parameter, make=torch.optim.AdamW):
    parameter = nn.Parameter(parameter)
    parameter.grad = torch.ones_like(parameter)
    return make([parameter], lr=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by the compiler
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop], ids=lambda one: one.__name__
)
def test_steps_of_optimizers_are_not_traced(make):
    optimizers = [optimizer_of(sharded(4, 2), make) for _ in range(2)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    optimizers[1].param_groups[0]["lr"] = 0.1
    seen = []
    optimizers[0].register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    steps = torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step
    for _ in range(2):
        for step in steps:
            step()
        scheduler.step()
        optimizers[1].param_groups[0]["lr"] *= 0.5
    assert not any("/optim/" in one for one in dynamo_tls.traced_frame_infos)
    assert seen[0] is optimizers[0]
    one, other = (optimizer.param_groups[0]["params"][0].full_tensor() for optimizer in optimizers)
    assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by the compiler
def test_steps_on_plain_tensors_are_compiled():
    optimizer_of(sharded(4, 2))
    optimizer = optimizer_of(torch.ones(3))
    graphs = []
    torch.compile(optimizer.step, backend=lambda graph, _: graphs.append(graph) or graph.forward)()
    assert len(graphs) == 1
    assert optimizer.param_groups[0]["params"][0][0] < 1


def test_optimizers_are_freed_without_a_garbage_collection():
    optimizer = optimizer_of(sharded(4, 2))
    optimizer.step()
    optimizer_of(sharded(4, 2)).step()  # No other object refers to this optimizer.
    known = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert known() is None
    finally:
        gc.enable()


def test_copies_of_optimizers_step():
    optimizer = optimizer_of(sharded(4, 2))
    copied = copy.deepcopy(optimizer)
    for one in (optimizer, copied):
        one.param_groups[0]["params"][0].grad = torch.ones_like(one.param_groups[0]["params"][0])
        one.step()
    one, other = (each.param_groups[0]["params"][0].full_tensor() for each in (optimizer, copied))
    assert torch.equal(one, other)
    assert not torch.equal(one, sharded(4, 2).full_tensor())


def test_a_backward_pass_is_skipped_whole():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values * 2

        @staticmethod
        def backward(ctx, gradient):
            return by_value(gradient)

    tensor = sharded(6, 2).requires_grad_()
    loss = Doubled.apply(tensor).sum()

    def step():
        loss.backward()

    torch.compile(step, backend="eager")()
    assert torch.equal(tensor.grad.full_tensor(), torch.full((6, 2), 2.0))
    assert not any("by_value" in one for one in dynamo_tls.traced_frame_infos)


def test_attributes_are_those_of_each_tensor():
    def program(tensor, plain):
        facts = tensor.shape, tensor.dtype, tensor.requires_grad, tensor.placements, tensor.stride(), tensor.is_leaf
        return facts, plain.sin() * tensor.ndim

    compiled = torch.compile(program, backend="eager")
    plain = torch.ones(3)
    square = abstract_mesh({"x": 2, "y": 2})
    for tensor in (
        *(sharded(6, 2), sharded(4, 2), sharded(6, 2).int(), sharded(6, 2).requires_grad_(), sharded(6, 2).T),
        *(sharded(6, 2, 3), distribute_tensor(torch.ones(6, 2), square, [Replicate(), Shard(0)])),
    ):
        facts, values = compiled(tensor, plain)
        expected, expected_values = program(tensor, plain)
        assert facts == expected
        assert torch.equal(values, expected_values)


def test_plain_regions_are_compiled():
    graphs = []

    def backend(graph, inputs):
        assert not any(isinstance(one, DTensor) for one in inputs)
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def program(tensor, plain):
        scale = plain.sin().cumsum(0)
        made = tensor * scale
        shift = (scale * 2).tanh()
        return made + shift

    tensor, plain = sharded(6, 2), torch.ones(2)
    compiled = torch.compile(program, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(tensor, plain).full_tensor(), program(tensor, plain).full_tensor())
    assert len(graphs[0]) == 2  # What comes after an operator on a DTensor may run in eager.
    assert len(graphs) <= 2


def test_functions_of_local_map_are_compiled():
    graphs = []

    def backend(graph, inputs):
        del inputs
        graphs.append(graph)
        return graph.forward

    model = compiled_programs.Mapped()
    tensor = sharded(8, 2)
    made = torch.compile(model.wave, backend=backend)(tensor)
    assert torch.equal(made.full_tensor(), compiled_programs.wave(tensor.full_tensor()))
    assert len(graphs) == 1
    assert traced_files() == []


def test_context_managers_of_programs_are_compiled():
    graphs = []

    def backend(graph, inputs):
        del inputs
        graphs.append(graph)
        return graph.forward

    @contextlib.contextmanager
    def scaled(plain):
        yield plain.sin() * 2

    def program(plain):
        with scaled(plain) as made:
            return made + 1

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(3))
    assert len(graphs) == 1


@pytest.mark.parametrize("program", [by_shape, in_place, by_value], ids=lambda one: one.__name__)
def test_full_graphs_are_refused_by_the_compiler(program):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="DTensor"):
        torch.compile(program, backend="eager", fullgraph=True)(sharded(4, 3))
