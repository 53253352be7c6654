"""`dtckpt.dtensor` shows the names that it promises, and docs/names.md says how they differ."""

import importlib
from pathlib import Path

from support.states import needs_newer_torch

from dtckpt import dtensor

from . import public_names
from .public_names import DEPARTURES, WORKS, module_of

PAGE = Path(__file__).parents[2] / "docs" / "names.md"

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


@needs_newer_torch("the page lists the names of 2.13")
def test_the_page_says_what_is_so():
    assert PAGE.read_text() == public_names.page(), (
        "run cd tests; python -m dtensor.public_names > ../docs/names.md again"
    )


@needs_newer_torch("the list has the names and arguments of 2.13")
def test_names_and_arguments_that_differ_have_a_reason():
    found = list(public_names.names())
    assert [name.path for name in found if name.verdict != WORKS and not name.why] == []
    known = {name.path for name in found} | {module_of(name.path) for name in found}
    assert set(DEPARTURES) <= known
    assert len(found) > 150


def test_differences_are_seen():
    theirs, ours = public_names._parsed("(tensor, dim=None, *, kept=True, **options)"), public_names._parsed
    for text, wanted in (
        ("(tensor, dim=None, *, kept=True, more=1, **rest)", []),
        ("(dim, tensor=None, *, kept=True, **rest)", ["tensor", "dim"]),
        ("(tensor, dim=0, *, kept=False)", ["dim", "kept", "options"]),
    ):
        assert list(public_names._differences(theirs.parameters, ours(text).parameters)) == wanted
