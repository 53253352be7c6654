"""`Checkpoint`: the tensors and values of any open checkpoint, and verified reads of any region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.reading.verified_reads import UNCHECKED_NBYTES
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DtckptError,
    StorageError,
    TensorNotFoundError,
    capped,
    did_you_mean,
)
from dtckpt.format import tree as trees
from dtckpt.format.manifest import Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location, is_remote

if TYPE_CHECKING:
    import torch

    from dtckpt.checkpoint.reading.verify import Progress, VerifyReport
    from dtckpt.checkpoint.signing.signed_folder import SignedFolder


from dtckpt.errors import format_nbytes
from dtckpt.pictures.notebook import drawn
from dtckpt.pictures.sharding import MAX_DRAWN_RANK, Subject
from dtckpt.pictures.svg import escape

T = TypeVar("T")


class Checkpoint:
    """A checkpoint, open for reading: of this library's format, or another's. Thread-safe; a context manager.

    Reads are local: any client may read any region at any time, without the others.

    Args:
        path: Its path or URL.
        files: Its files.
        reopen: Opens the checkpoint that is at its path now; None: no save can replace this checkpoint.
        signed: Its folder, if every read is compared with digests that a trusted key has signed.
    """

    def __init__(
        self,
        path: Location,
        files: CheckpointFiles,
        reopen: Callable[[], Checkpoint] | None = None,
        signed: SignedFolder | None = None,
    ) -> None:
        self.path = path
        # Signed bytes are read as bytes of other storage are: once for all clients, and not straight from a file.
        self.is_remote = is_remote(path)
        self.signed = signed
        self.files = files
        self.reopen = reopen
        self.tensors: Mapping[str, TensorInfo] = files.tensors

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors)"

    def _repr_html_(self) -> str:
        return checkpoint_html(repr(self), self.tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that reading holds open."""
        self.files.close()

    @property
    def format(self) -> str:
        """The format of the files: ``dtckpt``, or another library's format, as ``safetensors``."""
        return self.files.kind

    @property
    def identity(self) -> str:
        """A token that clients compare: equal if and only if they opened the same checkpoint."""
        return self.files.identity

    @property
    def manifest(self) -> Manifest:
        """The manifest of a checkpoint of this library's format.

        Raises:
            CheckpointError: The checkpoint is of another format.
        """
        if not isinstance(self.files, ManifestFiles):
            raise CheckpointError(f"{self.path} is of format {self.format}, and has no manifest of dtckpt")
        return self.files.manifest

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of the state tree, by path."""
        return dict(trees.values(self.structure))

    @property
    def refused(self) -> Mapping[str, DtckptError]:
        """By path, why something in another library's checkpoint, which `structure` lacks, cannot be read."""
        return self.files.refused

    @property
    def unread(self) -> Sequence[str]:
        """Names of the files, and of the notes in files, that are not read in another library's directory.

        Where directories cannot be listed, as in object stores, files that this library does not know are not found.
        """
        return self.files.unread

    @property
    def notes(self) -> Sequence[str]:
        """Texts about tensors of another library that are kept as stored, such as a padded vocabulary."""
        return self.files.notes

    def validate_readable(self, path: str = "") -> None:
        """Check that everything at a path, above it and below it can be read; by default the whole checkpoint.

        Raises:
            TreeError: Something is of a class that only code could make; or another error, if it is damaged.
        """
        for name, refusal in self.refused.items():
            if not path or f"{name}/".startswith(f"{path}/") or f"{path}/".startswith(f"{name}/"):
                # Anew: an error that is raised twice would hold the traces of both.
                raise type(refusal)(refusal.message)

    @property
    def structure(self) -> trees.Node:
        """The saved state tree's structure (see `dtckpt.format.tree`), which must not be changed.

        A flat set of named tensors counts as a dict of them.
        """
        return self.files.structure

    @property
    def tree(self) -> bytes:
        """The structure as JSON; empty for a flat set of named tensors."""
        return self.files.tree

    def fingerprint(self) -> bytes:
        """Return bytes that differ between checkpoints of different content."""
        return self.files.fingerprint()

    def tied(self) -> Mapping[str, str]:
        """Return, for each tensor that is made of the same bytes as an earlier one in the tree, the first such one.

        A checkpoint of this library has no such tensors.
        """
        return self.files.tied()

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return a tensor, or a region of it, as a new CPU tensor; every byte is verified.

        Raises:
            TensorNotFoundError: There is no such tensor.
            RegionError: The region is outside the tensor.
            RegionNotFoundError: That part of the tensor was not saved.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
        """
        # Here, because they import PyTorch, which takes seconds: commands that only look or verify do without it.
        from dtckpt.checkpoint.leaves import host_array, new_memory

        info = self.info(name)
        region = Region.full(info.shape) if region is None else region
        # Before memory is taken: the tensor's shape is a claim of the manifest, and may be any.
        self.validate_stored([(name, region)])
        result = new_memory(name, region.shape, info.dtype)
        self.read_into(name, region, host_array(result))
        return result

    def info(self, name: str) -> TensorInfo:
        """Return the facts about a tensor.

        Raises:
            TensorNotFoundError: There is no such tensor.
            TreeError: The tensor is there and cannot be read.
        """
        try:
            return self.tensors[name]
        except KeyError:
            self.validate_readable(name)
            hint = did_you_mean(name, self.tensors) or f"; it has {capped(map(repr, self.tensors))}"
            raise TensorNotFoundError(f"checkpoint {self.path} has no tensor {name!r}{hint}", name=name) from None

    def read_into(
        self, name: str, region: Region, into: np.ndarray[Any, Any], *, max_in_flight: int | None = None
    ) -> int:
        """Read a region of a tensor into an array of its shape, converting to the array's dtype.

        Only chunks that intersect the region are read, and of large chunks only the blocks that do. Chunks inside the
        region are read straight into ``into``.

        Args:
            name: Tensor name.
            region: The region to read, in global indices.
            into: Array of the region's shape.
            max_in_flight: Bound on the bytes of chunks that are read at one time (one chunk may exceed it); default: as
                is fast for the storage.

        Returns:
            The bytes read from storage.
        """
        return self.read_all([(name, [(region, into)])], max_in_flight=max_in_flight)

    def read_all(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        *,
        max_in_flight: int | None = None,
        count: Callable[[int], object] = lambda _: None,
    ) -> int:
        """Read regions of many tensors at the same time, each as `read_into`.

        A chunk that several regions of one tensor need is read once.

        Args:
            requests: For each tensor its name, and the regions to read, each with an array of its shape.
            max_in_flight: As for `read_into`.
            count: Called with the bytes of every part of a chunk that was read.

        Returns:
            The bytes read from storage.
        """
        try:
            return self.files.read(self._known(requests), max_in_flight, count)
        except (CheckpointCorruptError, StorageError) as error:
            raise self.cause_of(error) from error

    def is_held(self, name: str, buffers: RegionBuffers) -> bool:  # noqa: ARG002  for those that know
        """Whether memory has regions of a tensor already; the clients that need the tensor say the same. Local.

        Most kinds of checkpoints cannot know and return False.

        Args:
            name: The tensor's name.
            buffers: The regions, each with its memory.
        """
        return False

    def has_taken(self, name: str) -> bool:  # noqa: ARG002  as above
        """Whether bytes of a tensor were read; no if all of them were held. The checkpoint may be closed. Local."""
        return True

    def has_elements(self, name: str, buffers: RegionBuffers) -> bool:  # noqa: ARG002  as above
        """Whether memory, of any owner, has the elements of regions of a tensor, as its digests tell. Local.

        The checkpoint may be closed.

        Args:
            name: The tensor's name.
            buffers: The regions, each with its memory.
        """
        return False

    def note_filled(self, tensors: Iterable[tuple[str, RegionBuffers]]) -> None:
        """Learn that a restore has read everything, and that some memory was filled with what other clients read.

        Args:
            tensors: Those tensors' names, and their regions, each with its memory.
        """

    def validate_stored(self, regions: Iterable[tuple[str, Region]], *, unchecked: int = UNCHECKED_NBYTES) -> None:
        """Check that the files are long enough for regions, before memory for them is taken.

        Otherwise a damaged or hostile description could ask for any amount of memory.

        Args:
            regions: The regions, each with the name of its tensor.
            unchecked: The smallest regions are not checked, up to so many bytes together.

        Raises:
            TensorNotFoundError: There is no such tensor.
        """
        try:
            self.files.validate_stored(self._known(regions), unchecked)
        except (CheckpointCorruptError, StorageError) as error:
            raise self.cause_of(error) from error

    def validate_wanted(self, names: Iterable[str]) -> None:
        """Check, before anything is written, that a reader understands tensors as they are meant."""

    def _known(self, requests: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yield requests, after a look whether there is such a tensor."""
        # An iterator: the reads of millions of chunks are never planned all at once.
        for name, request in requests:
            if name not in self.tensors:
                self.info(name)
            yield name, request

    def cause_of(self, error: CheckpointError) -> CheckpointError:
        """Return the error, or another error if a save has replaced the checkpoint since it was opened."""
        if self.reopen is None:
            return error
        try:
            with self.reopen() as now:
                is_same = now.identity == self.identity
        except CheckpointNotFoundError:
            is_same = False
        except CheckpointError:
            # Whether it was replaced cannot be told, and the first error says more than this error.
            is_same = True
        if is_same:
            return error
        return CheckpointConflictError(f"{self.path} was replaced or removed while it was being read; open it again")

    def verify(self, *, threads: int | None = None, progress: Progress | None = None) -> VerifyReport:
        """Read everything and compare all digests: of chunks, of their blocks, and of the tensors' content.

        Other libraries' files usually have no digests. Then the report says only whether all tensors can be read. Files
        that `dtckpt.convert` wrote can have content digests. Then the report also says which tensors have changed.

        Args:
            threads: Chunks that are read and digested at one time; default: one per core, from 4 to 8. Fewer, where
                chunks are so large that they would need more than 256 MiB of memory.
            progress: See `dtckpt.checkpoint.reading.verify.Progress`.

        Raises:
            CheckpointConflictError: A save replaced the checkpoint meanwhile.
        """
        # Here, because its digests are slow to import, and few programs verify a checkpoint.
        from dtckpt.checkpoint.reading.verify import verify

        return verify(self, self.files, threads=threads, progress=progress)


MAX_ROWS = 40


def checkpoint_html(title: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the tensors of a checkpoint as HTML.

    Args:
        title: The heading.
        tensors: Facts of the tensors, by name.
    """
    return "".join(_parts(title, tensors))


def _parts(title: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    yield f"<p><b>{escape(title)}</b></p><table><tr>"
    yield "".join(f"<th>{heading}</th>" for heading in ("tensor", "shape", "dtype", "layout", "size", "chunks"))
    yield "</tr>"
    shown = [tensors[name] for name in list(tensors)[:MAX_ROWS]]
    for each in shown:
        layout = ", ".join(map(str, each.layout.sharding_specs)) if each.layout else ""
        cells = (each.name, each.shape, each.dtype_name, layout, format_nbytes(each.nbytes), each.num_chunks)
        yield f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
    yield "</table>"
    if more := len(tensors) - len(shown):
        yield f"<p>and {more} more</p>"
    drawable = [each for each in shown if each.layout is not None and 0 < len(each.shape) <= MAX_DRAWN_RANK]
    largest = max(drawable, key=lambda info: info.nbytes, default=None)
    if largest is not None and largest.layout is not None:
        yield drawn(Subject(largest.layout, largest.shape), largest.name) or ""
