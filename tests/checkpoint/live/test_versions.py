"""The names of live versions, and where their parts are."""

import pytest

from dtckpt.checkpoint.live.versions import PartAddress, is_live, location_of_version, parse_location, save_of_version
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.coordination.feeds.events import MAX_ENDPOINT_BYTES
from dtckpt.errors import CheckpointCorruptError, ConfigError


@pytest.mark.parametrize(("feed", "step"), [("policy", None), ("a/b.c-1", 0), ("policy", 12)])
def test_locations_there_and_back(feed, step):
    location = location_of_version(feed, step)
    assert is_live(location)
    assert parse_location(location) == parse_location(str(location)) == (feed, step, "")
    for registry in ("10.0.0.5:50051", "trainer-0.train:5", "[::1]:50051"):
        there = location_of_version(feed, step, registry)
        assert parse_location(there) == parse_location(str(there)) == (feed, step, registry)


@pytest.mark.parametrize(
    "text",
    ["live://policy@", "live://policy@x", "live://a@1@2", "live://policy@-1", "live://h:5", "live://h:x/policy"],
)
def test_locations_that_are_none(text):
    with pytest.raises(ConfigError, match="expected live://feed"):
        parse_location(text)


def test_a_version_is_a_save_with_a_name():
    save = save_of_version("policy", 1795872759851, 3, 2, b"tree")
    assert SaveId.parse(save.name) == save
    assert save != save_of_version("other", 1795872759851, 3, 2, b"tree")
    assert save != save_of_version("policy", 1795872759851, 3, 2, b"tree of a publisher at another registry")


def test_addresses_there_and_back():
    address = PartAddress("10.0.0.1:5", "host", "/dev/shm/x", "root", "token")
    assert PartAddress.from_bytes(address.to_bytes()) == address
    # A folder whose path is too long for the registry: readers ask the server.
    far = PartAddress("10.0.0.1:5", "host", "/x" * MAX_ENDPOINT_BYTES, "root", "token")
    assert PartAddress.from_bytes(far.to_bytes()) == PartAddress("10.0.0.1:5", "host")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'["a"]', b'["a", 2, "", "", ""]', b"3"])
def test_addresses_that_are_none(data):
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        PartAddress.from_bytes(data)
