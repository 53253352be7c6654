"""Files of ``torch.save`` in memory, as the parsers read them."""

import io
import zlib
from collections.abc import Iterable, Mapping

import torch

from dtckpt.checkpoint.foreign.pickled_tree import PickledTree, read_tree
from dtckpt.checkpoint.foreign.torch_zip import TorchZip, read_zip
from dtckpt.checkpoint.foreign.torch_zip_plan import Checksum, Elements, Segment


def saved(value, **options) -> bytes:
    """Return the file that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def zip_of(data: bytes) -> TorchZip:
    """Return the zip in a file."""
    return read_zip(lambda start, stop: data[start:stop], len(data), "some/file")


def tree_of(value, **options) -> PickledTree:
    """Return the tree of a value that ``torch.save`` saved."""
    return read_tree(zip_of(saved(value, **options)).value)


def write_segments(segments: Iterable[Segment], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the file of a plan, given the tensors by name."""
    result, crcs = io.BytesIO(), []
    for segment in segments:
        if isinstance(segment, Elements):
            box = tensors[segment.name][segment.region.slices()].contiguous()
            data = box.reshape(-1).view(torch.uint8).numpy().tobytes() if box.numel() else b""
            crcs.append(zlib.crc32(data))
            result.write(data)
        elif isinstance(segment, Checksum):
            result.write(crcs[segment.number].to_bytes(4, "little"))
        else:
            result.write(segment)
    return result.getvalue()
