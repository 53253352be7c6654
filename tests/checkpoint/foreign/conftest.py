import tarfile

import pytest

from .peer_samples import ARCHIVE


@pytest.fixture(scope="session")
def peers(tmp_path_factory):
    """Return the folder with all samples, which tests must not change."""
    folder = tmp_path_factory.mktemp("peers")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder
