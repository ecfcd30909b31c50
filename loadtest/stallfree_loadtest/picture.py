"""A chart of panels side by side that share their rows: a dot for each median, a bar from the least to the most.

Pure: from figures to an SVG that reads on any background, since it paints its own. Used by the experiments' reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stallfree_loadtest.svg import Drawing

_BACKGROUND = "#ffffff"
_INK = "#1f2933"
_QUIET_INK = "#52606d"
_GRID = "#e4e7eb"
_STRIPE = "#f5f7fa"
_TARGET = "#b42318"
_COLOURS = ("#0b62a4", "#d97706", "#2f855a", "#6b7280", "#9f1239")
_LABEL_WIDTH = 190
_PANEL_WIDTH = 360
_PANEL_GAP = 44
_MARGIN = 24
_TOP = 126
_ROW_HEIGHT = 30
_BOTTOM = 62
_DOT_RADIUS = 4.5
_MARK_SPACING = 9
_MARKS_HEIGHT = 20
"""Of all marks of a row together, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One figure of one row. Infinite: it lies beyond the panel, and an arrow says so."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    label: str
    marks: tuple[Mark, ...]
    """One for each of the panel's series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A vertical line across a panel, such as a target."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    series: tuple[str, ...]
    rows: tuple[Row, ...]
    """The same rows in every panel of a chart; labels are those of the first."""
    is_logarithmic: bool = False
    lines: tuple[Line, ...] = ()


def draw(title: str, panels: Sequence[Panel], *, note: str) -> str:
    """The chart as the text of an SVG file."""
    num_rows = len(panels[0].rows)
    width = _MARGIN + _LABEL_WIDTH + len(panels) * (_PANEL_WIDTH + _PANEL_GAP)
    drawing = Drawing(width=width, height=_TOP + num_rows * _ROW_HEIGHT + _BOTTOM, background=_BACKGROUND)
    drawing.text(_MARGIN, 34, title, size=17, fill=_INK, font_weight="600")
    drawing.text(_MARGIN, 55, note, size=12, fill=_QUIET_INK)
    for number in range(0, num_rows, 2):
        drawing.rect(_MARGIN, _top_of(number), width - 2 * _MARGIN, _ROW_HEIGHT, fill=_STRIPE)
    for number, row in enumerate(panels[0].rows):
        drawing.text(_MARGIN + 8, _middle_of(number) + 4, row.label, size=13, fill=_INK)
    for number, panel in enumerate(panels):
        left = _MARGIN + _LABEL_WIDTH + number * (_PANEL_WIDTH + _PANEL_GAP)
        _PanelPainter(drawing, panel, left=left).paint()
    return drawing.svg()


def _top_of(row: int) -> float:
    return _TOP + row * _ROW_HEIGHT


def _middle_of(row: int) -> float:
    return _top_of(row) + _ROW_HEIGHT / 2


class _PanelPainter:
    def __init__(self, drawing: Drawing, panel: Panel, *, left: float) -> None:
        self._drawing = drawing
        self._panel = panel
        self._left = left
        self._bottom = _top_of(len(panel.rows))
        self._scale = _scale(panel)

    def paint(self) -> None:
        self._paint_head()
        self._paint_axis()
        self._paint_lines()
        for number, row in enumerate(self._panel.rows):
            spacing = min(_MARK_SPACING, _MARKS_HEIGHT / max(1, len(row.marks) - 1))
            top = _middle_of(number) - spacing * (len(row.marks) - 1) / 2
            for index, mark in enumerate(row.marks):
                self._paint_mark(mark, top + index * spacing, _COLOURS[index])

    def _paint_head(self) -> None:
        self._drawing.text(self._left, 82, self._panel.title, size=13, fill=_INK, font_weight="600")
        x = self._left
        for index, name in enumerate(self._panel.series):
            self._drawing.circle(x + 5, 97, _DOT_RADIUS, fill=_COLOURS[index])
            self._drawing.text(x + 14, 101, name, size=12, fill=_QUIET_INK)
            x += 34 + 7 * len(name)

    def _paint_axis(self) -> None:
        for tick in self._scale.ticks:
            x = self._x(tick)
            self._drawing.line((x, _TOP), (x, self._bottom), stroke=_GRID)
            label = f"{tick:g}"
            self._drawing.text(x, self._bottom + 18, label, size=12, fill=_QUIET_INK, text_anchor="middle")
        scale = ", logarithmic" if self._panel.is_logarithmic else ""
        middle = self._left + _PANEL_WIDTH / 2
        unit = f"{self._panel.unit}{scale}"
        self._drawing.text(middle, self._bottom + 38, unit, size=12, fill=_QUIET_INK, text_anchor="middle")

    def _paint_lines(self) -> None:
        for line in self._panel.lines:
            x = self._x(line.at)
            self._drawing.line((x, _TOP), (x, self._bottom), stroke=_TARGET, stroke_dasharray="4 3")
            self._drawing.text(x, _TOP - 5, line.label, size=11, fill=_TARGET, text_anchor="middle")

    def _paint_mark(self, mark: Mark, y: float, colour: str) -> None:
        if math.isnan(mark.median):
            return
        low, high = self._x(mark.low), self._x(mark.high)
        self._drawing.line((low, y), (high, y), stroke=colour, stroke_width=2, stroke_linecap="round")
        if math.isinf(mark.median):
            self._drawing.text(high, y + 4, "beyond →", size=11, fill=colour, text_anchor="end")
        else:
            self._drawing.circle(self._x(mark.median), y, _DOT_RADIUS, fill=colour)
            if len(self._panel.series) == 1:
                beside = max(high, self._x(mark.median) + _DOT_RADIUS) + 6
                self._drawing.text(beside, y + 4, f"{mark.median:.3g}", size=11, fill=_QUIET_INK)

    def _x(self, value: float) -> float:
        return self._left + _PANEL_WIDTH * min(1.0, max(0.0, self._scale.place(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    is_logarithmic: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at the left edge, 1 at the right one."""
        if math.isinf(value):
            return 1.0
        if self.is_logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _scale(panel: Panel) -> _Scale:
    values = [value for row in panel.rows for mark in row.marks for value in (mark.low, mark.high)]
    values += [line.at for line in panel.lines]
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    return _logarithmic(finite) if panel.is_logarithmic else _linear(finite)


def _linear(values: Sequence[float]) -> _Scale:
    """From 0 to just beyond the largest value, with five or so round ticks."""
    largest = max(values) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(largest))
    step = next(size * magnitude for size in (0.2, 0.5, 1.0, 2.0) if largest / (size * magnitude) <= 6)
    num_steps = math.ceil(largest * 1.02 / step)
    ticks = tuple(step * number for number in range(num_steps + 1))
    return _Scale(low=0.0, high=ticks[-1], is_logarithmic=False, ticks=ticks)


def _logarithmic(values: Sequence[float]) -> _Scale:
    """Whole steps of 1, 2, 5, 10, … around all values."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    steps = [size * 10.0**power for power in range(first, last + 1) for size in (1, 2, 5)]
    low = max(step for step in steps if step <= min(positive) * (1 + 1e-9))
    high = min(step for step in steps if step >= max(positive) and step > low)
    ticks = tuple(step for step in steps if low <= step <= high)
    return _Scale(low=low, high=high, is_logarithmic=True, ticks=ticks)
