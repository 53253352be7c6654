"""The engine and the trainer side for the weight-transfer interface of vLLM from 0.33 on.

::

    trainer, all ranks                        rank 0's client, to every replica       worker, each rank
    publish: copy, digest                     start_weight_update
    version is readable                       update_weights {step}           ----->  read its boxes, verify: receive
                                              finish_weight_update            ----->  apply

vLLM calls every worker with ``update_weights`` before it calls any with ``finish_weight_update``. If one of them fails
to read or to verify, all keep the weights that they have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dtckpt.checkpoint.live.publisher import Publisher
from dtckpt.coordination import identity
from dtckpt.coordination.api import Member
from dtckpt.coordination.discovery import find_coordinator
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_credentials import Access
from dtckpt.errors import ConfigError
from dtckpt.interop.vllm import NAME
from dtckpt.interop.vllm.receiver import WeightReceiver

JOB = "rollout"
"""The job of the workers, if neither the trainer nor their environment names one."""


@dataclass
class DtckptInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The trainer's first message to the workers.

    Args:
        feed: Name of the feed.
        prefix: Begins the names of the weights in the feed's versions; the loaders get the rest.
        coordinator: ``host:port``; default: as the workers' environment says.
        job: Name of the job of the workers. Replicas need one each: by default ``DTCKPT_JOB`` of their environment.
        timeout_s: Longest wait for a version, in seconds.
        direct: Whether boxes go into live memory, where that was seen to be right; else all is loaded whole.
    """

    feed: str
    prefix: str = ""
    coordinator: str = ""
    job: str = ""
    timeout_s: float = 60.0
    direct: bool = True


@dataclass
class DtckptUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Which version the workers take.

    Args:
        step: The newest version of this step; default: the newest of all.
    """

    step: int | None = None


class DtckptWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # as above
    """Takes live versions into the model of one inference worker.

    Attributes:
        receiver: Reads the versions; `init_transfer_engine` sets it.
    """

    init_info_cls = DtckptInitInfo
    update_info_cls = DtckptUpdateInfo
    receiver: WeightReceiver | None = None
    _coordination: GrpcCoordination | None = None

    def init_transfer_engine(self, init_info: DtckptInitInfo) -> None:
        """Join the coordinator as one client of the job of the workers."""
        self.shutdown()
        found = find_coordinator(os.environ, init_info.coordinator or None)
        if found is None:
            raise ConfigError("the dtckpt engine needs a coordinator; name it to the trainer, or to the workers")
        parallel = self.parallel_config
        replica_size, num_replicas = parallel.world_size, getattr(parallel, "data_parallel_size", 1)
        client = getattr(parallel, "data_parallel_index", 0) * replica_size + parallel.rank
        job = init_info.job or os.environ.get("DTCKPT_JOB") or JOB
        member = Member(job, client, num_replicas * replica_size, identity.incarnation())
        self._coordination = GrpcCoordination(found.address, member, access=Access.from_environ(os.environ))
        self.receiver = WeightReceiver(
            init_info.feed,
            self._coordination,
            prefix=init_info.prefix,
            reload=self._reload,
            direct=init_info.direct,
            timeout_s=init_info.timeout_s,
        )

    @contextmanager
    def _reload(self) -> Iterator[None]:
        """Let the engine process a checkpoint's weights layer by layer, into the storage that its graphs know."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        yield
        finalize_layerwise_reload(self.model, self.model_config)

    @property
    def _open_receiver(self) -> WeightReceiver:
        if self.receiver is None:
            raise ConfigError("the dtckpt engine is not open; call init_transfer_engine first")
        return self.receiver

    def start_weight_update(self) -> None:
        """Begin an update: nothing is touched before `finish_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and verify a version beside the model."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DtckptUpdateInfo) -> None:
        """Read and verify a version beside the model."""
        self._open_receiver.receive(self.model, step=update_info.step)

    def finish_weight_update(self) -> None:
        """Put the version into the model."""
        self._open_receiver.apply()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next step uses the new weights

    def shutdown(self) -> None:
        """Leave the coordinator."""
        if self.receiver is not None:
            self.receiver.clear()
        if self._coordination is not None:
            from dtckpt.checkpoint.live.feed_client import end_feed_client

            end_feed_client(self._coordination)
            self._coordination.leave()
        self.receiver = self._coordination = None


class TensorSource(WeightSource):  # type: ignore[misc]  # as above
    """The trainer's tensors as they are: nothing is gathered.

    Args:
        tensors: A module, or tensors of any kind by name. The engine's loaders must know the names.
    """

    def __init__(self, tensors: nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""
        source = self._tensors
        return source.state_dict() if isinstance(source, nn.Module) else source

    @cached_property
    def metadata(self) -> list[Any]:
        """Names, dtypes and global shapes."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]


@dataclass
class DtckptTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # as above
    """How the trainer publishes.

    Args:
        feed: Name of the feed.
        rank: Of this process; rank 0 speaks to vLLM.
        keep: How many versions stay in memory.
        workers: Further fields of `DtckptInitInfo`, as ``job``.
    """

    backend: ClassVar[str] = NAME
    feed: str
    keep: int = 2
    workers: Mapping[str, Any] | None = None


class DtckptTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # as above
    """Publishes the trainer's weights, and lets vLLM's workers take them."""

    init_info_cls = DtckptTrainerInitInfo
    publisher: Publisher
    _next_step = 0

    @classmethod
    def trainer_init(cls, init_info: DtckptTrainerInitInfo, *, client: Any, source: Any = None) -> DtckptTrainerEngine:
        """Open the feed, and tell the workers of it.

        Collective: Over all clients of the job; as `dtckpt.Publisher`.

        Args:
            init_info: How to publish.
            client: Speaks to every replica; rank 0 uses it.
            source: A `TensorSource`. Of any other source each rank gathers the full tensors.
        """
        if source is None:
            raise ConfigError("the dtckpt trainer engine needs a source; pass TensorSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine.publisher = Publisher(init_info.feed, keep=init_info.keep)
        if engine.is_sender:
            client.init_weight_transfer_engine({"feed": init_info.feed, **(init_info.workers or {})})
        return engine

    def send_weights(self, step: int | None = None) -> None:
        """Publish the weights, and let all workers take them. Returns when they have.

        Collective: Over all clients of the job; as `dtckpt.Publisher.publish`. Ranks other than 0 return when the
        version is readable: it is a copy, so training may go on.

        Args:
            step: The step of the training; default: the last call's step plus one.
        """
        step = self._next_step if step is None else step
        self._next_step = step + 1
        source = self.source
        tensors = source.tensors if isinstance(source, TensorSource) else dict(source.iter_full())
        self.publisher.publish(dict(tensors), step=step, wait=True)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"step": step})
            self.client.finish_weight_update(weight_version=f"{self.publisher.name}@{step}")

    def shutdown(self) -> None:
        """Close the feed."""
        self.publisher.close()
