"""Write pictures as SVG, as a page of HTML, or as PNG (with matplotlib)."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from dtckpt.errors import ConfigError, StorageError
from dtckpt.pictures.svg import TEXT_CLASSES, escape

SUFFIXES = (".svg", ".html", ".png")
_DOTS_PER_PIXEL = 2
_PX_PER_INCH = 96


def svg_size(svg: str) -> tuple[float, float]:
    """Return width and height of a picture."""
    root = ET.fromstring(svg)  # noqa: S314  (made by this process)
    return float(root.get("width", "0")), float(root.get("height", "0"))


def validate_output(path: Path) -> None:
    """Refuse a file that no picture can be written to.

    Raises:
        ConfigError: Its suffix names no format, or matplotlib is missing for PNG.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output {str(path)!r} cannot be used; expected a file name with {', '.join(SUFFIXES)}")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError(
                "PNG needs matplotlib: pip install 'dtckpt[plot]', or write .svg or .html with --output"
            ) from None


def write_picture(svg: str, title: str, path: Path) -> None:
    """Write a picture in the format of the file's suffix; the file appears whole or not at all.

    Raises:
        StorageError: The file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        match path.suffix.lower():
            case ".png":
                _write_png(svg, draft)
            case ".html":
                draft.write_text(
                    f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
                    f"<style>body{{margin:24px;background:#fff}}svg{{max-width:100%;height:auto}}</style>\n{svg}</html>\n",
                    encoding="utf-8",
                )
            case _:
                draft.write_text(f"{svg}\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise StorageError(f"the picture cannot be written to {path}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


# --- PNG --------------------------------------------------------------------------------------------------------------


def _write_png(svg: str, path: Path) -> None:
    """Draw the shapes of a picture with matplotlib. Only the parts of SVG that dtckpt's pictures have are known."""
    from matplotlib.figure import Figure

    root = ET.fromstring(svg)  # noqa: S314  (made by this process)
    width, height = svg_size(svg)
    figure = Figure((width / _PX_PER_INCH, height / _PX_PER_INCH), dpi=_PX_PER_INCH * _DOTS_PER_PIXEL)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _draw(axes, root, 0.0, 0.0)
    figure.savefig(path, format="png")


def _draw(axes: Any, element: ET.Element, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    for child in element:
        tag = child.tag.rpartition("}")[2]
        at = x + _number(child, "x"), y + _number(child, "y")
        if tag == "svg":
            _draw(axes, child, *at)
        elif tag == "g":
            move = re.match(r"translate\(([\d.-]+) ([\d.-]+)\)", child.get("transform", ""))
            _draw(axes, child, x + float(move[1]) if move else x, y + float(move[2]) if move else y)
        elif tag == "rect":
            size = [_number(child, name, of=element) for name in ("width", "height")]
            edge = child.get("stroke")
            style = (0, (4, 3)) if child.get("stroke-dasharray") else "solid"
            axes.add_patch(
                Rectangle(
                    at,
                    *size,
                    facecolor=child.get("fill"),
                    edgecolor=edge,
                    linestyle=style,
                    linewidth=0.75 if edge else 0,
                )
            )
        elif tag == "text":
            _draw_text(axes, child, *at, is_centred=element.get("class") == "c")


def _draw_text(axes: Any, element: ET.Element, x: float, y: float, *, is_centred: bool) -> None:
    kind = element.get("class", "")
    size, colour = TEXT_CLASSES.get(kind, TEXT_CLASSES[""])
    anchor = "middle" if is_centred else element.get("text-anchor", "start")
    is_turned = "rotate(-90" in element.get("transform", "")
    axes.text(
        x,
        y,
        # matplotlib would set text between dollar signs as a formula.
        (element.text or "").replace("$", r"\$"),
        fontsize=size * 72 / _PX_PER_INCH * 0.94,
        color=element.get("fill", colour),
        fontweight="bold" if kind == "h" else "normal",
        ha={"start": "left", "middle": "center", "end": "right"}[anchor],
        va="center" if is_turned else "baseline",
        rotation=90 if is_turned else 0,
    )


def _number(element: ET.Element, name: str, of: ET.Element | None = None) -> float:
    text = element.get(name, "0")
    return float((of if of is not None else element).get(name, "0")) if text == "100%" else float(text)
