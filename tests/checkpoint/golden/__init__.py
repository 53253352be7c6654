"""Checkpoints as released versions wrote them, and their content. Never write one of them anew.

``python -m tests.checkpoint.golden FOLDER`` writes a set for the current format: for a new format only, beside the old.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import dtckpt
from dtckpt import UNSHARDED, Layout, SaveOptions, abstract_mesh

FOLDER = Path(__file__).parent
ERAS = ("format-1", "format-1-crc64")
"""Of the first, the content digests are not known any more."""
KVSTORES = ("ocdbt", "zarr")
BITS = "format-1-bits"
"""Two checkpoints with codec ``blosc``, from the time when it shuffled bits: `compressed`."""
COMPRESSED_NBYTES = 300 << 10
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
LAYOUTS: dict[str, list[Any]] = {
    "model/w": ["x", "y"],
    "model/uneven": [("y", "x"), UNSHARDED],
    "model/replicated": [UNSHARDED],
}
VALUES = {"step": 7, "lr": 1e-3, "limit": math.inf, "raw": b"\0x", "note": "é", "none": None, "list": [1, (2, True)]}


def counted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return 0, 1, 2 … (mod 8, which every dtype holds) in a shape."""
    return (torch.arange(math.prod(shape)) % 8).reshape(shape).to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Return every tensor of a golden checkpoint, whole, by name."""
    found = {f"dtypes/{name}": counted((3,), getattr(torch, name)) for name in DTYPES}
    found |= {
        "model/w": counted((8, 6), torch.float32),
        "model/uneven": counted((7, 5), torch.float64),
        "model/replicated": counted((9,), torch.float32),
        "model/rounded": torch.tensor([1 + 2**-9, -0.0, math.nan, 3e38]),
        # Several blocks a chunk, and a chunk at the edge.
        "model/large": counted((9, 65536), torch.uint8),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "odd name/é ü/%": counted((2,), torch.int16),
        "nested": counted((1,), torch.int8),
        "nested/below": counted((2,), torch.int8),
    }
    return found


def compressed() -> dict[str, torch.Tensor]:
    """Return tensors for a codec: chunks of one and of several blocks, and chunks at the edge."""
    values = torch.arange(1100 * 256).reshape(1100, 256) % 251 - 100
    names = ("bfloat16", "float16", "float32", "float64", "int64", "int8")
    return {name: values.to(getattr(torch, name)) for name in names}


def write_compressed(folder: Path) -> None:
    """Write one compressed checkpoint per key-value store."""
    for kvstore in KVSTORES:
        options = SaveOptions(kvstore=kvstore, codec="blosc", chunk_nbytes=COMPRESSED_NBYTES)
        dtckpt.save(folder / kvstore, compressed(), options=options)


def write(folder: Path) -> None:
    """Write one checkpoint per key-value store."""
    mesh = abstract_mesh({"x": 2, "y": 2}, "train")
    for kvstore in KVSTORES:
        flat: dict[str, Any] = {}
        for name, whole in tensors().items():
            if name not in LAYOUTS:
                flat[name] = whole
                continue
            layout = Layout(LAYOUTS[name], mesh)
            parts = [whole[layout.region(device, whole.shape).slices()].clone() for device in mesh.local_device_ids()]
            flat[name] = dtckpt.pack(parts, layout, tuple(whole.shape))
        rounded = flat.pop("model/rounded")
        options = SaveOptions(kvstore=kvstore, chunk_nbytes=384 << 10)
        dtckpt.save(folder / kvstore, {**flat, **VALUES}, options=options)
        dtckpt.save(
            folder / f"{kvstore}-bf16",
            {"model/rounded": rounded},
            options=SaveOptions(kvstore=kvstore, save_as_bf16=True),
        )
