"""Completion, driven as the shells drive it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import run_process

# What bash does when Tab is pressed after the words of $1: it calls the function that the script has registered.
BASH = """
source ./script
COMP_WORDS=($1); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
[[ $1 == *' ' ]] && COMP_WORDS+=('') && COMP_CWORD=$(( COMP_CWORD + 1 ))
function=$(complete -p dtckpt | sed -E 's/.*-F (\\S+) .*/\\1/')
compopt() { :; }
"$function" dtckpt "${COMP_WORDS[COMP_CWORD]}" ''
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def shell(tmp_path, source):
    """Return what bash offers after a line; the command and a checkpoint are in the folder."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    (tmp_path / "script").write_text(run_process("completion", "bash").out)
    command = tmp_path / "dtckpt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dtckpt.cli.main "$@"\n')
    command.chmod(0o755)
    (tmp_path / "step_7").symlink_to(source)

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", BASH, "bash", line],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_bash_completes_commands_options_and_tensors(shell):
    assert shell("dtckpt re") == ["reshard"]
    assert "--max-memory" in shell("dtckpt reshard --m")
    assert shell("dtckpt cat step_7 model/u") == ["model/uneven"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_ask_the_command(shell):
    script = run_process("completion", shell).out
    assert "dtckpt" in script
    assert f"{shell}_complete" in script


def test_a_line_that_cannot_be_completed_offers_nothing(shell, tmp_path):
    assert shell("dtckpt cat no_such_checkpoint mod") == []
    assert not Path(tmp_path / "no_such_checkpoint").exists()
