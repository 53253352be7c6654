"""The project's English: patterns that must be read twice stay under bounds that only go down.

A rate is in hits per 1 000 words. ``python tests/test_english.py`` prints all rates, and
``python tests/test_english.py docs headless`` prints the hits of one kind of text and one pattern.
"""

import ast
import io
import re
import sys
import tokenize
from functools import cache
from inspect import cleandoc
from pathlib import Path

import pytest

from dtckpt.cli.commands import cli

ROOT = Path(__file__).resolve().parents[1]
_ASKED = r"(?<!\bsay )(?<!\bsays )(?<!\btells )(?<!\bshow )(?<!\bshows )(?<!\bknows )(?<!\bdecides )(?<!\bargument )"
_VERB = r"(?:is|are|was|were|has|have|had|can|may|must|will|would|does|did|\w+[^\Wisu]s)\b"
_CLAUSE = r"(?:[.;:(] ?|, |\b(?:and|or|but|if|that|until|when|while|which|where|because|as|so|than) )"
PATTERNS = {
    "headless": rf"{_ASKED}\b[Ww]hat (?!if\b|to\b)\w+(?![^.]*\?)",
    "that of": r"\b(?:[Tt]hat|[Tt]hose) of\b",
    "of its own": r"\bof (?:its|their|his|our|your) own\b",
    "no noun": r"\b(?i:nobody|everybody|somebody|everyone|someone|anyone|anybody|whoever)\b|^None of\b"
    rf"|(?:^One |{_CLAUSE}(?:none|one) )(?:{_VERB}|(?:that|which|who)\b)|\bnone of (?:it|them|these|those)\b|^One of\b",
    "pronoun": rf"^(?:It|They|(?:This|That) (?:{_VERB}|alone|too|also)|(?:These|Those) (?:are|were|have|may|must))\b",
    "long": r"^(?:\S+ ){30}",
}
"""Patterns of a sentence; the last one is a sentence of more than 30 words."""
AIM = {"headless": 0.3, "that of": 0.3, "of its own": 0.3, "no noun": 0.3}
BOUNDS = {
    "docs": AIM | {"that of": 0.1, "of its own": 0.1, "no noun": 0.1, "pronoun": 0.8, "long": 0.3},
    "changelog": AIM | {"that of": 0.1, "of its own": 0.1, "no noun": 0.1, "pronoun": 1.4, "long": 0.3},
    "contributing": AIM | {"that of": 0.1, "of its own": 0.1, "no noun": 0.1, "pronoun": 0.7, "long": 0.1},
    "docstrings": AIM | {"pronoun": 0.1, "long": 0.3},
    "comments": AIM | {"pronoun": 0.1, "long": 0.4},
    "errors": AIM | {"pronoun": 0.1, "long": 2.0},
    "help": AIM | {"pronoun": 0.5, "long": 2.4},
}
"""The highest rate of each pattern in each kind of text. Lower a bound when texts become better; never raise one."""


def pages(*names):
    """Yield the pieces of Markdown pages: paragraphs, items of lists, cells of tables; without code."""
    for name in names:
        text = re.sub(r"^( *)```.*?^\1```$|<[^>]*>|^:::[^\n]*", "", (ROOT / name).read_text(), flags=re.M | re.S)
        text = re.sub(r"^#+ (.*)$", r"\n\1\n", text, flags=re.M)
        text = re.sub(r"\]\([^)]*\)|[\[\]]|\*+(?=\S)|(?<=\S)\*+", "", text)
        yield from re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n?\|", text)


@cache
def modules():
    """Return the texts of all modules of the library and of the server."""
    paths = (path for folder in ("dtckpt", "server") for path in sorted((ROOT / folder).rglob("*.py")))
    return [path.read_text() for path in paths if "_proto" not in path.parts]


def nodes(kind):
    """Yield the nodes of one kind in the syntax trees of all modules."""
    return (node for text in modules() for node in ast.walk(ast.parse(text)) if isinstance(node, kind))


def without_figures(text):
    """Return a docstring without its literal blocks, which follow a line that ends in two colons."""
    kept, margin = [], None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if margin is not None and line.strip() and indent <= margin:
            margin = None
        if margin is None:
            kept.append(line)
            if line.rstrip().endswith("::"):
                margin = indent
                kept.append("")
    return "\n".join(kept)


def docstrings():
    """Yield the pieces of docstrings, also of constants; without examples and figures."""
    for node in nodes(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = re.sub(r"^ *>>> .*\n(?: *\S.*\n)*", "", without_figures(cleandoc(node.value.value)), flags=re.M)
            yield from re.split(
                r"\n\s*\n|\n\s*(?:[-*]|\w+:|\w+ \(.*?\):) |\n\s*(?:Args|Returns|Raises|Yields):\n", text
            )


def comments():
    """Yield each comment, joined with those on the next lines."""
    for text in modules():
        lines = {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:|fmt:|pragma)", token.string):
                number, words = token.start[0], token.string.lstrip("#: ")
                lines[number] = f"{lines.pop(number - 1, '')} {words}" if token.line.lstrip()[0] == "#" else words
        yield from lines.values()


def texts(node):
    """Yield each text below a node; values in it read ``X``."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def helps():
    """Yield the pieces of the help of each command and option."""
    for command in cli.commands.values():
        for text in (command.help, command.epilog, *(getattr(option, "help", "") for option in command.params)):
            yield from re.split(r"\n\s*\n|^\s*(?:\$ )?dtckpt .*$", text or "", flags=re.M)


GENERATED = {"operators.md", "names.md"}  # from docstrings
DOCS = {path for path in (ROOT / "docs").rglob("*.md") if path.name not in GENERATED}
EXAMPLES = {path for path in DOCS if path.parent.name == "contributing"}
KINDS = {
    "docs": lambda: pages(*DOCS - EXAMPLES, "README.md", "deploy/README.md", "examples/README.md"),
    "changelog": lambda: pages("CHANGELOG.md"),
    "contributing": lambda: pages("CONTRIBUTING.md", *EXAMPLES),
    "docstrings": docstrings,
    "comments": comments,
    "errors": lambda: (text for node in nodes(ast.Raise) for text in texts(node)),
    "help": helps,
}


@cache
def sentences(kind):
    """Return the sentences of a kind of text."""
    pieces = (" ".join(piece.replace("`", "").split()) for piece in KINDS[kind]())
    ends = r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)(?<!i\.e\.) "
    return [sentence for piece in pieces for sentence in re.split(ends, piece) if sentence]


def hits(kind, pattern):
    """Return the sentences with a pattern, once for each time that it occurs."""
    return [sentence for sentence in sentences(kind) for _ in re.finditer(PATTERNS[pattern], sentence)]


def rate(kind, pattern):
    """Return how often a pattern occurs in 1 000 words."""
    return 1000 * len(hits(kind, pattern)) / sum(len(sentence.split()) for sentence in sentences(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_english(kind):
    for pattern, bound in BOUNDS[kind].items():
        assert rate(kind, pattern) <= bound, (pattern, hits(kind, pattern))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*hits(*sys.argv[1:]), sep="\n")
    else:
        for kind in KINDS:
            print(f"{kind:13}", {pattern: round(rate(kind, pattern), 2) for pattern in PATTERNS})
