"""Options that several commands share, and parsers of their texts, without NumPy and PyTorch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtckpt.errors import ConfigError, DtckptError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from dtckpt.checkpoint.mapping.map_rules import TensorMap

_Command = TypeVar("_Command", bound=Callable[..., Any])

KVSTORES = ("ocdbt", "zarr")
"""A copy of the names in `dtckpt.format.manifest`, which is slow to import."""
TARGETS = ("dtckpt", "zarr", "safetensors", "dcp", "torch", "orbax", "tensorflow")
"""A copy of the names in `dtckpt.checkpoint.converting.targets`, which is slow to import."""
LOCATION = click.Path()
"""A path or URL; a shell completes paths."""
LIVE = "live://"
"""A copy of the scheme in `dtckpt.checkpoint.live.versions`, which is slow to import."""
MAX_NAMES = 1000
"""How many names a shell is offered."""
# Parameters of `mallopt`, from <malloc.h>.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for infix, base in (("i", 1024), ("", 1000))
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


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


def return_freed_memory() -> None:
    """Make glibc return the memory of freed chunks to the system at once.

    By default it keeps up to twice ``--max-memory`` for later, in the heaps of several threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_ARENA_MAX, 1)


def parse_size(text: str) -> int:
    """Parse a size such as ``512KiB``, ``1.5GiB``, ``2GB`` or ``4096``; return it in bytes.

    Raises:
        ConfigError: The text is no size of at least one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    nbytes = (
        0 if match is None or unit is None else int(float(match[1]) * unit if "." in match[1] else int(match[1]) * unit)
    )
    if nbytes < 1:
        raise ConfigError(
            f"size cannot be used; got {text!r}, expected bytes or a number with KiB, MiB, GiB, KB, MB, GB"
        )
    return nbytes


def parse_pairs(texts: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Parse ``LEFT=RIGHT`` texts; names may hold ``=``, and the last one parts the two.

    Raises:
        ConfigError: A text is malformed, or two of them begin alike.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        left, _, right = text.rpartition("=")
        if not left or not right or left in pairs:
            raise ConfigError(f"--{option} {text!r} cannot be used; expected {form}, and each name once")
        pairs[left] = right
    return pairs


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


def map_options(command: _Command) -> _Command:
    """Add ``--map``, ``--map-back`` and ``--map-size``; `parse_map` takes them."""
    name = click.option(
        "--map",
        "map_name",
        metavar="MAP",
        help="Take names and shapes from a map: a JSON file, or a map of dtckpt by name.",
    )
    back = click.option("--map-back", metavar="MAP", help="The same, from the other side of the map.")
    size = click.option("--map-size", "map_sizes", multiple=True, metavar="AXIS=N", help="Size of an axis of the map.")
    return name(back(size(command)))


def parse_map(name: str | None, back: str | None, sizes: Sequence[str]) -> TensorMap | None:
    """Return the map that the options of `map_options` choose, if any.

    Raises:
        ConfigError: Both sides of a map are asked for, or the map or a size cannot be used.
    """
    if (name is None) == (back is None):
        if name is not None or sizes:
            raise ConfigError(f"expected one of --map and --map-back; got {'both' if name is not None else 'none'}")
        return None
    pairs = parse_pairs(sizes, "map-size", "AXIS=N")
    if wrong := [text for text in pairs.values() if not text.isdecimal()]:
        raise ConfigError(f"--map-size must be a whole number; got {wrong[0]!r}")
    from dtckpt.checkpoint.mapping.map_rules import TensorMap

    rules = TensorMap.load(name or back or "", {axis: int(text) for axis, text in pairs.items()})
    return rules if back is None else rules.inverse()


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


def complete_tensors(context: click.Context, _: click.Parameter, incomplete: str) -> list[str | CompletionItem]:
    """Return names of tensors of the checkpoint before on the line; none if it cannot be opened."""
    from dtckpt.checkpoint.open import open_checkpoint

    if str(context.params["path"]).startswith(LIVE):
        return []  # a shell that waits for a coordinator would seem to hang
    try:
        with open_checkpoint(str(context.params["path"])) as checkpoint:
            names = [name for name in checkpoint.tensors if name.startswith(incomplete)]
    except (DtckptError, OSError, KeyError):
        return []  # an error would be printed into the line
    return list(names[:MAX_NAMES])
