"""The names that `dtckpt.dtensor` shows are those that it promises."""

import importlib

from dtckpt import dtensor

SUBMODULES = ["debug", "experimental", "parallel", "placement_types"]


def test_dir_shows_the_public_names_only():
    assert dir(dtensor) == sorted({*dtensor.__all__, *SUBMODULES})
    assert len(dir(dtensor)) == len(dtensor.__all__) + len(SUBMODULES)


def test_all_that_is_shown_exists():
    for name in dtensor.__all__:
        assert getattr(dtensor, name) is not None
    for name in SUBMODULES:
        assert importlib.import_module(f"dtckpt.dtensor.{name}").__all__


def test_each_name_is_there():
    assert [name for name in dir(dtensor) if not hasattr(dtensor, name)] == []
