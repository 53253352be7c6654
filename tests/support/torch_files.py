"""Files of ``torch.save`` in memory, as the parsers read them."""

import io

import torch

from dtckpt.format.pickled_tree import PickledTree, read_tree
from dtckpt.format.torch_zip import TorchZip, read_zip


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
