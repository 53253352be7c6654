"""The table that notebooks show of an open checkpoint, with a picture of its largest tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.errors import format_nbytes
from dtckpt.pictures.notebook import drawn
from dtckpt.pictures.sharding import MAX_DRAWN_RANK, Subject
from dtckpt.pictures.svg import escape

MAX_ROWS = 40


def checkpoint_html(title: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the tensors of a checkpoint as HTML.

    Args:
        title: The heading.
        tensors: Facts of the tensors, by name.
    """
    return "".join(_parts(title, tensors))


def _parts(title: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    yield f"<p><b>{escape(title)}</b></p><table><tr>"
    yield "".join(f"<th>{heading}</th>" for heading in ("tensor", "shape", "dtype", "layout", "size", "chunks"))
    yield "</tr>"
    shown = [tensors[name] for name in list(tensors)[:MAX_ROWS]]
    for each in shown:
        layout = ", ".join(map(str, each.layout.sharding_specs)) if each.layout else ""
        cells = (each.name, each.shape, each.dtype_name, layout, format_nbytes(each.nbytes), each.num_chunks)
        yield f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
    yield "</table>"
    if more := len(tensors) - len(shown):
        yield f"<p>and {more} more</p>"
    drawable = [each for each in shown if each.layout is not None and 0 < len(each.shape) <= MAX_DRAWN_RANK]
    largest = max(drawable, key=lambda info: info.nbytes, default=None)
    if largest is not None and largest.layout is not None:
        yield drawn(Subject(largest.layout, largest.shape), largest.name) or ""
