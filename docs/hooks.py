"""The site's pages that lie outside ``docs/``, links that leave it, and examples in docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "kubernetes.md",
    "examples/README.md": "examples.md",
}
"""Files of the repository that are pages of the site."""
_FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(?P<text>\[[^\[\]]*\])\((?!\w+:)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point the links of a page at the site's pages."""
    name = page.file.src_uri
    source = next((source for source, other in PAGES.items() if other == name), f"docs/{name}")
    pieces = _FENCED.split(markdown)  # every other one is code
    return "".join(piece if number % 2 else with_links(piece, source, name) for number, piece in enumerate(pieces))


def with_links(markdown: str, source: str, name: str) -> str:
    """Return text whose links lead to pages of the site; a link to another file of the repository becomes plain text.

    Args:
        markdown: The text, without code.
        source: Path of its file in the repository.
        name: Path of its page in the site.
    """

    def changed(link: re.Match[str]) -> str:
        path = normpath(join(dirname(source), link["path"]))
        target = PAGES.get(path, path.removeprefix("docs/"))
        if target == path:
            return link["text"][1:-1]
        return f"{link['text']}({relpath(target, dirname(name) or '.')}{link['anchor'] or ''})"

    return _LINK.sub(changed, markdown)


_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.M)


class FencedExamples(Extension):
    """Makes the examples of docstrings blocks of code: Markdown takes lines with ``>>>`` for quotations."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
