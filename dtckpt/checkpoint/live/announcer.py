"""`Announcer`: a reader tells the publisher's clients which boxes it reads; later versions have digests of them."""

from __future__ import annotations

import logging

from dtckpt.checkpoint.live.versions import PartAddress
from dtckpt.checkpoint.parts.announced_boxes import RENEWED_PARTS, announcement
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
        self._announced: dict[str, int] = {}
        """By server: the number of the version with which boxes were announced last."""

    def announce(self, lease: FeedLease, files: PartFiles) -> None:
        """Announce the boxes of a version that was read, if they have no digests there, or if it was long ago. Local.

        Args:
            lease: The lease on the version.
            files: The version's parts.
        """
        for part in lease.parts:
            boxes = files.boxes.get(part.client, set())
            address = PartAddress.from_bytes(part.endpoint)
            last = self._announced.get(address.url)
            is_known = last is not None and lease.number - last < RENEWED_PARTS and files.have_digests(boxes)
            if not boxes or is_known:
                continue
            peer = Peer(address.url, address.host, part.ticket.hex(), TIMEOUT_S)
            try:
                peer.announce(files.save, part.client, announcement(sorted(boxes, key=repr)))
            except DtckptError as error:
                # Its parts are read all the same, verified where they come from.
                logger.debug("client %d takes no boxes: %s", part.client, error)
            else:
                self._announced[address.url] = lease.number
