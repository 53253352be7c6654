"""Full and read-only disks: every client reports the error, and the old checkpoint stays."""

import pytest
from support import mounts

from . import crash_cases
from .forked_clients import Nursery

pytestmark = pytest.mark.processes

DISK_NBYTES = 1 << 20
"""Room for one checkpoint of these tests, not for two."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small file system, which only its clients see."""
    folder = str(tmp_path_factory.mktemp("disk"))
    if reason := mounts.reason_unsupported(folder):
        pytest.skip(f"may not mount a file system: {reason}")
    with Nursery(mounts.mount_small, folder, DISK_NBYTES) as nursery:
        yield nursery, folder


def one(nursery, case, *args):
    (found,) = nursery.values(case, *args, clients=1)
    return found


@pytest.mark.share(1, of="full disks")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_a_full_disk(disk, kvstore):
    nursery, folder = disk
    path, options = f"{folder}/s", {"kvstore": kvstore, "clients": 2}
    nursery.values(crash_cases.save, path, "old", **options)
    for target in (path, f"{folder}/beside"):
        answers = nursery.run(crash_cases.save, target, "new", **options)
        assert {answer.error for answer in answers} == {"StorageFullError"}, answers
        assert len({answer.text for answer in answers}) == 1
        assert "free space and save again" in answers[0].text
        assert one(nursery, crash_cases.generation_at, path) == "old"
        assert one(nursery, crash_cases.names_in, folder) == ["s"]
    one(nursery, crash_cases.remove, path)
    nursery.values(crash_cases.save, path, "new", **options)
    assert one(nursery, crash_cases.generation_at, path) == "new"
    one(nursery, crash_cases.remove, path)


@pytest.mark.share(1, of="full disks")
def test_a_disk_that_may_not_be_written(disk):
    nursery, folder = disk
    path = f"{folder}/s"
    nursery.values(crash_cases.save, path, "old", clients=2)
    one(nursery, mounts.forbid_writing, folder)
    for target in (path, f"{folder}/beside", f"{folder}/new/beside"):
        for kvstore in ("ocdbt", "zarr"):
            answers = nursery.run(crash_cases.save, target, "new", kvstore=kvstore, clients=2)
            assert {answer.error for answer in answers} == {"StoragePermissionError"}, answers
            assert len({answer.text for answer in answers}) == 1
            assert "client 0: " in answers[0].text
            assert one(nursery, crash_cases.generation_at, path) == "old"
            assert one(nursery, crash_cases.names_in, folder) == ["s"]
