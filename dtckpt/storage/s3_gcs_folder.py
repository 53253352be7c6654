"""The S3 and Google Cloud Storage back end: `BucketFolder`, a prefix of a bucket, through TensorStore.

Every write is durable when it returns, so `sync` has nothing to do. `BucketFolder.create` is a conditional write: the
commit by decision rests on it (`dtckpt.storage.commit_by_decision`).
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from typing_extensions import override

from dtckpt.errors import ConfigError
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder, ObjectFolder
from dtckpt.storage.regular_files import too_long_error
from dtckpt.storage.tensorstore_setup import open_context, tensorstore
from dtckpt.storage.url import Url

SILENCE_S = 60
"""Seconds without a byte to or from an object store after which TensorStore gives a request up, and repeats it
(`dtckpt.storage.tensorstore_setup.RETRIES`)."""

MAX_PROBES = 256
"""Files of an object store whose sizes are asked for at one time."""


def open_bucket_folder(url: Url) -> BucketFolder:
    """Return the folder at a URL whose scheme is one of `SCHEMES`.

    Raises:
        ConfigError: The URL names no bucket.
    """
    bucket, _, path = url.text.partition("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket")
    _bound_waits()
    return BucketFolder({**SCHEMES[url.scheme](), "bucket": bucket}, path, str(url))


def _bound_waits() -> None:
    """Have TensorStore give up requests that a server leaves without an answer; else it would wait for ever.

    TensorStore takes this bound from the environment only, at its first request. A value that the user has set stays.
    """
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(SILENCE_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def _s3_spec() -> dict[str, Any]:
    """Return TensorStore's specification of S3, from the environment variables of AWS.

    Conditional writes are asked for by name: without that, at an endpoint that is not Amazon's, TensorStore would look
    first and write then.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {"driver": "s3", "use_conditional_write": True}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}
    if endpoint:
        # TensorStore cannot ask an endpoint that is not Amazon's for the region.
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    return spec


def _gcs_spec() -> dict[str, Any]:
    """Return TensorStore's specification of Google Cloud Storage; TensorStore finds the credentials."""
    return {"driver": "gcs"}


SCHEMES = {"s3": _s3_spec, "gs": _gcs_spec}
"""Schemes of URLs that TensorStore reaches: each makes TensorStore's specification of its store."""


class BucketFolder(ObjectFolder):
    """A prefix of a bucket.

    Args:
        spec: TensorStore's specification of the bucket, without a path.
        path: The prefix, without slashes at its ends.
        where: The folder's URL, for messages.
    """

    def __init__(self, spec: Mapping[str, Any], path: str, where: str) -> None:
        self._spec = spec
        self._path = path
        self._where = where
        self._store: Any = None
        # TensorStore signs each upload to S3 with the SHA-256 digest of its bytes, and S3 refuses other bytes.
        self.confirms_writes = spec["driver"] == "s3"

    def __str__(self) -> str:
        return self._where

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._spec, f"{self._path}/{name}".lstrip("/"), f"{self._where}/{name}")

    @override
    def make(self) -> None:
        """A bucket has no folders to make."""

    @override
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        part = {} if (start, stop) == (0, None) else {"byte_range": slice(start, stop)}
        try:
            result = self._open().read(name, **part).result()
        except ValueError as error:
            # TensorStore refuses a range that goes behind the end, where a `Folder` returns the bytes before it.
            if "OUT_OF_RANGE" not in str(error):
                raise
            return b"" if stop is None else self.read(name, start)[: stop - start]
        return _value(f"{self}/{name}", result)

    def start_read(self, name: str, start: int, stop: int) -> Any:
        """Start a read of bytes ``start`` to ``stop`` of a file; return TensorStore's future of it."""
        return self._open().read(name, byte_range=slice(start, stop))

    @override
    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        waiting = iter(names)
        while batch := list(itertools.islice(waiting, MAX_PROBES)):
            # The list makes all requests before the first is waited for.
            for name, read in [(name, self._open().read(name)) for name in batch]:
                yield _value(f"{self}/{name}", read.result())

    @override
    def read_whole(self, name: str, most: int) -> bytes:
        """TensorStore does not tell sizes, only whether a file has a byte at a position."""
        if self.find_short_file({name: most + 1}) is None:
            raise too_long_error(name, most)
        return self.read(name)

    @override
    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        files = iter(sizes.items())
        while batch := list(itertools.islice(files, MAX_PROBES)):
            # A read of the last byte that a file must have tells whether the file is long enough.
            probes = [(name, self.start_read(name, least - 1, least)) for name, least in batch]
            # All answers are waited for before one of them counts, so no request is left under way.
            answers = [(name, probe.exception(), probe) for name, probe in probes]
            for name, error, probe in answers:
                if error is not None and "OUT_OF_RANGE" not in str(error):
                    raise error
                if error is not None or probe.result().state != "value":
                    return name
        return None

    @override
    def write(self, name: str, data: bytes) -> None:
        self._open().write(name, data).result()

    @override
    def write_all(self, files: Mapping[str, bytes]) -> None:
        # As in `remove`: all requests are made first. After a failure no request is under way.
        writes = [self._open().write(name, data) for name, data in files.items()]
        errors = [write.exception() for write in writes]
        if error := next(filter(None, errors), None):
            raise error

    replace = write  # the store shows no half of an object

    @override
    def share(self, source: Folder, sizes: Mapping[str, int]) -> bool:
        """Have S3 copy the objects, between buckets of one store; not where the environment names no region.

        Google's store has such a request, too, but TensorStore has none, and keeps the credentials to itself.
        """
        if not isinstance(source, BucketFolder) or {**source._spec, "bucket": self._bucket} != self._spec:
            return False
        if "aws_region" not in self._spec:
            return False
        if (short := source.find_short_file({name: least for name, least in sizes.items() if least})) is not None:
            raise MalformedError(f"{source}/{short} is missing or too short")
        from dtckpt.storage.s3_copies import copy_objects  # here, because it loads a further library

        pairs = ((source._place(name), self._place(name)) for name in sizes)
        copy_objects(self._spec.get("endpoint", ""), self._spec["aws_region"], pairs)
        return True

    @property
    def _bucket(self) -> str:
        return str(self._spec["bucket"])

    def _place(self, name: str) -> str:
        """Return the bucket and the key of a file."""
        return "/".join(filter(None, (self._bucket, self._path, name)))

    @override
    def sync(self, names: Iterable[str]) -> None:
        """Writes are durable."""

    @override
    def settle(self, names: Iterable[str]) -> None:
        """There is nothing to be done."""

    @override
    def early_sync(self, folder: str) -> AbstractContextManager[None]:  # writes are durable
        return nullcontext()

    @override
    def create(self, name: str, data: bytes) -> bool:
        # The condition of the write is that the file is still missing: a file that another client creates after this
        # look wins.
        current = self._open().read(name).result()
        if current.state != "missing":
            return False
        stamp = self._open().write(name, data, if_equal=current.stamp.generation).result()
        return bool(stamp.generation)  # empty where the condition failed, and nothing was written

    @override
    def names(self, prefix: str = "") -> list[str]:
        # Names are text to Google's API, so the end of the range must be, too.
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        names = self._open().list(tensorstore().KvStore.KeyRange(prefix, after)).result()
        return sorted(name.decode() for name in names)

    @override
    def remove(self, names: Iterable[str]) -> None:
        store = self._open()
        # The list makes all requests before the first is waited for.
        for removal in [store.write(name, None) for name in names]:
            removal.result()

    @override
    def remove_below(self, names: Mapping[str, Iterable[str]]) -> None:
        self.remove(f"{folder}/{name}" for folder, below in names.items() for name in below)

    @override
    def clear(self) -> None:
        self._open().delete_range(tensorstore().KvStore.KeyRange()).result()

    @override
    def kvstore(self, *, to_write: bool = False) -> dict[str, Any]:  # reads and writes alike
        return {**self._spec, "path": f"{self._path}/" if self._path else ""}

    def _open(self) -> Any:
        if self._store is None:
            self._store = tensorstore().KvStore.open(self.kvstore(), context=_shared_context()).result()
        return self._store


def _value(where: str, result: Any) -> bytes:
    """Return the content of a file, from TensorStore's result of its read."""
    if result.state != "value":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    return bytes(result.value)


# TensorStore bounds the requests in flight per context: with one context the bound holds for all folders together.
@functools.cache
def _shared_context() -> Any:
    return open_context()
