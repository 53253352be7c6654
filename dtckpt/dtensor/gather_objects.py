"""Exchange small Python objects between the clients of a mesh: `gather_objects`."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch

from dtckpt.comm.collectives import all_gather_object
from dtckpt.comm.process_groups import is_fake
from dtckpt.dtensor.derived_layouts import cached_layout, one_device_per_client
from dtckpt.errors import LayoutError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Replicate, Shard
from dtckpt.redistribution import agreements
from dtckpt.redistribution.disagreement import ARGUMENTS_AXIS
from dtckpt.redistribution.execute import plan_redistribution, redistribute_components

T = TypeVar("T")

_NBYTES = 504
"""Bytes of an object in the first exchange; most objects fit."""
_LENGTH_NBYTES = 8


def gather_objects(value: T, mesh: Mesh, purpose: str) -> list[T]:
    """Return the value of every client of a mesh, in the order of ``mesh.clients``.

    Under PyTorch's ``fake`` process group, for dry runs, the result has this client's value for every client.

    On the host the values travel as a redistribution. So if a client does not come, because it makes another
    redistribution or fails, all clients raise, as in any redistribution.

    Collective: Over the mesh's clients, which a process group connects.

    Args:
        value: Anything that can be pickled; a few hundred bytes go fastest.
        mesh: A mesh in which this client has a device.
        purpose: Name of the calling function, in printable characters without spaces. Values for different purposes
            never meet.

    Raises:
        LayoutError: Other clients make another call, or took other facts for granted before.
        CoordinationError: A client is gone.
    """
    if is_fake():
        return [value] * mesh.num_clients  # no client sends, so the buffers hold no valid length of an object
    if mesh.device_type != "cpu":
        return _gathered_beside_gpus(value, mesh, purpose)
    data = pickle.dumps(value)
    first = _rows(
        len(data).to_bytes(_LENGTH_NBYTES, "little") + data[:_NBYTES], _LENGTH_NBYTES + _NBYTES, mesh, purpose
    )
    lengths = [int.from_bytes(row[:_LENGTH_NBYTES], "little") for row in first]
    texts = [row[_LENGTH_NBYTES:] for row in first]
    if (longest := max(lengths)) > _NBYTES:
        # Rounded up, so that few plans serve all lengths.
        rest = _rows(data[_NBYTES:], 1 << (longest - _NBYTES - 1).bit_length(), mesh, purpose)
        texts = [start + end for start, end in zip(texts, rest, strict=True)]
    # The clients of one job trust each other, as in PyTorch's own collectives of objects.
    return [pickle.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]  # noqa: S301  (see above)


def _rows(data: bytes, width: int, mesh: Mesh, purpose: str) -> list[bytes]:
    """Return the bytes of every client, each filled up to ``width``."""
    hosts = one_device_per_client(mesh, ARGUMENTS_AXIS, purpose)
    (device,) = hosts.local_device_ids()
    row = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)[None]
    source, target = cached_layout(hosts, [Shard(0)], 2), cached_layout(hosts, [Replicate()], 2)
    plan = plan_redistribution(source, target, (mesh.num_clients, width), torch.uint8)
    gathered = redistribute_components([plan], [{device: row}]).components[0][device]
    return [bytes(each.numpy()) for each in gathered]


def _gathered_beside_gpus(value: T, mesh: Mesh, purpose: str) -> list[T]:
    # Messages between GPUs carry no digest of the clients' agreements, so compare the digests here.
    own = (agreements.digest(mesh.clients), purpose, value)
    gathered: list[tuple[int, str, Any]] = all_gather_object(own, mesh.clients)
    if len({(digest, asked) for digest, asked, _ in gathered}) > 1:
        agreements.forget(mesh.clients)
        raise LayoutError(agreements.MISMATCH)
    return [each for _, _, each in gathered]
