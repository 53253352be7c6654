"""The formats of other libraries that are read directly: how each is recognized, and how its index is read.

To add a format: a pure parser in `dtckpt.format` that returns a `ForeignIndex`, and an entry in `FORMATS`. All else
(restores onto any mesh, reads of regions, resharding, conversion) follows from the index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from dtckpt.checkpoint.reading import safetensors_files
from dtckpt.format.stored_pieces import ForeignIndex
from dtckpt.storage.folder import Folder

HEAD_NBYTES = 64
"""Bytes from the start of a file by which its format is recognized."""


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A format of another library.

    Args:
        kind: Its name, as in `ForeignIndex.kind`.
        title: Its name in messages, with an article.
        suffixes: Ends of the names of its files, where a checkpoint can be one file.
        markers: Names of which a checkpoint that is a directory usually has one. Where directories cannot be listed,
            as in object stores, only these are looked for.
        is_file: Whether a file, by its name and its first `HEAD_NBYTES` bytes, is such a checkpoint.
        is_folder: Whether a directory, by the names in it, is such a checkpoint.
        read_index: Reads the index, given the folder and the names in it: that of the one file which the user named,
            or those of all files. It raises `CheckpointError`s, and what the methods of `Folder` raise.
    """

    kind: str
    title: str
    suffixes: tuple[str, ...]
    markers: tuple[str, ...]
    is_file: Callable[[str, bytes], bool]
    is_folder: Callable[[Collection[str]], bool]
    read_index: Callable[[Folder, Collection[str]], ForeignIndex]


FORMATS: dict[str, ForeignFormat] = {
    each.kind: each
    for each in (
        ForeignFormat(
            kind=safetensors_files.KIND,
            title="a safetensors file, or a directory of them",
            suffixes=(safetensors_files.SUFFIX,),
            markers=safetensors_files.MARKERS,
            is_file=safetensors_files.is_file,
            is_folder=safetensors_files.is_folder,
            read_index=safetensors_files.read_index,
        ),
    )
}
"""By kind, in the order in which they are tried."""
