"""The formats of other libraries that are read directly: how each is recognized, and how its index is read.

To add a format: a pure parser in this folder that returns a `PieceIndex`, or a `ChunkIndex` if elements are compressed,
and an entry in `FORMATS`. All else (restores onto any mesh, reads of regions, resharding, conversion) follows from the
index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dtckpt.checkpoint.foreign import (
    bundle_files,
    dcp_files,
    deepspeed_files,
    deepspeed_tree,
    fsdp_files,
    huggingface_files,
    megatron,
    megatron_zarr,
    orbax_files,
    safetensors_files,
    torch_files,
)
from dtckpt.checkpoint.foreign.chunk_files import ChunkFiles, ChunkIndex
from dtckpt.checkpoint.foreign.piece_files import PieceFiles
from dtckpt.checkpoint.foreign.safetensors_index import validate_alone
from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles
from dtckpt.checkpoint.reading.pieces import PieceIndex, is_file_name
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    DtckptError,
    capped,
)
from dtckpt.format.names import DCP_METADATA_NAME, is_own_segment
from dtckpt.storage.failures import NOT_A_FILE, MalformedError, translate_errors
from dtckpt.storage.folder import Folder, open_folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location, is_remote
from dtckpt.storage.url import Url
from dtckpt.storage.watched_folder import WatchedFolder

HEAD_NBYTES = 64
"""Bytes from the start of a file by which its format is recognized."""
_NUM_THREADS = 16


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A format of another library.

    Args:
        kind: Its name, as in `PieceIndex.kind`.
        title: Its name in messages, with an article.
        suffixes: Ends of the names of its files, where a checkpoint can be one file.
        markers: Names of which a checkpoint that is a directory usually has one. Where directories cannot be listed,
            as in object stores, only these are looked for.
        is_file: Whether a file, by its name and its first `HEAD_NBYTES` bytes, is such a checkpoint.
        is_folder: Whether a directory, by the names in it, is such a checkpoint.
        read_index: Reads the index, given the folder and names of files in it: all names, or the
            single name that the user chose. Raises `CheckpointError`s, and the errors of the methods of `Folder`.
        validate_file: Raises a `CheckpointError` for a file that is only a part of a checkpoint, by its name.
        prefix_suffix: The end of the name of the file that `read_index` is given, where the path of a checkpoint is the
            prefix of its files; else empty.
    """

    kind: str
    title: str
    suffixes: tuple[str, ...]
    markers: tuple[str, ...]
    is_file: Callable[[str, bytes], bool]
    is_folder: Callable[[Collection[str]], bool]
    read_index: Callable[[Folder, Collection[str]], PieceIndex | ChunkIndex]
    validate_file: Callable[[str], None] = lambda _: None
    prefix_suffix: str = ""


FORMATS: dict[str, ForeignFormat] = {
    each.kind: each
    for each in (
        ForeignFormat(
            kind=dcp_files.KIND,
            title="a directory of torch.distributed.checkpoint",
            suffixes=(),
            markers=dcp_files.MARKERS,
            is_file=dcp_files.is_file,
            is_folder=dcp_files.is_folder,
            read_index=dcp_files.read_index,
        ),
        ForeignFormat(
            kind=megatron_zarr.KIND,
            title="a directory of Megatron-Core's zarr",
            suffixes=(),
            markers=(),
            is_file=megatron_zarr.is_file,
            is_folder=megatron_zarr.is_folder,
            read_index=megatron_zarr.read_index,
        ),
        ForeignFormat(
            kind=huggingface_files.KIND,
            title="a folder of transformers' Trainer, of accelerate or of PEFT",
            suffixes=(),
            markers=huggingface_files.MARKERS,
            is_file=huggingface_files.is_file,
            is_folder=huggingface_files.is_folder,
            read_index=huggingface_files.read_index,
        ),
        ForeignFormat(
            kind=safetensors_files.KIND,
            title="a safetensors file, or a directory of them",
            suffixes=(safetensors_files.SUFFIX,),
            markers=safetensors_files.MARKERS,
            is_file=safetensors_files.is_file,
            is_folder=safetensors_files.is_folder,
            read_index=safetensors_files.read_index,
            validate_file=validate_alone,
        ),
        ForeignFormat(
            kind=deepspeed_files.KIND,
            title="a directory of DeepSpeed",
            suffixes=(),
            markers=deepspeed_files.MARKERS,
            is_file=deepspeed_files.is_file,
            is_folder=deepspeed_files.is_folder,
            read_index=deepspeed_tree.read_index,
        ),
        ForeignFormat(
            kind=torch_files.KIND,
            title="a file of torch.save",
            suffixes=torch_files.SUFFIXES,
            markers=torch_files.MARKERS,
            is_file=torch_files.is_file,
            is_folder=torch_files.is_folder,
            read_index=torch_files.read_index,
            validate_file=validate_alone,
        ),
        ForeignFormat(
            kind=fsdp_files.KIND,
            title="a directory of FSDP1's local state dicts",
            suffixes=(),
            markers=(),
            is_file=fsdp_files.is_file,
            is_folder=fsdp_files.is_folder,
            read_index=fsdp_files.read_index,
        ),
        ForeignFormat(
            kind=orbax_files.KIND,
            title="a directory of Orbax",
            suffixes=(),
            markers=orbax_files.MARKERS,
            is_file=orbax_files.is_file,
            is_folder=orbax_files.is_folder,
            read_index=orbax_files.read_index,
        ),
        ForeignFormat(
            kind=bundle_files.KIND,
            title="a checkpoint of TensorFlow, by its prefix",
            suffixes=(bundle_files.SUFFIX,),
            markers=(),
            is_file=bundle_files.is_file,
            is_folder=bundle_files.is_folder,
            read_index=bundle_files.read_index,
            prefix_suffix=bundle_files.SUFFIX,
        ),
    )
}
"""By kind, in the order in which they are tried."""


POINTERS: Mapping[str, Callable[[str], str]] = {
    megatron.STEP_NAME: megatron.step_folder,
    **dict.fromkeys(deepspeed_files.LATEST, str.strip),
}
"""Files of the folder of a run that name the newest checkpoint below it; each with the rule of that name."""
MAX_POINTER_NBYTES = 256
INNER_FOLDERS = ("weights",)
"""Folders that hold the checkpoint, where libraries add a folder around it, as NeMo does."""


def has_foreign_name(where: Location) -> bool:
    """Whether a URL ends as the name of a file of another library does."""
    return isinstance(where, Url) and where.name.endswith(
        tuple(end for each in FORMATS.values() for end in each.suffixes)
    )


def open_foreign(where: Location) -> CheckpointFiles | None:
    """Open another library's checkpoint; None if there is none of a format in `FORMATS`. Blocks: on storage.

    Raises:
        CheckpointCorruptError: The checkpoint is damaged.
        CheckpointVersionError: The checkpoint holds something that this version does not know.
        StorageError: Storage refused.
    """
    with translate_errors("look for the checkpoint of another library", where, is_read=True):
        found = _found(where)
        if found is None:
            return None
        # Remote storage takes long, and so would the pause.
        with nullcontext() if is_remote(where) else gc_paused():
            try:
                index = found.form.read_index(found.folder, found.names)
            except DtckptError:
                raise  # `CheckpointNotFoundError` is a `FileNotFoundError`, too
            except FileNotFoundError as error:
                # A link to nowhere, or a file that was removed after the directory was listed.
                raise CheckpointCorruptError(
                    f"{error.filename or error} is missing; use another copy, or restore another checkpoint"
                ) from None
            files = (
                ChunkFiles(found.folder, index)
                if isinstance(index, ChunkIndex)
                else PieceFiles(found.folder, index, is_remote=is_remote(where))
            )
        files.unread = (*(name for name in found.beside if name not in index.files), *files.unread)
        files.notes = (*found.notes, *files.notes)
        return files


def beside_own(folder: Folder) -> list[str]:
    """Return the names in a local folder with a checkpoint of this library that may be one of another. Blocks."""
    names: Collection[str] = ()
    with suppress(PermissionError):  # a directory may be open for reading and closed for listing
        names = folder.names() if isinstance(folder, LocalFolder) else ()
    # `interop.dcp` writes metadata, for trainers that look for them.
    others = [name for name in names if name != DCP_METADATA_NAME]
    found = [form for form in FORMATS.values() if form.is_folder(others)]
    return [name for name in others if any(form.is_folder([name]) for form in found)] if found else []


@dataclass(frozen=True, slots=True)
class _Found:
    """Another library's checkpoint.

    Args:
        folder: Its folder.
        names: The names in it.
        form: Its format.
        beside: Names of other files of the place that the user named, such as those around a folder of weights.
        notes: Notes for the reader about the place.
    """

    folder: Folder
    names: Collection[str]
    form: ForeignFormat
    beside: Sequence[str] = ()
    notes: Sequence[str] = ()


def _found(where: Location) -> _Found | None:
    if isinstance(where, Path):
        if where.name == DCP_METADATA_NAME and where.is_file():
            where = where.parent  # its metadata stand for a whole directory
        if where.is_file():
            return _as_file(WatchedFolder(where.parent), where.name)
    elif has_foreign_name(where) and (file := _as_file(open_folder(where.parent), where.name)) is not None:
        return file
    if (outer := _listed(where)) is not None:
        if (found := _as_folder(*outer) or _of_run(where, *outer)) is not None:
            return found
        for name in INNER_FOLDERS:
            if (listed := _listed(where / name)) is not None and (found := _as_folder(*listed)) is not None:
                return replace(found, beside=[f"../{each}" for each in sorted(set(outer[1]) - {name})])
    return _as_prefix(where)


def _listed(where: Location) -> tuple[Folder, Collection[str]] | None:
    """Return a folder and the names in it, or the names that matter if it cannot be listed; None if it has none."""
    if isinstance(where, Path):
        return (watched := WatchedFolder(where), watched.names()) if where.is_dir() else None
    folder = open_folder(where)
    names = dict.fromkeys([*POINTERS, *(name for form in FORMATS.values() for name in form.markers)])
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dtckpt-markers") as pool:
        heads = pool.map(partial(_head, folder), names)
        return folder, [name for name, head in zip(names, heads, strict=True) if head is not None]


def _of_run(where: Location, folder: Folder, names: Collection[str]) -> _Found | None:
    """Return the checkpoint that a file in the folder of a run names; None if there is no such file.

    Raises:
        CheckpointNotFoundError: There is no checkpoint where the files say.
    """
    found: _Found | None = None
    taken = ""
    others: dict[str, str] = {}
    for name in sorted(POINTERS.keys() & set(names)):
        try:
            text = folder.read_whole(name, MAX_POINTER_NBYTES).decode(errors="replace")
        except MalformedError:
            continue  # a directory or a long file, which somebody else gave this name
        inner = POINTERS[name](text)
        is_name = is_file_name(inner) and "/" not in inner
        listed = _listed(where / inner) if is_name and found is None else None
        if listed is not None and (found := _as_folder(*listed)) is not None:
            taken = inner
        elif found is None or inner != taken:
            others[name] = text.strip()[:80]
    told = [f"{name} names {text!r}" for name, text in others.items()]
    if found is None and told:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {where}: {told[0]}, and there is no checkpoint in a folder of this name below "
            "it; open a folder of the run by its path"
        )
    return found and replace(found, notes=[f"{each}, and {taken} is read" for each in told])


def _as_folder(folder: Folder, names: Collection[str]) -> _Found | None:
    return next((_Found(folder, names, form) for form in FORMATS.values() if form.is_folder(names)), None)


def _as_prefix(where: Location) -> _Found | None:
    if isinstance(where, Path) and (where.is_dir() or not where.parent.is_dir()):
        return None
    folder: Folder = open_folder(where.parent) if isinstance(where, Url) else WatchedFolder(where.parent)
    for form in FORMATS.values():
        name = f"{where.name}{form.prefix_suffix}"
        try:
            if form.prefix_suffix and _head(folder, name) is not None:
                return _Found(folder, [name], form, _of_prefix(folder, f"{where.name}."))
        except MalformedError:
            continue  # it is no file
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                raise
    return None


def _of_prefix(folder: Folder, prefix: str) -> Sequence[str]:
    """Return the names that begin with a prefix, where the directory can be listed."""
    with suppress(PermissionError):
        names = folder.names(prefix) if isinstance(folder, LocalFolder) else []
        # A name with one more dot is of another prefix.
        return [name for name in names if "." not in name.removeprefix(prefix)]
    return []


def _as_file(folder: Folder, name: str) -> _Found | None:
    if (head := _head(folder, name)) is None:
        return None
    form = next((form for form in FORMATS.values() if form.is_file(name, head)), None)
    if form is None:
        return None
    form.validate_file(name)
    return _Found(folder, [name], form)


def _head(folder: Folder, name: str) -> bytes | None:
    """Return the first bytes of a file; None if there is none."""
    with suppress(FileNotFoundError):
        return folder.read(name, 0, HEAD_NBYTES)
    return None


def not_understood(where: Location, error: CheckpointError) -> CheckpointError:
    """Return the error for a place without a checkpoint that can be read.

    Args:
        where: The place.
        error: The error of opening it as a checkpoint of this library.
    """
    if isinstance(where, Path) and orbax_files.is_msgpack(where):
        return CheckpointVersionError(
            f"{where} is a checkpoint of Flax in MessagePack, expected one of Orbax; restore it with "
            "flax.training.checkpoints.restore_checkpoint, and save it with Orbax"
        )
    expected = f"expected a checkpoint of dtckpt, {', '.join(form.title for form in FORMATS.values())}"
    if isinstance(where, Path) and where.is_file():
        return CheckpointNotFoundError(
            f"there is no checkpoint at {where}: it is a file of no format that dtckpt reads; {expected}"
        )
    names = LocalFolder(where).names() if isinstance(where, Path) and where.is_dir() else []
    if steps := [name for name in names if isinstance(where, Path) and orbax_files.is_step(where / name)]:
        return CheckpointNotFoundError(
            f"there is no checkpoint at {where}: it holds checkpoints of Orbax, {capped(steps)}; open one of these"
        )
    if any(name.endswith(dcp_files.ITEMS_SUFFIX) for name in names) and DCP_METADATA_NAME not in names:
        return CheckpointIncompleteError(
            f"{where}/{DCP_METADATA_NAME} is missing, without which {dcp_files.ITEMS_SUFFIX} files cannot be read; it "
            "is written last: restore another checkpoint"
        )
    # A directory that nothing of ours is in was not left behind by a save.
    if names and not any(map(is_own_segment, names)):
        return CheckpointNotFoundError(f"there is no checkpoint at {where}: it holds {capped(names)}; {expected}")
    return error
