"""``dtckpt inspect``: show the tensors, values and phases of a checkpoint, as text or JSON."""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from dtckpt.checkpoint.reading.checkpoint import Checkpoint, open_checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.cli.output import format_count, format_layout, format_shape, write_event, write_line, write_table
from dtckpt.errors import TensorNotFoundError, capped, format_nbytes, printable
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.manifest import Costs
from dtckpt.format.plain_values import Node, peek_value
from dtckpt.format.tree import value_nodes
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region

MAX_VALUE_CHARS = 80


def run_inspect(path: str, patterns: Sequence[str], *, with_chunks: bool, as_json: bool) -> None:
    """Run the command.

    Raises:
        TensorNotFoundError: No tensor matches one of the patterns.
        CheckpointError: As for `dtckpt.open_checkpoint`.
    """
    with open_checkpoint(path) as checkpoint:
        tensors = select(checkpoint, patterns)
        meshes = list(dict.fromkeys(info.layout.mesh for info in tensors if info.layout is not None))
        if as_json:
            write_event("checkpoint", **to_json(checkpoint, tensors, meshes, with_chunks=with_chunks))
        else:
            _write_text(checkpoint, tensors, meshes, with_chunks=with_chunks)


def select(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[TensorInfo]:
    """Return the tensors whose names match any of the globs; all tensors if there are no globs.

    Raises:
        TensorNotFoundError: No tensor matches one of the globs.
    """
    for pattern in patterns:
        if not fnmatch.filter(checkpoint.tensors, pattern):
            raise TensorNotFoundError(
                f"no tensor of {checkpoint.path} matches {pattern!r}; it has {capped(map(repr, checkpoint.tensors))}"
            )
    return [
        info
        for name, info in checkpoint.tensors.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


# --- JSON ---------------------------------------------------------------------------------------------------------


def to_json(
    checkpoint: Checkpoint, tensors: Sequence[TensorInfo], meshes: Sequence[Mesh], *, with_chunks: bool
) -> dict[str, Any]:
    """Return the JSON object that describes a checkpoint; a tensor's ``mesh`` is its position in ``meshes``."""
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        **_save_json(checkpoint),
        "meshes": [
            {"name": mesh.name, "axes": mesh.axis_sizes, "devices": mesh.size(), "device_type": mesh.device_kind}
            for mesh in meshes
        ],
        "tensors": [_tensor_json(info, meshes, with_chunks=with_chunks) for info in tensors],
        "totals": {
            "tensors": len(tensors),
            "chunks": sum(info.num_chunks for info in tensors),
            "bytes": sum(info.nbytes for info in tensors),
        },
        "values": {path: node.get("value", node) for path, node in _value_nodes(checkpoint)},
        "phases": [
            {"client": client, "phase": phase, "seconds": round(cost.seconds, 6), "bytes": cost.nbytes}
            for client, own in _costs(checkpoint).items()
            for phase, cost in own.items()
        ],
    }


def _save_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the manifest says of the save; nothing for a checkpoint of another library."""
    if checkpoint.format != KIND:
        return {}
    manifest = checkpoint.manifest
    return {
        "format_version": manifest.format_version,
        "job": manifest.job,
        "num_clients": manifest.num_clients,
        "kvstore": manifest.kvstore,
        "raw_bits": manifest.raw_bits,
    }


def _costs(checkpoint: Checkpoint) -> Costs:
    return checkpoint.manifest.costs if checkpoint.format == KIND else {}


def _tensor_json(info: TensorInfo, meshes: Sequence[Mesh], *, with_chunks: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": info.name,
        "shape": info.shape,
        "dtype": info.dtype_name,
        "stored_dtype": info.stored_dtype_name,
        "codec": info.codec,
        "mesh": None if info.layout is None else meshes.index(info.layout.mesh),
        "sharding_specs": None if info.layout is None else info.layout.sharding_specs,
        "chunks": info.num_chunks,
        "bytes": info.nbytes,
        "is_whole": info.is_whole,
        "content_digest": None if info.content_digest is None else _digest_text(info.content_digest),
        "chunk_shape": info.chunk_shape,
        "block_shape": info.block_shape,
    }
    if with_chunks:
        facts["chunk_list"] = [
            {
                "offset": chunk.region.offset,
                "shape": chunk.region.shape,
                "key": chunk.key,
                "digest": None if chunk.digest is None else _digest_text(chunk.digest),
                "client": chunk.client,
            }
            for chunk in info.chunks
        ]
    return facts


def _value_nodes(checkpoint: Checkpoint) -> Iterator[tuple[str, Node]]:
    """Yield path and node of every plain value; values that JSON lacks are nodes in it, too."""
    return value_nodes(checkpoint.structure)


def _digest_text(digest: int) -> str:
    # As text: JSON readers that keep numbers as doubles would round it.
    return f"{digest:016x}"


# --- text ---------------------------------------------------------------------------------------------------------


def _write_text(
    checkpoint: Checkpoint, tensors: Sequence[TensorInfo], meshes: Sequence[Mesh], *, with_chunks: bool
) -> None:
    save = _save_json(checkpoint)
    chunks = format_count(sum(info.num_chunks for info in tensors), "chunk")
    size = format_nbytes(sum(info.nbytes for info in tensors))
    of_all = "" if len(tensors) == len(checkpoint.tensors) else f" of {len(checkpoint.tensors)}"
    facts = [
        ("checkpoint", str(checkpoint.path)),
        ("format", str(save.get("format_version", checkpoint.format))),
        *(
            (title, str(save[key]))
            for title, key in (("job", "job"), ("clients", "num_clients"), ("kvstore", "kvstore"))
            if key in save
        ),
        *([("raw bits", "bfloat16 and float8 are unsigned integers in zarr.json")] if save.get("raw_bits") else []),
        *((f"mesh {position}", _mesh_text(mesh)) for position, mesh in enumerate(meshes)),
        ("tensors", f"{len(tensors)}{of_all}, {chunks}, {size}"),
    ]
    for key, fact in facts:
        write_line(f"{key:<12}{printable(fact)}")
    if tensors:
        write_line("")
        write_table(
            ("TENSOR", "SHAPE", "DTYPE", "LAYOUT", "CHUNKS", "SIZE", "READ UNIT", "CONTENT"),
            [_tensor_row(info, meshes) for info in tensors],
        )
    if with_chunks and tensors:
        write_line("")
        rows = [
            (
                info.name,
                _region_text(chunk.region),
                chunk.key,
                "" if chunk.digest is None else _digest_text(chunk.digest),
                "" if chunk.client is None else str(chunk.client),
            )
            for info in tensors
            for chunk in info.chunks
        ]
        write_table(("TENSOR", "REGION", "KEY", "DIGEST", "CLIENT"), rows)
    if values := [(path, _value_text(node)) for path, node in _value_nodes(checkpoint)]:
        write_line("")
        write_table(("VALUE", ""), values)
    if costs := _costs(checkpoint):
        write_line("")
        write_table(("PHASE", "MEDIAN", "SLOWEST", "CLIENT", "SIZE"), list(_phase_rows(costs)))


def _phase_rows(costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield a row per phase of the save: median and longest time of the clients, the slowest client, bytes of all."""
    for phase in dict.fromkeys(name for own in costs.values() for name in own):
        by_client = {client: own[phase] for client, own in costs.items() if phase in own}
        seconds = {client: cost.seconds for client, cost in by_client.items()}
        slowest = max(seconds, key=lambda client: seconds[client])
        yield (
            phase,
            f"{statistics.median(seconds.values()):.3f} s",
            f"{seconds[slowest]:.3f} s",
            str(slowest),
            format_nbytes(sum(cost.nbytes for cost in by_client.values())),
        )


def _mesh_text(mesh: Mesh) -> str:
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.axis_sizes.items())
    name = f" named {mesh.name}" if mesh.name else ""
    return f"{axes} ({format_count(mesh.size(), f'{mesh.device_kind} device')}){name}"


def _tensor_row(info: TensorInfo, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    layout = format_layout(info.layout)
    if info.layout is not None and len(meshes) > 1:
        layout += f" on mesh {meshes.index(info.layout.mesh)}"
    dtype, stored = info.dtype_name, info.stored_dtype_name
    special = [f"stored {stored}"] * (stored != dtype) + [info.codec] * (info.codec != NO_CODEC)
    return (
        info.name,
        format_shape(info.shape),
        f"{dtype} ({', '.join(special)})" if special else dtype,
        layout,
        str(info.num_chunks) if info.is_whole else f"{info.num_chunks} (part)",
        format_nbytes(info.nbytes),
        format_shape(info.block_shape),
        "" if info.content_digest is None else _digest_text(info.content_digest),
    )


def _region_text(region: Region) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in zip(region.offset, region.stop, strict=True)) or "scalar"


def _value_text(node: Node) -> str:
    ((kind, content),) = node.items()
    text = repr(peek_value(kind, content))
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
