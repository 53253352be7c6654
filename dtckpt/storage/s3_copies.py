"""Copies of objects that S3 makes by itself (CopyObject), through awscrt: TensorStore has no such request.

S3 begins to answer before it has copied, so an answer with status 200 may hold an error; awscrt looks for it, and
repeats requests that S3 puts off. A server that does not know the request may take it for the upload of an empty
object. So the answer must hold a `CopyObjectResult`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from functools import cache
from itertools import islice
from urllib.parse import quote, urlsplit

from awscrt.auth import AwsCredentialsProvider
from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType, create_default_s3_signing_config

MAX_COPIES = 256
"""Copies that are under way at one time."""
COPY_S = 300.0
"""Seconds for one copy, with all repetitions. The largest object that S3 copies by one request has 5 GB, and so has the
largest that a save writes by one request."""
MAX_ANSWER_NBYTES = 64 << 10
_CODE = re.compile(rb"<Code>(\w{1,100})</Code>")
_STATUS_ERRORS = {403: errno.EACCES, 501: errno.ENOTSUP}


def copy_objects(endpoint: str, region: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Have a store copy objects. Blocks: until all are copied, or one of them could not be copied.

    Args:
        endpoint: URL of the store; "" is Amazon's.
        region: The region of the store.
        pairs: The object and its copy, each as ``bucket/key``.

    Raises:
        FileNotFoundError: There is no such object.
        PermissionError: The store denies the copy.
        OSError: The store refuses the copy, has no such request, or does not answer in time.
    """
    url = endpoint or f"https://s3.{region}.amazonaws.com"
    waiting = iter(pairs)
    while batch := list(islice(waiting, MAX_COPIES)):
        # The list makes all requests before the first is waited for. After a failure no request is under way.
        copies = [_Copy(url, region, source, target) for source, target in batch]
        try:
            for copy in copies:
                copy.wait()
        finally:
            for copy in copies:
                copy.end()


class _Copy:
    """The copy of one object, under way.

    Args:
        url: See `copy_objects`; so for the others.
    """

    def __init__(self, url: str, region: str, source: str, target: str) -> None:
        self._names = f"{source} to {target}"
        self._source = source
        self._answer = bytearray()
        parts = urlsplit(url)
        headers = [("host", parts.netloc), ("content-length", "0"), ("x-amz-copy-source", quote(source))]
        self._request = _client(region, is_encrypted=parts.scheme == "https").make_request(
            type=S3RequestType.DEFAULT,
            operation_name="CopyObject",
            request=HttpRequest("PUT", f"{parts.path}/{quote(target)}", HttpHeaders(headers)),
            on_body=self._take,
        )

    def _take(self, chunk: bytes, **_: object) -> None:
        if len(self._answer) < MAX_ANSWER_NBYTES:
            self._answer += chunk

    def wait(self) -> None:
        """Wait for the answer. Raises: as `copy_objects`."""
        try:
            self._request.finished_future.result(COPY_S)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"the copy of {self._names} did not end in {COPY_S:.0f} s") from None
        except AwsCrtError as error:
            raise self._error(error) from error
        if b"CopyObjectResult" not in self._answer:
            raise OSError(errno.ENOTSUP, f"the store did not copy {self._names}: it has no such request")

    def _error(self, error: AwsCrtError) -> OSError:
        status, body = (getattr(error, name, None) for name in ("status_code", "body"))
        found = _CODE.search(body or b"")
        code = found[1].decode() if found else error.name
        if code == "NoSuchKey":
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._source)
        return OSError(_STATUS_ERRORS.get(status or 0, errno.EIO), f"the store did not copy {self._names}: {code}")

    def end(self) -> None:
        """Give the copy up if it is under way."""
        if not self._request.finished_future.done():
            self._request.cancel()
            self._request.finished_future.exception(COPY_S)


@cache
def _client(region: str, *, is_encrypted: bool) -> S3Client:
    """Return the client; it finds the credentials of the environment, the profile or the machine."""
    signing = create_default_s3_signing_config(
        region=region, credential_provider=AwsCredentialsProvider.new_default_chain()
    )
    mode = S3RequestTlsMode.ENABLED if is_encrypted else S3RequestTlsMode.DISABLED
    return S3Client(region=region, signing_config=signing, tls_mode=mode)
