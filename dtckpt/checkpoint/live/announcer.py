"""`Announcer`: a reader tells the publisher's clients which boxes it reads; later versions have digests of them."""

from __future__ import annotations

import logging

from dtckpt.checkpoint.live.versions import PartAddress
from dtckpt.checkpoint.parts.announced_boxes import MAX_BOXES, RENEWED_PARTS, announcement
from dtckpt.checkpoint.parts.part_files import PartFiles
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.coordination.feeds.leases import FeedLease
from dtckpt.errors import DtckptError

logger = logging.getLogger("dtckpt.live")

TIMEOUT_S = 5.0
"""How long a client of the publisher has to take an announcement; a later version will do, too."""


class Announcer:
    """The announcements of one reader."""

    def __init__(self) -> None:
        self._tries: dict[str, tuple[int, bool]] = {}
        """By server: the number of the version when boxes were announced last, and whether it took them."""

    def announce(self, lease: FeedLease, files: PartFiles) -> None:
        """Announce the boxes of a version that was read, if they have no digests there, or if it was long ago. Local.

        A client that does not take them is asked again when it would be time to announce them again.

        Args:
            lease: The lease on the version.
            files: The version's parts.
        """
        for part in lease.parts:
            boxes = files.boxes.get(part.client)
            address = PartAddress.from_bytes(part.endpoint)
            if boxes and self._is_due(address.url, lease.number, lacks_digests=not files.have_digests(boxes)):
                peer = Peer(address.url, address.host, part.ticket.hex(), TIMEOUT_S)
                try:
                    peer.announce(files.save, part.client, announcement(sorted(boxes, key=repr)[:MAX_BOXES]))
                    is_taken = True
                except DtckptError as error:
                    # Its parts are read all the same, verified where they come from.
                    logger.warning("client %d of feed %r takes no boxes: %s", part.client, lease.feed, error)
                    is_taken = False
                self._tries[address.url] = lease.number, is_taken

    def _is_due(self, url: str, number: int, *, lacks_digests: bool) -> bool:
        last, is_taken = self._tries.get(url, (number - RENEWED_PARTS, True))
        return number - last >= RENEWED_PARTS or (is_taken and lacks_digests)
