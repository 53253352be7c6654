"""Open a live version: the parts that its publisher's clients and relays hold, as an open checkpoint.

A reader on the host of a publisher or a relay maps the parts; other readers ask servers for the boxes
that they need (`dtckpt.checkpoint.live.sources`). Each byte is compared with the publisher's digest, and each
index with the digest that the registry told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from dtckpt.checkpoint.live.sources import holders_of
from dtckpt.checkpoint.live.versions import KIND, location_of_version, save_of_version, title_of_version
from dtckpt.checkpoint.parts.held_boxes import HeldBoxes
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.part_files import PartCheckpoint, PartFiles, PartHolder
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.comm.background_threads import Pool
from dtckpt.coordination.feeds.leases import FeedLease, FeedSource
from dtckpt.errors import CheckpointCorruptError, DtckptError, SourceLostError, capped
from dtckpt.format.digest import bytes_digest

logger = logging.getLogger("dtckpt.live")

MAX_ASKED = 16
"""Clients of the publisher that are asked for their indexes at a time."""
DIGEST_NBYTES = 8


def index_digest(file: bytes) -> bytes:
    """Return the digest of an index file that the registry tells readers."""
    return bytes_digest(file).to_bytes(DIGEST_NBYTES, "big")


def save_of_lease(lease: FeedLease) -> SaveId:
    """Return the version of a lease as the save that its parts name."""
    return save_of_version(lease.feed, lease.number, lease.step, len(lease.parts), lease.tree_digest)


def open_version(
    lease: FeedLease,
    timeout_s: float,
    held: HeldBoxes | None = None,
    *,
    own: HostFolder | None = None,
    layout_tags: Mapping[str, str] = MappingProxyType({}),
    registry: str = "",
) -> PartCheckpoint:
    """Open a version for reading. Local. Reads raise once the lease is over, as `FeedLease.raise_if_over`.

    Args:
        lease: A live lease on the version.
        timeout_s: Longest wait for each answer of a publisher's client.
        held: The boxes that the output memory holds.
        own: The folder of this reader's own relay.
        layout_tags: The layout tags that the reader expects, by glob on the names of tensors.
        registry: ``host:port`` of the publisher's registry, for the location; empty: the coordinator.

    Raises:
        SourceLostError: A part is nowhere to be had.
        CheckpointCorruptError: An index differs from the index that its client announced.
    """
    save = save_of_lease(lease)
    title = title_of_version(lease.feed, lease.number, lease.step)
    with Pool(min(MAX_ASKED, max(1, len(lease.parts))), "dtckpt-live-indexes") as pool:
        found = list(
            pool.map(lambda part: _open_part(part, holders_of(lease, part, save, timeout_s, own), save), lease.parts)
        )
    lost = {part.client: reason for part, (_, _, reason) in zip(lease.parts, found, strict=True) if reason}
    if lost:
        raise SourceLostError(f"{title} cannot be read: {capped(f'client {c}: {why}' for c, why in lost.items())}")
    indexes = {index.client: index for index, _, _ in found if index is not None}
    holders = {part.client: holders for part, (_, holders, _) in zip(lease.parts, found, strict=True)}
    files = PartFiles(
        save,
        indexes,
        holders,
        kind=KIND,
        title=title,
        held=held,
        lost_error=SourceLostError,
        # A reader whose process stood still may find that its lease is over, and other elements in the memory.
        validate_held=lease.raise_if_over,
    )
    files.map_parts()  # a publisher that is restarted removes the files of its former attempt
    is_remote = any(not isinstance(some[0].source, MappedFolder) for some in holders.values())
    location = location_of_version(lease.feed, lease.step, registry)
    return PartCheckpoint(files, location, is_remote=is_remote, layout_tags=layout_tags)


def _open_part(
    part: FeedSource, sources: Iterable[PartHolder], save: SaveId
) -> tuple[PartIndex | None, Sequence[PartHolder], str]:
    """Return the index of a client's part, where the part is, and why there is none."""
    failures: list[str] = []
    index: PartIndex | None = None
    holders: list[PartHolder] = []
    for holder in sources:
        try:
            if index is None:
                index = _read_index(holder, save, part)
            holders.append(holder)
        except (DtckptError, OSError) as error:
            failures.append(str(error))
    return index, holders, "" if index is not None else "; ".join(failures)


def _read_index(holder: PartHolder, save: SaveId, part: FeedSource) -> PartIndex:
    file = holder.source.index_file(save, part.client)
    if index_digest(file) != part.digest:
        raise CheckpointCorruptError(f"the index of client {part.client} differs from its announcement")
    index = PartIndex.from_bytes(file)
    if (index.save, index.client) != (save, part.client):
        raise CheckpointCorruptError(f"client {part.client} announced the index of another part")
    return index
