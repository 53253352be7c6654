"""The storage interface: `Folder`, files by name below one path or URL, and `open_folder`, which finds the back end.

Back ends:

* `dtckpt.storage.local_folder`: a directory of a file system;
* `dtckpt.storage.s3_gcs_folder`: a prefix of a bucket of S3 or Google Cloud Storage, through TensorStore;
* `dtckpt.storage.fsspec_folder`: any other URL, through fsspec.

A folder raises the errors of its library; its callers translate them (`dtckpt.storage.failures.translate_errors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from dtckpt.storage.failures import MalformedError
from dtckpt.storage.local_values import OpenFile
from dtckpt.storage.url import Url


class Folder(Protocol):
    """Files by name below one path or URL. Names may hold slashes."""

    confirms_writes: bool = False
    """Whether storage compares a digest of the bytes of each write before it confirms the write."""
    is_local: bool = False
    """Whether the files are files of this machine, which `open_local` opens."""

    def __truediv__(self, name: str) -> Self:
        """Return a folder below this folder."""
        ...

    def make(self) -> None:
        """Make the folder, where folders must be made; its parent must exist."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return a file's content, or bytes ``start`` to ``stop`` of it: fewer, maybe none, where the file ends before.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the contents of files, which may be read at the same time. Raises: as `read`."""
        return map(self.read, names)

    def read_whole(self, name: str, most: int) -> bytes:
        """Return a file's content, unless the file has more than ``most`` bytes: then it is not read.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedError: The file is longer, or is no regular file.
        """
        ...

    def open_local(self, name: str) -> OpenFile:
        """Open a file of this machine, where `is_local`.

        Raises:
            MalformedError: The file is missing, is no regular file, or is not on this machine.
        """
        raise MalformedError(f"{self}/{name} is no file of this machine")

    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        """Return the name of a file that is missing or shorter than its size here; None if there is none.

        No file is read.

        Args:
            sizes: By file name, the fewest bytes that the file must have.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        ...

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Write whole files, maybe at the same time: their contents, by name."""
        for name, data in files.items():
            self.write(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a whole file that others may read at this moment: they find the former content or this, no mixture."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Wait until the files of these names survive a power loss. Does nothing if every write is durable already."""
        ...

    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        """In a context, start to write the files of a subfolder to the disk early, so that `sync` has less to do."""
        ...

    def settle(self, names: Iterable[str]) -> None:
        """Write out large files that are not read soon: `sync` has less to do, and they leave this machine's memory."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files below whose names begin with ``prefix``, sorted."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and pass over missing files."""
        ...

    def remove_below(self, names: Mapping[str, Iterable[str]]) -> None:
        """Remove files of folders below this folder, as `remove`: their names, by folder."""
        for folder, below in names.items():
            (self / folder).remove(below)

    def remove_tree(self, name: str) -> None:
        """Remove the folder of this name below this one, with all that is in it, if it is there."""
        below = self / name
        below.remove(below.names())

    def share(self, source: Folder, sizes: Mapping[str, int]) -> bool:  # noqa: ARG002  (for those that can)
        """Make files of another folder files of this folder, too, under the same names, without sending their bytes.

        Args:
            source: The other folder.
            sizes: By file name, the fewest bytes that the file must have.

        Returns:
            Whether the store can do this between the two folders; if not, nothing was done.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedError: A file is shorter, or is no regular file.
            OSError: The store refused. Some of the files may be there.
        """
        return False

    def kvstore(self, *, to_write: bool = False) -> dict[str, Any] | None:
        """Return TensorStore's specification of this folder as a key-value store; None if TensorStore cannot reach it.

        Args:
            to_write: Whether to write, in which case `sync` makes the files durable, not TensorStore.
        """
        ...


class ObjectFolder(Folder, Protocol):
    """A folder of a store that can create a file in one step: if several clients try, only the first succeeds."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file if there is none of that name yet; return whether there was none."""
        ...

    def clear(self) -> None:
        """Remove all files."""
        ...


def open_folder(url: Url) -> ObjectFolder:
    """Return the folder at a URL.

    Raises:
        ConfigError: No back end has this scheme, or the URL names no bucket.
    """
    # Imported here: the back ends import this module, and fsspec is slow to import.
    from dtckpt.storage import s3_gcs_folder

    if url.scheme in s3_gcs_folder.SCHEMES:
        return s3_gcs_folder.open_bucket_folder(url)
    from dtckpt.storage.fsspec_folder import open_fsspec_folder

    return open_fsspec_folder(str(url))
