"""Which storage is this machine's own."""

from __future__ import annotations

from pathlib import Path

from dtckpt.storage.location import Location

LOCAL_TYPES = frozenset(
    {
        "bcachefs",
        "btrfs",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "squashfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""File systems whose data is on this machine. One that is not known is taken for one of a network."""
_MOUNTS = Path("/proc/self/mounts")


def is_remote(path: str | Location) -> bool:
    """Whether what is at a path, or will be, lies elsewhere: on an object store or a network file system."""
    if "://" in str(path):
        return True
    where = Path(str(path)).absolute().resolve()
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    # The last mount at a place hides those before.
    types = {_unescaped(place): kind for place, kind in mounts}
    places = map(str, (where, *where.parents))
    return next((types[place] not in LOCAL_TYPES for place in places if place in types), False)


def _unescaped(place: str) -> str:
    return place.encode().decode("unicode_escape") if "\\" in place else place
