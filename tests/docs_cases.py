"""The Python blocks of README.md and of pages in docs/, run in client processes.

A page is a generator: before each block it prepares the names that the page takes for given, and yields.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dtckpt

Names = dict[str, Any]
REPLACED = {
    'dtckpt.init_process_group("gloo")': "pass",  # there is one
    "torch.distributed.destroy_process_group()": "pass",
    "10_000": "205",
    "time.sleep(0.2)": "pass",
    "s3://bucket": "bucket",
    "abfs://container": "container",
    "file:///ckpt": "file://FOLDER/ckpt",
    "/dev/shm/run": "FOLDER/tier",
    '"cuda", (2, 4)': '"cpu", (2, 1)',
    '{"dp": 2, "tp": 4}': '{"dp": 1, "tp": 2}',
    "range(8)": "range(2)",
    "DVariable(...)": "DVariable(value)",
}


def run_page(page: str, folder: str, blocks: list[str]) -> None:
    """Run the blocks of a page one after the other, with common names, in a new folder."""
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    # Other tests may have drawn numbers on one client and not on another.
    torch.manual_seed(0)
    names: Names = {"torch": torch, "dtckpt": dtckpt}
    with contextlib.chdir(folder):
        prepared = globals()[page](names)
        for block in blocks:
            next(prepared)
            for written, tried in REPLACED.items():
                block = block.replace(written, tried.replace("FOLDER", folder))  # noqa: PLW2901
            exec(compile(block, page, "exec"), names)
            dist.barrier()
        assert next(prepared, None) is None, "each block has its names"


def remove(path: str) -> None:
    """Remove a directory, on one client."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def training(names: Names, preempted_at: int | None = None) -> None:
    """Add a model, its optimizer, their state, and a step that trains them and may send SIGTERM to this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(step: int, state: Any) -> float:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == preempted_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return float(loss.detach())

    names |= {"model": model, "optimizer": optimizer, "train": train, "steps": 4}
    names["state"] = {"model": model, "optimizer": optimizer}


def mesh_of_all() -> dtckpt.Mesh:
    """Return a mesh of all clients."""
    return dtckpt.create_distributed_mesh([("x", dist.get_world_size())])


# --- pages --------------------------------------------------------------------------------------------------------


def readme(names: Names) -> Iterator[None]:
    training(names)
    yield
    assert dtckpt.CheckpointManager("ckpt").latest_step() == 200
    yield
    names["mesh8"] = mesh_of_all()
    names["other_dtensor"] = dtckpt.dtensor.ones(1024, 512, device_mesh=names["mesh8"])
    yield
    assert names["rows"].shape == (16, 512)
    training(names, preempted_at=203)
    names["state"]["rng"] = dtckpt.PerClient(dtckpt.RngState(), on_resize="keep")
    yield
    assert names["step"] == 203


def checkpointing(names: Names) -> Iterator[None]:
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    training(names)
    names["train_on"] = lambda: names["train"](0, None)
    yield
    assert names["report"].nbytes > 0
    names["stage"] = names["model"]
    names["other_state"] = {"model": names["model"], "optimizer": names["optimizer"], "step": 0}
    remove("ckpt/step_10")
    yield
    assert names["other_state"]["step"] == 10
    groups = [dist.new_group([client]) for client in range(dist.get_world_size())]
    names |= {"my_layers": names["other_state"], "groups": groups, "number": dist.get_rank()}
    yield
    training(names)
    names["loader"] = {"position": dist.get_rank()}
    remove("ckpt/step_10")
    yield
    names |= {"StatefulDataLoader": StatefulDataLoader, "data": list(range(16))}
    names |= {"StatefulDistributedSampler": StatefulDistributedSampler, "torch": torch}
    remove("ckpt/step_10")
    yield
    remove("ckpt/step_10")
    layer = fully_shard(nn.Linear(4, 5))
    dtckpt.save("ckpt/step_10", {"model": layer, "optimizer": torch.optim.AdamW(layer.parameters())})
    names |= {"fully_shard": fully_shard, "Transformer": lambda: nn.Linear(4, 5)}
    yield
    assert torch.equal(names["model"].weight.full_tensor(), layer.weight.full_tensor())
    names |= {"SaveOptions": dtckpt.SaveOptions, "RestoreOptions": dtckpt.RestoreOptions}
    yield
    assert {*names["reports"][0].owners.values()} == {"name"}
    yield
    training(names)
    remove("ckpt/step_10")
    dtckpt.save("ckpt/step_10", names["state"])
    yield
    assert names["report"].nbytes_written + names["report"].nbytes_reused == names["report"].nbytes
    training(names)
    remove("ckpt/step_10")
    yield
    training(names, preempted_at=2)
    remove("ckpt")
    yield
    assert dtckpt.CheckpointManager("ckpt").latest_step() == names["step"] == 2
    names |= {"signal": signal, "DataLoader": torch.utils.data.DataLoader, "data": torch.arange(4)}
    yield
    names["mesh"] = mesh_of_all()
    names["value"] = dtckpt.dtensor.ones(4, device_mesh=names["mesh"])
    saved = dtckpt.DTensorCheckpoint(names["mesh"], weight=dtckpt.DVariable(names["value"]))
    for _ in range(3):
        saved.save("ckpt")
    yield


def concepts(names: Names) -> Iterator[None]:
    yield
    yield
    names["component"] = torch.ones(2, 3)
    yield
    assert names["tensor"].layout == names["rows"]


def convert(names: Names) -> Iterator[None]:
    weights = {"model.embed_tokens.weight": torch.rand(128, 4096), "norm.weight": torch.rand(8, 2)}
    module = nn.Linear(4, 5)
    dtckpt.save("ckpt", weights)
    dtckpt.save("module", module.state_dict())
    for source, target in (("ckpt", "Llama-3-8B"), ("ckpt", "bucket/Llama-3-8B"), ("module", "model.safetensors")):
        if dist.get_rank() == 0:
            Path(target).parent.mkdir(exist_ok=True)
            (Path(target).mkdir() if "." not in target else None)
            dtckpt.convert(source, target, to="safetensors", overwrite=True)
        dist.barrier()
    names["module"] = nn.Linear(4, 5)
    yield
    assert torch.equal(names["module"].weight, module.weight)
    assert names["rows"].shape == (128, 4096)
    training(names)
    yield
    assert dtckpt.restore("exported").keys() == names["model"].state_dict().keys()
    names["train"](0, None)
    model, optimizer = (names[name].state_dict() for name in ("model", "optimizer"))
    from torch.distributed import checkpoint as dcp

    dcp.save({"model": model, "optim": optimizer}, checkpoint_id="runs/dcp/step_100")
    if dist.get_rank() == 0:
        torch.save({"norm.weight": torch.rand(8, 2)}, "model.pt")
    dist.barrier()
    names |= {"model_state": model, "optimizer_state": optimizer}
    yield
    assert [*names["weights"]] == ["norm.weight"]
    samples = Path(__file__).parent / "checkpoint" / "foreign" / "samples"
    if dist.get_rank() == 0:
        shutil.copytree(samples / "orbax" / "v0_manager", "run", dirs_exist_ok=True)
        for file in (samples / "tensorflow" / "dtensor_2x2_obj").iterdir():
            shutil.copyfile(file, Path("run", file.name.replace("ck-1", "ckpt-7")))
        for file in (samples / "tensorflow" / "dtensor_2x2").iterdir():
            shutil.copyfile(file, Path("run", file.name))
    dist.barrier()
    yield
    assert names["state"]["params"]["layers_0"]["kernel"].layout.sharding_specs == ["unsharded", "tp"]
    assert names["items"].keys() == {"state", "extra"}
    mesh = names["mesh"]
    weight = dtckpt.DVariable(torch.zeros(6, 4), dtckpt.Layout(["dp", "tp"], mesh))
    bias = dtckpt.DVariable(torch.zeros(4), dtckpt.Layout(["tp"], mesh))
    names |= {"model": {"w": weight, "b": bias}, "templates": {"w": weight}}
    yield
    names["status"].assert_consumed()
    assert torch.equal(names["tensors"]["w"].full_tensor(), names["names"]["model"]["w"])


def dcp(names: Names) -> Iterator[None]:
    yield
    names["tensor"] = torch.ones(3)
    yield
    with mock.patch.dict(sys.modules, trainer_modules()):
        yield
    manager, modes = names["DtckptManager"](), names["AsyncMode"]
    for step, mode in enumerate([modes.DISABLED, modes.ASYNC]):
        saved = manager.dcp_save({"w": torch.full((3,), float(step))}, f"step-{step}", mode)
        if mode is not modes.DISABLED:
            saved.result()
        assert Path(f"step-{step}/.metadata").is_file()
        state = {"w": torch.zeros(3)}
        manager.dcp_load(state, f"step-{step}", from_hf=False, from_quantized=False)
        assert manager.states["model"].loaded["w"].tolist() == state["w"].tolist() == [float(step)] * 3
    with mock.patch.object(torch.distributed.checkpoint, "async_save") as async_save:  # it would start a process
        manager.dcp_save({}, "step-9", modes.ASYNC_WITH_PINNED_MEM)
    options = async_save.call_args.kwargs
    assert (options["async_checkpointer_type"].value, options["async_stager"]) == ("process", "the trainer's")
    assert manager.dcp_save({}, "step-9", modes.DISABLED, to_hf=True) == "by the trainer itself"
    assert manager.dcp_load({}, "step-9", from_hf=True, from_quantized=False) == "by the trainer itself"


def trainer_modules() -> dict[str, types.ModuleType]:
    """Return modules with the names and signatures of torchtitan's checkpoint manager that the page relies on."""

    class AsyncMode(enum.Enum):
        DISABLED = "disabled"
        ASYNC = "async"
        ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"

    class ModelState:
        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    class CheckpointManager:
        @dataclass(kw_only=True, slots=True)
        class Config:
            enable: bool = False

        pg = None

        def __init__(self) -> None:
            self.states = {"model": ModelState()}
            self.stager = "the trainer's"

        def dcp_save(self, *_: Any) -> str:
            return "by the trainer itself"

        dcp_load = dcp_save

    module = types.ModuleType("torchtitan.components.checkpointer")
    vars(module).update(MODEL="model", AsyncMode=AsyncMode, CheckpointManager=CheckpointManager)
    parents = ("torchtitan", "torchtitan.components")
    return {**{name: types.ModuleType(name) for name in parents}, module.__name__: module}


def expert_parallel(names: Names) -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Model(nn.Module):
        def __init__(self, experts_here: int) -> None:
            super().__init__()
            self.experts = nn.Module()
            self.experts.w = nn.Parameter(torch.full((experts_here, 2, 3), dist.get_rank() % 2 + 1.0))

    names |= {"Model": Model, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    yield
    assert names["model"].experts.w.to_local().shape == (2, 2, 3)
    yield
    rows = dtckpt.restore("ckpt/step_10")["model"]["experts.w"][:, 0, 0]
    assert rows.tolist() == [1.0] * 4 + [2.0] * 4
    own = names["mesh"]["ep"].get_local_rank()
    names |= {"own_experts": torch.arange(4.0) + 4 * own, "own_columns": torch.zeros(3, 2)}
    yield
    assert names["experts"].tolist() == list(range(8))


def formats(names: Names) -> Iterator[None]:
    import tensorstore

    dtckpt.save("ckpt/step_10", {"model": {"w": torch.ones(3)}})
    names["tensorstore"] = tensorstore
    yield


def object_stores(names: Names) -> Iterator[None]:
    names["state"] = {"w": torch.ones(3)}
    yield
    assert Path("container/run/step_10/zarr.json").exists()


def protocol(names: Names) -> Iterator[None]:
    names |= {"path": "ckpt", "tree": {"w": torch.ones(3)}, "step": 7}
    yield
    yield


def simulate(names: Names) -> Iterator[None]:
    yield
    assert names["found"].blocking_s > 0


def tensor_parallel(names: Names) -> Iterator[None]:
    from dtckpt.dtensor.parallel import ColwiseParallel, loss_parallel

    def ffn() -> nn.ModuleDict:
        return nn.ModuleDict({"ffn": nn.ModuleDict({"w1": nn.Linear(4, 8), "w2": nn.Linear(8, 4)})})

    names["model"] = nn.ModuleDict({"layers": nn.ModuleList([ffn(), ffn()])})
    yield
    assert isinstance(names["model"]["layers"][1]["ffn"]["w1"].weight, dtckpt.DTensor)
    names["model"] = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "output": nn.Linear(4, 8, bias=False)})
    names["model"]["output"].weight = names["model"]["embedding"].weight
    yield
    mesh = names["mesh"]["model"]
    layout = dtckpt.Layout(["unsharded", "unsharded", "model"], mesh)
    scores = dtckpt.relayout(dtckpt.copy_to_mesh(torch.rand(2, 3, 8), dtckpt.Layout(["unsharded"] * 3, mesh)), layout)
    names |= {"plan": {}, "scores": scores.requires_grad_(), "loss_parallel": loss_parallel}
    names |= {"ColwiseParallel": ColwiseParallel, "targets": torch.zeros(2, 3, dtype=torch.long)}
    yield
    assert names["scores"].grad is not None


def tiers(names: Names) -> Iterator[None]:
    training(names)
    names["steps"] = 21
    yield
    assert dtckpt.CheckpointManager("bucket/run").latest_step() == 0


def start(names: Names) -> Iterator[None]:
    yield
    yield
    assert names["rows"].shape == (16, 64)


def train(folder: str, program: str, last: int) -> int:
    """Run the program of docs/start.md up to a step; return the step at which it began."""
    names: Names = {}
    with contextlib.chdir(folder):
        program, _, _ = program.replace('dtckpt.init_process_group("gloo")', "pass").rpartition("torch.distributed.d")
        exec(program.replace("range(start, 60)", f"range(start, {last + 1})").replace("0.2", "0"), names)
    return int(names["start"])


def tour() -> dict[str, Any]:
    """Run the notebook's cells; return it with their outputs."""
    from examples.make_tour import notebook

    return notebook()
