"""Verify the files of one checkpoint of a root, segment by segment, and mend them from a copy.

First the frame: the manifest, the index, the digests of blocks, documents and small files, in short all bytes that no
chunk covers. Some of them have no digest in the checkpoint: bytes of data files that no reader uses, and metrics. For
them counts the digest that they had when `scrub` first saw the checkpoint. Then the chunks, file by file.

A file is mended as a whole: sound chunks are taken from the file, the others from the copy if they have the manifest's
digest there. The new file is written beside the old one and renamed. If the old file has further names in the root
(hard links), each of them gets the new file.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from dtckpt.checkpoint.copying.chunk_places import ChunkPlaces, Segment, read_manifest, validate_rest
from dtckpt.checkpoint.copying.scrub_state import KnownCheckpoint
from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME, MAX_NBYTES, Lineage
from dtckpt.checkpoint.managing.step_folders import MAX_METRICS_NBYTES, METRICS_NAME
from dtckpt.errors import CheckpointCorruptError, CheckpointError, StorageError, capped
from dtckpt.format import json_facts
from dtckpt.format.digest import bytes_digest, documents_digest
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.format.zarr_documents import DOCUMENT_NAME
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location
from dtckpt.storage.whole_files import RangeSource, WholeFile, list_files, make_parents, open_ranges, replace_file
from dtckpt.storage.zarr_tensorstore import DATA_FOLDER, DATABASE_NAME

logger = logging.getLogger("dtckpt.checkpoint")

OWN_NAMES = (MANIFEST_NAME, DATABASE_NAME, LINEAGE_NAME, METRICS_NAME)
"""The files of a checkpoint that a save writes, beside documents, data files and chunks.

A marker of another program, a signature, and files that a user put there are not among them: these may change.
"""


@dataclass(frozen=True, slots=True)
class ScrubDamage:
    """A damage that was found.

    Args:
        checkpoint: The checkpoint.
        file: The file; empty: the frame as a whole.
        reason: The finding, in words.
        is_mended: Whether the file was replaced.
    """

    checkpoint: Location
    file: str
    reason: str
    is_mended: bool


class Frame:
    """A checkpoint's files and the plan of its chunks, read and validated; see `Frame.read`.

    Args:
        folder: The checkpoint's folder.
        data: The bytes of the manifest.
        plan: The plan.
        files: The files, by name.
    """

    def __init__(self, folder: Folder, data: bytes, plan: ChunkPlaces, files: Mapping[str, WholeFile]) -> None:
        self.folder = folder
        self.data = data
        self.plan = plan
        self.files = files

    @classmethod
    def read(cls, where: Location, folder: Folder) -> Frame:
        """Read a checkpoint's frame. Blocks: on storage.

        Raises:
            CheckpointCorruptError: Something in it is damaged.
        """
        data, manifest = read_manifest(where, folder)
        with translate_errors("list the files", where):
            files = list_files(folder)
        plan = ChunkPlaces.of(where, folder, manifest)
        files = {name: file for name, file in files.items() if name in plan.chunks or is_own(name)}
        validate_rest(where, folder, manifest)
        with translate_errors("read the small files", where, is_read=True):
            if LINEAGE_NAME in files:
                _validate(LINEAGE_NAME, lambda: Lineage.from_bytes(folder.read_whole(LINEAGE_NAME, MAX_NBYTES)))
            if METRICS_NAME in files:
                _validate(
                    METRICS_NAME, lambda: json_facts.parse_object(folder.read_whole(METRICS_NAME, MAX_METRICS_NBYTES))
                )
        return cls(folder, data, plan, files)

    @property
    def digest(self) -> int:
        """Digest of the manifest."""
        return bytes_digest(self.data)

    def names(self) -> list[str]:
        """Return the names of the files that are there or should be, sorted."""
        return sorted(self.files.keys() | self.plan.chunks.keys())

    def segments(self, name: str) -> Iterator[Segment]:
        """Yield the segments of a file."""
        file = self.files.get(name)
        return self.plan.segments(name, 0 if file is None else file.nbytes)

    def rest_digest(self, count: Callable[[int], object]) -> int:
        """Return the digest of all bytes that no chunk covers, and of the names of all files. Blocks: on storage."""
        return documents_digest((name, self._rest(name, count)) for name in self.names())

    def _rest(self, name: str, count: Callable[[int], object]) -> bytes:
        if not any(not segment.chunks for segment in self.segments(name) if self.files.get(name)):
            return b""
        found = []
        with suppress(MalformedError), open_ranges(self.folder, name) as read:
            for segment in self.segments(name):
                if not segment.chunks:
                    # A digest for each range: an old data file may have gigabytes that no chunk covers any more.
                    data = read(segment.start, segment.stop)
                    # An object store does not tell where a file ends, so its last range may be empty.
                    if data.nbytes:
                        found.append(b"%d %d " % (data.nbytes, bytes_digest(data)))
                    count(data.nbytes)
                    if data.nbytes < segment.stop - segment.start:
                        break
        return b"".join(found)


def validate_damage(error: CheckpointError) -> None:
    """Raise an error that says nothing of the stored bytes: storage cannot be reached, or denies access.

    An input or output error of a disk counts as damage.
    """
    cause = error.__cause__
    if isinstance(error, StorageError) and not (isinstance(cause, OSError) and cause.errno == errno.EIO):
        raise error


def is_own(name: str) -> bool:
    """Whether a save writes a file of this name."""
    first, _, rest = name.partition("/")
    is_data = bool(rest) and (first == DATA_FOLDER or first.startswith("client_"))
    return name in OWN_NAMES or is_data or name.rpartition("/")[2] == DOCUMENT_NAME


def _validate(name: str, read: Callable[[], object]) -> None:
    try:
        read()
    except ValueError as error:
        raise MalformedError(f"{name} is damaged: {error}") from None


def _no_bytes(start: int, stop: int) -> memoryview:  # noqa: ARG001  (as a `RangeSource`)
    return memoryview(b"")


class CheckpointScrub:
    """One visit of a checkpoint.

    Args:
        where: The checkpoint.
        folder: Its folder.
        copy_at: Where a copy of it may be, and the copy's folder; None: there is none.
        known: The checkpoint as the last visit has seen it; None: this is the first visit.
        relink: Gives every other name of an inode in the root a file: the inode, the folder and name of the file.
        count: Called with the bytes that were read.
    """

    def __init__(
        self,
        where: Location,
        folder: Folder,
        copy_at: tuple[Location, Folder] | None,
        known: KnownCheckpoint | None,
        *,
        relink: Callable[[WholeFile, LocalFolder, str], object],
        count: Callable[[int], object],
    ) -> None:
        self._where = where
        self.folder = folder
        self._copy_at = copy_at
        self._copy: Frame | None = None
        self._known = known
        self._relink = relink
        self._count = count
        self.damages: list[ScrubDamage] = []

    def frame(self) -> Frame | None:
        """Verify the frame, and mend it; return it, or None if it is damaged and not mended."""
        try:
            return self._sound_frame()
        except (CheckpointCorruptError, StorageError) as error:
            validate_damage(error)
            reason = error.message
        try:
            self._mend_frame()
            frame = self._sound_frame()
        except (CheckpointCorruptError, StorageError) as error:
            self._note("", f"{reason}; it cannot be mended: {error.message}", is_mended=False)
            return None
        self._note("", reason, is_mended=True)
        return frame

    def _sound_frame(self) -> Frame:
        frame = Frame.read(self._where, self.folder)
        self._count(len(frame.data))
        if missing := sorted(frame.plan.chunks.keys() - frame.files.keys()):
            raise CheckpointCorruptError(f"{self._where} is damaged: {capped(missing)} are missing")
        rest = frame.rest_digest(self._count)
        if self._known is None or self._known.manifest != frame.digest:
            self._known = KnownCheckpoint(frame.digest, rest)  # a new checkpoint, or a save has replaced it
        elif self._known.rest != rest:
            raise CheckpointCorruptError(
                f"bytes of {self._where} that no chunk covers have changed since they were first read"
            )
        return frame

    @property
    def known(self) -> KnownCheckpoint | None:
        """The checkpoint as this visit has seen it."""
        return self._known

    def check(self, frame: Frame, name: str, segments: Sequence[Segment]) -> None:
        """Verify some segments of a file; if a chunk in them is damaged, verify and mend the whole file."""
        reasons = list(self._damaged(frame, name, segments))
        if not reasons:
            return
        ending = ""
        try:
            copy = self._twin(frame.data)
            reasons = list(self._damaged(frame, name, list(frame.plan.chunk_segments(name))))
            self._replace(frame.files.get(name), name, self._pieces(frame, copy, name))
        except (CheckpointCorruptError, StorageError) as error:
            ending = f"; it cannot be mended: {error.message}"
        for reason in reasons:
            self._note(name, reason + ending, is_mended=not ending)

    def _damaged(self, frame: Frame, name: str, segments: Sequence[Segment]) -> Iterator[str]:
        try:
            with translate_errors("read {}", self._where, name, is_read=True), open_ranges(self.folder, name) as read:
                for segment in segments:
                    data = read(segment.start, segment.stop)
                    self._count(data.nbytes)
                    for chunk in frame.plan.damaged(segment, data):
                        yield f"{chunk.text} is damaged"
        except (CheckpointCorruptError, StorageError) as error:
            validate_damage(error)
            yield error.message

    def _note(self, file: str, reason: str, *, is_mended: bool) -> None:
        self.damages.append(ScrubDamage(self._where, file, reason, is_mended))

    # --- mending --------------------------------------------------------------------------------------------------

    def _twin(self, data: bytes | None) -> Frame:
        """Return the frame of the copy, if it is a copy of this checkpoint.

        Args:
            data: The bytes of this checkpoint's manifest; None: it is damaged.

        Raises:
            CheckpointCorruptError: There is no copy, the copy is damaged, or it is another checkpoint.
        """
        if self._copy_at is None:
            raise CheckpointCorruptError("there is no copy; name one by --from")
        if self._copy is None:
            try:
                self._copy = Frame.read(*self._copy_at)
            except CheckpointError as error:
                raise CheckpointCorruptError(f"the copy cannot be used: {error.message}") from error
        is_same = self._copy.data == data
        if data is None:
            is_known = self._known is not None and self._known.manifest == self._copy.digest
            is_same = is_known or self._fits(self._copy)
        if not is_same:
            raise CheckpointCorruptError(f"{self._copy_at[0]} is another checkpoint")
        return self._copy

    def _fits(self, copy: Frame) -> bool:
        """Whether a copy's manifest has the digests of all chunks of this checkpoint: both have one manifest."""
        chunks = ((name, list(copy.plan.chunk_segments(name))) for name in copy.plan.chunks)
        return bool(copy.plan.chunks) and not any(
            reason for name, segments in chunks for reason in self._damaged(copy, name, segments)
        )

    def _mend_frame(self) -> None:
        """Write all bytes that no chunk covers as the copy has them, where they differ."""
        try:
            data, _ = read_manifest(self._where, self.folder)
        except CheckpointCorruptError:
            data = None
        copy = self._twin(data)
        known = self._known
        if known is not None and known.manifest == copy.digest and known.rest != copy.rest_digest(self._count):
            raise CheckpointCorruptError("the copy's bytes that no chunk covers have changed, too")
        with translate_errors("list the files", self._where):
            ours = list_files(self.folder)
        # The manifest last: a folder with a manifest is a checkpoint.
        for name in sorted(copy.files, key=lambda name: (name == MANIFEST_NAME, name)):
            if self._rest_differs(copy, name):
                self._replace(ours.get(name), name, self._pieces(copy, copy, name))

    def _rest_differs(self, copy: Frame, name: str) -> bool:
        with translate_errors("compare {}", self._where, name, is_read=True), self._ranges(name) as ours:
            with open_ranges(copy.folder, name) as theirs:
                for segment in copy.segments(name):
                    if not segment.chunks:
                        data = bytes(theirs(segment.start, segment.stop))
                        self._count(2 * len(data))
                        if ours(segment.start, segment.stop) != data:
                            return True
                        if len(data) < segment.stop - segment.start:
                            break
            end = copy.files[name].nbytes
            return not self._is_file(name) or (end is not None and ours(end, end + 1).nbytes > 0)

    def _is_file(self, name: str) -> bool:
        with suppress(MalformedError), open_ranges(self.folder, name) as read:
            read(0, 1)
            return True
        return False

    @contextmanager
    def _ranges(self, name: str) -> Iterator[RangeSource]:
        """Open a file of the checkpoint; a missing one has no bytes."""
        with ExitStack() as stack:
            try:
                read = stack.enter_context(open_ranges(self.folder, name))
            except MalformedError:
                yield _no_bytes
                return

            def read_or_miss(start: int, stop: int) -> memoryview:
                try:
                    return read(start, stop)
                except MalformedError:
                    return _no_bytes(start, stop)

            yield read_or_miss

    def _pieces(self, frame: Frame, copy: Frame, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a file: sound chunks from the file, all else from the copy, verified."""
        with self._ranges(name) as ours, open_ranges(copy.folder, name) as theirs:
            for segment in copy.segments(name):
                data = ours(segment.start, segment.stop) if segment.chunks else _no_bytes(0, 0)
                self._count(data.nbytes)
                lost = {chunk.start for chunk in frame.plan.damaged(segment, data)}
                if lost or not segment.chunks:
                    data = self._mended(segment, data, theirs(segment.start, segment.stop), lost, copy)
                yield data
                if data.nbytes < segment.stop - segment.start:
                    break

    def _mended(
        self, segment: Segment, ours: memoryview, theirs: memoryview, lost: Set[int], copy: Frame
    ) -> memoryview:
        """Return the bytes of a segment: chunks that begin at a byte of ``lost`` from the copy, the others from here.

        Raises:
            CheckpointCorruptError: One of them is damaged in the copy, too.
        """
        self._count(theirs.nbytes)
        if both := [chunk.text for chunk in copy.plan.damaged(segment, theirs) if chunk.start in lost]:
            raise CheckpointCorruptError(f"{capped(both)} is damaged in the copy, too")
        mended = bytearray(max(ours.nbytes, theirs.nbytes))
        mended[: theirs.nbytes] = theirs
        for chunk in segment.chunks:
            if chunk.start not in lost:
                at = slice(chunk.start - segment.start, chunk.stop - segment.start)
                mended[at] = ours[at]
        return memoryview(mended)

    def _replace(self, file: WholeFile | None, name: str, pieces: Iterator[memoryview]) -> None:
        with translate_errors("replace {}", self._where, name):
            make_parents(self.folder, [name])
            replace_file(self.folder, name, pieces)
            if file is not None and file.num_names > 1 and isinstance(self.folder, LocalFolder):
                self._relink(file, self.folder, name)
        logger.warning("%s/%s was damaged, and is replaced from the copy", self._where, name)
