"""What a CUDA GPU is to reach, measured in one process: staging, saves in the background, host waits, CUDA graphs.

Run: ``python -m benchmarks.gpu [--mib 2048] [--rounds 5] [--folder /dev/shm] [--device cuda]``. ``--device cpu`` only
shows that the program runs. A measurement that fails is a row of the table, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import dtckpt
from benchmarks.results import show
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import plan_save
from dtckpt.checkpoint.saving.staging import StagingMemory
from dtckpt.checkpoint.saving.state import state_of_tree
from dtckpt.errors import RandomParameterError
from examples.gpt import GPT, SEED, batch_of, distributed, placed, train_step

TENSORS = 64
WARM_STEPS, STEPS = 5, 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of CUDA's runtime that return when a GPU has done something."""

Row = tuple[str, str, str]
"""What was measured, what was found, and what is wanted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where checkpoints go")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments = parser.parse_args()
    table = Table(title=f"{_name(arguments.device)}, PyTorch {torch.__version__}: medians of {arguments.rounds} rounds")
    for column in ("measured", "found", "wanted"):
        table.add_column(column)
    for measure in (staging, blocking, steps_beside_a_save, host_waits, graph_with_sgd, graph_with_adamw, random_graph):
        start = time.perf_counter()
        try:
            for row in measure(arguments):
                table.add_row(*row)
        except Exception as error:
            traceback.print_exc()
            found = f"failed: {type(error).__name__}: {error!s:.200}"
            table.add_row(measure.__name__.replace("_", " "), found, "")
        print(f"{measure.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    show(table, width=150)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def staging(arguments: argparse.Namespace) -> Iterator[Row]:
    """Copy to the staging memory of saves, beside copies to page-locked memory."""
    tree = _tree(arguments)
    options = SaveOptions()
    state = state_of_tree(tree, options, 0, [0])
    plan, memory = plan_save(state.specs, options.chunk_nbytes), StagingMemory()

    def stage() -> None:
        memory.stage(state, plan, 0, with_copies=False, count=lambda _: None)

    first = _seconds(stage, arguments.device)
    plain, ours = _medians([_plain_copy(tree, arguments.device), stage], arguments)
    nbytes = sum(tensor.nbytes for tensor in tree.values())
    yield f"plain copy of {nbytes >> 20} MiB to page-locked memory", f"{nbytes / plain / 1e9:.1f} GB/s", ""
    yield "staging", f"{nbytes / ours / 1e9:.1f} GB/s, {plain / ours:.2f} of that; first {first:.2f} s", ">= 0.8"


def blocking(arguments: argparse.Namespace) -> Iterator[Row]:
    """Start saves in the background, each beside a plain copy made just before."""
    tree = _tree(arguments)
    copy, ratios, blocked = _plain_copy(tree, arguments.device), [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for round_ in range(arguments.rounds + 1):
            copied = _seconds(copy, arguments.device)
            start = time.perf_counter()
            handle = dtckpt.save_async(Path(folder) / "save", tree, options=SaveOptions(overwrite=True))
            seconds = time.perf_counter() - start
            handle.result()
            if round_:  # the first one locks pages
                ratios.append(seconds / copied)
                blocked.append(seconds)
    yield "save_async blocks", f"{statistics.median(blocked):.4f} s", ""
    yield "save_async blocks / plain copy", f"{statistics.median(ratios):.2f}", "<= 1.2"


def steps_beside_a_save(arguments: argparse.Namespace) -> Iterator[Row]:
    """Time steps of a training loop while a save goes on in the background, and while none does."""
    tree = _tree(arguments)
    size = 8192 if arguments.device == "cuda" else 512
    weight = torch.ones(size, size, device=arguments.device)

    def step() -> None:
        for _ in range(4):
            weight @ weight

    for _ in range(WARM_STEPS):
        _seconds(step, arguments.device)
    alone, beside = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for round_ in range(arguments.rounds + 1):
            times = [_seconds(step, arguments.device) for _ in range(STEPS)]
            handle = dtckpt.save_async(Path(folder) / "save", tree, options=SaveOptions(overwrite=True))
            during = []
            while not handle.done():
                during.append(_seconds(step, arguments.device))
            handle.result()
            if round_:
                alone += times
                beside += during
    if not beside:
        yield "step during a save", "no save took as long as a step", "<= 1.05"
        return
    means = statistics.mean(beside), statistics.mean(alone)
    found = f"{means[0] / means[1]:.3f} ({means[0] * 1e3:.2f} ms, {len(beside)} steps; alone {means[1] * 1e3:.2f} ms)"
    yield "step during a save / alone", found, "<= 1.05"


def _tree(arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    count = (arguments.mib << 20) // (4 * TENSORS)
    return {f"t{number}": torch.randn(count, device=arguments.device) for number in range(TENSORS)}


def _plain_copy(tree: dict[str, torch.Tensor], device: str) -> Callable[[], None]:
    """Return what copies the tensors to page-locked memory and waits."""
    ready = {name: torch.empty(tensor.shape, pin_memory=device == "cuda") for name, tensor in tree.items()}

    def copy() -> None:
        for name, tensor in tree.items():
            ready[name].copy_(tensor, non_blocking=True)

    return copy


# --- the runtime ---------------------------------------------------------------------------------------------------


def host_waits(arguments: argparse.Namespace) -> Iterator[Row]:
    """Count what makes the host wait in steps of a GPT, by the profiler, and say where."""
    step = _gpt(arguments.device, is_training=True)
    for _ in range(WARM_STEPS):
        step()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (arguments.device == "cuda")]
    _synchronize(arguments.device)
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
    # The profiler itself waits for the GPU at its end.
    waits = Counter({event.key: event.count for event in profiled.key_averages() if event.key in WAITS})
    waits["cudaDeviceSynchronize"] -= min(waits["cudaDeviceSynchronize"], 1)
    found = ", ".join(f"{count} {name}" for name, count in waits.items() if count) or "none"
    yield f"host waits in {STEPS} steps of a GPT", found, "none"
    if arguments.device == "cuda":
        with warnings.catch_warnings(record=True) as caught, _sync_warnings():
            warnings.simplefilter("always")
            step()
        places = Counter(
            f"{Path(one.filename).name}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)
        )
        yield "where, by torch.cuda.set_sync_debug_mode", ", ".join(map(str, places.items())) or "nowhere", "nowhere"
    for _ in range(WARM_STEPS):
        step()
    seconds = statistics.median(_seconds(step, arguments.device) for _ in range(STEPS))
    yield "step of a GPT on 4 mesh devices", f"{seconds * 1e3:.2f} ms", ""


def graph_with_sgd(arguments: argparse.Namespace) -> Iterator[Row]:
    """Capture a step in a CUDA graph."""
    return _captured("SGD", arguments)


def graph_with_adamw(arguments: argparse.Namespace) -> Iterator[Row]:
    """Capture a step of an optimizer that keeps its step count on the GPU."""
    return _captured("AdamW", arguments)


def _captured(optimizer: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Capture a step of a GPT without dropout; its losses must equal the losses of steps that are not captured."""
    if arguments.device != "cuda":
        yield f"CUDA graph of a step of {optimizer}", "left out: no GPU", "the same losses"
        return
    eager, step = (_gpt("cuda", is_training=False, optimizer=optimizer) for _ in range(2))
    expected = [eager().item() for _ in range(WARM_STEPS + 2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [step().item() for _ in range(WARM_STEPS)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step().full_tensor()
    for _ in range(2):
        graph.replay()
        losses.append(loss.item())
    difference = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    seconds = [statistics.median(_seconds(one, "cuda") for _ in range(STEPS)) for one in (eager, graph.replay)]
    found = f"{difference:.1e} apart; {seconds[0] * 1e3:.2f} ms eager, {seconds[1] * 1e3:.2f} ms replayed"
    yield f"CUDA graph of a step of {optimizer}", found, "the same losses"


def random_graph(arguments: argparse.Namespace) -> Iterator[Row]:
    """Capture a step with dropout, which must be refused."""
    if arguments.device != "cuda":
        yield "CUDA graph of a step with dropout", "left out: no GPU", "a clear error"
        return
    step = _gpt("cuda", is_training=True)
    step()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    except RandomParameterError as error:
        yield "CUDA graph of a step with dropout", f"{error!s:.90}", "a clear error"
    else:
        yield "CUDA graph of a step with dropout", "was captured", "a clear error"


def _gpt(device: str, *, is_training: bool, optimizer: str = "AdamW") -> Callable[[], torch.Tensor]:
    """Return a step of training on one batch, on four mesh devices."""
    kind = {"cpu": "CPU", "cuda": "GPU"}[device]
    dtckpt.configure_virtual_devices(kind, 4)
    mesh = dtckpt.create_mesh({"data": 2, "model": 2}, device_type=kind)
    torch.manual_seed(SEED)
    model = distributed(GPT(), mesh).train(is_training)
    options: dict[str, Any] = {"capturable": device == "cuda"} if optimizer == "AdamW" else {"momentum": 0.9}
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=3e-3, **options)
    inputs, targets = placed(batch_of(0), mesh)
    return lambda: train_step(model, chosen, inputs, targets)


# --- time ----------------------------------------------------------------------------------------------------------


def _medians(works: list[Callable[[], None]], arguments: argparse.Namespace) -> list[float]:
    """Return median seconds of each, measured in turns."""
    rounds = [[_seconds(work, arguments.device) for work in works] for _ in range(arguments.rounds + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def _seconds(work: Callable[[], object], device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _sync_warnings() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "host memory"


if __name__ == "__main__":
    main()
