"""The formats that a conversion writes: `TARGETS`, by the names that users give.

To add the files of another library: a function that plans them from an `Export` (`dtckpt.checkpoint.converting`), and
an entry here. Writing in bounded memory, proof and commit follow from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtckpt.checkpoint.converting import bundle_target, orbax_target, safetensors_target, torch_target
from dtckpt.checkpoint.converting.export import Export
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.format.manifest import KVSTORES
from dtckpt.format.tree import Node

DTCKPT = "dtckpt"
"""The format of this library, with its default storage."""
ZARR = "zarr"
"""A checkpoint of this library as a plain tree of Zarr v3 arrays, named as the tensors."""
KVSTORE_OF = {DTCKPT: KVSTORES[0], ZARR: ZARR}


@dataclass(frozen=True, slots=True)
class FileTarget:
    """The files of another library.

    Args:
        kind: The format, as in `dtckpt.checkpoint.foreign.formats.FORMATS`.
        suffixes: Ends of a destination's name by which it is one file, and not a directory.
        is_own: Whether an entry of a directory belongs to the format. An overwriting conversion may replace such
            entries.
        plan_folder: Plans the files of a directory, given the bound on the bytes of a file; None if the format has
            no directories.
        plan_file: Plans a single file, given its name; None if the format needs a directory.
        dropped: Returns, by path in a state tree, the reason why the format does not keep a value.
        read_back: Returns the state tree that a reader of the files finds for a state tree.
        numbers_parameters: Whether optimizers have numbers in place of the names of their parameters.
    """

    kind: str
    suffixes: tuple[str, ...]
    is_own: Callable[[Path], bool]
    plan_folder: Callable[[Export, int], Sequence[FilePlan]] | None
    plan_file: Callable[[Export, str], Sequence[FilePlan]] | None
    dropped: Callable[[Node], Mapping[str, str]] = lambda _: {}
    read_back: Callable[[Node], Node] = lambda tree: tree
    numbers_parameters: bool = False


FILE_TARGETS: dict[str, FileTarget] = {
    each.kind: each
    for each in (
        FileTarget(
            kind="safetensors",
            suffixes=(".safetensors",),
            is_own=safetensors_target.is_own,
            plan_folder=safetensors_target.plan_folder,
            plan_file=safetensors_target.plan_file,
        ),
        FileTarget(
            kind="dcp",
            suffixes=(),
            is_own=torch_target.is_own,
            plan_folder=torch_target.plan_folder,
            plan_file=None,
            dropped=torch_target.dropped,
        ),
        FileTarget(
            kind="torch",
            suffixes=(".pt", ".pth"),
            is_own=lambda _: False,
            plan_folder=None,
            plan_file=torch_target.plan_file,
            numbers_parameters=True,
        ),
        FileTarget(
            kind="orbax",
            suffixes=(),
            is_own=orbax_target.is_own,
            plan_folder=orbax_target.plan_folder,
            plan_file=None,
        ),
        FileTarget(
            kind="tensorflow",
            suffixes=(),
            is_own=bundle_target.is_own,
            plan_folder=bundle_target.plan_folder,
            plan_file=None,
            dropped=bundle_target.dropped,
            read_back=bundle_target.read_back,
        ),
    )
}
"""By kind."""


def target_names() -> list[str]:
    """Return the names of all formats that a conversion writes."""
    return [DTCKPT, ZARR, *FILE_TARGETS]


def target_of(name: str) -> str:
    """Return the format that a destination's name tells: the format of its suffix, or else ``dtckpt``."""
    return next((each.kind for each in FILE_TARGETS.values() if name.endswith(each.suffixes)), DTCKPT)
