"""``dtckpt help`` and ``dtckpt completion``: the commands about the other commands."""

from __future__ import annotations

import click

from dtckpt.cli.completion import EXIT_CODES_TOPIC, complete_topics
from dtckpt.cli.exit_codes import exit_code_lines
from dtckpt.cli.options import debug_option
from dtckpt.errors import did_you_mean


def _group_of(context: click.Context) -> click.Group:
    """Return the group of all commands."""
    group = context.find_root().command
    assert isinstance(group, click.Group)  # noqa: S101  these commands are started from it
    return group


@click.command(
    name="help",
    epilog="""\b
Examples:
  dtckpt help reshard
  dtckpt help exit-codes
""",
)
@click.argument("topic", required=False, metavar="[COMMAND|exit-codes]", shell_complete=complete_topics)
@debug_option
@click.pass_context
def show_help(context: click.Context, topic: str | None) -> None:
    """Show the help of a command, or the meaning of the exit codes."""
    from dtckpt.cli.output import write_line

    parent, group = context.parent or context, _group_of(context)
    if topic == EXIT_CODES_TOPIC:
        for line in exit_code_lines():
            write_line(line)
    elif topic is None:
        write_line(parent.get_help())
    elif (command := group.get_command(parent, topic)) is not None:
        write_line(command.get_help(click.Context(command, info_name=topic, parent=parent)))
    else:
        hint = did_you_mean(topic, [*group.commands, EXIT_CODES_TOPIC])
        raise click.UsageError(f"there is no help on {topic!r}{hint}", context)


_COMPLETION_HELP = """\b
To have it in every shell:
  bash   dtckpt completion bash > ~/.local/share/bash-completion/completions/dtckpt
  zsh    dtckpt completion zsh > a folder of $fpath, as the file _dtckpt
  fish   dtckpt completion fish > ~/.config/fish/completions/dtckpt.fish

\b
Examples:
  dtckpt completion bash
  dtckpt completion zsh

"""


@click.command(epilog=_COMPLETION_HELP)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@debug_option
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, paths and names of tensors."""
    from dtckpt.cli.completion import completion_script
    from dtckpt.cli.output import write_line

    write_line(completion_script(_group_of(context), shell))
