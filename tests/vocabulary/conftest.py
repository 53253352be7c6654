import os

import pytest

_PREFIXES = ("DTENSOR_", "DTCKPT_", "TORCHELASTIC_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """One client alone, whatever environment the tests run in; gives a function that sets variables."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables
