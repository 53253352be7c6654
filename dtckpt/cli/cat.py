"""``dtckpt cat``: print a slice of a tensor, or statistics of it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from dtckpt.checkpoint.progress_bar import is_watched
from dtckpt.cli.options import (
    LOCATION,
    complete_tensors,
    debug_option,
    json_option,
    memory_option,
    parse_size,
    quiet_option,
    return_freed_memory,
)
from dtckpt.cli.output import format_shape, open_progress, value_text, write_event, write_line
from dtckpt.errors import ConfigError, TensorNotFoundError, capped, did_you_mean, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.inspecting.elements import Statistics
    from dtckpt.checkpoint.inspecting.selection import Selection
    from dtckpt.checkpoint.reading.checkpoint import Checkpoint
    from dtckpt.checkpoint.reading.tensor_info import TensorInfo

MAX_SHOWN = 1000
"""Elements that are printed without ``--all``; of more, those at the edges, as NumPy does."""
EDGE = 3
MAX_PRINTED = 1 << 20
"""Elements that are printed at all: they are in memory."""

EPILOG = """\b
Examples:
  dtckpt cat step_100 model/w                      all of it, or its edges if it is large
  dtckpt cat step_100 'model/w[0:4, ..., -1]'
  dtckpt cat step_100 'model/w[::1000]' --all
  dtckpt cat step_100 model/w --stats              with counts of NaN and Inf
  dtckpt cat step_100 step                         a plain value

"""


@click.command("cat", epilog=EPILOG)
@click.argument("path", type=LOCATION)
@click.argument("tensor", metavar="TENSOR[SLICE]", shell_complete=complete_tensors)
@click.option("--stats", is_flag=True, help="Print statistics of the elements: extremes, mean, NaN, Inf, zeros.")
@click.option("--all", "all_elements", is_flag=True, help="Print every element; else of over 1000 those at the edges.")
@memory_option("256MiB", "Bound on tensor data in memory with --stats: 512MiB, 2GB.")
@json_option("Print one line of JSON, with every element or the statistics.")
@quiet_option
@debug_option
def command(*, path: str, tensor: str, stats: bool, all_elements: bool, max_memory: str, as_json: bool) -> None:
    """Print elements of a tensor of checkpoint PATH.

    SLICE has NumPy's syntax: integers, start:stop:step and '...'. Only the chunks that it meets are read. Minimum,
    maximum, mean and standard deviation count the finite elements, and the magnitudes of complex elements.
    """
    from dtckpt.checkpoint.inspecting.read_elements import read_elements
    from dtckpt.checkpoint.inspecting.selection import Selection
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.format.dtypes import numbers_of

    return_freed_memory()
    bound = parse_size(max_memory)
    with open_checkpoint(path) as checkpoint:
        name, text = split_slice(tensor, checkpoint)
        if name not in checkpoint.tensors:
            _write_value(checkpoint, name, text, stats=stats, as_json=as_json)
            return
        info = checkpoint.info(name)
        selection = Selection.parse("..." if text is None else text, info.shape)
        facts = {
            "path": str(checkpoint.path),
            "name": name,
            "dtype": info.dtype_name,
            "stored_dtype": info.stored_dtype_name,
            "tensor_shape": info.shape,
            "slice": text,
            "shape": selection.shape,
        }
        if stats:
            _write_statistics(_statistics(checkpoint, info, selection, bound), facts, as_json=as_json)
        elif as_json:
            _validate_printable(selection.shape)
            values = _json(numbers_of(read_elements(checkpoint, name, selection), info.stored_dtype_name).tolist())
            write_event("tensor", **facts, values=values)
        else:
            for line in _text(checkpoint, info, selection, is_all=all_elements).splitlines():
                write_line(line)


def split_slice(text: str, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """Split ``NAME[SLICE]`` into a name and a slice, None if there is none. Names may have brackets, too."""
    name, bracket, rest = text.rpartition("[")
    if text in checkpoint.tensors or not bracket or not rest.endswith("]"):
        return text, None
    return name, rest[:-1]


def _write_value(checkpoint: Checkpoint, name: str, text: str | None, *, stats: bool, as_json: bool) -> None:
    """Print a plain value, whole.

    Raises:
        TensorNotFoundError: There is none of this path.
    """
    from dtckpt.format.tree import value_nodes

    nodes = dict(value_nodes(checkpoint.structure))
    if name not in nodes:
        checkpoint.validate_readable(name)
        names = [*checkpoint.tensors, *nodes]
        hint = did_you_mean(name, names) or f"; it has {capped(map(repr, names))}"
        raise TensorNotFoundError(f"{checkpoint.path} has no tensor or value {name!r}{hint}", name=name)
    if text is not None or stats:
        raise ConfigError(f"{name!r} of {checkpoint.path} is a plain value; a slice and --stats are for tensors")
    node = nodes[name]
    if as_json:
        write_event("value", path=str(checkpoint.path), name=name, value=node.get("value", node))
    else:
        write_line(printable(value_text(node)))


# --- elements ---------------------------------------------------------------------------------------------------------


def _text(checkpoint: Checkpoint, info: TensorInfo, selection: Selection, *, is_all: bool) -> str:
    """Return the elements as NumPy writes them, with as many digits as tell each from its neighbours."""
    import shutil

    import numpy as np

    from dtckpt.checkpoint.inspecting.read_elements import read_edges, read_elements
    from dtckpt.format.dtypes import numbers_of

    shape = selection.shape
    is_short = is_all or math.prod(shape) <= MAX_SHOWN
    _validate_printable(shape if is_short else [min(size, 2 * EDGE + 1) for size in shape])
    read = (
        read_elements(checkpoint, info.name, selection)
        if is_short
        else read_edges(checkpoint, info.name, selection, EDGE)
    )
    numbers = numbers_of(read, info.stored_dtype_name)
    if not shape and numbers.size == 1:
        return str(numbers.reshape(()).item() if numbers.dtype.kind in "biu" else numbers[()])
    return np.array2string(
        numbers,
        # In a pipe, a row is a line.
        max_line_width=shutil.get_terminal_size().columns if is_watched(sys.stdout) else sys.maxsize,
        threshold=sys.maxsize if is_short else 0,
        edgeitems=EDGE,
        floatmode="unique",
    )


def _validate_printable(shape: tuple[int, ...] | list[int]) -> None:
    if math.prod(shape) > MAX_PRINTED:
        raise ConfigError(
            f"{math.prod(shape)} elements would be printed, expected at most {MAX_PRINTED}; give a smaller slice, as "
            "in 'NAME[0:10, ..., -1]', or --stats"
        )


def _json(values: Any) -> Any:
    """Return numbers, or nested lists of them, as JSON; numbers that JSON lacks are nodes, as in ``dtckpt inspect``."""
    if isinstance(values, list):
        return [_json(value) for value in values]
    from dtckpt.format.plain_values import encode_value

    node = encode_value(values, "")
    return node.get("value", node)


# --- statistics -------------------------------------------------------------------------------------------------------


def _statistics(checkpoint: Checkpoint, info: TensorInfo, selection: Selection, max_memory: int) -> Statistics:
    from dtckpt.checkpoint.inspecting.read_elements import read_statistics

    nbytes = selection.region.numel * info.nbytes // max(1, math.prod(info.shape))
    with open_progress("reading", nbytes) as progress:
        return read_statistics(checkpoint, info.name, selection, max_memory=max_memory, progress=progress.advance)


def _write_statistics(statistics: Statistics, facts: dict[str, Any], *, as_json: bool) -> None:
    numbers = {
        "count": statistics.count,
        "min": statistics.minimum,
        "max": statistics.maximum,
        "mean": statistics.mean if statistics.num_finite else None,
        "std": statistics.deviation if statistics.num_finite else None,
        "nan": statistics.num_nan,
        "inf": statistics.num_inf,
        "zeros": statistics.num_zeros,
    }
    if as_json:
        write_event("statistics", **facts, **{key: _json(number) for key, number in numbers.items()})
        return
    write_line(f"shape  {format_shape(facts['shape'])}")
    write_line(f"dtype  {facts['dtype']}")
    for key, number in numbers.items():
        write_line(f"{key:<7}{'none' if number is None else number}")
