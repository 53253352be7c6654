"""Layouts and meshes derived from others: of gradients, of placements, of one device of each client."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, Replicate, placement_of


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor in ``layout``: the same without pending reductions."""
    return Layout(layout.sharding_specs, layout.mesh) if layout.partial else layout


def cached_layout(mesh: Mesh, placements: Sequence[Placement] | None, ndim: int) -> Layout:
    """Return a layout from placements, as `Layout.from_placements`; equal arguments get the same object from a cache.

    Args:
        mesh: The mesh.
        placements: One per mesh axis; None means replicated on all.
        ndim: Rank of the tensor.

    Raises:
        LayoutTypeError: ``placements`` is no sequence of placements.
        LayoutError: The placements do not fit the mesh or the rank.
    """
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if not isinstance(placements, Sequence):
        return Layout.from_placements(mesh, placements, ndim)  # which raises a fitting error
    converted = tuple(map(placement_of, placements))
    if not all(isinstance(each, Placement) for each in converted):
        return Layout.from_placements(mesh, converted, ndim)  # as above
    return _layout(mesh, id(mesh), converted, ndim)


@lru_cache(maxsize=4096)
def _layout(mesh: Mesh, identity: int, placements: tuple[Placement, ...], ndim: int) -> Layout:
    # Equal meshes may be seen from different clients of one process, and know different names and backends.
    del identity
    return Layout.from_placements(mesh, placements, ndim)


def shared_layout(layout: Layout) -> Layout:
    """Return one layout for all equal ones on a mesh."""
    return _shared(layout, id(layout.mesh))


@lru_cache(maxsize=8192)
def _shared(layout: Layout, identity: int) -> Layout:
    # Equal meshes may be seen from different clients of one process.
    del identity
    return layout


def one_device_per_client(mesh: Mesh, axis: str = "client", name: str = "") -> Mesh:
    """Return the mesh of every client's first device, on one axis."""
    return _host_mesh(mesh, id(mesh), axis, name)


@lru_cache(maxsize=256)
def _host_mesh(mesh: Mesh, identity: int, axis: str, name: str) -> Mesh:
    # Equal meshes may be seen from different clients of one process.
    del identity
    hosts = [mesh.device_name(mesh.devices_of(client)[0]) for client in mesh.clients]
    own = [mesh.clients.index(mesh.client_of(device)) for device in mesh.local_device_ids()[:1]]
    return Mesh([axis], np.arange(len(hosts)), own, [hosts[index] for index in own], name, hosts)


def mesh_of_all_clients(meshes: Sequence[Mesh]) -> Mesh:
    """Return a mesh with a device of every client of some meshes: the first such mesh among them, or else a new one.

    Args:
        meshes: At least one, in an order that all clients agree on.
    """
    return _union_mesh(tuple(meshes), tuple(map(id, meshes)))


@lru_cache(maxsize=256)
def _union_mesh(meshes: tuple[Mesh, ...], identities: tuple[int, ...]) -> Mesh:
    # Equal meshes may be seen from different clients of one process.
    del identities
    clients = sorted({client for mesh in meshes for client in mesh.clients})
    for mesh in meshes:
        if len(mesh.clients) == len(clients):
            return mesh
    owners = {client: mesh for mesh in reversed(meshes) for client in mesh.clients}
    hosts = [owners[client].device_name(owners[client].devices_of(client)[0]) for client in clients]
    local = next((mesh for mesh in meshes if not mesh.is_remote()), None)
    own = [] if local is None else [clients.index(local.client_of(local.local_device_ids()[0]))]
    return Mesh(["client"], np.arange(len(hosts)), own, [hosts[index] for index in own], "", hosts)
