"""Saves and restores over several clients: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.client_calls import wait_until
from support.faulty_coordination import Fault, FaultyCoordination
from support.states import bits_of, cluster_mesh, differences, packed, tensor_of

import dtckpt
from dtckpt import Layout, Mesh, SaveOptions
from dtckpt.coordination.connect import connect, set_coordination
from dtckpt.errors import DtckptError
from dtckpt.storage import commit_by_rename

Tensors = Mapping[str, tuple[tuple[int, ...], str, Sequence[Any] | None]]
"""Tensors by name: shape, dtype, sharding specs (None: a plain tensor, of which all clients have a copy)."""


def mesh_over_all(axes: Mapping[str, int], devices: int = 1) -> Mesh:
    dtckpt.configure_virtual_devices("CPU", devices)
    return dtckpt.create_distributed_mesh(dict(axes))


def tree_on(mesh: Mesh, tensors: Tensors, generation: str = "") -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, (shape, dtype, specs) in tensors.items():
        whole = tensor_of(name + generation, shape, dtype)
        tree[name] = whole if specs is None else packed(whole, Layout(specs, mesh))
    return {**tree, "step": generation}


def save(
    path: str, axes: Mapping[str, int], tensors: Tensors, *, devices: int = 1, generation: str = "", **options: Any
) -> dict[str, Any]:
    """Save tensors whose elements follow from name and generation."""
    mesh = mesh_over_all(axes, devices)
    report = dtckpt.save(path, tree_on(mesh, tensors, generation), options=SaveOptions(**options))
    return {"nbytes": report.nbytes, "client_nbytes": report.client_nbytes, "phases": report.phases}


def restore(
    path: str, axes: Mapping[str, int], tensors: Tensors, *, devices: int = 1, generation: str = ""
) -> list[str]:
    """Restore into layouts on another mesh, both ways; return the faults."""
    mesh = mesh_over_all(axes, devices)
    layouts = {name: Layout(specs, mesh) for name, (_, _, specs) in tensors.items() if specs is not None}
    found: list[str] = []
    target = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        if specs is None
        else packed(torch.zeros(shape, dtype=getattr(torch, dtype)), layouts[name])
        for name, (shape, dtype, specs) in tensors.items()
    } | {"step": None}
    for restored in (dtckpt.restore(path, mesh=mesh, layouts=layouts), dtckpt.restore(path, target)):
        if restored["step"] != generation:
            found.append(f"step is {restored['step']!r}")
        for name, (shape, dtype, specs) in tensors.items():
            whole = tensor_of(name + generation, shape, dtype)
            if specs is None and not isinstance(restored[name], dtckpt.DTensor):
                found += [] if bits_of(restored[name]) == bits_of(whole) else [f"{name}: got {restored[name]}"]
            else:
                found += [f"{name}: {text}" for text in differences(restored[name], whole)]
    return found


# --- disagreement --------------------------------------------------------------------------------------------

WEIGHT: Tensors = {"w": ((8, 4), "float32", ["x", "unsharded"])}


def save_differently(path: str, clients: int, kind: str) -> None:
    """Save, with something different on the last client."""
    is_odd = dtckpt.client_id() == clients - 1
    mesh = mesh_over_all({"x": clients})
    tree = tree_on(mesh, WEIGHT)
    options = SaveOptions(timeout_s=20)
    if is_odd and kind == "names":
        tree["v"] = tree.pop("w")
    elif is_odd and kind == "more tensors":
        tree["v"] = torch.zeros(2)
    elif is_odd and kind == "values":
        tree["step"] = "other"
    elif is_odd and kind == "structure":
        tree["step"] = [""]
    elif is_odd and kind == "options":
        options = SaveOptions(timeout_s=20, kvstore="zarr")
    elif is_odd and kind == "stored dtypes":
        options = SaveOptions(timeout_s=20, stored_dtypes={"w": "bfloat16"})
    elif kind == "order of stored dtypes":
        rules = {"*": "bfloat16", "w": "float32"}
        rules = dict(reversed(rules.items())) if is_odd else rules
        options = SaveOptions(timeout_s=20, stored_dtypes=rules)
    elif kind == "pattern":
        options = SaveOptions(timeout_s=20, stored_dtypes={"v": "bfloat16"})
    elif is_odd and kind == "codec":
        options = SaveOptions(timeout_s=20, codec="zstd")
    elif is_odd and kind == "progress":
        options = SaveOptions(timeout_s=20, progress=True)
    elif is_odd and kind == "path":
        path += "_other"
    elif is_odd and kind == "shape":
        tree["w"] = packed(torch.zeros(10, 4), Layout(["x", "unsharded"], mesh))
    elif is_odd and kind == "dtype":
        tree["w"] = packed(torch.zeros(8, 4).half(), Layout(["x", "unsharded"], mesh))
    elif is_odd and kind == "layout":
        tree["w"] = packed(torch.zeros(8, 4), Layout(["unsharded", "x"], mesh))
    elif is_odd and kind == "mesh":
        tree["w"] = packed(torch.zeros(8, 4), Layout(["x", "unsharded"], dtckpt.create_mesh({"x": 1})))
    elif kind == "axes":
        # Both layouts give the same chunks and owners; only one of them has rows to hand over.
        dtckpt.configure_virtual_devices("CPU", 2)
        axes, specs = ({"z": 2 * clients}, "z") if is_odd else ({"x": clients, "y": 2}, ("x", "y"))
        tree = {"w": packed(torch.zeros(50257), Layout([specs], dtckpt.create_distributed_mesh(axes)))}
    elif is_odd and kind == "unsavable":
        tree["v"] = object()
    elif is_odd and kind == "name":
        tree["a\0v"] = torch.zeros(2)
    elif is_odd and kind == "error of the state":

        class Broken:
            def state_dict(self) -> dict[str, Any]:
                raise ZeroDivisionError("no state today")

            def load_state_dict(self, state: Any) -> None: ...

        tree["v"] = Broken()
    elif kind in ("copies", "copies, later"):
        tree["c"] = torch.full((3,), float(is_odd))
    elif kind == "copies on devices":
        dtckpt.configure_virtual_devices("CPU", 2)
        mesh = dtckpt.create_distributed_mesh({"x": clients, "y": 2})
        parts = [torch.zeros(4), torch.full((4,), float(is_odd))]
        tree = {"c": dtckpt.pack(parts, Layout(["x"], mesh), (4 * clients,))}
    if kind == "copies, later":
        dtckpt.save_async(path, tree, options=options).result(20)
    else:
        dtckpt.save(path, tree, options=options)


def restore_differently(path: str, clients: int, kind: str) -> None:
    is_odd = dtckpt.client_id() == clients - 1
    mesh = mesh_over_all({"x": clients})
    weight = packed(torch.zeros(8, 4), Layout(["x", "unsharded"], mesh))
    target: dict[str, Any] = {"w": weight, "step": None}
    if is_odd and kind == "missing checkpoint":
        path += "_other"
    elif is_odd and kind == "missing tensor":
        target["v"] = packed(torch.zeros(8, 4), Layout(["x", "unsharded"], mesh))
    elif is_odd and kind == "shape":
        target["w"] = weight = packed(torch.zeros(8, 5), Layout(["x", "unsharded"], mesh))
    elif is_odd and kind == "other checkpoint":
        path += "_2"
    elif is_odd and kind == "raises":
        target["broken"] = Broken()
    elif is_odd and kind == "contains itself":
        target["self"] = target
    before = bits_of(dtckpt.unpack(weight)[0])
    try:
        dtckpt.restore(path, target)
    finally:
        assert bits_of(dtckpt.unpack(weight)[0]) == before, "the target was touched"


class Broken:
    """A stateful object that fails."""

    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state today")

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("nothing was read")


# --- clients that die --------------------------------------------------------------------------------------------

WAIT_S = 50.0
"""Less than a case may take."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_death_of(pid_file: Path) -> None:
    wait_until(pid_file.exists, within_s=WAIT_S)
    pid = int(pid_file.read_text())
    wait_until(lambda: _state_of(pid) == "Z", within_s=WAIT_S)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class _DieOnceArrived(FaultyCoordination):
    """Dies as soon as its arrival at a barrier is stored, while another client keeps the barrier open."""

    def __init__(self, inner: Any, at: str, pid_file: Path) -> None:
        super().__init__(inner)
        self._at, self._pid_file = at, pid_file

    def barrier(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == self._at:
            threading.Thread(target=self._die_once_arrived, args=(name,), daemon=True).start()
        return super().barrier(name, *args, **kwargs)

    def _die_once_arrived(self, name: str) -> None:
        def has_arrived() -> bool:
            found = [barrier for barrier in self.status().barriers if barrier.name == name]
            return bool(found) and self.member.client not in found[0].missing

        wait_until(has_arrived, within_s=WAIT_S)
        scratch = self._pid_file.with_suffix(".part")
        scratch.write_text(str(os.getpid()))
        scratch.rename(self._pid_file)  # a client that waits for it must not find it empty
        _die()


BARRIERS = {"save/begin": 0, "save/written": 1, "save/merged": 2}


def save_and_die(
    path: str, axes: Mapping[str, int], tensors: Tensors, generation: str, victim: int, when: str, folder: str
) -> None:
    """Save, while one client dies at a certain point."""
    inner = connect()
    is_victim, pid_file = inner.member.client == victim, Path(folder) / "pid"
    coordination: FaultyCoordination = FaultyCoordination(inner)
    # Before all have voted that their parts are written, a commit would publish a checkpoint without the victim's part.
    if when == "before the save":
        if is_victim:
            inner.register()
            coordination = FaultyCoordination(inner, {("heartbeat", 0): Fault(before=_die)})
    elif when == "before written":
        coordination = FaultyCoordination(inner, {("heartbeat", 1): Fault(before=_die)} if is_victim else {})
    elif when == "amid its writes":
        if is_victim:
            _die_at_write(2)
    elif when == "in written":
        coordination = FaultyCoordination(inner, {("barrier", 1): Fault(before=_die)} if is_victim else {})
    elif when == "in written, arrived":
        # Its vote is stored, so a barrier that counted votes alone would go on, and the merge wait for a dead client.
        last = max(client for client in range(inner.member.num_clients) if client != victim)
        if is_victim:
            coordination = _DieOnceArrived(inner, "save/written", pid_file)
        elif inner.member.client == last:
            wait = Fault(before=lambda: _wait_for_death_of(pid_file))
            coordination = FaultyCoordination(inner, {("barrier", 1): wait})
    # From here on all parts are written. A half merged or half replaced checkpoint would be neither old nor new.
    elif when == "before merged":
        coordination = FaultyCoordination(inner, {("heartbeat", 2): Fault(before=_die)} if is_victim else {})
    elif when == "amid the merge":
        if is_victim:
            from dtckpt.checkpoint.saving import merge

            merge.merge = lambda *args, **kwargs: _die()
    elif when == "before the commit":
        if is_victim:
            commit_by_rename.commit = lambda *args, **kwargs: _die()
    elif when == "in merged":
        coordination = FaultyCoordination(inner, {("barrier", 2): Fault(before=_die)} if is_victim else {})
    else:
        raise ValueError(when)
    set_coordination(coordination)
    mesh = mesh_over_all(axes)
    options = SaveOptions(overwrite=True, timeout_s=30, chunk_nbytes=64)
    dtckpt.save(path, tree_on(mesh, tensors, generation), options=options)


def _die_at_write(number: int) -> None:
    from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

    write, count = TensorStoreWriter.write, iter(range(number))

    def write_some(*args: Any, **kwargs: Any) -> None:
        if next(count, None) is None:
            _die()
        write(*args, **kwargs)

    TensorStoreWriter.write = write_some  # type: ignore[method-assign]


# --- packing over clients --------------------------------------------------------------------------------------------


def pack_over_clients(axes: Mapping[str, int], specs: Sequence[Any], shape: tuple[int, ...], devices: int) -> list[str]:
    """Pack without a global shape, then put the whole tensor together."""
    layout = Layout(specs, mesh_over_all(axes, devices))
    whole = tensor_of("w", shape, "int16")
    parts = [whole[layout.region(device, shape).slices()].clone() for device in layout.mesh.local_device_ids()]
    tensor = dtckpt.pack(parts, layout)
    found = differences(tensor, whole)
    if bits_of(tensor.full_tensor()) != bits_of(whole):
        found.append(f"full_tensor: got {tensor.full_tensor()}, expected {whole}")
    return found


def pack_differently(clients: int, kind: str) -> None:
    is_odd = dtckpt.client_id() == clients - 1
    layout = Layout(["x"], mesh_over_all({"x": clients}))
    parts: Any = [torch.zeros(3)]
    if is_odd:
        parts = {
            "shape": [torch.zeros(4)],
            "rank": [torch.zeros(3, 1)],
            "dtype": [torch.zeros(3, dtype=torch.int32)],
            "count": [torch.zeros(3)] * 2,
            "kind": torch.zeros(1, 3),
        }[kind]
    dtckpt.pack(parts, layout)


def sum_over_clients(clients: int) -> list[float]:
    """Put together a tensor whose reductions are pending over clients."""
    layout = Layout(["y"], mesh_over_all({"x": clients, "y": 2}, 2), partial={"x": "sum"})
    client = dtckpt.client_id()
    tensor = dtckpt.pack([torch.full((2,), 10.0**client), torch.full((1,), 2 * 10.0**client)], layout)
    return tensor.full_tensor().tolist()


# --- PyTorch's DTensors --------------------------------------------------------------------------------------------


def torch_save(path: str, mesh_shape: tuple[int, ...], placements: Sequence[Any], shape: tuple[int, ...]) -> None:
    dtckpt.save(path, {"w": _torch_dtensor(mesh_shape, placements, tensor_of("w", shape, "float32")), "step": 3})


def torch_restore(
    path: str, mesh_shape: tuple[int, ...], placements: Sequence[Any], shape: tuple[int, ...]
) -> tuple[bool, int]:
    target = {"w": _torch_dtensor(mesh_shape, placements, torch.zeros(shape)), "step": 0}
    dtckpt.restore(path, target)
    return target["w"].full_tensor().equal(tensor_of("w", shape, "float32")), target["step"]


def _torch_dtensor(mesh_shape: tuple[int, ...], placements: Sequence[Any], whole: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("xyz"[: len(mesh_shape)]))
    return distribute_tensor(whole, mesh, [Replicate() if item is None else Shard(item) for item in placements])


# --- one client in a special environment ---


def fill_disk(folder: str, nbytes: int) -> None:
    """Save more than the file system at ``folder`` holds, over nothing and over a checkpoint; print what becomes."""
    small, large = (
        {"w": tensor_of("w", (size // 4,), "float32"), "v": torch.ones(3)} for size in (nbytes // 8, 2 * nbytes)
    )
    outcomes = []
    for kvstore in ("ocdbt", "zarr"):
        for has_old in (False, True):
            path = Path(folder) / f"{kvstore}-{has_old}"
            if has_old:
                dtckpt.save(path, small, options=SaveOptions(kvstore=kvstore))
            error: Any = None
            try:
                dtckpt.save(path, large, options=SaveOptions(kvstore=kvstore, overwrite=True))
            except dtckpt.errors.DtckptError as caught:
                error = caught
            survives = bits_of(dtckpt.restore(path)["w"]) == bits_of(small["w"]) if has_old else not path.exists()
            left = sorted(entry.name for entry in Path(folder).iterdir() if entry != path)
            outcomes.append({"error": type(error).__name__, "text": str(error), "survives": survives, "left": left})
            shutil.rmtree(path, ignore_errors=True)
    print(json.dumps(outcomes))


def as_nobody(folder: str) -> dict[str, str]:
    """Try directories that another user forbids."""
    dtckpt.save(f"{folder}/warm", {"w": torch.ones(2)})  # the other user may not read what is imported at first use
    dtckpt.restore(f"{folder}/warm")
    os.seteuid(65534)
    found = {}
    attempts = {
        "save": lambda: dtckpt.save(f"{folder}/closed/new", {"w": torch.ones(2)}),
        "overwrite": lambda: dtckpt.save(
            f"{folder}/closed/s", {"w": torch.ones(2)}, options=SaveOptions(overwrite=True)
        ),
        "save beside": lambda: dtckpt.save(f"{folder}/readable/new", {"w": torch.ones(2)}),
        "restore": lambda: dtckpt.restore(f"{folder}/closed/s"),
        "open": lambda: dtckpt.open_checkpoint(f"{folder}/closed/s"),
        "manifest": lambda: dtckpt.restore(f"{folder}/manifest"),
        "data": lambda: dtckpt.restore(f"{folder}/data"),
    }
    try:
        for name, attempt in attempts.items():
            try:
                attempt()
                found[name] = "no error"
            except BaseException as error:
                found[name] = f"{type(error).__name__}: {error}"
    finally:
        os.seteuid(0)
    return found


def save_elsewhere(path: str, private: str = "") -> None:
    """Save; a client with a ``private`` folder sees that where the others see ``path``'s."""
    mesh = mesh_over_all({"x": 2})
    staging_path = commit_by_rename.working_path
    if private:
        commit_by_rename.working_path = lambda target, token: Path(private) / token
    try:
        dtckpt.save(path, tree_on(mesh, WEIGHT), options=SaveOptions(timeout_s=20))
    finally:
        commit_by_rename.working_path = staging_path


def save_on_a_part_of_the_job(path: str, members: int) -> list[str]:
    """Save and restore over the first clients of the job; the others do something else."""
    client = dtckpt.client_id()
    if client >= members:
        return []
    mesh = cluster_mesh({"x": members}, members, client)
    whole = tensor_of("w", (7, 3), "float32")
    tensor = packed(whole, Layout(["x", "unsharded"], mesh))
    dtckpt.sharded_save(mesh, path, ["w"], [""], [tensor], options=SaveOptions(timeout_s=20))
    template = packed(torch.zeros(7, 3), Layout(["unsharded", "x"], mesh))
    again = dtckpt.restore(path, mesh=mesh)["w"]
    return [
        *differences(dtckpt.name_based_restore(mesh, path, {"w": template})["w"], whole),
        *differences(again, whole),
    ]


def save_in_two_threads(folder: str, rounds: int) -> list[str]:
    """Save from two threads at once, in an order that is the same on every client; return what came out."""
    first_runs, found = threading.Event(), []

    def save_all(name: str, before: threading.Event | None, begun: threading.Event | None) -> None:
        for number in range(rounds):
            if before is not None:
                before.wait(20)
            try:
                dtckpt.save(f"{folder}/{name}{number}", Announcing(begun, number), options=SaveOptions(timeout_s=20))
            except DtckptError as error:
                found.append(f"{name}{number}: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=save_all, args=("a", None, first_runs)),
        threading.Thread(target=save_all, args=("b", first_runs, None)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


class Announcing:
    """State that says when its save is under way."""

    def __init__(self, begun: threading.Event | None, number: int) -> None:
        self._begun, self._number = begun, number

    def state_dict(self) -> dict[str, Any]:
        if self._begun is not None:
            self._begun.set()
        return {"w": torch.full((300,), float(self._number))}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("nothing is restored")


def save_as_a_stranger(path: str) -> None:
    """Every client saves on a mesh that the last one is no member of."""
    clients = dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients - 1}, clients - 1, min(dtckpt.client_id(), clients - 2))
    dtckpt.sharded_save(mesh, path, ["w"], [""], [torch.ones(3)], options=SaveOptions(timeout_s=20))


# --- the pool ---


def fail() -> None:
    raise ZeroDivisionError


def who() -> tuple[int, int]:
    return dtckpt.client_id(), dtckpt.num_clients()


def pid() -> int:
    return os.getpid()


def die() -> None:
    _die()
