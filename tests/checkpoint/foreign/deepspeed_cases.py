"""Checkpoints of DeepSpeed, written by its rules without DeepSpeed."""

import math
import sys
import types
from pathlib import Path
from typing import Any

import torch


class fragment_address:
    """The place of a parameter in a vector."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


def install(monkeypatch) -> None:
    """Let files refer to DeepSpeed's class under its own name; only while they are written."""
    name = "deepspeed.utils.tensor_fragment"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    monkeypatch.setattr(fragment_address, "__module__", name)
    sys.modules[name].fragment_address = fragment_address


def parameters(shapes: list[dict[str, tuple[int, ...]]]) -> list[dict[str, torch.Tensor]]:
    """Return parameters of some shapes, all with other elements."""
    numbers = iter(range(1, 1000))
    return [
        {
            name: torch.arange(float(math.prod(shape))).reshape(shape) + 1000 * next(numbers)
            for name, shape in group.items()
        }
        for group in shapes
    ]


def model_file(groups: list[dict[str, torch.Tensor]], **fields: Any) -> dict[str, Any]:
    """Return the content of a model file."""
    return {
        "module": {name: value.bfloat16() for group in groups for name, value in group.items()},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in group.items()} for group in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": 2,
        "mp_world_size": 1,
        "global_steps": 7,
    } | fields


def joined(groups: list[dict[str, torch.Tensor]], count: int, *, align: int = 1, elastic: bool = False) -> list[Any]:
    """Return the contents of the optimizer files of ZeRO 1 or 2.

    Args:
        groups: The parameters.
        count: The number of processes.
        align: Parameters begin at multiples of so many elements.
        elastic: Whether the vectors have no padding, also the vectors of moments.
    """
    files = []
    for rank in range(count):
        fp32, state, slices, paddings, gaps = [], [], [], [], []
        for group in groups:
            own_gaps = [-value.numel() % align for value in group.values()]
            whole = torch.cat(
                [
                    torch.cat([value.reshape(-1), torch.full((gap,), math.nan)])
                    for value, gap in zip(group.values(), own_gaps, strict=True)
                ]
            )
            size = -(-whole.numel() // (2 * count)) * 2
            mine = whole[rank * size : (rank + 1) * size]
            padding = size - mine.numel()
            filled = mine if elastic else torch.cat([mine, torch.full((padding,), math.nan)])
            fp32.append(mine.clone())
            state.append({"step": torch.tensor(7.0), "exp_avg": filled + 0.25, "exp_avg_sq": filled + 0.5})
            paddings.append(padding)
            gaps.append(own_gaps)
            places, start = {}, 0
            for value, gap in zip(group.values(), own_gaps, strict=True):
                first, last = max(start, rank * size), min(start + value.numel(), (rank + 1) * size)
                if first < last:
                    places[next(n for n, v in group.items() if v is value)] = fragment_address(
                        last - first, first - rank * size
                    )
                start += value.numel() + gap
            slices.append(places)
        options = [{"lr": 0.1 * number, "params": [number]} for number in range(len(groups))]
        base = state if elastic else {"state": dict(enumerate(state)), "param_groups": options}
        files.append(
            {
                "optimizer_state_dict": {
                    "base_optimizer_state": base,
                    "single_partition_of_fp32_groups": fp32,
                    "zero_stage": 2,
                    "group_paddings": paddings,
                    "param_alignment_paddings": gaps,
                    "param_slice_mappings": slices,
                    "partition_count": [count] * len(groups),
                    "overflow": False,
                }
            }
        )
    return files


def cut(groups: list[dict[str, torch.Tensor]], count: int, sizes: list[int] | None = None) -> list[Any]:
    """Return the contents of the optimizer files of ZeRO 3; ``sizes``: of the vectors, if not one for each group."""
    files = []
    for rank in range(count):
        vectors = [torch.cat([part_of(value, rank, count) for value in group.values()]) for group in groups]
        if sizes is not None:
            vectors = list(torch.cat(vectors).split(sizes))
        state = {
            number: {"step": torch.tensor(7.0), "exp_avg": vector + 0.25, "exp_avg_sq": vector + 0.5}
            for number, vector in enumerate(vectors)
        }
        options = [{"lr": 0.1, "params": list(range(len(vectors)))}]
        files.append(
            {
                "optimizer_state_dict": {
                    "zero_stage": 3,
                    "partition_count": count,
                    "optimizer_state_dict": {"state": state, "param_groups": options},
                    "fp32_flat_groups": vectors,
                }
            }
        )
    return files


def part_of(value: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """Return a process's part of a parameter, with padding."""
    size = -(-value.numel() // count)
    mine = value.reshape(-1)[rank * size : (rank + 1) * size]
    return torch.cat([mine, torch.full((size - mine.numel(),), math.nan, dtype=mine.dtype)])


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write files of these contents."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        torch.save(content, folder / name)
    return folder
