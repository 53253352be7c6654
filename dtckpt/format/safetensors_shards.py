"""Models in several safetensors files: what their names tell, and tensors that lie in shards; pure.

transformers cuts a model between tensors, and numbers the files: ``model-00001-of-00002.safetensors``. The Hugging Face
writer of ``torch.distributed.checkpoint`` writes a file for each client, and cuts the tensors themselves. The metadata
of such a file say where its boxes begin; nothing notes the shapes of the tensors::

    shard-00001-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    shard-00002-model-00001-of-00001.safetensors    {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4, 0]}}'}

Source: torch.distributed.checkpoint.hf_storage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, DtckptError, capped
from dtckpt.format.safetensors_index import SafetensorsHeader
from dtckpt.format.stored_pieces import ForeignTensor
from dtckpt.layout.region import Region

SHARDS = "DCP_SHARDING_INFO"
VERSION = "DCP_VERSION"
MAX_PARTS = 1 << 20
"""Bound on the number of files that a name may tell."""
_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.safetensors")
_SHARD = re.compile(r"shard-(?P<number>[0-9]{1,9})-.*\.safetensors")


def validate_alone(file: str) -> None:
    """Refuse a file that is a part of a model by its name.

    Raises:
        CheckpointIncompleteError: It is.
    """
    if (match := _SHARD.fullmatch(file)) is not None:
        raise CheckpointIncompleteError(
            f"{file} holds the shards of client {int(match['number'])} of a job only; give the directory of all shards"
        )
    if (match := _PART.fullmatch(file)) is not None and int(match["count"]) > 1:
        raise CheckpointIncompleteError(
            f"{file} is part {int(match['number'])} of {int(match['count'])} of a model; give its directory, or the "
            f"index {match['stem']}.safetensors.index.json"
        )


def validate_parts(files: Collection[str], where: str) -> None:
    """Check that of models in several files, as far as the names tell, no file is missing.

    Args:
        files: The names of the files.
        where: Their folder, for messages.

    Raises:
        CheckpointIncompleteError: A file is missing.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for file in files:
        # A client has no file for the parts that it holds no tensor of.
        if _SHARD.fullmatch(file) is None and (match := _PART.fullmatch(file)) is not None:
            numbers.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    for (stem, count), found in numbers.items():
        if int(count) > MAX_PARTS:
            raise CheckpointCorruptError(f"{where} has a file that is one of {count} by its name, expected fewer")
        if absent := [number for number in range(1, int(count) + 1) if number not in found]:
            names = (f"{stem}-{str(number).zfill(len(count))}-of-{count}.safetensors" for number in absent)
            raise CheckpointIncompleteError(
                f"{where} holds {len(found)} of the {int(count)} files of a model; missing: "
                f"{capped(names, count=len(absent))}"
            )


def absent_shards(files: Collection[str]) -> list[str]:
    """Return the names of shards that are not there, of clients before the last one that has a file.

    A client that held no tensor has no file either; the files do not tell which it is.
    """
    numbers = {int(match["number"]) for file in files if (match := _SHARD.fullmatch(file)) is not None}
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
    if len(headers) == 1 and not any(map(_SHARD.fullmatch, headers)):
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
