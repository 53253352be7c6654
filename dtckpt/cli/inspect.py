"""``dtckpt inspect``: show the tensors, values and phases of a checkpoint, as text or JSON."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.options import LOCATION, debug_option, json_option, map_options, pager_option, parse_map
from dtckpt.cli.output import format_count, format_layout, format_shape, format_value, page, table_lines, write_event
from dtckpt.errors import TensorNotFoundError, capped, did_you_mean, format_nbytes, printable
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.names import natural_key

if TYPE_CHECKING:
    from dtckpt.checkpoint.reading.checkpoint import Checkpoint
    from dtckpt.checkpoint.reading.tensor_info import TensorInfo
    from dtckpt.cli.name_groups import NameGroup
    from dtckpt.format.manifest import Costs, Manifest
    from dtckpt.format.plain_values import Node
    from dtckpt.layout.mesh import Mesh
    from dtckpt.layout.region import Region


EPILOG = """\b
Examples:
  dtckpt inspect step_100
  dtckpt inspect step_100 --tree --sort size           the largest subtrees first
  dtckpt inspect step_100 --tensor 'model/*' --chunks  which file has which part
  dtckpt inspect step_100 --map names.json             under the names of another model
  dtckpt inspect s3://bucket/step_100 --json

"""


@click.command("inspect", epilog=EPILOG)
@click.argument("path", type=LOCATION)
@click.option("--tensor", "patterns", multiple=True, metavar="GLOB", help="Only tensors with such names.")
@click.option("--tree", is_flag=True, help="Show names as a tree, with the size of every subtree.")
@click.option(
    "--sort",
    type=click.Choice(("name", "size")),
    default="name",
    show_default=True,
    help="Order of the tensors: layers.2 before layers.10, or the largest first.",
)
@click.option("--each", is_flag=True, help="A line for each tensor, also for tensors that differ in numbers only.")
@click.option("--chunks", "with_chunks", is_flag=True, help="List every chunk: region, key, digest, client.")
@map_options
@pager_option
@json_option("Print one line of JSON.")
@debug_option
def command(
    *,
    path: str,
    patterns: Sequence[str],
    tree: bool,
    sort: str,
    each: bool,
    with_chunks: bool,
    map_name: str | None,
    map_back: str | None,
    map_sizes: Sequence[str],
    pager: bool,
    as_json: bool,
) -> None:
    """Show the tensors and values of checkpoint PATH.

    Tensors whose names differ only in numbers share a line if they are alike: layers.{0..31}.norm stands for 32
    tensors, and the line shows the chunks and bytes of all 32.
    """
    from dtckpt.checkpoint.gc_pause import gc_paused
    from dtckpt.checkpoint.open import open_checkpoint

    # A listing of many tensors makes many objects, too.
    with gc_paused(), open_checkpoint(path, map=parse_map(map_name, map_back, map_sizes)) as checkpoint:
        tensors = select(checkpoint, patterns)
        meshes = list(dict.fromkeys(info.layout.mesh for info in tensors if info.layout is not None))
        if as_json:
            write_event("checkpoint", **to_json(checkpoint, tensors, meshes, with_chunks=with_chunks))
        else:
            lines = _lines(checkpoint, tensors, meshes, is_tree=tree, sort=sort, each=each, with_chunks=with_chunks)
            page(lines, is_wanted=pager)


def select(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[TensorInfo]:
    """Return the tensors whose names match any of the globs; all tensors if there are no globs.

    Raises:
        TensorNotFoundError: No tensor matches one of the globs.
    """
    for pattern in patterns:
        if not fnmatch.filter(checkpoint.tensors, pattern):
            hint = did_you_mean(pattern, checkpoint.tensors)
            known = capped(map(repr, checkpoint.tensors))
            raise TensorNotFoundError(f"no tensor of {checkpoint.path} matches {pattern!r}{hint}; it has {known}")
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
        "origins": _origins(tensors),
        "values": {path: node.get("value", node) for path, node in _value_nodes(checkpoint)},
        "refused": {path: error.message for path, error in checkpoint.refused.items()},
        "unread": checkpoint.unread,
        "notes": checkpoint.notes,
        "phases": [
            {"client": client, "phase": phase, "seconds": round(cost.seconds, 6), "bytes": cost.nbytes}
            for client, own in _costs(checkpoint).items()
            for phase, cost in own.items()
        ],
    }


def _origins(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """Return the bytes that the save took from earlier checkpoints, by the checkpoint that first wrote them."""
    nbytes: dict[str, int] = {}
    for info in tensors:
        for name, own in info.origin_nbytes.items():
            nbytes[name] = nbytes.get(name, 0) + own
    return nbytes


def _save_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest's facts about the save; nothing for a checkpoint of another library."""
    manifest = _manifest(checkpoint)
    if manifest is None:
        return {}
    return {
        "format_version": manifest.format_version,
        "job": manifest.job,
        "num_clients": manifest.num_clients,
        "kvstore": manifest.kvstore,
        "raw_bits": manifest.raw_bits,
    }


def _costs(checkpoint: Checkpoint) -> Costs:
    manifest = _manifest(checkpoint)
    return {} if manifest is None else manifest.costs


def _manifest(checkpoint: Checkpoint) -> Manifest | None:
    """Return the manifest; None for a checkpoint of another library."""
    from dtckpt.checkpoint.reading.manifest_files import KIND

    return checkpoint.manifest if checkpoint.format == KIND else None


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
                "origin": chunk.origin,
            }
            for chunk in info.chunks
        ]
    return facts


def _value_nodes(checkpoint: Checkpoint) -> Iterator[tuple[str, Node]]:
    """Yield path and node of every plain value; values that JSON lacks are nodes in it, too."""
    from dtckpt.format.tree import value_nodes

    return value_nodes(checkpoint.structure)


def _digest_text(digest: int) -> str:
    # As text: JSON readers that keep numbers as doubles would round it.
    return f"{digest:016x}"


# --- text ---------------------------------------------------------------------------------------------------------


def _lines(
    checkpoint: Checkpoint,
    tensors: Sequence[TensorInfo],
    meshes: Sequence[Mesh],
    *,
    is_tree: bool,
    sort: str,
    each: bool,
    with_chunks: bool,
) -> Iterator[str]:
    for key, fact in _facts(checkpoint, tensors, meshes):
        yield f"{key:<12}{printable(fact)}"
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = []
    groups = _groups(tensors, meshes, sort=sort, each=each)
    if is_tree:
        tables.append((("TENSOR", "TENSORS", "SIZE", "SHAPE", "DTYPE"), _tree_rows(groups, by_size=sort == "size")))
    else:
        cells = [_group_row(group, meshes) for group in groups]
        tables.append((("TENSOR", "SHAPE", "DTYPE", "LAYOUT", "CHUNKS", "SIZE", "READ UNIT", "CONTENT"), cells))
    if with_chunks:
        in_order = sorted(tensors, key=lambda info: natural_key(info.name))
        tables.append((("TENSOR", "REGION", "KEY", "DIGEST", "CLIENT", "ORIGIN"), list(_chunk_rows(in_order))))
    values = sorted(_value_nodes(checkpoint), key=lambda item: natural_key(item[0]))
    tables.append((("VALUE", ""), [(path, format_value(node)) for path, node in values]))
    tables.append((("NOT READ", ""), list(_unread_rows(checkpoint))))
    tables.append((("NOTE",), [(note,) for note in checkpoint.notes]))
    tables.append((("PHASE", "MEDIAN", "SLOWEST", "CLIENT", "SIZE"), list(_phase_rows(_costs(checkpoint)))))
    for header, body in tables:
        if body:
            yield ""
            yield from table_lines(header, body)


def _facts(checkpoint: Checkpoint, tensors: Sequence[TensorInfo], meshes: Sequence[Mesh]) -> Iterator[tuple[str, str]]:
    """Yield the facts about the whole checkpoint."""
    save = _save_json(checkpoint)
    yield "checkpoint", str(checkpoint.path)
    yield "format", str(save.get("format_version", checkpoint.format))
    for title, key in (("job", "job"), ("clients", "num_clients"), ("kvstore", "kvstore")):
        if key in save:
            yield title, str(save[key])
    if save.get("raw_bits"):
        yield "raw bits", "bfloat16 and float8 are unsigned integers in zarr.json"
    for position, mesh in enumerate(meshes):
        yield f"mesh {position}", _mesh_text(mesh)
    chunks = format_count(sum(info.num_chunks for info in tensors), "chunk")
    of_all = "" if len(tensors) == len(checkpoint.tensors) else f" of {len(checkpoint.tensors)}"
    yield "tensors", f"{len(tensors)}{of_all}, {chunks}, {format_nbytes(sum(info.nbytes for info in tensors))}"
    # The largest first: over a long run there may be many.
    origins = sorted(_origins(tensors).items(), key=lambda item: -item[1])
    if origins:
        yield "reused", capped(f"{format_nbytes(nbytes)} of {name}" for name, nbytes in origins)


def _groups(
    tensors: Sequence[TensorInfo], meshes: Sequence[Mesh], *, sort: str, each: bool
) -> list[NameGroup[TensorInfo]]:
    """Return groups of similar tensors, in the order that the user wants."""
    from dtckpt.cli.name_groups import NameGroup, group_names

    if each:
        groups = [NameGroup(info.name, [info]) for info in sorted(tensors, key=lambda info: natural_key(info.name))]
    else:
        groups = group_names(
            tensors, lambda info: info.name, lambda info: (_alike_cells(info, meshes), info.num_chunks, info.nbytes)
        )
    if sort == "size":
        groups.sort(key=_group_nbytes, reverse=True)
    return groups


def _group_nbytes(group: NameGroup[TensorInfo]) -> int:
    return sum(info.nbytes for info in group.items)


def _tree_rows(groups: Sequence[NameGroup[TensorInfo]], *, by_size: bool) -> list[tuple[str, ...]]:
    from dtckpt.cli.name_groups import TreeLeaf, tree_rows

    cells = [(format_shape(group.items[0].shape), _dtype_text(group.items[0])) for group in groups]
    leaves = [
        TreeLeaf(group.name, len(group.items), _group_nbytes(group), own)
        for group, own in zip(groups, cells, strict=True)
    ]
    return tree_rows(leaves, by_size=by_size)


def _group_row(group: NameGroup[TensorInfo], meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """Return the row of a group; chunks and bytes are sums over all its tensors."""
    first, *more = group.items
    shape, dtype, layout, part, unit = _alike_cells(first, meshes)
    digest = "" if first.content_digest is None else _digest_text(first.content_digest)
    return (
        group.name,
        shape,
        dtype,
        layout,
        f"{sum(info.num_chunks for info in group.items)}{part}",
        format_nbytes(_group_nbytes(group)),
        unit,
        f"({format_count(len(group.items), 'tensor')})" if more else digest,
    )


def _chunk_rows(tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, ...]]:
    for info in tensors:
        for chunk in info.chunks:
            digest = "" if chunk.digest is None else _digest_text(chunk.digest)
            client = "" if chunk.client is None else str(chunk.client)
            yield info.name, _region_text(chunk.region), chunk.key, digest, client, chunk.origin or ""


def _unread_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    for path, error in sorted(checkpoint.refused.items(), key=lambda item: natural_key(item[0])):
        yield path, error.message
    for name in checkpoint.unread:
        yield name, "dtckpt does not read it"


def _phase_rows(costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield a row per phase of the save: median and longest time of the clients, the slowest client, bytes of all."""
    from statistics import median  # here, because it is slow to import

    for phase in dict.fromkeys(name for own in costs.values() for name in own):
        by_client = {client: own[phase] for client, own in costs.items() if phase in own}
        seconds = {client: cost.seconds for client, cost in by_client.items()}
        slowest = max(seconds, key=lambda client: seconds[client])
        yield (
            phase,
            f"{median(seconds.values()):.3f} s",
            f"{seconds[slowest]:.3f} s",
            str(slowest),
            format_nbytes(sum(cost.nbytes for cost in by_client.values())),
        )


def _mesh_text(mesh: Mesh) -> str:
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.axis_sizes.items())
    name = f" named {mesh.name}" if mesh.name else ""
    return f"{axes} ({format_count(mesh.size(), f'{mesh.device_kind} device')}){name}"


def _alike_cells(info: TensorInfo, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """Return the cells of a row that must be equal in a group: shape, dtype, layout, whether in part, read unit."""
    layout = format_layout(info.layout)
    if info.layout is not None and len(meshes) > 1:
        layout += f" on mesh {meshes.index(info.layout.mesh)}"
    part = "" if info.is_whole else " (part)"
    return format_shape(info.shape), _dtype_text(info), layout, part, format_shape(info.block_shape)


def _dtype_text(info: TensorInfo) -> str:
    dtype, stored = info.dtype_name, info.stored_dtype_name
    special = [f"stored {stored}"] * (stored != dtype) + [info.codec] * (info.codec != NO_CODEC)
    return f"{dtype} ({', '.join(special)})" if special else dtype


def _region_text(region: Region) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in zip(region.offset, region.stop, strict=True)) or "scalar"
