"""The sources of a live version, in the order in which a reader asks them.

A folder of this host comes first, the publisher's or a relay's: reads map it. Then come relays that have the whole
version, in the registry's order; then the publisher. A source that is damaged, lost or refuses is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

from typing_extensions import override

from dtckpt.checkpoint.live.pulls import PullPeer
from dtckpt.checkpoint.live.versions import PartAddress
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.nixl_offer import is_wanted
from dtckpt.checkpoint.parts.nixl_reads import NixlReads
from dtckpt.checkpoint.parts.part_files import PartHolder
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.parts.transports import BoxRequest
from dtckpt.coordination.feeds.leases import FeedLease, FeedSource
from dtckpt.coordination.identity import host_name
from dtckpt.errors import CheckpointCorruptError, DtckptError, StorageError

MAX_RELAYS_FIRST = 4
"""Relays that are asked before the publisher; further ones are asked after it."""
RELAY_TIMEOUT_S = 10.0
"""Longest wait for each answer of a relay, of which there are others."""


def folder_of(address: PartAddress) -> HostFolder | None:
    """Return the folder of a source, if it is on this host."""
    if not address.folder or os.environ.get("DTCKPT_HOST", address.host) != address.host:
        return None
    folder = HostFolder(Path(address.folder), address.root, host=address.host, title="the live versions")
    return folder if address.token and folder.token() == address.token else None


def relays_of(lease: FeedLease) -> list[tuple[PartAddress, FeedSource]]:
    """Return the relays of a version, and where they are; without relays whose address cannot be read."""
    found = []
    for holder in lease.holders:
        with suppress(CheckpointCorruptError):
            found.append((PartAddress.from_bytes(holder.endpoint), holder))
    return found


class RelayPeer(PullPeer):
    """A relay, with the arguments of `Peer`; once it did not answer, it is not asked again."""

    def __init__(self, url: str, host: str, token: str, timeout_s: float) -> None:
        super().__init__(url, host, token, min(timeout_s, RELAY_TIMEOUT_S))
        self._lost: StorageError | None = None

    @override
    @contextmanager
    def _errors_named(self, what: str) -> Iterator[HTTPConnection]:
        if self._lost is not None:
            raise self._lost
        try:
            with super()._errors_named(what) as connection:
                yield connection
        except StorageError as error:
            self._lost = error
            raise
        except DtckptError:
            raise
        except ValueError as error:
            self._lost = StorageError(f"host {self.host}: the address of a relay is malformed: {error}")
            raise self._lost from error

    @override
    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> int:
        with self._telling(save, client):
            return super().read(save, client, boxes)


def holders_of(
    lease: FeedLease, part: FeedSource, save: SaveId, timeout_s: float, own: HostFolder | None = None
) -> list[PartHolder]:
    """Return the holders of a publisher's part, in the order in which to ask them.

    Args:
        lease: The lease on the version.
        part: The part.
        save: The version.
        timeout_s: Longest wait for each answer.
        own: The folder of this reader's own relay.
    """
    publisher, found = PartAddress.from_bytes(part.endpoint), list[PartHolder]()
    relays = [(address, holder) for address, holder in relays_of(lease) if holder.is_whole]
    folders = [(host_name(), own), *((each.host, folder_of(each)) for each in [publisher, *(one for one, _ in relays)])]
    for host, folder in folders:
        if folder is not None and folder.has(save, part.client):
            found.append(PartHolder(host, MappedFolder(folder, host)))
            break
    peers = [
        PartHolder(address.host, RelayPeer(address.url, address.host, each.ticket.hex(), timeout_s))
        for address, each in relays
    ]
    peer = PullPeer(publisher.url, publisher.host, part.ticket.hex(), timeout_s)
    asked = PartHolder(publisher.host, NixlReads(peer, timeout_s) if is_wanted() else peer)
    num_first = len(peers) if part.is_lost else MAX_RELAYS_FIRST
    return [*found, *peers[:num_first], asked, *peers[num_first:]]
