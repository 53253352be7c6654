"""vLLM's weight transfer: destinations that its loaders show, the engine, and the trainer side."""

from __future__ import annotations

import importlib
import os
import tomllib
from pathlib import Path

import pytest
import torch
from support.coordinators import running_server
from torch import nn

from dtckpt import Publisher, errors
from dtckpt.coordination import connect
from dtckpt.interop import vllm
from dtckpt.interop.vllm.destinations import Weight, plan_destinations
from dtckpt.interop.vllm.receiver import WeightReceiver
from dtckpt.interop.vllm.recorded_tensor import NotRecordedError, RecordedTensor, box_of_view

from .vllm_cases import SHAPES, WHEEL, TpModel, base_of_wheel, expected, install, worker_config

WORLD_SIZE = 2
WHOLE = {"router.weight", "scale", "latent.weight", "packed.weight"}
"""What is loaded whole: it is cast, its element is asked for, another tensor is derived from it, it is quantized."""


def weights_of(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state_of(model):
    return {**dict(model.named_parameters()), "derived": model.latent.derived}


def assert_has(model, step, rank):
    wanted = state_of(expected(weights_of(step), rank, WORLD_SIZE))
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, wanted[name]), name


# --- recorded tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[2],
        lambda t: t[1:3, :, 2],
        lambda t: t.narrow(1, 3, 2).transpose(0, 2),
        lambda t: t.permute(2, 0, 1)[1:2],
        lambda t: t.chunk(2, dim=2)[1].unsqueeze(0),
        lambda t: t.unbind(1)[4].t(),
        lambda t: t.reshape(24, 5),
        lambda t: t[3:, 5:, 4:],
    ],
)
def test_a_view_is_a_box_of_the_tensor(view):
    whole = torch.arange(120).reshape(4, 6, 5)
    recorded, target = view(RecordedTensor.of(whole.shape, whole.dtype)), torch.empty_like(view(whole))
    target.copy_(recorded)
    (copy,) = recorded.recording.copies
    assert not recorded.recording.reason
    box = box_of_view(copy.source, whole.shape)
    assert copy.target is target
    start, size = box.region.offset, box.region.shape
    part = whole[tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))]
    assert torch.equal(box.of(part.contiguous()), view(whole))


@pytest.mark.parametrize(
    "view", [lambda t: t[:, ::2], lambda t: t.view(24, 5)[3:9], lambda t: t.view(2, 2, 6, 5)[:, 1], lambda t: t[:0]]
)
def test_other_views_are_no_boxes(view):
    assert box_of_view(view(torch.empty(4, 6, 5)), (4, 6, 5)) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.mul_(2),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.view(torch.int32),
        lambda t: t[[0, 2]],
        lambda t: t.t().reshape(-1),
        lambda t: t.clone(),
        lambda t: torch.cat([t, t]),
        lambda t: torch.zeros(4, 6).add_(t),
        lambda t: torch.zeros(4, 6).index_copy_(0, torch.arange(4), t),
        lambda t: torch.zeros(4, 6).__setitem__([0, 1, 2, 3], t),
    ],
)
def test_what_is_no_view_is_noted_or_raises(use):
    recorded, target = RecordedTensor.of((4, 6), torch.float32), torch.zeros(1)
    try:
        made = use(recorded)
    except NotRecordedError:
        assert not recorded.recording.copies
    else:
        if made is not None:
            target.copy_(made)
        assert recorded.recording.reason
        assert len(recorded.recording.copies) == 1


@pytest.mark.parametrize("use", [lambda t: t.item(), lambda t: bool(t[0, 0]), lambda t: t.tolist(), float])
def test_what_needs_elements_raises(use):
    with pytest.raises(NotRecordedError, match="elements"):
        use(RecordedTensor.of((1, 1), torch.float32))


def test_a_parameter_is_not_replaced_by_a_tensor_without_elements():
    linear = nn.Linear(6, 4)
    with pytest.raises((NotRecordedError, RuntimeError)):
        linear.weight.data = RecordedTensor.of((4, 6), torch.float32)
    assert not linear.weight.is_meta


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_of(model):
    return plan_destinations(model, [Weight(name, shape, torch.float32) for name, shape in SHAPES.items()])


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_a_plan_has_boxes_and_names_what_is_loaded_whole(rank):
    model = TpModel(rank, WORLD_SIZE)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    plan = plan_of(model)
    assert set(plan.whole) == WHOLE
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    boxes = {each.name: each.view.region for each in plan.boxes}
    assert boxes["q.weight"].offset == (8 * rank, 0)
    assert boxes["o.weight"].offset == (0, 8 * rank)
    assert boxes["experts.3.up.weight"].shape == (6, 8)


def test_the_loaders_run_once_if_none_of_them_fails():
    model, calls = TpModel(0, WORLD_SIZE), []
    load = model.load_weights
    model.load_weights = lambda weights: calls.append(load(weights))
    weights = [Weight(name, shape, torch.float32) for name, shape in SHAPES.items() if name != "scale"]
    assert set(plan_destinations(model, weights).whole) == WHOLE - {"scale"}
    assert len(calls) == 1


def test_the_parameters_of_a_module_are_loaded_in_one_way():
    """A layer of which some go in whole is loaded by the engine, which waits for all of the layer."""
    model = TpModel(0, WORLD_SIZE)
    load = model.load_weights

    def load_weights(weights):
        for name, weight in weights:
            load([(name, weight.clone() if name == "k.weight" else weight)])

    model.load_weights = load_weights
    assert {"q.weight", "k.weight", "v.weight"} <= set(plan_of(model).whole)


def test_copies_that_are_not_the_live_parameter_are_loaded_whole():
    """Situation 25."""
    model = TpModel(0, WORLD_SIZE)
    stale = torch.zeros(8, 8)
    model.load_weights = lambda weights: [stale.copy_(weight) for _, weight in weights]
    plan = plan_destinations(model, [Weight("square.weight", (8, 8), torch.float32)])
    assert "no parameter" in plan.whole["square.weight"]


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def coordinator(monkeypatch, tmp_path):
    """A coordinator; this process is the only client of the trainer's job."""
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "MASTER_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DTCKPT_LIVE_FOLDER", str(tmp_path))
    with running_server(heartbeat_timeout_s=20.0) as server:
        monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{server.port}")
        with connect.as_job_of_command(10.0) as coordination:
            yield coordination


def test_boxes_go_into_the_live_parameters(coordinator):
    """Situations 24, 25, 29, 30 and 31: other forms, fused parameters, casts, quantized layers, addresses."""
    model = TpModel(1, WORLD_SIZE)
    addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    receiver = WeightReceiver("policy", coordinator, prefix="model/")
    with Publisher("policy") as feed:
        for step in range(3):
            feed.publish({"model": weights_of(step), "step": step}, step=step, wait=True)
            model.loads.clear()
            report = receiver.receive(model)
            assert receiver.version is None or receiver.version.step == step - 1
            receiver.apply()
            assert_has(model, step, rank=1)
            # The first goes in whole; then what the engine keeps in another form does, too.
            assert set(model.loads) == (set(SHAPES) if step == 0 else WHOLE | {"square.weight"})
            assert set(report.whole) == set(model.loads)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == addresses
    whole = sum(4 * torch.Size(SHAPES[name]).numel() for name in WHOLE | {"square.weight"})
    boxes = sum(
        4 * torch.Size(SHAPES[name]).numel() for name in SHAPES.keys() - WHOLE - {"square.weight", "norm.weight"}
    )
    assert (report.nbytes_whole, report.nbytes_boxes) == (whole, boxes // WORLD_SIZE + 4 * 8)
    assert report.nbytes_received == report.nbytes_whole + report.nbytes_boxes
    receiver.clear()


def test_a_model_is_as_it_was_until_a_version_is_applied(coordinator):
    model, receiver = TpModel(0, WORLD_SIZE), WeightReceiver("policy", coordinator)
    with Publisher("policy") as feed:
        for step in range(2):
            feed.publish(weights_of(step), step=step, wait=True)
            receiver.receive(model)
            if step:
                assert_has(model, 0, rank=0)
            receiver.apply()
        with pytest.raises(errors.CheckpointError, match="received"):
            receiver.apply()
    assert_has(model, 1, rank=0)


def test_parameters_that_get_nothing_are_named(coordinator, caplog):
    """Situation 26."""
    model, receiver = TpModel(0, WORLD_SIZE), WeightReceiver("policy", coordinator)
    weights = {name: weight for name, weight in weights_of(0).items() if not name.startswith("experts.")}
    with Publisher("policy") as feed:
        feed.publish({**weights, "unknown.weight": torch.ones(3)}, step=0, wait=True)
        load = model.load_weights
        model.load_weights = lambda named: load([each for each in named if each[0] in SHAPES])
        report = receiver.receive(model)
    assert set(report.untouched) == {"experts", "scale"}
    assert "have nothing for parameters" in caplog.text
    assert plan_destinations(model, [Weight("unknown.weight", (3,), torch.float32)]).whole == {
        "unknown.weight": "no loader copies it"
    }


def test_an_engine_may_move_experts(coordinator):
    """Situation 32: the plan is as the loaders are now, and its boxes are compared anew."""
    model, receiver = TpModel(0, WORLD_SIZE), WeightReceiver("policy", coordinator)
    with Publisher("policy") as feed:
        for step in range(4):
            feed.publish(weights_of(step), step=step, wait=True)
            if step == 2:
                model.order.reverse()
            report = receiver.receive(model)
            receiver.apply()
            assert (set(report.whole) == set(SHAPES)) == (step in (0, 2))
    assert torch.equal(model.experts[0], weights_of(3)["experts.3.up.weight"][:6].t())


def test_a_failed_load_leaves_it_mixed(coordinator):
    """Situation 6."""
    model, receiver = TpModel(0, WORLD_SIZE), WeightReceiver("policy", coordinator)
    with Publisher("policy") as feed:
        feed.publish(weights_of(0), step=0, wait=True)
        receiver.receive(model)
        model.packed.weight.data = torch.zeros(3, 3)
        with pytest.raises(RuntimeError):
            receiver.apply()
        assert (receiver.is_mixed, receiver.version) == (True, None)
        model.packed.weight.data = torch.zeros(8, 8)
        receiver.receive(model)
        receiver.apply()
    assert not receiver.is_mixed
    assert_has(model, 0, rank=0)


def test_no_version_and_no_such_names(coordinator):
    receiver = WeightReceiver("policy", coordinator, prefix="nothing/", timeout_s=0.1)
    with pytest.raises(errors.CheckpointNotFoundError):
        receiver.receive(TpModel(0, WORLD_SIZE))
    with Publisher("policy") as feed:
        feed.publish(weights_of(0), step=0, wait=True)
        with pytest.raises(errors.CheckpointError, match="begins with 'nothing/'"):
            receiver.receive(TpModel(0, WORLD_SIZE))


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", "wheel"])
def interface(request, monkeypatch):
    """The engine's module on vLLM's interface: a stand-in, and the file of the wheel, if it is there."""
    base = base_of_wheel() if request.param == "wheel" else None
    if request.param == "wheel" and base is None:
        pytest.skip(f"no interface of vLLM; unzip its wheel, and set {WHEEL} to the folder")
    factory, calls = install(monkeypatch, base)
    vllm.register()
    module, class_name = factory.WeightTransferEngineFactory.registered["dtckpt"]
    found = importlib.import_module(module)
    assert hasattr(found, class_name)
    assert hasattr(found, factory.WeightTransferTrainerFactory.registered["dtckpt"][1])
    found.reload_calls = calls
    return found


class Workers:
    """What a trainer speaks to: the control plane of vLLM, in this process."""

    def __init__(self, interface):
        self.engines = [
            interface.DtckptWeightTransferEngine(
                None, worker_config(rank, WORLD_SIZE), torch.device("cpu"), TpModel(rank, WORLD_SIZE)
            )
            for rank in range(WORLD_SIZE)
        ]
        self.weight_version = None

    def init_weight_transfer_engine(self, init_info):
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self):
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info):
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self, weight_version=None):
        for engine in self.engines:
            engine.finish_weight_update()
        self.weight_version = weight_version

    def close(self):
        for engine in self.engines:
            engine.shutdown()


def test_a_trainer_sends_weights_to_workers(interface, coordinator):
    workers, weights = Workers(interface), weights_of(0)
    init_info = interface.DtckptTrainerInitInfo("policy", rank=0, workers={"job": "engines"})
    source = interface.TensorSource(weights)
    assert {meta.name: tuple(meta.shape) for meta in source.metadata} == SHAPES
    trainer = interface.DtckptTrainerEngine.trainer_init(init_info, client=workers, source=source)
    for step in (0, 5):
        for name, tensor in weights_of(step).items():
            weights[name].copy_(tensor)
        trainer.send_weights(step)
        for rank, engine in enumerate(workers.engines):
            assert_has(engine.model, step, rank)
        assert workers.weight_version == f"policy@{step}"
    assert interface.reload_calls == ["initialize", "finalize"] * 2 * WORLD_SIZE
    workers.close()
    trainer.shutdown()


def test_no_worker_applies_if_one_fails(interface, coordinator):
    """Situation 5."""
    workers, weights = Workers(interface), weights_of(0)
    init_info = interface.DtckptTrainerInitInfo("policy", rank=0, workers={"job": "engines"})
    trainer = interface.DtckptTrainerEngine.trainer_init(
        init_info, client=workers, source=interface.TensorSource(weights)
    )
    trainer.send_weights()

    def fail(*_, **__):
        raise errors.SourceLostError("gone")

    workers.engines[1].receiver.receive = fail
    for name, tensor in weights_of(1).items():
        weights[name].copy_(tensor)
    with pytest.raises(errors.SourceLostError):
        trainer.send_weights()
    for rank, engine in enumerate(workers.engines):
        assert_has(engine.model, 0, rank)
        assert engine.receiver.version.step == 0
    workers.close()
    trainer.shutdown()


def test_an_engine_that_is_not_open(interface):
    engine = interface.DtckptWeightTransferEngine(None, worker_config(0, 1), torch.device("cpu"), nn.Linear(2, 2))
    with pytest.raises(errors.ConfigError, match="init_transfer_engine"):
        engine.update_weights({"step": 1})


def test_the_entry_point_of_vllm_is_there():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"][vllm.NAME].partition(":")
    assert getattr(importlib.import_module(module), function) is vllm.register
