import pytest

from .sample_files import SAMPLES


@pytest.fixture(scope="session")
def peers():
    """Return the folder with all samples, which tests must not change."""
    return SAMPLES
