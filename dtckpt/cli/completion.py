"""``dtckpt completion``: print the script with which a shell completes command lines, by `click`."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from dtckpt.cli.options import debug_option
from dtckpt.cli.output import write_line

VARIABLE = "_DTCKPT_COMPLETE"
"""A shell's script sets it to ask ``dtckpt`` for the completions; `click` derives the name from the program's."""

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}

EPILOG = """\b
To have it in every shell:
  bash   dtckpt completion bash > ~/.local/share/bash-completion/completions/dtckpt
  zsh    dtckpt completion zsh > a folder of $fpath, as the file _dtckpt
  fish   dtckpt completion fish > ~/.config/fish/completions/dtckpt.fish

\b
Examples:
  dtckpt completion bash
  dtckpt completion zsh

"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@debug_option
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, paths and names of tensors."""
    completion = SHELLS[shell](context.find_root().command, {}, "dtckpt", VARIABLE)
    # Not `source`, which runs bash to ask for its version: the script is made for other machines, too.
    write_line(completion.source_template % completion.source_vars())
