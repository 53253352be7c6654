"""docs/errors.md has the meaning and the cure of every error class."""

import re
from pathlib import Path

from dtckpt import errors

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"


def classes(base):
    return {
        base,
        *(each for child in base.__subclasses__() if child.__module__ == errors.__name__ for each in classes(child)),
    }


def test_every_class_is_in_one_row():
    firsts = [re.split(r"(?<!\\)\|", line)[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [name for cell in firsts for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(each.__name__ for each in classes(errors.DtckptError))
