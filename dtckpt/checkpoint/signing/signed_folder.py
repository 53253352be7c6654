"""`SignedFolder`: a checkpoint's folder whose every read is verified by the digests that a trusted key has signed.

All reads of a checkpoint pass through its folder: the manifest, the index, the digests of blocks, the chunks. Here they
read the blocks that a range lies in, digest those very bytes, and only then hand on the range::

    file ----> the block's memory ----> digest as signed? ----> the range, to the caller's memory

So the bytes that are used are the bytes that were signed, whatever happens to the files meanwhile, and no other byte
gets to a tensor. A restore reads and digests each byte once. The last block of each thread is kept, as the next range
of a chunk begins where this one ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dtckpt.checkpoint.reading.read_chunks import Scratch
from dtckpt.checkpoint.signing.keys import KeySource, public_keys, signers
from dtckpt.checkpoint.signing.statement import (
    MAX_SIGNATURE_NBYTES,
    SIGNATURE_NAME,
    Envelope,
    SignedFile,
    SignedFiles,
    block_digest,
    signed_message,
)
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointUntrustedError, ConfigError, capped
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_values import OpenFile
from dtckpt.storage.location import Location
from dtckpt.storage.regular_files import too_long_error

NUM_THREADS = 8
"""Ranges that `SignedFolder.validate_files` verifies at one time."""
RANGE_NBYTES = 8 << 20
"""About the bytes of one of them."""
MAX_CACHED_NBYTES = 32 << 20
"""Bytes of verified blocks that are kept, for reads of small parts of one block."""


class _LastBlock(Scratch):
    """The block of a local file that this thread verified last; its memory stays in the processor's cache."""

    place: tuple[str, int] | None = None
    data: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class _VerifiedBlocks:
    """The blocks that `SignedFolder.read` verified last. Thread-safe.

    Attributes:
        last: The blocks of local files.
    """

    def __init__(self) -> None:
        self.last = _LastBlock()
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._nbytes = 0

    def get(self, key: tuple[str, int]) -> bytes | None:
        """Return a block; None if it is not kept."""
        with self._lock:
            if (found := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
            return found

    def put(self, key: tuple[str, int], data: bytes) -> None:
        """Keep a block, and drop the blocks that were not used for long."""
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = data
                self._nbytes += len(data)
            while self._nbytes > MAX_CACHED_NBYTES and len(self._blocks) > 1:
                self._nbytes -= len(self._blocks.popitem(last=False)[1])


class _VerifiedFile(OpenFile):
    """A signed file of this machine. Thread-safe.

    Args:
        plain: The open file.
        folder: The folder that it was opened in.
        name: Its name there.
        last: The blocks that were verified last.
    """

    def __init__(self, plain: OpenFile, folder: SignedFolder, name: str, last: _LastBlock) -> None:
        self._plain, self._folder, self._name, self._last = plain, folder, name, last
        self._place = str(folder / name)
        self.descriptor, self.nbytes = plain.descriptor, folder.file(name).nbytes

    @override
    def read_into(self, memories: Sequence[memoryview], position: int) -> int:
        start, step = position, self._folder.block_nbytes
        for memory in memories:
            target = np.frombuffer(memory, np.uint8) if memory.nbytes else self._last.data[:0]
            while target.size and position < self.nbytes:
                number, begin = divmod(position, step)
                part = self._block(number)[begin : begin + target.size]
                target[: part.size] = part
                target, position = target[part.size :], position + part.size
        return position - start

    def _block(self, number: int) -> npt.NDArray[np.uint8]:
        """Return the verified bytes of a block; the next call may reuse the memory."""
        last, step, place = self._last, self._folder.block_nbytes, (self._place, number)
        if last.place != place:
            last.place = None
            start, stop = number * step, min((number + 1) * step, self.nbytes)
            last.data = last.take(stop - start, start)
            filled = 0
            while nbytes := self._plain.read_into([last.data[filled:].data], start + filled):
                filled += nbytes
            self._folder.validate_blocks(self._name, number, number + 1, last.data[:filled].data)
            last.place = place
        return last.data


class SignedFolder(Folder):
    """A folder of signed files, for reading.

    Args:
        inner: The folder.
        signed: The digests.
        signers: The ids of the trusted keys that have signed them.
        prefix: The folder's name below the checkpoint's, with a slash; empty: the checkpoint's.
        blocks: The blocks that were verified last.
    """

    def __init__(
        self,
        inner: Folder,
        signed: SignedFiles,
        signers: tuple[str, ...],
        prefix: str = "",
        blocks: _VerifiedBlocks | None = None,
    ) -> None:
        self.signers = signers
        self.is_local = inner.is_local
        self._inner = inner
        self._signed = signed
        self._prefix = prefix
        self._blocks = blocks or _VerifiedBlocks()

    def __str__(self) -> str:
        return str(self._inner)

    @override
    def __truediv__(self, name: str) -> Self:
        return type(self)(self._inner / name, self._signed, self.signers, f"{self._prefix}{name}/", self._blocks)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block; the last block of a file may be shorter."""
        return self._signed.block_nbytes

    def file(self, name: str) -> SignedFile:
        """Return the digests of a file. Raises: FileNotFoundError: It was not signed."""
        try:
            return self._signed.files[self._prefix + name]
        except KeyError:
            raise FileNotFoundError(f"{self}/{name} is not among the signed files") from None

    @override
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        file, step = self.file(name), self.block_nbytes
        stop = file.nbytes if stop is None else min(stop, file.nbytes)
        if start >= stop:
            return b""
        first, last = start // step, -(-stop // step)
        if last - first == 1 and (kept := self._blocks.get((self._prefix + name, first))) is not None:
            return kept[start - first * step : stop - first * step]
        data = self._verified(name, file, first, last)
        if last - first == 1:
            self._blocks.put((self._prefix + name, first), data)
        return data[start - first * step : stop - first * step]

    def _verified(self, name: str, file: SignedFile, first: int, last: int) -> bytes:
        """Read blocks ``first`` to ``last`` (exclusive) of a file, and compare their digests."""
        data = self._inner.read(name, first * self.block_nbytes, min(last * self.block_nbytes, file.nbytes))
        self.validate_blocks(name, first, last, memoryview(data))
        return data

    def validate_blocks(self, name: str, first: int, last: int, data: memoryview) -> None:
        """Compare the bytes of blocks ``first`` to ``last`` (exclusive) of a file with the signed digests.

        Raises:
            CheckpointUntrustedError: The file was changed, or cut off, after it was signed.
        """
        file, step = self.file(name), self.block_nbytes
        start, stop = first * step, min(last * step, file.nbytes)
        if data.nbytes < stop - start or any(
            block_digest(data[(number - first) * step :][:step], self._signed.algorithm) != file.digest(number)
            for number in range(first, last)
        ):
            raise CheckpointUntrustedError(
                f"{self}/{name} was changed after it was signed: bytes {start} to {stop} are not the signed ones; "
                "restore another checkpoint"
            )

    @override
    def open_local(self, name: str) -> OpenFile:
        self.file(name)
        return _VerifiedFile(self._inner.open_local(name), self, name, self._blocks.last)

    @override
    def read_whole(self, name: str, most: int) -> bytes:
        if self.file(name).nbytes > most:
            raise too_long_error(name, most)
        return self.read(name)

    @override
    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        for name, least in sizes.items():
            file = self._signed.files.get(self._prefix + name)
            if file is None or file.nbytes < least:
                return name
        return self._inner.find_short_file(sizes)

    @override
    def names(self, prefix: str = "") -> list[str]:
        start = self._prefix + prefix
        return sorted(name[len(self._prefix) :] for name in self._signed.files if name.startswith(start))

    @override
    def kvstore(self, *, to_write: bool = False) -> dict[str, Any] | None:
        # It tells only whether there may be a database: chunks are read by `read`.
        return self._inner.kvstore(to_write=to_write)

    def validate_sizes(self, index: int, count: int) -> None:
        """Check that no file of one of ``count`` shares of all files is missing or cut off; no file is read.

        Blocks: On storage.

        Args:
            index: The share.
            count: The number of shares, together all files.

        Raises:
            CheckpointUntrustedError: A file was removed or cut off after it was signed.
            StorageError: Storage refused.
        """
        files = self._signed.files
        sizes = {name: files[name].nbytes for name in sorted(files)[index::count]}
        with translate_errors("look for the signed files", self, is_read=True):
            if (short := self._inner.find_short_file(sizes)) is not None:
                raise CheckpointUntrustedError(
                    f"{self}/{short} was removed or cut off after it was signed; expected {sizes[short]} bytes; "
                    "restore another checkpoint"
                )

    def validate_files(self) -> None:
        """Verify all bytes of all files, also of files that no reader needs. Blocks: on storage.

        Raises:
            CheckpointUntrustedError: A file was changed after it was signed.
            StorageError: Storage refused.
        """
        with (
            translate_errors("verify the signed files", self, is_read=True),
            Pool(NUM_THREADS, "dtckpt-signed") as pool,
        ):
            for _ in pool.map(self._validate_range, self._ranges()):
                pass

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield all blocks, in ranges of a file: its name, the first block, the block behind the last."""
        at_once = max(1, RANGE_NBYTES // self.block_nbytes)
        for name, file in sorted(self._signed.files.items()):
            number = -(-file.nbytes // self.block_nbytes)
            # A file without bytes must be there, too.
            for first in range(0, max(1, number), at_once):
                yield name, first, min(first + at_once, number)

    def _validate_range(self, found: tuple[str, int, int]) -> None:
        name, first, last = found
        try:
            self._verified(name, self._signed.files[name], first, last)
        except FileNotFoundError:
            raise CheckpointUntrustedError(f"{self}/{name} was signed, and is missing; restore another") from None

    # --- a reader writes nothing ----------------------------------------------------------------------------------

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise PermissionError(f"{self} is open to be read, by its signature")

    @override
    def make(self) -> None:
        self._refuse()

    @override
    def write(self, name: str, data: bytes) -> None:
        self._refuse()

    @override
    def replace(self, name: str, data: bytes) -> None:
        self._refuse()

    @override
    def sync(self, names: Iterable[str]) -> None:
        self._refuse()

    @override
    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        self._refuse()

    @override
    def settle(self, names: Iterable[str]) -> None:
        self._refuse()

    @override
    def remove(self, names: Iterable[str]) -> None:
        self._refuse()


def open_signed(where: Location, folder: Folder, trusted: Iterable[KeySource]) -> SignedFolder:
    """Return a checkpoint's folder for reads of signed bytes.

    Args:
        where: The checkpoint, for messages.
        folder: Its folder.
        trusted: The public keys, of which one must have signed it.

    Raises:
        CheckpointUntrustedError: No trusted key has signed the checkpoint.
        ConfigError: A key cannot be read, or the package for its digests is not installed.
        StorageError: Storage refused.
    """
    keys = public_keys(tuple(trusted))
    with translate_errors("read the signature", where, is_read=True):
        try:
            envelope = Envelope.from_bytes(folder.read_whole(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES))
        except FileNotFoundError:
            raise CheckpointUntrustedError(
                f"{where} is not signed, and the restore asks for a signature of a trusted key; dtckpt sign signs it"
            ) from None
        except (MalformedError, ValueError) as error:
            raise CheckpointUntrustedError(f"the signature of {where} cannot be read: {error}") from None
    found = signers(signed_message(envelope.payload), envelope.signatures, keys)
    if not found:
        raise CheckpointUntrustedError(
            f"no trusted key has signed {where}; got keys {capped(map(repr, envelope.signatures)) or 'none'}, "
            f"expected one of {', '.join(keys)}"
        )
    try:
        signed = SignedFiles.from_bytes(envelope.payload)
    except ConfigError:
        raise
    except ValueError as error:
        raise CheckpointUntrustedError(f"the signed digests of {where} cannot be read: {error}") from None
    return SignedFolder(folder, signed, tuple(found))
