"""Visualize shardings: the region of a tensor that each device holds, in the terminal, as SVG and as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.layout import Layout
from dtckpt.pictures.sharding import Subject, sharding_grid, subject_html, subject_svg
from dtckpt.pictures.terminal import print_sharding

__all__ = ["sharding_grid", "sharding_html", "sharding_svg", "visualize_sharding"]


def _subject_of(tensor: DTensor | Layout, shape: Sequence[int] | None) -> Subject:
    if isinstance(tensor, Layout):
        if shape is None:
            raise LayoutTypeError("drawing a layout: got no shape, expected the global shape of the tensor")
        return Subject(tensor, tuple(shape))
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"drawing needs a DTensor; got {type(tensor).__name__}")
    if shape is not None and tuple(shape) != tuple(tensor.shape):
        raise LayoutError(f"drawing a DTensor: got shape {tuple(shape)}, expected its own, {tuple(tensor.shape)}")
    return Subject(tensor.layout, tuple(tensor.shape))


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print the region of a tensor that each device holds, once per mesh.

    The client that owns the mesh's first device prints, the others do nothing; no client waits for another. The
    function draws tensors with two or three dims. For other tensors, and for very fine cuts, it prints a list of
    regions.

    Args:
        dtensor: The tensor.
        header: Text to print above.
        use_rich: Colour the regions, if the terminal can show colours.

    Raises:
        LayoutError: The argument is no DTensor.
    """
    subject = _subject_of(dtensor, None)
    mesh = subject.layout.mesh
    if mesh.device_ids[0] in mesh.local_device_ids():
        print_sharding(subject, header, is_coloured=use_rich)


def sharding_svg(dtensor_or_layout: DTensor | Layout, shape: Sequence[int] | None = None, title: str = "") -> str:
    """Draw the region that each device holds, as an SVG picture.

    Each distinct region is one cell, with a colour and the devices that hold it, as far as there is room. The tooltip
    has all these devices. Empty regions are dashed cells below the drawing.

    Of three dims, every chunk of the first one gets a panel.
    Long dims are shortened and very short chunks widened; the numbers at the edges are indices.

    Args:
        dtensor_or_layout: The tensor, or a layout.
        shape: Global shape; needed with a layout.
        title: Text to show above.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    return subject_svg(_subject_of(dtensor_or_layout, shape), title)


def sharding_html(dtensor_or_layout: DTensor | Layout, shape: Sequence[int] | None = None, title: str = "") -> str:
    """Return a page of HTML with the picture of `sharding_svg` and a table of the regions.

    Args:
        dtensor_or_layout: The tensor, or a layout.
        shape: Global shape; needed with a layout.
        title: Text to show above.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    return subject_html(_subject_of(dtensor_or_layout, shape), title)
