"""Restores that read each byte once: every client reads other rows, and a redistribution brings them to all.

If every client reads for itself, each reads a replicated tensor whole. Every client also reads all of a tensor that is
split across its rows, because every block, of whole rows, has elements for all clients::

    stored rows      read (layout `rows`)      redistributed (the tensor's layout)
    row 0  abcd      client 0:  abcd           client 0:  ab    client 1:  cd
    row 1  efgh                 efgh                      ef               gh
    row 2  ijkl      client 1:  ijkl                      ij               kl
    row 3  mnop                 mnop                      mn               op

Reading each byte once pays if storage is slower than the network between the clients.

Invariant: all clients of a mesh read the same tensors this way, in the same batches, because the redistribution of a
batch is collective. Each client lists the tensors that it would share, and sends the others a digest of the list in the
restore's first round. Clients share the tensors of a mesh only if all clients of the mesh sent the same digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dtckpt.checkpoint.leaves import Leaf, host_array, torch_dtype
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.shared_memory import NamedLeaf
from dtckpt.checkpoint.restoring.shared_rows import pays, rows_layout, rows_nbytes
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import host_memory
from dtckpt.comm.process_groups import is_connected
from dtckpt.comm.torch_device import device_of
from dtckpt.errors import CheckpointError, DtckptError
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution.execute import plan_redistribution, redistribute_into, report_error

BATCH_NBYTES = 64 << 20
"""Bytes that a client reads at a time; they are redistributed before it reads more."""
_MAX_MESHES = 16
"""Bound on the meshes whose tensors are shared: their digests must fit a barrier's payload."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that the clients of its mesh read together.

    Args:
        name: Its name in the checkpoint.
        leaf: The memory that it is restored to.
        layout: The layout of that memory, on the mesh as this client sees it.
        rows: The layout in which the tensor is read from storage.
    """

    name: str
    leaf: Leaf
    layout: Layout
    rows: Layout

    @property
    def nbytes(self) -> int:
        """Bytes that the client with most rows reads; all clients count this number, so they form equal batches."""
        return rows_nbytes(self.rows, self.leaf.shape, torch_dtype(self.leaf.dtype).itemsize)


def shareable_tensors(checkpoint: Checkpoint, leaves: Sequence[NamedLeaf]) -> list[SharedTensor]:
    """Return the tensors that are worth reading together, by mesh, in the same order on all clients of each mesh."""
    tensors: list[SharedTensor] = []
    for name, leaf in leaves:
        info, layout = checkpoint.info(name), leaf.layout
        # Without a process group over the mesh's clients nothing can be redistributed; each client reads for itself.
        if layout is None or not layout.mesh.local_device_ids() or not is_connected(layout.mesh.clients):
            continue
        if pays(info, layout, torch_dtype(leaf.dtype).itemsize):
            tensors.append(SharedTensor(name, leaf, layout, rows_layout(layout, info.row_dim)))
    # By facts that all clients of a mesh share: the order of the target's tensors may differ by client.
    return sorted(tensors, key=lambda tensor: (mesh_key(tensor.layout.mesh), tensor.name))


def digests_by_mesh(shared: Sequence[SharedTensor]) -> dict[str, str]:
    """Return a digest of each mesh's tensors, by a digest of the mesh; clients compare these digests."""
    facts_by_mesh: dict[str, list[str]] = {}
    for tensor in shared:
        # All facts that determine the messages of the redistribution; if they differed, clients would wait for each
        # other.
        facts = tensor.name, tensor.leaf.shape, tensor.leaf.dtype, tensor.layout.sharding_specs
        facts_by_mesh.setdefault(mesh_key(tensor.layout.mesh), []).append(repr(facts))
    return {mesh: _digest(repr(facts)) for mesh, facts in list(facts_by_mesh.items())[:_MAX_MESHES]}


def agreed_tensors(shared: Sequence[SharedTensor], digests: Mapping[int, Mapping[str, str]]) -> list[SharedTensor]:
    """Return the tensors that all clients of their mesh will read together.

    Args:
        shared: The tensors that this client would share.
        digests: The `digests_by_mesh` of every client.
    """
    own = digests_by_mesh(shared)

    def is_agreed(mesh: Mesh) -> bool:
        key = mesh_key(mesh)
        # A client that would not share these tensors sends no digest of them, so no client shares them.
        return key in own and all(digests.get(client, {}).get(key) == own[key] for client in mesh.clients)

    meshes = {tensor.layout.mesh: None for tensor in shared}
    agreed = {mesh for mesh in meshes if is_agreed(mesh)}
    return [tensor for tensor in shared if tensor.layout.mesh in agreed]


def read_shared(checkpoint: Checkpoint, shared: Sequence[SharedTensor], phases: Phases) -> None:
    """Fill tensors, each byte read by one client. Collective: over the clients of each mesh, with the same tensors.

    Raises:
        DtckptError: This client's read failed, or another's.
    """
    for batch in _batches(shared):
        mesh = batch[0].layout.mesh
        torch_devices = dict(zip(mesh.local_device_ids(), map(device_of, mesh.local_devices()), strict=True))
        try:
            rows = [_empty_rows(tensor) for tensor in batch]
            checkpoint.read_all(
                (
                    (
                        tensor.name,
                        [
                            (tensor.rows.region(device, tensor.leaf.shape), host_array(part))
                            for device, part in parts.items()
                            # A device may have no rows, where there are fewer rows than devices.
                            if part.numel()
                        ],
                    )
                    for tensor, parts in zip(batch, rows, strict=True)
                ),
                count=phases.count,
            )
            plans = [
                plan_redistribution(tensor.rows, tensor.layout, tensor.leaf.shape, torch_dtype(tensor.leaf.dtype))
                for tensor in batch
            ]
        except Exception as error:
            # The other clients of the mesh wait in the redistribution for rows that this client does not have.
            failure = error if isinstance(error, DtckptError) else CheckpointError(f"{type(error).__name__}: {error}")
            report_error(failure, [mesh])
            raise
        with phases.measure("move"):
            outputs = [_components(tensor) for tensor in batch]
            inputs = [{device: part.to(torch_devices[device]) for device, part in parts.items()} for parts in rows]
            redistribute_into(plans, inputs, outputs)
            phases.count(sum(part.nbytes for parts in outputs for part in parts.values()))


def _batches(shared: Sequence[SharedTensor]) -> Iterator[list[SharedTensor]]:
    """Yield batches of tensors of one mesh, at most `BATCH_NBYTES` each; all clients of the mesh form equal batches."""
    batch: list[SharedTensor] = []
    nbytes = 0
    for tensor in shared:
        if batch and (tensor.layout.mesh != batch[0].layout.mesh or nbytes + tensor.nbytes > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _empty_rows(tensor: SharedTensor) -> dict[int, torch.Tensor]:
    """Allocate host memory for the rows that this client reads, by device."""
    return {
        device: host_memory.allocate(
            tensor.rows.region(device, tensor.leaf.shape).shape, torch_dtype(tensor.leaf.dtype)
        )
        for device in tensor.rows.mesh.local_device_ids()
    }


def _components(tensor: SharedTensor) -> dict[int, torch.Tensor]:
    """Return the memory to be filled, by device."""
    # A write to a parameter itself would be an operation of autograd.
    components = (memory.detach() for memory in tensor.leaf.components)
    return dict(zip(tensor.layout.mesh.local_device_ids(), components, strict=True))


@lru_cache(maxsize=64)
def mesh_key(mesh: Mesh) -> str:
    """Return a digest of a mesh's identity."""
    return _digest(repr(mesh.identity))


def _digest(text: str) -> str:
    return f"{bytes_digest(text.encode()):016x}"
