"""The values of live versions, and their text in the registry; pure.

A *version* is one state that all clients of a job published to a feed. Each client's share of it is a part, as in a
save of the local tier: the elements in one file, and an index.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.coordination.feeds.events import MAX_ENDPOINT_BYTES
from dtckpt.errors import CheckpointCorruptError, ConfigError
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.url import Url

SCHEME = "live"
"""Of the locations of live versions."""
KIND = "live version"
_ADDRESS = r"(?:\[[0-9A-Fa-f:.]+\]|[^/@\[\]:]+):(?P<port>\d{1,5})"
_LOCATION = re.compile(rf"(?:(?P<registry>{_ADDRESS})/)?(?P<feed>[^@:]+)(?:@(?P<step>\d{{1,18}}))?")


def job_of_feed(feed: str, job: str) -> str:
    """Return the name of a job's feed in a host's folder, which tells its parts from others."""
    return f"{SCHEME}://{feed} of {job}"


def save_of_version(feed: str, number: int, step: int, num_clients: int, tree_digest: bytes) -> SaveId:
    """Return a version as the save that its parts name.

    Registries know nothing of each other, so two jobs of one name may publish one number of one feed, on one host. Then
    the digests of their trees differ, as each has a random number of its publisher.
    """
    token = bytes_digest(tree_digest + feed.encode()) & 0xFFFFFFFF
    return SaveId(number, step, num_clients, is_durable=False, token=f"{token:08x}")


def title_of_version(feed: str, number: int, step: int) -> str:
    """Return a version's name in messages."""
    return f"version {number} (step {step}) of feed {feed!r}"


def location_of_version(feed: str, step: int | None = None, registry: str = "") -> Url:
    """Return the location of the newest version of a feed, or of a step."""
    name = feed if step is None else f"{feed}@{step}"
    return Url(SCHEME, f"{registry}/{name}" if registry else name)


class LiveLocation(NamedTuple):
    """The parts of a location.

    Args:
        feed: Name of the feed.
        step: The step of the version; None: the newest version.
        registry: ``host:port`` of the publisher's registry; empty: the feed is at the coordinator of the reader's job.
    """

    feed: str
    step: int | None = None
    registry: str = ""


def validate_registry(address: str) -> None:
    """Refuse an address at which no registry can be. Raises: ConfigError: The address is malformed."""
    match = re.fullmatch(_ADDRESS, address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigError(f"registry is {address!r}; expected host:port, with a port from 1 to 65535")


def is_live(location: object) -> bool:
    """Whether a location, or a text, names a live version."""
    return str(location).startswith(f"{SCHEME}://")


def parse_location(location: object) -> LiveLocation:
    """Return the parts of ``live://feed``, ``live://feed@step`` or ``live://host:port/feed@step``.

    Raises:
        ConfigError: The location is malformed.
    """
    match = _LOCATION.fullmatch(str(location).removeprefix(f"{SCHEME}://"))
    if match is None:
        raise ConfigError(f"{str(location)!r} names no live version; expected live://feed or live://feed@step")
    if match["registry"] is not None:
        validate_registry(match["registry"])
    return LiveLocation(match["feed"], None if match["step"] is None else int(match["step"]), match["registry"] or "")


@dataclass(frozen=True, slots=True)
class PartAddress:
    """Where readers reach a client's part.

    Args:
        url: ``host:port`` of its server.
        host: Name of its host.
        folder: The directory of the parts on its host; empty: readers of the host ask the server.
        root: Tells the job from others in that directory.
        token: The random token of the job's directory: a reader that finds it there is on the same host.
    """

    url: str
    host: str
    folder: str = ""
    root: str = ""
    token: str = ""

    def to_bytes(self) -> bytes:
        """Return the text for the registry, which has a bound: a folder whose path is too long is left out."""
        data = json.dumps([self.url, self.host, self.folder, self.root, self.token]).encode()
        return data if len(data) <= MAX_ENDPOINT_BYTES else json.dumps([self.url, self.host, "", "", ""]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PartAddress:
        """Read a text. Raises: CheckpointCorruptError: The text is malformed."""
        try:
            facts = json.loads(data)
            if not all(isinstance(fact, str) for fact in facts):
                raise TypeError("expected five texts")
            return cls(*facts)
        except (ValueError, TypeError) as error:
            raise CheckpointCorruptError(f"the address of a live part cannot be read: {error}") from error
