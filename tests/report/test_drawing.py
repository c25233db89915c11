"""Where labels stand: none on another, none on a bar, none outside of the picture, also in the letters of a phone."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.drawing.rows import Bar, Histogram, Lane, Mark, draw_bars, draw_histograms, draw_lanes
from headrace.report.drawing.svg import (
    SIZE,
    SMALL_SCREEN,
    WIDTH,
    linear_ticks,
    log_ticks,
    shortened,
    text_width,
    x_ticks,
)
from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.pictures import pictures
from headrace.report.views.style import PARTS, colours_of, style_variables, words_on

SVG = "{http://www.w3.org/2000/svg}"
COLOUR = colours_of(["mirrored"])["mirrored"]
LONG = "a_strategy_with_a_name_that_never_ends<script>alert('中文')</script>" * 4


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


def words_of(picture: ElementTree.Element) -> list[tuple[str, str, Box]]:
    """Returns kind, text and place of each text, in the letters of a small screen."""
    found = []
    for text in picture.iter(f"{SVG}text"):
        words, x, y = text.text or "", float(text.get("x", "")), float(text.get("y", ""))
        width = text_width(words) * float(text.get("font-size", "")) / SIZE
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "")]
        size = SIZE * SMALL_SCREEN
        found.append((text.get("class", ""), words, Box(left, y - 0.75 * size, left + width, y + 0.24 * size)))
    return found


def bars_of(picture: ElementTree.Element) -> list[Box]:
    """Returns the places of bars, boxes and of the lines across them."""
    found = []
    for rect in picture.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        found.append(Box(x, y, x + width, y + height))
    for path in picture.iter(f"{SVG}path"):
        if "--ink" in path.get("style", ""):
            points = [tuple(map(float, point.split())) for point in path.get("d", "")[1:].split("L")]
            xs, ys = zip(*points, strict=True)
            found.append(Box(min(xs) - 1, min(ys), max(xs) + 1, max(ys)))
    return found


def faults(svg: str) -> list[str]:
    picture = ElementTree.fromstring(svg)
    words, bars = words_of(picture), bars_of(picture)
    found = []
    for index, (kind, text, box) in enumerate(words):
        if box.left < -1 or box.right > WIDTH + 1:
            found.append(f"outside: {text}")
        found += [f"{text!r} on {other!r}" for _, other, place in words[:index] if box.meets(place)]
        inside = [bar for bar in bars if bar.left <= box.left and box.right <= bar.right and bar.meets(box)]
        if kind == "in" and not inside:
            found.append(f"not inside of its bar: {text}")
        if kind != "in" and any(box.meets(bar) for bar in bars):
            found.append(f"on a bar: {text}")
    assert len(words) > 2
    return found


def test_labels_of_all_pictures_of_runs_keep_their_distance(tmp_path, make_run, make_served_run):
    runs = [
        make_run(tmp_path / "one_device", "one_device", workers=1),
        *(make_run(tmp_path / name) for name in ("mirrored", LONG[:100].replace("/", "_"))),
        *(make_served_run(tmp_path / f"servers{workers}", workers, 2) for workers in (1, 16)),
    ]
    summaries = [summarize(run) for run in runs]
    drawn = pictures(summaries, References(100.0, {1: 90.0, 2: 200.0, 16: 900.0}, 70.0))
    for summary in summaries:
        drawn += pictures([summary], References())
    assert len(drawn) > 30
    assert {each.title: found for each in drawn if (found := faults(each.svg))} == {}


@pytest.mark.parametrize("note", ["12 ms", "answers of server 14: 0.30, 15: 0.60, 16: 0.70, 17: 0.10 s", "n" * 200])
@pytest.mark.parametrize("label", ["a", LONG])
def test_a_label_and_a_note_without_room_stand_below_each_other(label, note):
    bars = [Bar(label, note, [(3.0, COLOUR), (0.001, COLOUR), (1e-9, COLOUR)], [Mark(4.0), Mark(0.0)], inside=True)] * 3
    svg = draw_bars("T", bars, "seconds")
    assert faults(svg) == []
    assert faults(draw_histograms("T", [Histogram(label, note, {0: 1, 900: 2}, 600.0, COLOUR)] * 2, "staleness")) == []
    whole = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert all(len(text) < 500 for text in whole if text and label not in text)


def test_boxes_in_lanes_have_their_numbers_where_there_is_room():
    pieces = [(0.001 * at, 0.0004 if at % 3 else 0.001, PARTS["compute_s"], str(at)) for at in range(40)]
    lanes = [Lane("rank 0", pieces), Lane(LONG, pieces)]
    svg = draw_lanes("T", ((LONG, lanes), ("by the schedule", lanes)), "milliseconds", 1e3)
    assert faults(svg) == []
    told = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert "rank 0, 3: 3.00 to 4.00 milliseconds" in told


NUMBERS = (0.0, -1.0, 1e-320, 1e300, -1e308, 1e308, math.inf, -math.inf, math.nan, 1e16 + 2, 5.0)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_can_be_drawn(number, log):
    values = [1.0, number, 2.0]
    if log:
        values = [value if value > 0 else 1.0 for value in values]
    curve = Curve(list(enumerate(values, 1)), COLOUR, faint=[(number, 1.0), (2.0, 3.0)], dots=True, name="a")
    for svg in (
        draw_curves("T", [curve], "x", "y", log=log),
        draw_curves("T", [Curve([(1.0, number)], COLOUR)], "x", "y", from_zero=True),
        draw_bars("T", [Bar("a", "b", [(number, COLOUR), (1.0, COLOUR)], [Mark(number)], inside=True)], "s"),
        draw_lanes("T", (("a", [Lane("b", [(0.0, number, COLOUR, "1"), (1.0, 2.0, COLOUR, "2")])]),), "ms", 1e3),
    ):
        # What is written, or shows under the pointer, is the number itself; places are numbers.
        places = [value for element in ElementTree.fromstring(svg).iter() for value in element.attrib.values()]
        assert not [value for value in places if re.search("nan|inf", value)]


def test_a_value_that_is_not_finite_breaks_its_curve():
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, 1.0), (5.0, 3.0)]
    picture = ElementTree.fromstring(draw_curves("T", [Curve(points, COLOUR)], "x", "y"))
    lines = [path.get("d", "") for path in picture.iter(f"{SVG}path") if "series" in path.get("style", "")]
    assert [line.count("L") for line in lines] == [1, 1]


def test_a_logarithmic_axis_of_x_has_powers_of_ten_that_keep_their_distance():
    points = [(10.0**power, float(power)) for power in range(-7, 2)]
    svg = draw_curves("T", [Curve(points, COLOUR, dots=True)], "learning rate", "loss", log_x=True)
    assert faults(svg) == []
    words = [text for _, text, _ in words_of(ElementTree.fromstring(svg))]
    assert {"1e-05", "0.001", "10"} & set(words)
    places = [
        float(dot.get("cx", "")) for dot in ElementTree.fromstring(svg).iter(f"{SVG}circle") if dot.get("r") == "3.4"
    ]
    steps = [right - left for left, right in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 8, abs=0.2)


def test_values_of_long_curves_are_few_with_the_last_among_them():
    points = [(float(at), 1.0 / at) for at in range(1, 401)]
    picture = ElementTree.fromstring(draw_curves("T", [Curve(points, COLOUR, name="mirrored")], "steps", "loss"))
    told = [title.text for title in picture.iter(f"{SVG}title")]
    assert len(told) <= 48
    assert "mirrored: 0.0025 at 400 steps" in told


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]), (0.3, 0.44, [0.3, 0.35, 0.4])],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert linear_ticks(low, high, 5) == pytest.approx(ticks)


def test_ticks_of_a_logarithmic_axis_are_few():
    assert log_ticks(0.09, 2.5, 8) == pytest.approx([0.1, 0.2, 0.5, 1, 2])
    assert len(log_ticks(1e-90, 1e90, 8)) <= 8
    assert [text for _, text in x_ticks(0.0, 3.2, 0.0, WIDTH, whole=True)] == ["0", "1", "2", "3"]


def test_a_name_is_cut_in_its_middle():
    assert shortened("mirrored", 200) == "mirrored"
    cut = shortened("first" + "x" * 300 + "last", 150)
    assert cut.startswith("first")
    assert cut.endswith("last")
    assert text_width(cut) <= 150
    assert shortened("mirrored", 1) == "…"


def luminance(colour: str) -> float:
    """Returns the relative luminance of "#rrggbb" (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_words_on_every_colour_are_legible(dark: bool) -> None:
    colours = dict(re.findall(r"--([\w-]+): (#\w+);", style_variables(dark)))
    for name in colours.keys() - {"ink", "quiet", "grid", "paper"}:
        lower, higher = sorted(luminance(colours[each]) for each in (name, words_on(name)))
        assert (higher + 0.05) / (lower + 0.05) >= 4.5, name
