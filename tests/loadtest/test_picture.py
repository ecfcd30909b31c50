"""Charts: everything lies where its figure says, and inside the picture."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from stallfree_loadtest.picture import Line, Mark, Panel, Row, draw

SVG = "{http://www.w3.org/2000/svg}"


def panel(*medians: float, is_logarithmic: bool = False, lines: tuple[Line, ...] = ()) -> Panel:
    rows = tuple(Row(label=f"row {at:g}", marks=(Mark(median=at, low=at * 0.9, high=at * 1.1),)) for at in medians)
    return Panel(title="t", unit="s", series=("one",), rows=rows, is_logarithmic=is_logarithmic, lines=lines)


def drawn(*panels: Panel) -> ET.Element:
    return parsed(draw("title", panels, note="note"))


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - our own text


def texts_of(svg: str) -> list[str | None]:
    return [element.text for element in parsed(svg).iter(f"{SVG}text")]


def dots(root: ET.Element) -> list[float]:
    """Places of the medians, left to right as rows are; the first circle belongs to the legend."""
    return [float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle")][1:]


def test_a_linear_scale_begins_at_nothing_and_is_even() -> None:
    one, two, four = dots(drawn(panel(1.0, 2.0, 4.0)))
    assert (four - two) == pytest.approx(2 * (two - one), rel=1e-4)
    zero = one - (two - one)
    assert zero == pytest.approx(214)  # the panel's left edge


def test_a_logarithmic_scale_makes_equal_ratios_equal_distances() -> None:
    first, second, third = dots(drawn(panel(0.1, 1.0, 10.0, is_logarithmic=True)))
    assert third - second == pytest.approx(second - first, rel=1e-4)


@pytest.mark.parametrize("is_logarithmic", [False, True])
@pytest.mark.parametrize("scale", [0.0003, 1.0, 7.7, 99_999.0])
def test_everything_lies_inside_the_picture(scale: float, is_logarithmic: bool) -> None:
    lines = (Line(at=scale * 1.5, label="target"),)
    root = drawn(panel(scale, 3.3 * scale, 9.7 * scale, is_logarithmic=is_logarithmic, lines=lines))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.attrib.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.attrib.get(name, 0)) <= height


def test_a_figure_that_is_missing_leaves_its_place_empty_and_an_infinite_one_points_beyond() -> None:
    marks = [Mark(median=value, low=value, high=value) for value in (math.nan, math.inf, 1.0)]
    rows = tuple(Row(label=f"row {number}", marks=(mark,)) for number, mark in enumerate(marks))
    root = drawn(Panel(title="t", unit="s", series=("one",), rows=rows))
    assert len(dots(root)) == 1
    assert [text.text for text in root.iter(f"{SVG}text")].count("beyond →") == 1


def test_texts_are_escaped() -> None:
    assert "a &lt;b&gt; &amp; c" in draw("a <b> & c", (panel(1.0),), note="")
