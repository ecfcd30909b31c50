"""Just enough of SVG to draw charts: elements with escaped text. Pure. Used by `picture`."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Drawing:
    """Owns the elements of one picture, in the order in which they are painted. Lengths are in pixels."""

    def __init__(self, *, width: float, height: float, background: str) -> None:
        self._width = width
        self._height = height
        self._elements: list[str] = []
        self.rect(0, 0, width, height, fill=background)

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str) -> None:
        self._add("rect", x=x, y=y, width=width, height=height, fill=fill)

    def line(self, start: tuple[float, float], end: tuple[float, float], *, stroke: str, **style: str | float) -> None:
        self._add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke, **style)

    def circle(self, x: float, y: float, radius: float, *, fill: str, **style: str | float) -> None:
        self._add("circle", cx=x, cy=y, r=radius, fill=fill, **style)

    def text(self, x: float, y: float, text: str, *, size: float, fill: str, **style: str | float) -> None:
        attributes = {"x": x, "y": y, "font-size": size, "fill": fill, **_dashed(style)}
        self._elements.append(f"<text{_written(attributes.items())}>{escape(text)}</text>")

    def svg(self) -> str:
        size = f'width="{self._width:g}" height="{self._height:g}" viewBox="0 0 {self._width:g} {self._height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}">'
        return "\n".join((head, *self._elements, "</svg>", ""))

    def _add(self, element: str, **attributes: str | float) -> None:
        self._elements.append(f"<{element}{_written(_dashed(attributes).items())}/>")


def _dashed(attributes: dict[str, str | float]) -> dict[str, str | float]:
    """Python's names of attributes as SVG writes them: `stroke_width` is `stroke-width`."""
    return {name.replace("_", "-"): value for name, value in attributes.items()}


def _written(attributes: Iterable[tuple[str, str | float]]) -> str:
    return "".join(
        f" {name}={quoteattr(value if isinstance(value, str) else f'{value:.6g}')}" for name, value in attributes
    )
