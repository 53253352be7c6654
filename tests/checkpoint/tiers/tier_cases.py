"""Jobs with a local tier, run in client processes: each client counts as a host unless a case says otherwise."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dtckpt
from dtckpt import CheckpointManager, Layout, LocalTier
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.config import Config

SHAPES = {"w": (12, 10), "moment": (25, 3), "norm": (7,), "scalar": ()}


def tier(folder: Path, hosts: Sequence[str], **options: Any) -> LocalTier:
    """Return the options of this client's host."""
    host = hosts[Config.from_environ().client_id]
    return LocalTier(**{"path": folder / host, "every_steps": 1, "host": host, "address": "127.0.0.1", **options})


def values(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step, alike everywhere."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(step: int, mesh: dtckpt.Mesh, *, small: bool = True) -> dict[str, Any]:
    """Return the state of a step, sharded over all clients; each has a copy of the small tensors."""
    whole = {name: tensor for name, tensor in values(step).items() if small or tensor.ndim == 2}
    sharded = Layout(["x", dtckpt.UNSHARDED], mesh)
    tensors = {
        name: dtckpt.dtensor.distribute_tensor(tensor, mesh, sharded.placements) if tensor.ndim == 2 else tensor
        for name, tensor in whole.items()
    }
    return {"model": tensors, "step": step}


def mesh_of_all() -> dtckpt.Mesh:
    return dtckpt.create_distributed_mesh([("x", Config.from_environ().num_clients)], device_type="CPU")


def save_steps(
    root: Path, folder: Path, hosts: Sequence[str], steps: Sequence[int], *, small: bool = True, **options: Any
) -> list[Any]:
    """Save steps in the tier; return the parts of this host then, as steps with clients."""
    mesh = mesh_of_all()
    tier_options = {key: options.pop(key) for key in list(options) if key in LocalTier.__dataclass_fields__}
    local = tier(folder, hosts, **tier_options)
    with CheckpointManager(root, local=local, save_interval_steps=options.pop("durable", 10**6), **options) as manager:
        for step in steps:
            manager.save(step, state(step, mesh, small=small))
            manager.wait()
        dist.barrier()  # the copies of other clients have come, too
        parts = manager._tier.session.folder.parts()
    return sorted((save.step, sorted(clients)) for save, clients in parts.voted.items())


def restore(
    root: Path, folder: Path, hosts: Sequence[str], step: int | None = None, *, small: bool = True, **options: Any
) -> dict[str, Any]:
    """Restore onto all clients; return facts, and whether each tensor has the values of the step."""
    mesh = mesh_of_all()
    target = state(0, mesh, small=small)
    with CheckpointManager(root, local=tier(folder, hosts, **options)) as manager:
        restored = manager.restore(step, target)
        expected = values(restored.step)
        found = restored.tree["model"]
        whole = {
            name: tensor.full_tensor() if isinstance(tensor, dtckpt.DTensor) else tensor
            for name, tensor in found.items()
        }
        is_equal = all(torch.equal(whole[name], expected[name]) for name in whole)
        return {
            "step": restored.step,
            "noted": restored.tree["step"],
            "is_equal": is_equal,
            "local": restored.local,
            "skipped": restored.skipped,
        }


def go_on_without_copies(root: Path, folder: Path, hosts: Sequence[str], back_to: int | None = None) -> list[int]:
    """Restore a step, and save two more of which no copy comes to its end; return the steps of this host.

    To go ``back_to`` a step, the same process first saves three that follow the newest one.
    """
    mesh, may_send = mesh_of_all(), threading.Event()
    manager = CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6)
    step = manager.restore(target=state(0, mesh)).step
    if back_to is not None:
        for each in (step + 1, step + 2, step + 3):
            manager.save(each, state(each, mesh))
            manager.wait()
        dist.barrier()
        step = manager.restore(back_to, target=state(0, mesh)).step
    manager.wait()
    dist.barrier()
    with mock.patch.object(Peer, "put", side_effect=lambda *_: may_send.wait()):
        for each in (step + 1, step + 2):
            manager.save(each, state(each, mesh))
            manager._tier.wait_for_local()
        held = sorted({save.step for save in manager._tier.session.folder.parts().voted})
        dist.barrier()
        may_send.set()
        manager.wait()
    manager.__exit__(RuntimeError, RuntimeError("the job dies"), None)
    return held


def save_different_copies(root: Path, folder: Path, hosts: Sequence[str]) -> None:
    """Save values of which each client has another copy, although they should be alike."""
    client = Config.from_environ().client_id
    options = dtckpt.SaveOptions(check_replicas=False)
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6, options=options) as manager:
        for step in (1, 2):
            manager.save(step, {f"w{number}": torch.full((3,), client + 10.0 * number) for number in range(4)})
        manager.wait()


def restore_values(root: Path, folder: Path, hosts: Sequence[str]) -> dict[str, list[float]]:
    """Restore and return the values."""
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        restored = manager.restore()
        assert restored.local is not None
        return {name: tensor.tolist() for name, tensor in restored.tree.items()}


def _with_frozen_base(step: int, mesh: dtckpt.Mesh) -> dict[str, dtckpt.DTensor]:
    """Return a state of which 512 KiB are alike in all steps, and 2 KiB differ."""
    sharded = Layout(["x", dtckpt.UNSHARDED], mesh)
    seeds = {"frozen": (0, 512), "adapter": (step, 2)}
    whole = {
        name: torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
        for name, (seed, rows) in seeds.items()
    }
    return {name: dtckpt.dtensor.distribute_tensor(tensor, mesh, sharded.placements) for name, tensor in whole.items()}


def save_frozen_base(root: Path, folder: Path, hosts: Sequence[str], steps: Sequence[int]) -> list[int]:
    """Save steps with a frozen base; return the bytes that this client had sent to other hosts after each."""
    mesh, sent = mesh_of_all(), []
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in steps:
            manager.save(step, _with_frozen_base(step, mesh))
            manager.wait()
            dist.barrier()  # the copies of other clients have come, too
            sent.append(manager._tier.session.replicator.nbytes_sent)
    return sent


def restore_frozen_base(root: Path, folder: Path, hosts: Sequence[str], step: int) -> bool:
    """Restore a step with a frozen base from the tier; return whether it is right."""
    mesh = mesh_of_all()
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        restored = manager.restore(step, _with_frozen_base(-1, mesh))
        assert restored.local is not None
        wanted = _with_frozen_base(step, mesh)
        return all(torch.equal(restored.tree[name].full_tensor(), wanted[name].full_tensor()) for name in wanted)


def files_over_many_saves(root: Path, folder: Path, hosts: Sequence[str], count: int) -> list[tuple[int, int]]:
    """Save many steps; return how many files of elements this host's tier has after each, and their bytes."""
    mesh, used = mesh_of_all(), []
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in range(count):
            manager.save(step, state(step, mesh))
            manager.wait()
            dist.barrier()  # the copies of other clients have come, too
            files = list(manager._tier.session.folder.path.rglob("*.data"))
            used.append((len(files), sum(file.stat().st_size for file in files)))
            dist.barrier()
    return used


def save_and_leave(root: Path, folder: Path, hosts: Sequence[str], step: int, nbytes: int, **options: Any) -> None:
    """Save a step of so many bytes per client, and close the manager at once."""
    mesh = mesh_of_all()
    sharded = Layout(["x"], mesh)
    tensor = dtckpt.dtensor.distribute_tensor(torch.ones(mesh.size() * nbytes // 4), mesh, sharded.placements)
    with CheckpointManager(root, local=tier(folder, hosts, **options), save_interval_steps=10**6) as manager:
        manager.save(step, {"w": tensor})


def go_back(root: Path, folder: Path, hosts: Sequence[str]) -> list[tuple[int, float]]:
    """Save steps 1 to 4, go on from step 2 with other values; return the steps that are restored, with their values."""
    found = []

    def restored(manager: CheckpointManager, step: int | None) -> None:
        answer = manager.restore(step)
        assert answer.local is not None
        found.append((answer.step, float(answer.tree["w"][0])))

    with CheckpointManager(root, local=tier(folder, hosts, keep=4), save_interval_steps=10**6) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"w": torch.full((3,), float(step))})
        manager.wait()
        restored(manager, None)
        restored(manager, 2)
        manager.save(3, {"w": torch.full((3,), 30.0)})
        manager.wait()
        restored(manager, None)
    with CheckpointManager(root, local=tier(folder, hosts, keep=4)) as manager:
        restored(manager, None)
        restored(manager, 3)
    return found


def remove_host(folder: Path, host: str) -> None:
    shutil.rmtree(folder / host, ignore_errors=True)


def parts_of(folder: Path, step: int, kind: str) -> list[Path]:
    """Return the files of a kind (``data``, ``index``, ``voted``) of a step's parts below a folder."""
    found = [file for file in folder.rglob(f"*.{kind}") if file.parent.name != "spare"]
    return sorted(file for file in found if SaveId.parse(file.parent.name).step == step)


def bits_flipped(file: Path) -> None:
    """Flip a bit of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 64] ^= 4
    file.write_bytes(data)
