"""Authorization: which token may use which job.

A list of tokens is text: one ``JOB TOKEN`` per line, the token without blanks; a job may have several, so that tokens
can be replaced while jobs run. Two further columns name feeds, as in ``JOB TOKEN reads=policy,critic publishes=actor``.
The columns hold for the job, whichever of its tokens a call carries. A token reads the feeds of its jobs, and
the feeds that ``reads`` names (``*``: all). A feed that any line names under ``publishes`` is opened only by the jobs
of such lines. Every other feed belongs to the first job that opens it.

A token also opens the job ``JOB#durable-NUMBER``, in which a local tier writes, and no other name. Tokens of the job
``*`` are for operators of the coordinator: they may read all jobs and change none. Empty lines and lines that begin
with ``#`` are skipped.

Only digests are kept, so that no token can turn up in a log, a traceback or a dump.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dtckpt.coordination import barrier_texts
from dtckpt.coordination.feeds.events import validate_feed
from dtckpt.errors import ConfigError, CoordinatorPermissionError

ANY_JOB = "*"
MIN_TOKEN_CHARS = 16
"""A shorter token could be guessed by trying."""
ANY_FEED = "*"
READS, PUBLISHES = "reads", "publishes"
NO_FEEDS: Mapping[str, frozenset[str]] = MappingProxyType({})
_SCHEME = "Bearer "


class UnauthenticatedError(CoordinatorPermissionError):
    """The call carries no token that the coordinator knows."""


class Tokens:
    """The tokens of all jobs, as digests, and the feeds that jobs may use.

    Args:
        digests: Of the tokens of each job.
        reads: The feeds of other jobs that each job may read.
        publishes: The feeds that each job may publish, and that no other job may.
    """

    def __init__(
        self,
        digests: Mapping[str, tuple[bytes, ...]],
        reads: Mapping[str, frozenset[str]] = NO_FEEDS,
        publishes: Mapping[str, frozenset[str]] = NO_FEEDS,
    ) -> None:
        self._digests = digests
        self._reads, self._publishes = reads, publishes
        self._reserved = frozenset(feed for feeds in publishes.values() for feed in feeds)
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
        granted: dict[str, dict[str, frozenset[str]]] = {READS: {}, PUBLISHES: {}}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            rest, feeds = _cut_feeds(line.strip(), number)
            job, _, token = rest.rpartition(" ")
            if not job.strip() or len(token) < MIN_TOKEN_CHARS:
                raise ConfigError(
                    f"line {number} of the tokens cannot be used; expected a job, a blank, and a token of at least "
                    f"{MIN_TOKEN_CHARS} characters"
                )
            digests[job.strip()] = (*digests.get(job.strip(), ()), _digest(token))
            for column, names in feeds:
                granted[column][job.strip()] = granted[column].get(job.strip(), frozenset()) | names
        if not digests:
            raise ConfigError("the list of tokens is empty, so that no call could succeed; expected JOB TOKEN lines")
        return cls(digests, granted[READS], granted[PUBLISHES])

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
                f"{barrier_texts.BESIDE}{barrier_texts.DURABLE} or {barrier_texts.BESIDE}{barrier_texts.COMMAND} and a "
                "hexadecimal number behind it"
            )
        return owner

    def may_read(self, job: str, feed: str) -> bool:
        """Whether a job may read a feed of another owner."""
        return not {feed, ANY_FEED}.isdisjoint(self._reads.get(self.owner(job), frozenset()))

    def may_publish(self, job: str, feed: str) -> bool:
        """Whether a job may publish a feed, whichever job has published it before.

        Raises:
            CoordinatorPermissionError: The feed is reserved for other jobs.
        """
        is_named = feed in self._publishes.get(self.owner(job), frozenset())
        if feed in self._reserved and not is_named:
            raise CoordinatorPermissionError(
                f"the token of job {job!r} may not publish feed {feed!r}, which the list of tokens reserves for others"
            )
        return is_named

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


def _cut_feeds(line: str, number: int) -> tuple[str, list[tuple[str, frozenset[str]]]]:
    """Cut the columns of feeds off a line.

    Raises:
        ConfigError: A name in them is no name of a feed.
    """
    feeds: list[tuple[str, frozenset[str]]] = []
    while True:
        rest, _, last = line.rpartition(" ")
        column, equals, names = last.partition("=")
        if not equals or column not in (READS, PUBLISHES):
            return line, feeds
        listed = frozenset(names.split(","))
        for name in listed - {ANY_FEED} if column == READS else listed:
            try:
                validate_feed(name)
            except ConfigError as error:
                raise ConfigError(f"line {number} of the tokens, column {column}: {error.message}") from None
        feeds.append((column, listed))
        line = rest.strip()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
