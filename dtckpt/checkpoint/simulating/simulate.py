"""`simulate`: estimate the bytes and seconds of saves and restores of a model on a large mesh, from the real plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from dtckpt.checkpoint.managing.interval import HOST_MTBF_S, lost_share, optimal_interval
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.resharding.reshard_plan import DEFAULT_MAX_MEMORY, ReshardTarget, plan_reshard, share_out
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.saving.plan import SavePlan, TensorSpec, holdings_of, plan_save
from dtckpt.checkpoint.simulating.model_shapes import ModelShapes, open_model, validate_state
from dtckpt.checkpoint.simulating.planned_bytes import (
    Bytes,
    MovedBytes,
    SavedBytes,
    described_infos,
    held_bytes,
    redistributed_bytes,
    restored_bytes,
    saved_bytes,
    stored_infos,
    stored_tensors,
)
from dtckpt.errors import ConfigError, MeshError, format_nbytes
from dtckpt.format.manifest import MAX_MANIFEST_NBYTES
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The bytes that one kind of link carries in an operation.

    Args:
        link: ``device`` (between a device and its host's memory), ``network`` (of one host, one way) or ``storage``
            (of one host).
        total_nbytes: Bytes of all links of the kind; estimated from the planned hosts, if not all were planned.
        max_nbytes: Bytes of the busiest link.
        seconds: Seconds that these bytes take.
    """

    link: str
    total_nbytes: int
    max_nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedOperation:
    """One simulated operation.

    Args:
        name: ``save``, ``restore``, ``restore, read once``, ``redistribute`` or ``reshard``.
        parts: Seconds of its parts, one after the other.
        loads: Bytes and seconds per kind of link.
        by_client: Bytes of each planned client that read from storage or written to it; for a redistribution received.
    """

    name: str
    parts: Mapping[str, float]
    loads: Sequence[LinkLoad]
    by_client: Sequence[int] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the whole operation."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of `dtckpt.simulate`.

    Args:
        model: Name of the model.
        num_parameters: Elements of its parameters.
        mesh: Axes and sizes of the mesh that saves.
        target_mesh: Of the mesh that restores.
        num_clients: Clients that save.
        devices_per_client: Devices that each of them owns.
        num_hosts: Hosts that they run on.
        num_tensors: Tensors of the checkpoint.
        num_chunks: Chunks that they are stored in.
        nbytes: Bytes of tensor data in the checkpoint.
        max_client_nbytes: Bytes of state on the devices of the client that holds most.
        digests_nbytes: Bytes of the digests of chunks in the manifest, which every client of a restore reads.
        plan_s: Seconds that the plan of the save took in this process; every client plans the first save of a run.
        planned_clients: Clients whose restore was planned; the other clients are taken to be like them.
        operations: The operations.
        blocking_s: Seconds for which a save in the background stops training.
        lag_s: Seconds from the begin of a save until it is complete.
        mtbf_s: Mean seconds between failures of the whole job.
        interval_s: The interval between saves that loses the least time.
        notes: Problems that a real run would have.
    """

    model: str
    num_parameters: int
    mesh: Mapping[str, int]
    target_mesh: Mapping[str, int]
    num_clients: int
    devices_per_client: int
    num_hosts: int
    num_tensors: int
    num_chunks: int
    nbytes: int
    max_client_nbytes: int
    digests_nbytes: int
    plan_s: float
    planned_clients: Sequence[int]
    operations: Sequence[SimulatedOperation]
    blocking_s: float
    lag_s: float
    mtbf_s: float
    interval_s: float
    notes: Sequence[str]

    def lost_share(self, interval_s: float) -> float:
        """Return the share of the time that saves and repeated steps take with another interval between saves."""
        return lost_share(interval_s, self.blocking_s, self.mtbf_s, lag_s=self.lag_s)

    def operation(self, name: str) -> SimulatedOperation:
        """Return one operation.

        Raises:
            KeyError: The operation was not simulated.
        """
        return {each.name: each for each in self.operations}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hosts that are alike, and their storage; speeds are in bytes per second.

    The defaults are a guess at hosts with eight GPUs each. Pass measured speeds of copies, of transfers and of your
    storage, not the numbers of data sheets.

    Args:
        devices_per_host: Devices of a host; a client owns devices of one host only.
        device_link: From one device to the memory of its host, or back.
        network: From one host to other hosts, or from them; each way at the same time.
        host_storage: From one host to storage, or back.
        storage: From all hosts to storage, or back.
        arrival_s: Seconds that one client's arrival takes at a barrier; 2 048 took 0.36 s at the coordinator of the
            benchmarks.
    """

    devices_per_host: int = 8
    device_link: float = 25e9
    network: float = 50e9
    host_storage: float = 5e9
    storage: float = 200e9
    arrival_s: float = 0.00018

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{each.name} of the machine must be a positive number; got {value!r}")
        if int(self.devices_per_host) != self.devices_per_host:
            raise ConfigError(f"devices_per_host must be a whole number; got {self.devices_per_host!r}")

    def barrier_s(self, num_clients: int) -> float:
        """Return the seconds that a barrier of so many clients takes."""
        return num_clients * self.arrival_s if num_clients > 1 else 0.0

    def storage_s(self, most_of_a_host: float, total: float) -> float:
        """Return the seconds for writing or reading: of the busiest host, or of all storage."""
        return max(most_of_a_host / self.host_storage, total / self.storage)


DEFAULT_SAMPLE = 256
"""Clients whose restores are planned, of a mesh with more."""
SMALL_CHUNK_NBYTES = 64 << 10
"""Chunks that are smaller than this on average are worth a note: storage is asked for each."""
_DIGEST_NBYTES = 8


def simulate(
    model: str | Path | ModelShapes,
    mesh: Mesh,
    *,
    layouts: Layouts | None = None,
    target_mesh: Mesh | None = None,
    target_layouts: Layouts | None = None,
    state: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    options: SaveOptions | None = None,
    workers: int = 1,
    mtbf_s: float | None = None,
    sample: int = DEFAULT_SAMPLE,
) -> Simulation:
    """Simulate saves, restores and reshards of a model's training state.

    The bytes come from the plans that real saves, restores and redistributions follow; only the seconds come from the
    speeds of ``machine``. Nothing is read or written, and neither mesh needs devices. The state is assumed to be on
    GPUs, and to be saved in the background.

    Args:
        model: A model that the package describes, such as ``llama-3-8b``; a JSON file; or the shapes.
        mesh: The mesh that saves, as from ``dtckpt.abstract_mesh(axes, devices_per_client=1)``.
        layouts: Layouts on ``mesh``, as for `dtckpt.restore`; other tensors get the model's layouts, as far as the mesh
            has their axes.
        target_mesh: The mesh that restores, to which tensors are redistributed, and for which the checkpoint is laid
            out anew; default: ``mesh``. Without it and ``target_layouts`` only saves and restores are simulated.
        target_layouts: Layouts on it; other tensors keep theirs, as far as the mesh has their axes.
        state: Dtypes of the tensors that are kept of each parameter, by the first part of their names; default: the
            model's dtypes.
        machine: The speeds; see `Machine`.
        options: Of these, ``chunk_nbytes`` and ``check_replicas`` count.
        workers: Processes that lay the checkpoint out anew, each on a separate host.
        mtbf_s: Mean seconds between failures of the whole job; default: from the number of hosts.
        sample: How many clients' restores are planned, at least, if there are more; the clients of some whole hosts.

    Raises:
        ConfigError: The model is unknown, or a number cannot be used.
        MeshError: A layout is on another mesh, or clients span hosts.
        LayoutError: A layout does not fit its tensor.

    >>> import dtckpt
    >>> found = dtckpt.simulate("llama-3-8b", dtckpt.abstract_mesh({"dp": 8, "tp": 8}, devices_per_client=1))
    >>> found.num_clients, found.num_hosts, found.nbytes == 14 * found.num_parameters
    (64, 8, True)
    """
    is_new_layout = target_mesh is not None or target_layouts is not None
    machine, options, target_mesh = machine or Machine(), options or SaveOptions(), target_mesh or mesh
    if workers < 1 or sample < 1 or (mtbf_s is not None and not mtbf_s > 0):
        raise ConfigError(f"expected positive numbers; got workers {workers}, sample {sample}, mtbf_s {mtbf_s}")
    shapes = model if isinstance(model, ModelShapes) else open_model(model)
    if state is not None:
        validate_state(state)
        shapes = replace(shapes, state=state)
    described = described_infos(shapes)
    start = time.perf_counter()
    plan = plan_save(_specs(described, mesh, layouts), options.chunk_nbytes)
    plan_s = time.perf_counter() - start
    infos = stored_infos(plan)
    targets = {name: _laid_out(info, target_mesh, target_layouts) for name, info in infos.items()}
    saving, restoring = _SimulatedJob.of(mesh, machine), _SimulatedJob.of(target_mesh, machine)
    saved = saved_bytes(plan, saving.num_clients)
    nbytes, digests_nbytes = sum(info.nbytes for info in infos.values()), _DIGEST_NBYTES * plan.owners.size
    save = _save(plan, saved, saving, digests_nbytes, check_replicas=bool(options.check_replicas))
    tensors, clients = stored_tensors(infos, targets), restoring.sample(sample)
    held = held_bytes(tensors, restoring.num_clients)[clients]
    operations = [save]
    for name, read_once in (("restore", False), ("restore, read once", True)):
        moved = restored_bytes(tensors, clients, restoring.clients_per_host, read_once=read_once)
        # Where clients share nothing, the second restore is the first one.
        if not read_once or (moved.read != np.array(operations[-1].by_client)).any():
            operations.append(_restore(name, moved, held, restoring, clients, digests_nbytes=digests_nbytes))
    if is_new_layout:
        moving = max(saving, restoring, key=lambda job: job.num_clients)
        movers = moving.sample(sample)
        moved = redistributed_bytes(tensors, movers, moving.clients_per_host)
        operations.append(_redistribute(moved, moving, movers))
        operations.append(_reshard(infos, ReshardTarget(target_mesh, target_layouts), options, workers, machine))
    blocking_s, mtbf_s = save.parts["stage"], mtbf_s or HOST_MTBF_S / saving.num_hosts
    return Simulation(
        model=shapes.name,
        num_parameters=shapes.num_parameters,
        mesh=mesh.axis_sizes,
        target_mesh=target_mesh.axis_sizes,
        num_clients=saving.num_clients,
        devices_per_client=saving.devices_per_client,
        num_hosts=saving.num_hosts,
        num_tensors=len(plan.tensors),
        num_chunks=int(plan.owners.size),
        nbytes=nbytes,
        max_client_nbytes=int(saved.held.max()),
        digests_nbytes=digests_nbytes,
        plan_s=plan_s,
        planned_clients=clients,
        operations=operations,
        blocking_s=blocking_s,
        lag_s=save.seconds,
        mtbf_s=mtbf_s,
        interval_s=optimal_interval(blocking_s, mtbf_s, lag_s=save.seconds),
        notes=list(_notes(plan, nbytes, digests_nbytes)),
    )


def _specs(infos: Mapping[str, TensorInfo], mesh: Mesh, layouts: Layouts | None) -> list[TensorSpec]:
    laid_out = {name: _laid_out(info, mesh, layouts) for name, info in infos.items()}
    return [
        TensorSpec(name, info.shape, info.dtype_name, info.dtype_name, holdings_of(layout, info.shape), layout)
        for (name, info), layout in zip(infos.items(), laid_out.values(), strict=True)
    ]


def _laid_out(info: TensorInfo, mesh: Mesh, layouts: Layouts | None) -> Layout:
    layout = choose_layout(info.name, info, mesh, layouts)
    if layout is None or layout.mesh != mesh:
        raise MeshError(f"layout for tensor {info.name!r} is on another mesh; expected {mesh.axis_sizes}")
    return layout


@dataclass(frozen=True, slots=True)
class _SimulatedJob:
    """The clients of a mesh on their hosts: consecutive ones share a host."""

    mesh: Mesh
    machine: Machine
    num_clients: int
    devices_per_client: int

    @classmethod
    def of(cls, mesh: Mesh, machine: Machine) -> _SimulatedJob:
        devices_per_client = mesh.size() // max(1, mesh.num_clients)
        counts = np.bincount(mesh.owners.ravel(), minlength=1)
        if not mesh.size() or (counts != devices_per_client).any():
            raise MeshError(f"mesh {mesh.axis_sizes}: expected clients from 0 with equally many devices each")
        if machine.devices_per_host % devices_per_client:
            raise MeshError(
                f"mesh {mesh.axis_sizes}: got {devices_per_client} devices per client, expected a divisor of the "
                f"{machine.devices_per_host} devices of a host"
            )
        return cls(mesh, machine, mesh.num_clients, devices_per_client)

    @property
    def clients_per_host(self) -> int:
        return self.machine.devices_per_host // self.devices_per_client

    @property
    def num_hosts(self) -> int:
        return -(-self.num_clients // self.clients_per_host)

    def sample(self, count: int) -> list[int]:
        """Return all clients, or all clients of some hosts, spread evenly: at least ``count``, if there are so many."""
        num_hosts = min(self.num_hosts, -(-count // self.clients_per_host))
        hosts = np.linspace(0, self.num_hosts - 1, num_hosts).round().astype(int).tolist() if num_hosts > 1 else [0]
        chosen = range(self.num_hosts) if num_hosts == self.num_hosts else hosts
        return [
            client
            for host in chosen
            for client in range(host * self.clients_per_host, (host + 1) * self.clients_per_host)
            if client < self.num_clients
        ]

    def most_of_a_host(self, by_client: Bytes, clients: Sequence[int]) -> int:
        """Return the bytes of the busiest host; ``by_client`` has the bytes of ``clients``, in the same order."""
        sums = np.zeros(self.num_hosts, np.int64)
        np.add.at(sums, np.array(clients, np.int64) // self.clients_per_host, by_client)
        return int(sums.max(initial=0))

    def device_load(self, by_client: Bytes, clients: Sequence[int]) -> LinkLoad:
        """Return the load of the links between devices and their hosts; a client's devices share its bytes evenly."""
        most = -(-int(by_client.max(initial=0)) // self.devices_per_client)
        return LinkLoad("device", self.total(by_client, clients), most, most / self.machine.device_link)

    def storage_load(self, by_client: Bytes, clients: Sequence[int]) -> LinkLoad:
        """Return the load of the links between hosts and storage."""
        most, total = self.most_of_a_host(by_client, clients), self.total(by_client, clients)
        return LinkLoad("storage", total, most, self.machine.storage_s(most, total))

    def network_load(self, moved: MovedBytes, clients: Sequence[int]) -> LinkLoad:
        """Return the load of the network between hosts."""
        most = max(self.most_of_a_host(each, clients) for each in (moved.sent, moved.received))
        return LinkLoad("network", self.total(moved.received, clients), most, most / self.machine.network)

    def total(self, by_client: Bytes, clients: Sequence[int]) -> int:
        """Return the bytes of all clients, if the other clients are like ``clients``."""
        return round(int(by_client.sum()) * self.num_clients / len(clients))

    @property
    def barrier_s(self) -> float:
        """Seconds that a barrier takes."""
        return self.machine.barrier_s(self.num_clients)


def _save(
    plan: SavePlan, saved: SavedBytes, job: _SimulatedJob, digests_nbytes: int, *, check_replicas: bool
) -> SimulatedOperation:
    clients = range(job.num_clients)
    # Copies on GPUs are compared on the host, so all of them are staged.
    device = job.device_load(saved.held if check_replicas else saved.staged, clients)
    storage = job.storage_load(saved.written, clients)
    parts = {"stage": max(device.seconds, job.barrier_s)}
    if plan.has_moves:
        handed = job.storage_load(saved.handed_over, clients)
        # Written by one client, and read by the other.
        parts["hand over"] = 2 * handed.seconds + job.barrier_s
    parts["write"] = storage.seconds
    parts["commit"] = 2 * job.barrier_s + digests_nbytes / job.machine.host_storage
    return SimulatedOperation("save", parts, [device, storage], saved.written.tolist())


def _restore(
    name: str,
    moved: MovedBytes,
    held: Bytes,
    job: _SimulatedJob,
    clients: Sequence[int],
    *,
    digests_nbytes: int,
) -> SimulatedOperation:
    index = job.storage_load(np.full(len(clients), digests_nbytes, np.int64), clients)
    storage, network = job.storage_load(moved.read, clients), job.network_load(moved, clients)
    device = job.device_load(held, clients)
    parts = {"open": index.seconds + job.barrier_s, "read": storage.seconds}
    if network.total_nbytes:
        parts["share"] = network.seconds
    parts |= {"load": device.seconds, "agree": job.barrier_s}
    return SimulatedOperation(name, parts, [storage, network, device], moved.read.tolist())


def _redistribute(moved: MovedBytes, job: _SimulatedJob, clients: Sequence[int]) -> SimulatedOperation:
    network = job.network_load(moved, clients)
    return SimulatedOperation(
        "redistribute", {"move": network.seconds}, [network], (moved.received + moved.within).tolist()
    )


def _reshard(
    infos: Mapping[str, TensorInfo], target: ReshardTarget, options: SaveOptions, workers: int, machine: Machine
) -> SimulatedOperation:
    start = time.perf_counter()
    plan = plan_reshard(
        infos, target.specs(infos), max_memory=DEFAULT_MAX_MEMORY * workers, chunk_nbytes=options.chunk_nbytes
    )
    plan_s = time.perf_counter() - start
    nbytes = sum(tensor.new_nbytes for tensor in plan.tensors)
    most = nbytes
    if workers > 1:
        shares = share_out(plan.save, plan.windows, workers)
        written = np.zeros(workers)
        for tensor in shares.tensors:
            share = tensor.spec
            chunk = np.bincount(tensor.owners, minlength=workers) / max(1, tensor.owners.size)
            written += chunk * infos[share.name].nbytes
        most = round(written.max())
    total = nbytes + plan.read_nbytes
    of_worker = round(total * most / max(1, nbytes))
    storage = LinkLoad("storage", total, of_worker, machine.storage_s(of_worker, total))
    return SimulatedOperation(
        "reshard", {"plan": plan_s, "read and write": storage.seconds}, [storage], [plan.read_nbytes, nbytes]
    )


def _notes(plan: SavePlan, nbytes: int, digests_nbytes: int) -> Iterator[str]:
    if digests_nbytes > MAX_MANIFEST_NBYTES:
        yield (
            f"the digests of {plan.owners.size} chunks exceed the bound on a manifest, "
            f"{format_nbytes(MAX_MANIFEST_NBYTES)}: such a save is refused; split tensors over fewer devices"
        )
    if plan.owners.size and nbytes / plan.owners.size < SMALL_CHUNK_NBYTES:
        yield (
            f"a chunk has {format_nbytes(nbytes / plan.owners.size)} on average: storage is asked for many small "
            "parts; split tensors over fewer devices"
        )
