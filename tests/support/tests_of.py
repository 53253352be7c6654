"""Run the fast tests of some files: of a test file that file, of a module the tests in the folder that mirrors its own.

python tests/support/tests_of.py dtckpt/storage/retries.py tests/layout/test_mesh.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = ("--workers=auto", "-m", "not processes and not slow")
"""The tests of ``make check``."""
NO_TESTS = 5
"""Exit code of pytest."""


def tests_of(files: Iterable[str]) -> Iterator[str]:
    """Yield the test files and folders that mirror files, given relative to the root of the repository."""
    for file in map(Path, files):
        match file.parts:
            case ("tests", *_) if file.name.startswith("test_"):
                yield str(file)
            case ("dtckpt", *folders, name):
                yield from _mirror(Path("tests", *folders), Path(name).stem)
            case ("server", *_):
                yield "tests/server"


def _mirror(folder: Path, stem: str) -> Iterator[str]:
    while not (ROOT / folder).is_dir():
        folder, stem = folder.parent, folder.name
    own = folder / f"test_{stem.strip('_')}.py"
    yield str(own if (ROOT / own).exists() else folder)


def main() -> int:
    found = sorted({test for test in tests_of(sys.argv[1:]) if (ROOT / test).exists() and test != "tests"})
    if not found:
        return 0
    os.chdir(ROOT)
    arguments = [sys.executable, "-m", "pytest", "-q", *OPTIONS, *found]
    return os.spawnv(os.P_WAIT, sys.executable, arguments)


if __name__ == "__main__":
    code = main()
    sys.exit(0 if code == NO_TESTS else code)
