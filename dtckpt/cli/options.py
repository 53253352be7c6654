"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

KVSTORES = ("ocdbt", "zarr")
"""A copy of the names in `dtckpt.format.manifest`, which is slow to import."""
CODECS = ("none", "zstd", "blosc")
"""A copy of the names in `dtckpt.format.codecs`, which is slow to import."""
TARGETS = ("dtckpt", "zarr", "safetensors", "dcp", "torch")
"""A copy of the names in `dtckpt.checkpoint.converting.targets`, which is slow to import."""
LOCATION = click.Path()
"""A path or URL; a shell completes paths."""


def debug_option(command: _Command) -> _Command:
    """Add ``--debug``."""
    # Without effect here: `dtckpt.cli.main` searches the arguments for it, so that it works even if parsing fails.
    return click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")(command)


def json_option(text: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def quiet_option(command: _Command) -> _Command:
    """Add ``--quiet``, which `dtckpt.cli.output` asks for."""

    def note(context: click.Context, _: click.Parameter, is_quiet: bool) -> None:
        context.meta[QUIET] = is_quiet

    text = "Print no progress and no closing line; only results and errors."
    return click.option("--quiet", is_flag=True, expose_value=False, callback=note, help=text)(command)


QUIET = "dtckpt.quiet"
"""The key, in the context of a command, that tells whether ``--quiet`` was given."""


def pager_option(command: _Command) -> _Command:
    """Add ``--pager``."""
    return click.option(
        "--pager/--no-pager", default=True, help="On a terminal: show long text in $PAGER, or else less [default: yes]."
    )(command)


def memory_option(default: str, text: str = "Bound on tensor data in memory: 512MiB, 2GB.") -> Callable[..., Any]:
    """Return a decorator that adds ``--max-memory``."""
    return click.option("--max-memory", metavar="SIZE", default=default, show_default=True, help=text)


def source_and_target(command: _Command) -> _Command:
    """Add the arguments SRC and DST."""
    return click.argument("src", type=LOCATION)(click.argument("dst", type=LOCATION)(command))


def rest_options(command: _Command) -> _Command:
    """Add ``--overwrite`` and ``--ignore-rest``."""
    overwrite = click.option(
        "--overwrite", is_flag=True, help="Replace a checkpoint at DST, once the new one is durable."
    )
    ignore = click.option(
        "--ignore-rest",
        is_flag=True,
        help="Leave behind the files, notes and values of another library's SRC that dtckpt does not read.",
    )
    return overwrite(ignore(command))


def mesh_options(*, is_required: bool) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--mesh``, ``--layout`` and ``--layout-file``."""
    mesh = click.option(
        "--mesh",
        required=is_required,
        metavar="AXIS=SIZE,...",
        help="Target mesh, major axis first: data=2,model=4.",
    )
    layout = click.option(
        "--layout",
        "layouts",
        multiple=True,
        metavar="PATTERN=SPEC",
        help="Layout of the tensors that match; see below.",
    )
    file = click.option("--layout-file", type=click.Path(path_type=Path), help="File of layouts, one per line.")
    return lambda command: mesh(layout(file(command)))


LAYOUT_HELP = """\b
Layouts:
  PATTERN is a glob over tensor names (* also matches /); the first match wins, command line before file.
  SPEC has one entry per dim, separated by commas: an axis (x), axes in order, major first (x+y), or unsharded.
  A scalar's SPEC is empty. The last = parts the two. Tensors that nothing matches keep their saved specs as far
  as the mesh has those axes. A layout file has one PATTERN=SPEC per line; # starts a comment.

"""
