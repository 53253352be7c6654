"""Authorization: which token may use which job.

A list of tokens is text: one ``JOB TOKEN`` per line, the token without blanks; a job may have several, so that tokens
can be replaced while jobs run. A token also opens the job ``JOB#durable-NUMBER``, in which a local tier writes, and no
other name. Tokens of the job ``*`` are for operators of the coordinator: they may read all jobs and
change none. Empty lines and lines that begin with ``#`` are skipped.

Only digests are kept, so that no token can turn up in a log, a traceback or a dump.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from dtckpt.coordination import barrier_texts
from dtckpt.errors import ConfigError, CoordinatorPermissionError

ANY_JOB = "*"
MIN_TOKEN_CHARS = 16
"""A shorter token could be guessed by trying."""
_SCHEME = "Bearer "


class UnauthenticatedError(CoordinatorPermissionError):
    """The call carries no token that the coordinator knows."""


class Tokens:
    """The tokens of all jobs, as digests."""

    def __init__(self, digests: Mapping[str, tuple[bytes, ...]]) -> None:
        self._digests = digests
        self._known = frozenset(digest for each in digests.values() for digest in each)

    def __len__(self) -> int:
        return len(self._known)

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Read a list of tokens.

        Raises:
            ConfigError: A line is malformed or there is none. Names the line's number, not its content.
        """
        digests: dict[str, tuple[bytes, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            job, _, token = line.strip().rpartition(" ")
            if not job.strip() or len(token) < MIN_TOKEN_CHARS:
                raise ConfigError(
                    f"line {number} of the tokens cannot be used; expected a job, a blank, and a token of at least "
                    f"{MIN_TOKEN_CHARS} characters"
                )
            digests[job.strip()] = (*digests.get(job.strip(), ()), _digest(token))
        if not digests:
            raise ConfigError("the list of tokens is empty, so that no call could succeed; expected JOB TOKEN lines")
        return cls(digests)

    @property
    def num_owners(self) -> int:
        return len(self._digests)

    def owner(self, job: str) -> str:
        """Return the job whose tokens open a job: the job itself, or the job that it is beside."""
        return job if job in self._digests else barrier_texts.main_job(job)

    def authorize(self, header: str, job: str, *, only_looks: bool) -> str:
        """Check the token of a call, and return the owner of its job.

        Args:
            header: Value of the call's ``authorization`` metadata, "" if it has none.
            job: The job that the call is about. A job beside another job needs no separate token.
            only_looks: Whether the call changes nothing.

        Raises:
            UnauthenticatedError: There is no token, or it is no job's.
            CoordinatorPermissionError: The token is another job's, or may only read.
        """
        digest = _digest(self._token(header))
        owner = self.owner(job)
        owners = (owner, ANY_JOB) if only_looks else (owner,)
        matches = [hmac.compare_digest(digest, each) for owner in owners for each in self._digests.get(owner, ())]
        # A job that is called "*" would otherwise be the operator's to change.
        if not any(matches) or (job == ANY_JOB and not only_looks):
            self._refuse_unknown(digest)
            raise CoordinatorPermissionError(
                f"the token is not for job {job!r}; it opens its own job, and that job with "
                f"{barrier_texts.BESIDE}{barrier_texts.DURABLE} and a hexadecimal number behind it"
            )
        return owner

    def visible(self, header: str) -> frozenset[str]:
        """Return the jobs that a token is for; `ANY_JOB` is among them if it may read all.

        Raises:
            UnauthenticatedError: There is no token, or it is no job's.
        """
        digest = _digest(self._token(header))
        self._refuse_unknown(digest)
        return frozenset(job for job, digests in self._digests.items() if digest in digests)

    def _token(self, header: str) -> str:
        if not header.startswith(_SCHEME):
            raise UnauthenticatedError(
                "the coordinator wants a token; set DTCKPT_COORDINATOR_TOKEN_FILE (or DTCKPT_COORDINATOR_TOKEN)"
            )
        return header.removeprefix(_SCHEME)

    def _refuse_unknown(self, digest: bytes) -> None:
        # No need for constant time: how digests begin says nothing about tokens.
        if digest not in self._known:
            raise UnauthenticatedError("the coordinator does not know this token")


def read_tokens(path: Path) -> Tokens:
    """Read a file of tokens.

    Raises:
        ConfigError: The file cannot be read, or is no list of tokens.
    """
    try:
        return Tokens.parse(path.read_text())
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the file of tokens cannot be read: {path}: {type(error).__name__}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
