"""Plan files of ``torch.save`` and distributed checkpoints of PyTorch, as PyTorch itself loads them; pure.

Parts of files (`dtckpt.checkpoint.foreign.torch_zip_plan`) become slots, and a frame that has the bytes and checksums
around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from awscrt.checksums import crc32

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FileDigests, FilePlan, FileSlot
from dtckpt.checkpoint.foreign.dcp_plan import ShapeAndDtype, empty_dicts, plan_checkpoint
from dtckpt.checkpoint.foreign.torch_zip_plan import (
    WEIGHTS_ONLY,
    Checksum,
    Elements,
    Segment,
    build_object,
    plan_zip,
    segment_nbytes,
)
from dtckpt.errors import ConfigError, RegionNotFoundError
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME, name_of_key
from dtckpt.layout.region import Region

MAX_ARRAYS_NBYTES = 64 << 20
"""Bound on the arrays of numpy that go into pickles: these are in memory as a whole."""


def is_own(path: Path) -> bool:
    """Whether a file of a directory is one of a distributed checkpoint."""
    return path.name.endswith((DCP_METADATA_NAME, ".distcp"))


def plan_file(export: Export, name: str) -> list[FilePlan]:
    """Plan a file of ``torch.save`` that ``torch.load(weights_only=True)`` reads.

    Tied tensors are one tensor in it. Arrays of numpy become tensors, since PyTorch reads no others.

    Args:
        export: The tensors and values to write.
        name: Name of the file.

    Raises:
        RegionNotFoundError: A tensor was saved in part.
        TreeError: The state tree holds something that PyTorch would not read.
    """
    _validate_whole(export)
    elements = {each.name: Elements(each.name, each.dtype, Region.full(each.shape)) for each in export.stored}

    def tensor(key: str) -> Elements:
        return elements[export.tied.get(key, key)]

    value = build_object(export.structure, WEIGHTS_ONLY, tensor, tensor)
    return [_file_plan(name, plan_zip(value), {each.name: each for each in export.tensors})]


def plan_folder(export: Export, max_file_nbytes: int) -> list[FilePlan]:
    """Plan a distributed checkpoint; the last file makes the others a checkpoint.

    Arrays of numpy become parts of pickles, as PyTorch saves them. Tied tensors are stored each by itself.

    Args:
        export: The tensors and values to write.
        max_file_nbytes: A file is closed once it has so many bytes.

    Raises:
        RegionNotFoundError: A tensor was saved in part.
        TreeError: The state tree holds something that PyTorch would not read.
        ConfigError: Arrays of numpy are too large for pickles.
    """
    _validate_whole(export)
    arrays = set(trees.array_names(export.structure))
    if (nbytes := sum(each.nbytes for each in export.tensors if each.name in arrays)) > MAX_ARRAYS_NBYTES:
        raise ConfigError(
            f"arrays of numpy go into pickles, which hold at most {MAX_ARRAYS_NBYTES} bytes of them; got {nbytes}; "
            "save them as tensors"
        )
    facts = {each.name: ShapeAndDtype(each.dtype, each.shape) for each in export.tensors}
    tensors = {each.name: each for each in export.tensors}
    files = plan_checkpoint(export.structure, facts, export.read_array, max_file_nbytes)
    return [_file_plan(name, segments, tensors) for name, segments in files.items()]


def dropped(structure: trees.Node) -> dict[str, str]:
    """Return, by path, why a distributed checkpoint does not keep something."""
    lost = ("/".join(name_of_key(str(key)) for key in path) for path in empty_dicts(structure))
    return dict.fromkeys(lost, "distributed checkpoints of PyTorch keep no empty dicts")


def _validate_whole(export: Export) -> None:
    for tensor in export.tensors:
        if not tensor.info.is_whole:
            raise RegionNotFoundError(
                f"tensor {tensor.info.name!r} was saved in part, and PyTorch's files have whole tensors only; leave it "
                "out"
            )


def _file_plan(name: str, segments: Iterable[Segment], tensors: Mapping[str, ExportedTensor]) -> FilePlan:
    parts = list(segments)
    *starts, nbytes = accumulate(map(segment_nbytes, parts), initial=0)
    placed = list(zip(starts, parts, strict=True))
    slots = tuple(FileSlot(tensors[part.name], part.region, at) for at, part in placed if isinstance(part, Elements))

    def frame(written: FileDigests) -> Iterator[tuple[int, bytes]]:
        for at, part in placed:
            if isinstance(part, Checksum):
                # The checksum of no bytes is zero.
                yield at, written.checksums.get(slots[part.number], 0).to_bytes(4, "little")
            elif not isinstance(part, Elements):
                yield at, part

    return FilePlan(name, nbytes, slots, frame, checksum=crc32)
