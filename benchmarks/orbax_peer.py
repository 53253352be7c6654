"""Orbax, which holds the parts of a client as JAX's arrays on CPUs; it runs in the processes of `torch.distributed`.

Data is not compressed, as in the other systems. Orbax always syncs data, and never its metadata and the last rename.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Orbax:
    """Saves and restores one checkpoint. Collective: every method."""

    def __init__(self, path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = [f"127.0.0.1:{free.getsockname()[1]}"]
        dist.broadcast_object_list(address, src=0)
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(address[0], dist.get_world_size(), dist.get_rank())
        self._path = path.absolute()
        self._mesh = Mesh(np.array(jax.devices()), ("x",))
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def arrays(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, jax.Array]:
        """Return the tensors, split along dim 0 into the parts of the clients."""
        sharding, device = self._sharding(0), jax.local_devices()[0]
        found = {
            name: jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(part.numpy(), device)])
            for name, part in parts.items()
        }
        return jax.block_until_ready(found)

    def save(self, arrays: Mapping[str, jax.Array]) -> None:
        self._checkpointer.save(self._path, dict(arrays))

    def restore(self, names: Iterable[str], shape: tuple[int, int], dim: int) -> None:
        """Restore to new arrays, split along a dim."""
        wanted = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=self._sharding(dim)) for name in names}
        how = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
        jax.block_until_ready(self._checkpointer.restore(self._path, args=how))

    def _sharding(self, dim: int) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*("x" if dim == each else None for each in range(2))))

    def close(self) -> None:
        jax.distributed.shutdown()
