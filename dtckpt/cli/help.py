"""``dtckpt help``: show the help of a command, or the exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dtckpt.cli.exit_codes import exit_code_lines
from dtckpt.cli.options import debug_option
from dtckpt.cli.output import write_line
from dtckpt.errors import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_CODES_TOPIC = "exit-codes"


def complete_topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str | CompletionItem]:
    """Return the topics of ``dtckpt help``."""
    group = context.parent.command if context.parent else None
    commands = group.list_commands(context) if isinstance(group, click.Group) else []
    return [topic for topic in (*commands, EXIT_CODES_TOPIC) if topic.startswith(incomplete)]


@click.command(
    "help",
    epilog="""\b
Examples:
  dtckpt help reshard
  dtckpt help exit-codes
""",
)
@click.argument("topic", required=False, metavar="[COMMAND|exit-codes]", shell_complete=complete_topics)
@debug_option
@click.pass_context
def command(context: click.Context, topic: str | None) -> None:
    """Show the help of a command, or the meaning of the exit codes."""
    parent = context.parent or context
    group = parent.command
    assert isinstance(group, click.Group)  # noqa: S101  this command is started from it
    if topic == EXIT_CODES_TOPIC:
        for line in exit_code_lines():
            write_line(line)
    elif topic is None:
        write_line(parent.get_help())
    elif (found := group.get_command(parent, topic)) is not None:
        write_line(found.get_help(click.Context(found, info_name=topic, parent=parent)))
    else:
        hint = did_you_mean(topic, [*group.commands, EXIT_CODES_TOPIC])
        raise click.UsageError(f"there is no help on {topic!r}{hint}", context)
