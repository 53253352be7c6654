"""Completion of command lines in bash, zsh and fish, by `click`: scripts, and the values of arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VARIABLE = "_DTCKPT_COMPLETE"
"""A shell's script sets it to ask ``dtckpt`` for the completions; `click` derives the name from the program's."""
EXIT_CODES_TOPIC = "exit-codes"
MAX_NAMES = 1000


def completion_script(command: click.Command, shell: str) -> str:
    """Return a shell's script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    completion = kind(command, {}, "dtckpt", VARIABLE)
    # Not `source`, which runs bash to ask for its version: the script is made for other machines, too.
    return completion.source_template % completion.source_vars()


def complete_topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str | CompletionItem]:
    """Return the topics of ``dtckpt help``."""
    group = context.parent.command if context.parent else None
    commands = group.list_commands(context) if isinstance(group, click.Group) else []
    return [topic for topic in (*commands, EXIT_CODES_TOPIC) if topic.startswith(incomplete)]


def complete_tensors(context: click.Context, _: click.Parameter, incomplete: str) -> list[str | CompletionItem]:
    """Return names of tensors of the checkpoint before on the line; none if it cannot be opened."""
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.errors import DtckptError

    try:
        with open_checkpoint(str(context.params["path"])) as checkpoint:
            names = [name for name in checkpoint.tensors if name.startswith(incomplete)]
    except (DtckptError, OSError, KeyError):
        return []  # an error would be printed into the line
    return list(names[:MAX_NAMES])
