"""The recipes of docs/live.md for inference engines, with stand-ins for the engines."""

import asyncio
import logging
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.coordinators import running_server

import dtckpt
from dtckpt.coordination import connect
from dtckpt.coordination.feeds.client import FeedClient

PAGE = (Path(__file__).resolve().parents[2] / "docs/live.md").read_text()


def recipe(title, **names):
    """Return the names that the first program below a title of the page defines."""
    program = re.search(rf"^### {title}\n.*?^```\w*\n(.*?)^```$", PAGE, re.M | re.S)[1]
    names = {"dtckpt": dtckpt, "asyncio": asyncio, **names}
    exec(compile(program, title, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def one_client(monkeypatch, tmp_path):
    """This process is the only client of a job; it publishes and reads."""
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "MASTER_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DTCKPT_LIVE_FOLDER", str(tmp_path))
    with running_server(heartbeat_timeout_s=20.0) as server:
        monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{server.port}")
        with connect.as_job_of_command(10.0):
            yield


def weights_of(step):
    return {"layers.0.up": torch.full((4, 3), float(step)), "norm": torch.arange(3.0) + step}


class Engine:
    """Loads weights as engines do: by name, into its parameters."""

    def __init__(self):
        self.calls, self.weights = [], {name: torch.zeros_like(each) for name, each in weights_of(0).items()}

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weights[name].copy_(tensor)


def assert_has(weights, step):
    assert weights.keys() == weights_of(step).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(step).items())


def test_any_engine():
    engine = Engine()
    live = recipe("Any engine with `load_weights`")["LiveWeights"](engine)
    assert live.step is None
    with dtckpt.Publisher("policy") as policy:
        for step in (10, 20):
            policy.publish({"model": weights_of(step), "step": step}, step=step, wait=True)
            assert live.update() == step
            assert_has(engine.weights, step)
        assert live.update(step=10) == 10
        assert_has(engine.weights, 10)
    assert engine.calls == ["pause", "resume"] * 3


def test_an_engine_that_fails_has_no_step():
    engine = Engine()
    live = recipe("Any engine with `load_weights`")["LiveWeights"](engine)
    with dtckpt.Publisher("policy") as policy:
        policy.publish({"model": weights_of(1), "step": 1}, step=1, wait=True)
        live.update()
        del engine.weights["norm"]
        with pytest.raises(KeyError):
            live.update()
    assert live.step is None


class CheckpointEngine(ABC):
    """The abstract methods of verl's class of this name."""

    @abstractmethod
    def prepare(self): ...

    @classmethod
    @abstractmethod
    def build_topology(cls, trainer_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_process_group(self, **kwargs): ...

    @abstractmethod
    def finalize(self): ...

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    async def receive_weights(self): ...


class CheckpointEngineRegistry:
    registered: ClassVar = {}

    @classmethod
    def register(cls, name):
        return lambda engine: cls.registered.setdefault(name, engine)


def test_verl():
    recipe("verl", CheckpointEngine=CheckpointEngine, CheckpointEngineRegistry=CheckpointEngineRegistry)
    made = CheckpointEngineRegistry.registered["dtckpt"]
    trainer, rollout = made(bucket_size=1 << 20), made(bucket_size=1 << 20)
    for engine, facts in zip((trainer, rollout), made.build_topology(1, 1, [{}, {}]), strict=True):
        assert engine.prepare() == {}
        engine.init_process_group(**{name: values[0] for name, values in facts.items()})

    async def update(step):
        async def receive():
            return {name: tensor async for name, tensor in rollout.receive_weights(step)}

        _, received = await asyncio.gather(trainer.send_weights(iter(weights_of(step).items()), step), receive())
        return received

    for step in (0, 3):
        assert_has(asyncio.run(update(step)), step)
    trainer.finalize()
    trainer.publisher.close()


def test_what_was_read_counts_though_the_coordinator_is_not_told(monkeypatch, caplog):
    """Situation 14: the coordinator is gone when the lease ends."""

    tell, untold = FeedClient.done, []

    def done(*lease):
        untold.append(lease)
        raise dtckpt.errors.CoordinatorUnavailableError("gone")

    with dtckpt.Publisher("policy") as policy:
        policy.publish({"model": weights_of(1)}, step=1, wait=True)
        with monkeypatch.context() as patched:
            patched.setattr(FeedClient, "done", done)
            assert_has(dtckpt.restore("live://policy")["model"], 1)
            with pytest.raises(ZeroDivisionError), dtckpt.open_checkpoint("live://policy"):
                raise ZeroDivisionError
        assert "(step 1) of feed 'policy' stays leased for now: gone" in caplog.text
        for lease in untold:
            tell(*lease)  # the publisher waits for the readers


def test_both_sides_log_the_version(caplog):
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}}
    with caplog.at_level(logging.INFO, "dtckpt.live"), dtckpt.Publisher("policy") as policy:
        for step, in_place in ((1, False), (2, True)):
            policy.publish({"model": weights_of(step)}, step=step, wait=True)
            with dtckpt.Subscriber("policy", target) as subscriber:
                number = subscriber.update(in_place=in_place).number
            version = f"version {number} (step {step}) of feed 'policy'"
            published, taken = [line for line in caplog.messages if version in line]
            assert published == f"{version} is readable"
            assert re.fullmatch(
                re.escape(f"{version} is in the target: this client received 60 B in ") + r"\d+\.\d{3} s", taken
            )
