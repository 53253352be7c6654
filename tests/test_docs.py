"""Every Python block of README.md and docs/ runs; the pages name what exists; the site is built without a warning."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import docs_cases
import pytest

import dtckpt
from dtckpt.cli.commands import cli
from examples import plot_concepts, plot_overview

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": ("readme", 4),
    "docs/checkpointing.md": ("checkpointing", 2),
    "docs/concepts.md": ("concepts", 4),
    "docs/convert.md": ("convert", 2),
    "docs/dcp.md": ("dcp", 1),
    "docs/expert_parallel.md": ("expert_parallel", 4),
    "docs/format.md": ("formats", 1),
    "docs/object_stores.md": ("object_stores", 1),
    "docs/protocol.md": ("protocol", 2),
    "docs/simulate.md": ("simulate", 1),
    "docs/start.md": ("start", 2),
    "docs/tensor_parallel.md": ("tensor_parallel", 2),
    "docs/tiers.md": ("tiers", 2),
}
"""Pages whose blocks run here: their names in `docs_cases`, and the number of clients."""
ELSEWHERE = {
    "docs/adopt.md": "tests/interop/test_adopt.py",
    "docs/contributing/cli_command.md": "tests/test_contributing.py",
    "docs/contributing/storage_back_end.md": "tests/test_contributing.py",
    "docs/live.md": "tests/checkpoint/live/test_live.py",
    "docs/zarr.md": "tests/interop/test_zarr_docs.py",
}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def test_no_page_is_left_out():
    pages = {"README.md", *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))}
    assert {page for page in pages if blocks(page)} == PAGES.keys() | ELSEWHERE.keys()


@pytest.mark.share(4)
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(pool, tmp_path, page):
    name, clients = PAGES[page]
    pool.values(docs_cases.run_page, name, str(tmp_path / "job"), blocks(page), clients=clients, group=True)


def test_the_first_program_goes_on_with_another_number_of_processes(pool, tmp_path):
    program = blocks("docs/start.md")[0]
    assert pool.values(docs_cases.train, str(tmp_path), program, 13, clients=2, group=True) == [0, 0]
    assert pool.values(docs_cases.train, str(tmp_path), program, 25, clients=3, group=True) == [11, 11, 11]


def commands():
    """Yield the page and the words of every command of dtckpt on a page."""
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        # With their kinds: else the end of a Python block would count as the begin of one.
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S):
            if kind:
                continue
            for line in re.findall(r"^\$? ?dtckpt ([a-z].*)$", block, re.M):
                yield path.name, tuple(shlex.split(line.rstrip("\\"), comments=True))


def test_commands_have_the_options_that_pages_use():
    found = sorted({*commands()})
    assert len(found) > 40
    for _, (name, *arguments) in found:
        with click.Context(cli) as context:
            cli.commands[name].make_parser(context).parse_args(arguments)


def test_every_public_name_is_in_the_reference_once():
    pages = [path.read_text() for path in (DOCS / "reference").glob("*.md")]
    found = sorted(name for page in pages for name in re.findall(r"^::: dtckpt\.(\w+)$", page, re.M))
    assert found == sorted({*dtckpt.__all__} - {"dtensor", "interop"})


@pytest.mark.parametrize(("page", "least"), [("guarantees.md", 40), ("security.md", 30)])
def test_every_guarantee_names_a_test(page, least):
    rows = re.findall(r"^\| .* \| .* \| `(.*?)::(.*)` \|$", (DOCS / page).read_text(), re.M)
    assert len(rows) > least
    for file, name in rows:
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(), (file, name)  # of a class, maybe


def test_every_defect_of_the_track_record_names_a_test():
    rows = re.findall(r"^\| .* \| .* \| .* \| `(.*)::(.*)` \|$", (DOCS / "track_record.md").read_text(), re.M)
    assert len(rows) > 30
    for file, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text(), (file, name)


def test_pictures_are_what_their_programs_draw():
    for folder, pictures in ((DOCS, plot_overview.PICTURES), (DOCS / "pictures", plot_concepts.PICTURES)):
        for name, picture in pictures.items():
            assert (folder / f"{name}.svg").read_text() == picture()


def test_the_site_is_built_without_a_warning(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"<(script|link|img)[^>]*(src|href)=.?(https?:)?//", page.read_text()), page


def test_the_notebook_has_the_outputs_that_its_cells_give(pool):
    stored = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    assert pool.values(docs_cases.tour, clients=1) == [stored]
