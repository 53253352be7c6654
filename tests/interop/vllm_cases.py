"""Stand-ins for vLLM: its interface for weight transfer, and a model whose loaders fuse and cut weights."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

WHEEL = "VLLM_WHEEL"
"""Variable that names the folder of an unzipped wheel of vLLM 0.33."""
BASE = "vllm/distributed/weight_transfer/base.py"
NAMES = [
    "vllm",
    "vllm.config",
    "vllm.config.parallel",
    "vllm.config.weight_transfer",
    "vllm.distributed",
    "vllm.distributed.weight_transfer",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.reload",
]


def base_of_wheel():
    """Return the path of the interface in an unzipped wheel; None if there is none."""
    path = Path(os.environ.get(WHEEL, "")) / BASE
    return path if WHEEL in os.environ and path.is_file() else None


class Factory:
    """Keeps the registered classes."""

    def __init__(self):
        self.registered = {}

    def register_engine(self, name, module, class_name):
        self.registered[name] = module, class_name


def install(monkeypatch, base=None):
    """Make ``import vllm...`` find the stand-ins; ``base`` is the path of the real interface, if it is there."""
    for name in NAMES:
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.config.parallel"].ParallelConfig = object
    sys.modules["vllm.config.weight_transfer"].WeightTransferConfig = object
    factory = sys.modules["vllm.distributed.weight_transfer.factory"]
    factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory = Factory(), Factory()
    reload, calls = sys.modules["vllm.model_executor.model_loader.reload"], []
    reload.initialize_layerwise_reload = lambda model: calls.append("initialize")
    reload.finalize_layerwise_reload = lambda model, config: calls.append("finalize")
    name = "vllm.distributed.weight_transfer.base"
    if base is None:
        module = fake_base(name)
        monkeypatch.setitem(sys.modules, name, module)
    else:
        spec = importlib.util.spec_from_file_location(name, base)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "dtckpt.interop.vllm.engine_0_33", raising=False)
    return factory, calls


def fake_base(name):
    """Return a module with the classes of the interface that dtckpt uses, and the same abstract methods."""
    info, update, trainer = TypeVar("info"), TypeVar("update"), TypeVar("trainer")

    @dataclass(frozen=True)
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple

    class WeightSource(ABC):
        @property
        @abstractmethod
        def metadata(self): ...

    @dataclass
    class InitInfo(ABC):  # noqa: B024
        pass

    @dataclass
    class UpdateInfo(ABC):  # noqa: B024
        pass

    @dataclass
    class TrainerInitInfo:
        backend: ClassVar[str]
        rank: int = field(kw_only=True)

        @property
        def is_sender(self):
            return self.rank == 0

    class Engine(ABC, Generic[info, update]):
        def __init__(self, config, vllm_config, device, model):
            self.parallel_config = vllm_config.parallel_config
            self.model_config = vllm_config.model_config
            self.device, self.model = device, model

        def parse_init_info(self, facts):
            return self.init_info_cls(**facts)

        def parse_update_info(self, facts):
            return self.update_info_cls(**facts)

        @abstractmethod
        def init_transfer_engine(self, init_info): ...

        @abstractmethod
        def start_weight_update(self): ...

        @abstractmethod
        def finish_weight_update(self): ...

        @abstractmethod
        def receive_weights(self, update_info): ...

        @abstractmethod
        def shutdown(self): ...

    class Trainer(ABC, Generic[trainer]):
        def __init__(self, *, client, source=None, is_sender=True, rank=0):
            self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

        @classmethod
        @abstractmethod
        def trainer_init(cls, init_info, *, client, source=None): ...

        @abstractmethod
        def send_weights(self): ...

    module = types.ModuleType(name)
    module.ParamMeta, module.WeightSource, module.TrainerInitInfo = ParamMeta, WeightSource, TrainerInitInfo
    module.WeightTransferInitInfo, module.WeightTransferUpdateInfo = InitInfo, UpdateInfo
    module.WeightTransferEngine, module.TrainerWeightTransferEngine = Engine, Trainer
    return module


def worker_config(rank, world_size):
    """Return what an engine is made with."""
    parallel = SimpleNamespace(rank=rank, world_size=world_size, data_parallel_size=1, data_parallel_index=0)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace())


# --- a model ----------------------------------------------------------------------------------------------------------

HIDDEN, HEADS, EXPERTS = 8, 16, 4
SHAPES = {
    "embed.weight": (32, HIDDEN),
    "q.weight": (HEADS, HIDDEN),
    "k.weight": (HEADS, HIDDEN),
    "v.weight": (HEADS, HIDDEN),
    "o.weight": (HIDDEN, HEADS),
    **{f"experts.{each}.up.weight": (12, HIDDEN) for each in range(EXPERTS)},
    "router.weight": (EXPERTS, HIDDEN),
    "square.weight": (HIDDEN, HIDDEN),
    "norm.weight": (HIDDEN,),
    "scale": (1,),
    "latent.weight": (HIDDEN, HIDDEN),
    "packed.weight": (HIDDEN, HIDDEN),
}


class Fp8Method:
    pass


class UnquantizedMethod:
    pass


class OwnParameter(nn.Parameter):
    """A class of parameters, as engines have for their layers."""


class Latent(nn.Module):
    """Derives a tensor from a weight after loading, as attention with latent keys does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def process_weights_after_loading(self):
        self.derived = self.inner.weight.detach() * 2


class TpModel(nn.Module):
    """One rank's part of a model, with loaders as engines have them."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.embed = nn.Embedding(32 // world_size, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS // world_size, bias=False)
        self.qkv.quant_method = UnquantizedMethod()
        self.o = nn.Linear(HEADS // world_size, HIDDEN, bias=False)
        self.o.weight = OwnParameter(self.o.weight.detach())
        self.experts = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 12 // world_size))  # transposed
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.float64)  # cast
        self.square = nn.Linear(HIDDEN, HIDDEN, bias=False)  # the engine keeps it in another form
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self.latent = Latent()
        self.packed = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.packed.quant_method = Fp8Method()
        self.order = [*range(EXPERTS)]
        self.loads = []

    def _mine(self, loaded, dim):
        size = loaded.shape[dim] // self.world_size
        return loaded.narrow(dim, self.rank * size, size)

    def load_weights(self, weights):
        for name, loaded in weights:
            if type(loaded) is torch.Tensor:
                self.loads.append(name)
            if name in ("q.weight", "k.weight", "v.weight"):
                size = HEADS // self.world_size
                part = self.qkv.weight.data.narrow(0, "qkv".index(name[0]) * size, size)
                part.copy_(self._mine(loaded, 0))
            elif name == "embed.weight":
                self.embed.weight.data[:] = self._mine(loaded, 0)
            elif name == "o.weight":
                self.o.weight.data.copy_(self._mine(loaded, 1).contiguous(), True)
            elif name.startswith("experts."):
                self.experts.data[self.order.index(int(name.split(".")[1]))].copy_(self._mine(loaded, 0).t())
            elif name == "scale":
                self.scale.data.fill_(loaded.item())
            elif name == "latent.weight":
                self.latent.inner.weight.data.copy_(loaded)
            elif name == "square.weight":
                self.square.weight.data.copy_(loaded)
                if type(loaded) is torch.Tensor:  # stands for what is done when all of a layer is loaded
                    self.square.weight.data.copy_(loaded.t().clone())
            else:
                getattr(self, name.split(".")[0]).weight.data.copy_(loaded)
        if hasattr(self.latent.inner, "weight"):
            self.latent.process_weights_after_loading()


def expected(weights, rank, world_size):
    """Return a model into which whole weights were loaded as engines do."""
    model = TpModel(rank, world_size)
    with torch.no_grad():
        model.load_weights(weights.items())
    return model
