"""Safetensors, the file format of Hugging Face: parses the header of a file, and the index of a model in several files.

A file is ``| length: 8 bytes | header: JSON | data |``. The header has, by tensor name, dtype, shape and the range of
the data that the elements fill::

    {"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}

A model in several files has an index beside them, ``model.safetensors.index.json``::

    {"metadata": {"total_size": 12}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}

The names of files that are parts of a model are numbered, as transformers and the writers of PyTorch do::

    model-00001-of-00002.safetensors               a part: some of the tensors; the index names the file of each
    pytorch_model-00001-of-00002.bin               the same in a file of torch.save
    shard-00001-model-00001-of-00001.safetensors   the shards that one client had (`join_shards`)

Source: https://github.com/huggingface/safetensors (README, section "Format"), and the checks of its reader.
"""

from __future__ import annotations

import fnmatch
import json
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor, is_file_name
from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, CheckpointVersionError, DtckptError, capped
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import MAX_RANK
from dtckpt.layout.region import Region

KIND = "safetensors"
LENGTH_NBYTES = 8
"""Bytes of the header's length, at the start of a file."""
MAX_HEADER_NBYTES = 100_000_000
"""Longest header, the bound of safetensors' own reader."""
MAX_INDEX_NBYTES = 256 << 20
"""Longest ``*.index.json``."""
METADATA = "__metadata__"
"""The key of a header whose value is texts by name, and no tensor."""

NAMES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Dtypes of safetensors by dtype name."""
_TOTALS = frozenset({"total_size", "total_parameters"})
"""Notes of an index that follow from the tensors."""
_DTYPES = {text: name for name, text in NAMES.items()}
_TWO_IN_ONE = "float4_e2m1fn_x2"
"""Two numbers of safetensors' F4 are one element here; its last dim is twice as long there."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file.

    Args:
        tensors: By name, in the order of the header.
        metadata: The texts of `METADATA`.
        nbytes: Bytes of the whole file.
        refused: By name, why a tensor cannot be read.
    """

    tensors: Mapping[str, PieceTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    refused: Mapping[str, DtckptError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The index of a model in several files.

    Args:
        name: Its file name.
        weight_map: The file of each tensor, by name.
        metadata: Notes.
    """

    name: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def unread(self, read: Collection[str] = ()) -> list[str]:
        """Return the notes that do not follow from the tensors, without the notes whose keys are in ``read``."""
        return [f"{self.name}: metadata/{key}" for key in self.metadata if key not in _TOTALS and key not in read]

    def differences(self, files: Mapping[str, str]) -> list[str]:
        """Return notes about tensors that lie in other files than it says, or that it does not name.

        Args:
            files: By name, the file of each tensor in its files.
        """
        moved = [name for name, file in self.weight_map.items() if files.get(name, file) != file]
        more = [name for name in files if name not in self.weight_map]
        return [
            f"{self.name} {text}: {capped(name[:200] for name in names)}"
            for text, names in (("names the wrong file of", moved), ("lacks tensors that its files have", more))
            if names
        ]

    def absent(self, where: str, known: Collection[str]) -> dict[str, DtckptError]:
        """Return the errors of the tensors that it names, and that its files lack.

        Args:
            where: The folder, for messages.
            known: Names of the tensors in the files.
        """
        return {
            name: CheckpointCorruptError(f"{where}/{self.name} says that {name[:200]!r} is in {file}, which lacks it")
            for name, file in self.weight_map.items()
            if name not in known
        }


def parse_length(data: bytes, file: str) -> int:
    """Return the length of a header from the first bytes of its file.

    Raises:
        CheckpointCorruptError: The file is too short, or the header would be too long.
    """
    length = int.from_bytes(data[:LENGTH_NBYTES], "little")
    if len(data) < LENGTH_NBYTES or not 2 <= length <= MAX_HEADER_NBYTES:
        raise CheckpointCorruptError(
            f"{file} is no safetensors file, or is damaged: its header would have {length} bytes, expected 2 to "
            f"{MAX_HEADER_NBYTES}"
        )
    return length


def parse_header(header: bytes, file: str, nbytes: int | None = None) -> SafetensorsHeader:
    """Parse the header of a file.

    Args:
        header: The JSON, without its length.
        file: The file's name, relative to the checkpoint's folder.
        nbytes: Size of the file, if it is known.

    Raises:
        CheckpointCorruptError: The header is malformed, contradicts itself, or does not fit the file.
    """
    entries = _object(header, file)
    # As in safetensors' own reader, null stands for no metadata.
    metadata = given if (given := entries.pop(METADATA, None)) is not None else {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointCorruptError(f"{file} is damaged: {METADATA} of its header must map names to texts")
    start = LENGTH_NBYTES + len(header)
    ranges = {name: _range(name, entry, file) for name, entry in entries.items()}
    end = 0
    # As in safetensors' own reader: every byte of the data belongs to one tensor.
    for name, (begin, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != end:
            raise CheckpointCorruptError(
                f"{file} is damaged: tensor {name[:200]!r} begins at byte {begin} of the data, expected {end}: tensors "
                "follow each other without gaps and do not overlap"
            )
        end = stop
    if nbytes is not None and nbytes != start + end:
        raise CheckpointCorruptError(
            f"{file} is damaged or was cut short: it has {nbytes} bytes, by its header it should have {start + end}"
        )
    tensors: dict[str, PieceTensor] = {}
    refused: dict[str, DtckptError] = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(name, entry, file, start, ranges[name])
        except CheckpointVersionError as error:
            refused[name] = error
    return SafetensorsHeader(tensors, metadata, start + end, refused)


def _object(data: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) != len(pairs):
            raise ValueError("a key occurs twice")
        return items

    try:
        parsed = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file} is damaged: its JSON cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointCorruptError(f"{file} is damaged: its JSON is no object")
    return parsed


def _range(name: str, entry: Any, file: str) -> tuple[int, int]:
    """Return the range of the data that a tensor fills."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointCorruptError(
            f"{file} is damaged: its entry of tensor {name[:200]!r} lacks dtype, shape or offsets"
        )
    offsets = entry["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointCorruptError(f"{file} is damaged: tensor {name[:200]!r} has offsets {str(offsets)[:80]}")
    return offsets[0], offsets[1]


def _are_sizes(numbers: Any) -> bool:
    # The exact type: True is an int, too.
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _tensor(name: str, entry: Mapping[str, Any], file: str, start: int, span: tuple[int, int]) -> PieceTensor:
    """Return the tensor of an entry, whose data begin at byte ``start`` of the file."""
    # Before the sizes are multiplied, which takes long for many.
    if not _are_sizes(entry["shape"]) or len(entry["shape"]) > MAX_RANK:
        raise CheckpointCorruptError(f"{file} is damaged: tensor {name[:200]!r} has shape {str(entry['shape'])[:80]}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointVersionError(
            f"tensor {name[:200]!r} of {file} has dtype {str(entry['dtype'])[:80]}, which this version does not know; "
            f"expected one of {', '.join(_DTYPES)}"
        )
    shape = list(entry["shape"])
    if dtype == _TWO_IN_ONE:
        if not shape or shape[-1] % 2:
            raise CheckpointCorruptError(
                f"{file} is damaged: tensor {name[:200]!r} of F4 has shape {shape}, an odd one"
            )
        shape[-1] //= 2
    numel = math.prod(shape)
    region = Region.full(shape)
    pieces = (Piece(region, file, start + span[0]),) if numel else ()
    tensor = PieceTensor(name, tuple(shape), dtype, pieces)
    if tensor.nbytes != span[1] - span[0]:
        raise CheckpointCorruptError(
            f"{file} is damaged: tensor {name[:200]!r} of shape {tuple(shape)} and dtype {dtype} has "
            f"{span[1] - span[0]} bytes, expected {tensor.nbytes}"
        )
    return tensor


def parse_weight_map(data: bytes, file: str) -> WeightIndex:
    """Parse the index of a model in several files.

    Args:
        data: The JSON.
        file: The index's name.

    Raises:
        CheckpointCorruptError: The index is malformed, or names a file that is missing.
    """
    content = _object(data, file)
    weight_map, metadata = content.get("weight_map"), content.get("metadata") or {}
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise CheckpointCorruptError(f"{file} is no index of safetensors files: it has no weight_map")
    files: dict[str, str] = {}
    for name, part in weight_map.items():
        files[name] = posixpath.normpath(part) if isinstance(part, str) else ""
        if not is_file_name(files[name]) or "/" in files[name]:
            raise CheckpointCorruptError(
                f"{file} says that {name[:200]!r} is in {str(part)[:200]!r}, which is no file beside it"
            )
    return WeightIndex(file, files, metadata)


def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file, padded with blanks so that the data begin at a multiple of 8.

    Args:
        tensors: Name, dtype and shape of each tensor, in the order of their data.
        metadata: The texts of `METADATA`.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        stored = [*shape[:-1], 2 * shape[-1]] if dtype == _TWO_IN_ONE else list(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": stored, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_NBYTES)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


MAX_PARTS = 1 << 20
"""Bound on the number of files that a name may tell."""
SHARD = re.compile(r"shard-(?P<number>[0-9]{1,9})-.*\.safetensors")
_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>\.safetensors|\.bin)")


_DESCRIPTIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "preprocessor_config.json", "processor_config.json", "chat_template*", "model_index.json"),
    *("README*", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.md", ".gitattributes", ".gitignore", ".git", ".cache"),
)


def is_description(file: str) -> bool:
    """Whether a file beside a published model describes the model or its tokenizer, by its name: it has no state."""
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in _DESCRIPTIONS)


def validate_alone(file: str) -> None:
    """Refuse a file that is a part of a model by its name.

    Raises:
        CheckpointIncompleteError: The file is a part of a model.
    """
    if (match := SHARD.fullmatch(file)) is not None:
        raise CheckpointIncompleteError(
            f"{file} holds the shards of client {int(match['number'])} of a job only; give the directory of all shards"
        )
    if (match := _PART.fullmatch(file)) is not None and int(match["count"]) > 1:
        raise CheckpointIncompleteError(
            f"{file} is part {int(match['number'])} of {int(match['count'])} of a model; give its directory, or the "
            f"index {match['stem']}{match['suffix']}.index.json"
        )


def validate_parts(files: Collection[str], where: str) -> None:
    """Check that no file of a model in several files is missing, as far as the names tell.

    Args:
        files: The names of the files.
        where: Their folder, for messages.

    Raises:
        CheckpointIncompleteError: A file is missing.
        CheckpointCorruptError: A name claims too many files.
    """
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        # A client has no file for the parts that it holds no tensor of.
        if SHARD.fullmatch(file) is None and (match := _PART.fullmatch(file)) is not None:
            numbers.setdefault((match["stem"], match["count"], match["suffix"]), set()).add(int(match["number"]))
    for (stem, count, suffix), found in numbers.items():
        if int(count) > MAX_PARTS:
            raise CheckpointCorruptError(f"{where} has a file that is one of {count} by its name, expected fewer")
        if absent := [number for number in range(1, int(count) + 1) if number not in found]:
            names = (f"{stem}-{str(number).zfill(len(count))}-of-{count}{suffix}" for number in absent)
            raise CheckpointIncompleteError(
                f"{where} holds {len(found)} of the {int(count)} files of a model; missing: "
                f"{capped(names, count=len(absent))}"
            )
