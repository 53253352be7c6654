"""Pictures as SVG text: shapes, texts and colours; they need no library, and refer to nothing outside."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

FONT = "12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif"
INK, MUTED, WAIT = "#1f2933", "#616e7c", "#c5ccd3"
OKABE_ITO = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (0, 114, 178), (213, 94, 0))
"""Red, green and blue of the colours of Okabe and Ito, which colour-blind people tell apart."""
PALETTE = tuple("#" + bytes(colour).hex() for colour in OKABE_ITO)
TEXT_CLASSES = {"h": (15.0, INK), "s": (12.0, MUTED), "t": (11.0, MUTED), "r": (10.5, INK), "": (12.0, INK)}
"""Size and colour of the texts of a class, here and in `dtckpt.pictures.sharding`."""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Return a text as XML and HTML write it; characters that XML cannot hold are replaced."""
    return html.escape(_NOT_XML.sub("\ufffd", text))


@dataclass(slots=True)
class Picture:
    """A picture that is drawn from shapes; lengths are pixels.

    Args:
        title: Its title.
        width: Its width.
        height: Its height.
    """

    title: str
    width: float
    height: float
    body: list[str] = field(default_factory=list)

    def rect(  # noqa: PLR0917  (in the order of SVG)
        self, x: float, y: float, width: float, height: float, fill: str, tooltip: str = ""
    ) -> None:
        """Draw a rectangle."""
        inner = f"<title>{escape(tooltip)}</title>" if tooltip else ""
        self.body.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}">{inner}</rect>\n'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", fill: str = "") -> None:
        """Write a text; ``kind`` is its class: ``h`` heading, ``s`` subtitle, ``t`` tick."""
        # The styles of a class go before an attribute ``fill``.
        colour = f' style="fill:{fill}"' if fill else ""
        self.body.append(
            f'<text x="{x:.2f}" y="{y:.2f}" class="{kind}" text-anchor="{anchor}"{colour}>{escape(text)}</text>\n'
        )

    def place(self, svg: str, x: float, y: float) -> None:
        """Place another picture inside this one."""
        self.body.append(svg.replace("<svg ", f'<svg x="{x:.2f}" y="{y:.2f}" ', 1))

    def svg(self) -> str:
        """Return the picture."""
        width, height = round(self.width), round(self.height)
        rules = "".join(
            f".dtckpt-plot .{kind}{{font-size:{size}px;fill:{colour}}}"
            for kind, (size, colour) in TEXT_CLASSES.items()
            if kind
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dtckpt-plot" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>.dtckpt-plot text{{font:{FONT}}}{rules}</style>\n"
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n{"".join(self.body)}</svg>'
        )
