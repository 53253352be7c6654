"""One tensor's change of layout, and the memory that its messages are in.

Apart from `exchange_plan`, which simulations use without PyTorch.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch

from dtckpt.comm.process_groups import message_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """One tensor's change of layout; the meshes of the layouts are as this client sees them.

    Args:
        source: The layout before.
        target: The layout after. The change does the reductions that are pending in the source only. The target has no
            other pending reductions.
        shape: Global shape.
        dtype: The tensor's dtype.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        """Source and target mesh."""
        return self.source.mesh, self.target.mesh

    @property
    def clients(self) -> tuple[int, ...]:
        """Clients of both meshes, ascending."""
        source, target = self.source.mesh, self.target.mesh
        return source.clients if source is target else tuple(sorted({*source.clients, *target.clients}))

    @property
    def client(self) -> int:
        """This client; -1 if it has no device in either mesh."""
        source, target = self.source.mesh.local_client, self.target.mesh.local_client
        return source if source is not None else -1 if target is None else target

    @property
    def device_type(self) -> str:
        """Device type of messages: ``cuda`` if each client has one GPU there and a backend for it, else ``cpu``."""
        for mesh in (self.source.mesh, self.target.mesh):
            # The ranks of a process group are clients, so NCCL could not address each of several GPUs of a client.
            if mesh.device_type != "cuda" or mesh.num_clients != mesh.size():
                return "cpu"
        return message_memory("cuda")

    @property
    def device(self) -> torch.device:
        """The device on which this client's messages lie; the host if it has no device in either mesh."""
        mesh = self.source.mesh if self.source.mesh.local_device_ids() else self.target.mesh
        return _HOST if self.device_type == "cpu" or self.client < 0 else device_of(mesh.local_devices()[0])

    @property
    def fingerprint(self) -> int:
        """A number below 2**31, equal on all clients for equal changes, and very rarely for different changes."""
        # No `hash`: the hash of a text differs from process to process.
        layouts = [(_fingerprint(each.mesh), each.sharding_specs, each.partial) for each in (self.source, self.target)]
        return zlib.crc32(f"{layouts} {self.shape} {self.dtype}".encode()) >> 1


@lru_cache(maxsize=256)
def _fingerprint(mesh: Mesh) -> int:
    return zlib.crc32(repr(mesh.identity).encode())
