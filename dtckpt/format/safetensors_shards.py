"""Shards of tensors in safetensors files, as the Hugging Face writer of ``torch.distributed.checkpoint`` writes; pure.

Each client writes a file. Its metadata say where the boxes in it begin; nothing notes the shapes of the tensors::

    shard-00001-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    shard-00002-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4, 0]}}'}

Source: torch.distributed.checkpoint.hf_storage.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, DtckptError, capped
from dtckpt.format.model_parts import MAX_PARTS, SHARD
from dtckpt.format.safetensors_index import SafetensorsHeader
from dtckpt.format.stored_pieces import ForeignTensor
from dtckpt.layout.region import Region

SHARDS = "DCP_SHARDING_INFO"
VERSION = "DCP_VERSION"


def absent_shards(files: Collection[str]) -> list[str]:
    """Return the names of missing shards, of clients before the last client that has a file.

    A client that held no tensor has no file either; the files do not tell the two cases apart.
    """
    numbers = {int(match["number"]) for file in files if (match := SHARD.fullmatch(file)) is not None}
    last = min(max(numbers, default=0), MAX_PARTS)
    return [f"shard-{number:05}-*" for number in range(1, last) if number not in numbers]


def is_sharded(header: SafetensorsHeader) -> bool:
    """Whether the tensors of a file are shards of larger ones."""
    return SHARDS in header.metadata


def join_shards(headers: Mapping[str, SafetensorsHeader]) -> tuple[dict[str, ForeignTensor], dict[str, DtckptError]]:
    """Return the tensors whose shards lie in several files, and by name why some cannot be read.

    Args:
        headers: The headers of the files with shards, by file name.

    Raises:
        CheckpointCorruptError: A note of the shards is malformed.
        CheckpointIncompleteError: There is one file, and its name does not tell that it is the first.
    """
    if len(headers) == 1 and not any(map(SHARD.fullmatch, headers)):
        raise CheckpointIncompleteError(
            f"{next(iter(headers))} holds shards of tensors; give the directory of all files that the job wrote, under "
            "the names that it gave them"
        )
    shards: dict[str, list[tuple[ForeignTensor, tuple[int, ...]]]] = {}
    for file, header in headers.items():
        offsets = _offsets(header, file)
        for name, tensor in header.tensors.items():
            if len(offsets.get(name, ())) != len(tensor.shape):
                raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} does not say where {name[:200]!r} begins")
            shards.setdefault(name, []).append((tensor, offsets[name]))
    tensors: dict[str, ForeignTensor] = {}
    refused: dict[str, DtckptError] = {}
    for name, boxes in shards.items():
        try:
            tensors[name] = _joined(name, boxes, headers)
        except (CheckpointCorruptError, CheckpointIncompleteError) as error:
            refused[name] = error
    return tensors, refused


def _joined(name: str, boxes: Iterable[tuple[ForeignTensor, tuple[int, ...]]], files: Collection[str]) -> ForeignTensor:
    first, *others = (tensor for tensor, _ in boxes)
    if any((each.dtype, len(each.shape)) != (first.dtype, len(first.shape)) for each in others):
        raise CheckpointCorruptError(f"the shards of tensor {name[:200]!r} differ in dtype or rank")
    stops = [[start + size for start, size in zip(offset, tensor.shape, strict=True)] for tensor, offset in boxes]
    shape = tuple(map(max, zip(*stops, strict=True)))
    pieces = tuple(
        replace(piece, region=Region(offset, tensor.shape)) for tensor, offset in boxes for piece in tensor.pieces
    )
    joined = ForeignTensor(name, shape, first.dtype, pieces)
    if not joined.is_whole:
        raise CheckpointIncompleteError(
            f"elements of tensor {name[:200]!r} are in none of the files; missing: "
            f"{capped(absent_shards(files)) or 'a file'}"
        )
    return joined


def _offsets(header: SafetensorsHeader, file: str) -> dict[str, tuple[int, ...]]:
    """Return, by name, where the box of a tensor begins."""
    try:
        notes = json.loads(header.metadata[SHARDS])
        offsets = {name: tuple(notes[name]["saved_offsets"]) for name in header.tensors if name in notes}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} cannot be read: {error}") from error
    for offset in offsets.values():
        if any(type(start) is not int or not 0 <= start < 1 << 62 for start in offset):
            raise CheckpointCorruptError(f"{file} is damaged: {SHARDS} has the offset {str(offset)[:80]}")
    return offsets
