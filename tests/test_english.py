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
from pathlib import Path

import click
import pytest

from dtckpt.cli.commands import cli

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"operators.md", "names.md"}
"""Pages that programs write from docstrings."""
_VERB = r"(?:is|are|was|were|has|have|had|can|may|must|will|would|does|did|gets?|\w+(?<![isu])s)\b"
_CLAUSE = r"(?:^|[.;:(] ?|, (?!one of)|\b(?:and|or|but|if|that|until|when|while|which|where|because|as|so|than) )"
_ASKED = "".join(rf"(?<!{verb} )" for verb in ("say", "says", "tell", "tells", "show", "shows", "knows", "decides", "explains"))
PATTERNS = {
    "headless": rf"{_ASKED}\bwhat (?:is|are|was|were|has|have|had|it|they|he|no|none|nobody|all|each|every|any|only|others?"
    r"|the|an?|this)\b(?![^.]*\?)",
    "that of": r"\b(?:that|those) of\b",
    "of its own": r"\bof (?:its|their|his|our|your) own\b",
    "no noun": r"\b(?:nobody|everybody|somebody|everyone|someone|anyone|anybody|whoever)\b|\bnone of (?:it|its|them|these|those)"
    rf"\b|{_CLAUSE}(?:none|one) (?:{_VERB}|(?:that|which|who)\b)|(?:^|[.;] )(?:none|one) of\b",
    "pronoun": rf"^(?:It\b|They\b|(?:This|These|Those|That) (?:{_VERB}|(?:too|also|alone|in|on|at|by)\b))",
    "long": r"^(?:\S+ ){30}",
}
"""Patterns of a sentence, without regard to case but for a sentence's begin."""
BOUNDS = {}


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


def docstrings():
    """Yield the pieces of docstrings, also of constants; without examples."""
    for text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                text = re.sub(r"^ *>>> .*\n(?: *\S.*\n)*", "", node.value.value, flags=re.M)
                yield from re.split(r"\n\s*\n|\n\s*(?:[-*]|\w+:|\w+ \(.*?\):) |\n\s*(?:Args|Returns|Raises|Yields):\n", text)


def comments():
    """Yield each comment, joined with those on the next lines."""
    for text in modules():
        lines = {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:|fmt:|pragma)", token.string):
                words = token.string.lstrip("#: ")
                number = token.start[0]
                lines[number] = f"{lines.pop(number - 1, '')} {words}" if token.line.lstrip()[0] == "#" else words
        yield from lines.values()


def errors():
    """Yield each text in a raise statement; values in it read ``X``."""
    for text in modules():
        for node in (inner for outer in ast.walk(ast.parse(text)) if isinstance(outer, ast.Raise) for inner in ast.walk(outer)):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
                node.values = []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def helps():
    """Yield the help of each command and option."""
    for command in cli.commands.values():
        for text in (command.help, command.epilog, *(getattr(one, "help", "") for one in command.params)):
            yield from re.split(r"\n\s*\n|^\s*(?:\$ )?dtckpt .*$", text or "", flags=re.M)


DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in GENERATED]
EXAMPLES = [path for path in DOCS if path.parent.name == "contributing"]
KINDS = {
    "docs": lambda: pages(*(path for path in DOCS if path not in EXAMPLES), "deploy/README.md", "examples/README.md"),
    "changelog": lambda: pages("CHANGELOG.md"),
    "readme": lambda: pages("README.md"),
    "contributing": lambda: pages("CONTRIBUTING.md", *EXAMPLES),
    "docstrings": docstrings,
    "comments": comments,
    "errors": errors,
    "help": helps,
}


@cache
def sentences(kind):
    """Return the sentences of a kind of text."""
    joined = (" ".join(piece.replace("`", "").split()) for piece in KINDS[kind]())
    return [sentence for piece in joined for sentence in re.split(r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)(?<!i\.e\.) ", piece) if sentence]


def hits(kind, pattern):
    """Return the sentences with a pattern, once for each time that it occurs."""
    flags = re.I if pattern != "pronoun" else 0
    return [sentence for sentence in sentences(kind) for _ in re.finditer(PATTERNS[pattern], sentence, flags)]


def rate(kind, pattern):
    return 1000 * len(hits(kind, pattern)) / sum(len(one.split()) for one in sentences(kind))


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
