"""Tickets, which show a source that a lease lets its reader in; a source checks one without asking the registry.

A ticket is the HMAC-SHA-256 of a claim, and the claim: feed, version, reader, and when the ticket ends. The key is the
secret of the feed, which only the registry and the publisher have. A reader that serves a version on has a key that is
derived from the secret, and lets it check tickets for itself only.
Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from dtckpt.coordination.task_identity import Identity
from dtckpt.errors import TicketError

LEEWAY_S = 60.0
"""How far the clocks of the registry and of a source may differ."""
MAX_TICKET_BYTES = 1024
_TICKET, _HOLDER = b"dtckpt.ticket.1\0", b"dtckpt.holder.1\0"
"""Begin the bytes that are authenticated, so that no MAC of one kind passes for the other kind."""
_HEAD = struct.Struct("<QQHH")
"""Number, end in seconds since the epoch, lengths of the feed's name and of the reader's name."""
_MAC_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Claim:
    """The parts that a ticket lets its bearer read.

    Args:
        feed: Name of the feed.
        number: Number of the version.
        reader: Job and group of the reader.
        expires_at: When the ticket ends, in whole seconds since the epoch.
    """

    feed: str
    number: int
    reader: str
    expires_at: int


def make_ticket(key: bytes, claim: Claim) -> bytes:
    """Return the ticket of a claim."""
    feed, reader = claim.feed.encode(), claim.reader.encode()
    text = _HEAD.pack(claim.number, claim.expires_at, len(feed), len(reader)) + feed + reader
    return _mac(key, _TICKET + text) + text


def check_ticket(key: bytes, ticket: bytes, *, feed: str, number: int, now_s: float) -> Claim:
    """Check a ticket for a version, and return its claim.

    Args:
        key: The secret of the feed, or the key of a holder.
        ticket: From a reader; any bytes.
        feed: Name of the feed that the reader asks for.
        number: Number of the version that the reader asks for.
        now_s: Seconds since the epoch.

    Raises:
        TicketError: The ticket is forged, expired, or for another version.
    """
    mac, text = ticket[:_MAC_NBYTES], ticket[_MAC_NBYTES:]
    if len(ticket) > MAX_TICKET_BYTES or not hmac.compare_digest(mac, _mac(key, _TICKET + text)):
        raise TicketError(f"ticket for version {number} of feed {feed!r} is not of the feed's publisher")
    claimed, expires_at, num_feed, num_reader = _HEAD.unpack_from(text)
    names = text[_HEAD.size :]
    claim = Claim(names[:num_feed].decode(), claimed, names[num_feed : num_feed + num_reader].decode(), expires_at)
    if (claim.feed, claim.number) != (feed, number):
        raise TicketError(
            f"ticket is for version {claim.number} of feed {claim.feed!r}; expected version {number} of {feed!r}"
        )
    if now_s > expires_at + LEEWAY_S:
        raise TicketError(
            f"ticket of {claim.reader!r} for version {number} of feed {feed!r} ended {now_s - expires_at:.0f} s ago; "
            "take a new lease, and compare the clocks of the coordinator and of this source"
        )
    return claim


def holder_key(secret: bytes, feed: str, number: int, who: Identity) -> bytes:
    """Return the key of a reader's client that serves a version on."""
    head = struct.pack("<QIQ", number, who.task, who.incarnation)
    return _mac(secret, _HOLDER + head + feed.encode() + b"\0" + who.job.encode())


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, hashlib.sha256)
