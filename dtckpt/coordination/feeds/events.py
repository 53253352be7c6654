"""The events of a registry of feeds, each of which is one call of a client; their bounds, and the answers.

Every event may come twice: the second time it gets the same answer, and changes nothing.
Pure: no clock, no I/O. Imports nothing that the coordinator's image lacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dtckpt.coordination.task_identity import Identity
from dtckpt.errors import ConfigError

MAX_FEED_CHARS = 128
MAX_ENDPOINT_BYTES = 1024
MAX_DIGEST_BYTES = 64
MAX_PIECES_BYTES = 4096
MAX_GROUP_BYTES = 128
MAX_TEXT_CHARS = 256
"""Longest reason of a failure, and longest name of a host."""
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 64
MAX_KEEP = 32
MAX_PARTS = 16_384
MAX_TIMEOUT_S = 7 * 86400.0
MAX_NUMBER = 1 << 62
APPLIED, FETCHED, SKIPPED, FAILED = "applied", "fetched", "skipped", "failed"
OUTCOMES = (APPLIED, FETCHED, SKIPPED, FAILED)
"""How a reader says that its lease ended, from good to bad. A version that was fetched lies beside the weights."""
_FEED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True)
class OpenFeed:
    """A client of a publisher opens a feed, or joins the other clients that have opened it.

    Args:
        attempt: Attempt of the job; a higher one fences the lower ones.
        keep: How many readable versions stay; older ones retire when a newer version becomes readable.
        floor: Lowest number of a new version, if this call begins the feed anew. The caller takes it from a clock that
            outlives the registry, so that numbers grow also where the registry has forgotten the feed.
        last_number: Highest number that the client knows of; 0: none.
        secret: Of the feed. The client sends the secret that it has; else the caller draws one.
        principal: Whose job it is, by its token; "": there are no tokens.
        is_granted: Whether the token may publish this feed, whichever job owns it.

    Refused with:
        FencedError: A higher attempt has opened the feed, or another job that is alive.
        CoordinatorPermissionError: The feed is another job's.
    """

    who: Identity
    feed: str
    attempt: int
    keep: int
    floor: int
    secret: bytes = field(repr=False)
    last_number: int = 0
    principal: str = ""
    is_granted: bool = True

    def __post_init__(self) -> None:
        validate_feed(self.feed)
        if not 1 <= self.keep <= MAX_KEEP:
            raise ConfigError(f"feed {self.feed!r}: keep is {self.keep}; expected 1 to {MAX_KEEP} versions")
        if not MIN_SECRET_BYTES <= len(self.secret) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"feed {self.feed!r}: secret has {len(self.secret)} bytes; expected {MIN_SECRET_BYTES} to "
                f"{MAX_SECRET_BYTES}"
            )
        _validate_number("last_number", self.last_number)


@dataclass(frozen=True, slots=True)
class Announce:
    """A client of the publisher says that a version is coming. All clients may say it, with the same values.

    Args:
        number: A number that the feed has not used; or the number of a version that the clients still have in memory,
            and that a restarted registry does not know.
        step: Training step, for people and for readers that ask for a step.
        num_parts: How many clients bring a part.
        tree_digest: Digest of the published tree, the same on all clients.
        timeout_s: The version fails if it lacks parts after so many seconds.
        is_rewound: Of a version that a restarted registry does not know: whether it was marked so.

    Refused with:
        NotKnownError: The registry does not know the feed; open it.
        FencedError: A higher attempt has opened the feed.
        FeedConflictError: The version was announced with other values, or another version is being published.
        VersionGoneError: The version has ended.
    """

    who: Identity
    feed: str
    attempt: int
    number: int
    step: int
    num_parts: int
    tree_digest: bytes
    timeout_s: float
    is_rewound: bool = False

    def __post_init__(self) -> None:
        _validate_number("number", self.number, least=1)
        _validate_number("step", self.step)
        validate_bytes("tree_digest", self.tree_digest, MAX_DIGEST_BYTES)
        if not 0 < self.num_parts <= MAX_PARTS or not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"version {self.number} of feed {self.feed!r}: {self.num_parts} parts within {self.timeout_s} s; "
                f"expected 1 to {MAX_PARTS} parts, and at most {MAX_TIMEOUT_S:g} s"
            )


@dataclass(frozen=True, slots=True)
class PutPart:
    """A client of the publisher has its part of a version in memory, and serves it.

    Args:
        endpoint: Where readers reach the part; the registry does not read it.
        digest: Of the part's manifest.
        nbytes: Of the part.
        host: Of the client.

    Refused with:
        NotKnownError: The registry does not know the feed or the version; open and announce.
        FencedError: A higher attempt has opened the feed.
        FeedConflictError: The client has put a part with another digest, or the version has failed.
        VersionGoneError: The version has ended.
    """

    who: Identity
    feed: str
    attempt: int
    number: int
    endpoint: bytes
    digest: bytes
    nbytes: int
    host: str = ""

    def __post_init__(self) -> None:
        validate_bytes("endpoint", self.endpoint, MAX_ENDPOINT_BYTES)
        validate_bytes("digest", self.digest, MAX_DIGEST_BYTES)
        _validate_number("nbytes", self.nbytes)


@dataclass(frozen=True, slots=True)
class Abort:
    """A client of the publisher cannot bring its part, so the version fails.

    Refused with:
        NotKnownError: The registry does not know the feed or the version.
        FencedError: A higher attempt has opened the feed.
        FeedConflictError: The version is readable already; retire it.
    """

    who: Identity
    feed: str
    attempt: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The publisher takes a version back: it gets no new leases.

    Refused with:
        NotKnownError: The registry does not know the feed or the version.
        FencedError: A higher attempt has opened the feed.
        FeedConflictError: The version is being published; abort it.
    """

    who: Identity
    feed: str
    attempt: int
    number: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A client of the publisher asks to free its part of a version that is retired.

    Refused with:
        NotKnownError: The registry does not know the feed or the version; so it does not know its leases either.
        FencedError: A higher attempt has opened the feed.
        FeedConflictError: The version is not retired.
        VersionLeasedError: Readers hold leases, or a restarted registry may not know all leases yet.
    """

    who: Identity
    feed: str
    attempt: int
    number: int


@dataclass(frozen=True, slots=True)
class Want:
    """Which version a reader wants; by default the newest.

    Args:
        newer_than: Only versions of a higher number.
        number: This version and no other; 0: any.
        step: The newest version of this step; None: any.
        allow_rewound: Whether the version may be of an earlier step than a version before it.
    """

    newer_than: int = 0
    number: int = 0
    step: int | None = None
    allow_rewound: bool = True

    def __str__(self) -> str:
        if self.number:
            return f"version {self.number}"
        kind = "the newest version" if self.allow_rewound else "the newest version that does not go back"
        if self.step is not None:
            kind += f" of step {self.step}"
        return f"{kind} after {self.newer_than}" if self.newer_than else kind


NEWEST = Want()


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A client of a reader takes a lease on a version, or joins the lease of the other clients of its group.

    Args:
        group: Name of the readers within the job that read one version together; "": all clients of the job.
        lease: Id of the lease, drawn at random by the group; the same when the call is repeated.
        want: Which version.
        host: Of the client; its sources are ordered by it.
        is_again: The group had this lease when the registry was restarted.
        principal: Whose job it is, by its token.
        is_granted: Whether the token may read this feed.

    Refused with:
        CoordinatorPermissionError: The token may not read the feed.
        FeedConflictError: The lease is another group's.
        VersionGoneError: The wanted version has ended.
        SourceLostError: The clients that have the wanted version are lost.
    """

    who: Identity
    feed: str
    group: str
    lease: int
    want: Want = NEWEST
    host: str = ""
    is_again: bool = False
    principal: str = ""
    is_granted: bool = True

    def __post_init__(self) -> None:
        validate_feed(self.feed)
        validate_bytes("group", self.group.encode(), MAX_GROUP_BYTES)
        if not self.lease:
            raise ConfigError(f"lease on feed {self.feed!r} has no id; got 0, expected a random number above it")


@dataclass(frozen=True, slots=True)
class Renew:
    """A reader goes on with its lease.

    Refused with:
        NotKnownError: The registry does not know the lease, as it has ended or the registry was restarted.
    """

    who: Identity
    feed: str
    lease: int


@dataclass(frozen=True, slots=True)
class Done:
    """A client of a reader needs the lease no more; it ends with the last client of the group. Never refused.

    After a lease that ended with `FETCHED`, the same call says whether the version was applied since, or has failed.

    Args:
        outcome: One of `OUTCOMES`.
    """

    who: Identity
    feed: str
    lease: int
    outcome: str

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ConfigError(f"outcome of a lease is {self.outcome[:32]!r}; expected {', '.join(OUTCOMES)}")


@dataclass(frozen=True, slots=True)
class Serve:
    """A client of a reader has verified a version, and serves it to further readers.

    Args:
        tree_digest: Of the version, as the client's lease said.
        endpoint: Where readers reach it.
        pieces: Which pieces it has, for readers; the registry does not read it.
        is_whole: Whether it has all bytes of the version.
        nbytes: How many it has.
        principal: Whose job it is, by its token.
        is_granted: Whether the token may read this feed.

    Refused with:
        NotKnownError: The registry does not know the feed or the version.
        CoordinatorPermissionError: The token may not read the feed.
        FeedConflictError: The version is another one, or is being published.
        VersionGoneError: The version has ended.
        FeedLimitError: The version has too many holders.
    """

    who: Identity
    feed: str
    number: int
    tree_digest: bytes
    endpoint: bytes
    pieces: bytes
    is_whole: bool
    nbytes: int
    host: str = ""
    principal: str = ""
    is_granted: bool = True

    def __post_init__(self) -> None:
        validate_bytes("endpoint", self.endpoint, MAX_ENDPOINT_BYTES)
        validate_bytes("pieces", self.pieces, MAX_PIECES_BYTES)
        _validate_number("nbytes", self.nbytes)


@dataclass(frozen=True, slots=True)
class StopServing:
    """A client of a reader serves a version no more. Never refused."""

    who: Identity
    feed: str
    number: int


PublisherEvent = OpenFeed | Announce | PutPart | Abort | Retire | Withdraw
ReaderEvent = Subscribe | Renew | Done | Serve | StopServing
FeedEvent = PublisherEvent | ReaderEvent


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeedOpened:
    """A feed is open for a client of the publisher."""

    next_number: int
    secret: bytes = field(repr=False)
    lease_s: float


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version as the publisher or a reader with a lease sees it."""

    number: int
    state: str
    num_parts_put: int = 0
    num_leases: int = 0
    lost: tuple[int, ...] = ()
    """Clients of the publisher that are lost, with their parts."""
    is_rewound: bool = False
    """Whether a version before it was of a later step."""


@dataclass(frozen=True, slots=True)
class VersionSource:
    """A client that has a part of a version, or all of it.

    Args:
        is_holder: Whether it is a client of a reader that serves on; else it is the publisher's client ``client``.
        digest: Of the part's manifest; of a holder: which pieces it has.
        key: The key that signs tickets for the holder; empty for a client of the publisher.
    """

    job: str
    client: int
    endpoint: bytes
    digest: bytes
    nbytes: int
    host: str
    is_whole: bool
    is_holder: bool
    is_lost: bool = False
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease is granted.

    Args:
        highest_step: Highest step that the feed had published when this version was announced.
        secret: Of the feed, with which the ticket for the publisher's clients is made.
        expires_in_s: Seconds after which the lease ends unless it is renewed.
        cap_in_s: Seconds after which it ends in any case.
    """

    number: int
    step: int
    is_rewound: bool
    highest_step: int
    tree_digest: bytes
    reader: str
    secret: bytes = field(repr=False)
    parts: tuple[VersionSource, ...]
    holders: tuple[VersionSource, ...]
    expires_in_s: float
    cap_in_s: float


@dataclass(frozen=True, slots=True)
class NotYet:
    """There is no version as wanted; ask again when the feed changes.

    Args:
        why: For people.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Served:
    """A holder is registered; ``key`` is what tickets for it are made with."""

    number: int
    key: bytes = field(repr=False)


FeedAnswer = FeedOpened | VersionState | Leased | NotYet | Served | None


# --- bounds -----------------------------------------------------------------------------------------------------------


def validate_feed(feed: str) -> None:
    """Refuse a name that is no name of a feed.

    Raises:
        ConfigError: The name is empty, too long, or has other characters than letters, digits, ``.``, ``_``, ``-``
            and ``/``.
    """
    if len(feed) > MAX_FEED_CHARS or not _FEED.fullmatch(feed):
        raise ConfigError(
            f"name of a feed is {feed[:MAX_FEED_CHARS]!r}; expected 1 to {MAX_FEED_CHARS} letters, digits and ._-/ , "
            "the first a letter or digit"
        )


def validate_bytes(what: str, value: bytes, limit: int) -> None:
    """Refuse a value that is too long.

    Raises:
        ConfigError: It is longer than ``limit`` bytes.
    """
    if len(value) > limit:
        raise ConfigError(f"{what} is too long: got {len(value)} bytes, at most {limit} fit")


def _validate_number(what: str, value: int, least: int = 0) -> None:
    if not least <= value < MAX_NUMBER:
        raise ConfigError(f"{what} is {value}; expected {least} to 2^62 - 1")
