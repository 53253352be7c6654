"""Reading Dockerfiles, as far as the tests need it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One ``FROM`` with the instructions below it."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [rest for each, rest in self.instructions if each == name]

    def last(self, name: str) -> str:
        return self.all(name)[-1]

    def last_list(self, name: str) -> list[str]:
        """Return the exec form of ENTRYPOINT or CMD; the shell form is no JSON and raises."""
        return json.loads(self.last(name))


def read_stages(path: Path) -> dict[str, Stage]:
    """Return the stages by name, in the file's order; every one must have a name."""
    text = path.read_text().replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = current = Stage(base)
        else:
            current.instructions.append((instruction, rest.strip()))
    return stages
