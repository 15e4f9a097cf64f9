"""Curves that are drawn as images in reports."""

from __future__ import annotations

import base64
import itertools
import math
import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.launch.report.curves import Curve, Source
from notebook_accelerate.launch.report.markup import number
from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.store import Record

EVIL = '<script>alert("&")</script>\x00'


def _store(name: str = "loss", ranks: int = 2, steps: int = 1000) -> Store:
    store = Store()
    for rank in range(ranks):
        store.add([
            Record(rank, 100.0 + step, MetricEvent({name: math.exp(-step / 300) + rank}, step)) for step in range(steps)
        ])  # fmt: skip
    return store


def _picture(name: str, store: Store) -> ET.Element:
    html = svg_curves.metric_image([Source(store, 100.0)], name)
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert data is not None
    return ET.fromstring(base64.b64decode(data[1]))


def test_an_image_has_one_line_per_rank_and_a_legend() -> None:
    root = _picture("loss", _store())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}path")) == 2
    texts = [element.text for element in root.findall(f"{space}text")]
    assert texts[0] == "loss"
    assert {"rank", "0", "1"} <= set(texts)


def test_names_are_escaped_in_the_image_and_the_alt_text() -> None:
    store = _store(EVIL)
    html = svg_curves.metric_image([Source(store, 100.0)], EVIL)
    assert "<script>" not in html
    assert "script" not in {element.tag.rpartition("}")[2] for element in _picture(EVIL, store).iter()}


def test_the_alt_text_describes_the_curve() -> None:
    text = svg_curves.description(_store().series("loss"))
    assert text.startswith("Curve of loss: 2,000 points of 2 ranks; first 1")
    assert "largest 2 at step 0" in text
    assert "at step 999" in text


@pytest.mark.parametrize("values", [[0.001, 0.00099], [-123456.5, -123456.0], [0.0, 1.0], [1e300, 2e300]])
def test_labels_fit_left_of_the_axis(values: list[float]) -> None:
    track = Curve("rank 0", np.arange(2.0), np.array(values))
    root = ET.fromstring(str(svg_curves.svg("lr", [track])))
    found = [text for text in root.iter() if text.tag.endswith("text") and text.get("text-anchor") == "end"]
    assert len(found) >= 2
    for text in found:
        assert float(text.get("x", "nan")) >= svg_curves.DIGIT * len(text.text or ""), text.text


def test_gaps_and_values_that_are_not_finite_are_not_drawn() -> None:
    store = Store()
    for step, value in enumerate([1.0, math.nan, 2.0, 3.0, math.inf, 1e308, -1e308]):
        store.add([Record(0, float(step), MetricEvent({"loss": value}, step))])
    assert "2 not finite" in svg_curves.description(store.series("loss"))
    picture = _picture("loss", store)
    path = picture.find("{http://www.w3.org/2000/svg}path")
    assert path is not None
    assert path.attrib["d"].count("M") == 2
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 1
    store.add([Record(0, 0.0, MetricEvent({"empty": math.nan}, 0))])
    assert "none of them finite" in svg_curves.description(store.series("empty"))
    _picture("empty", store)


def test_a_single_point_is_drawn_as_a_dot() -> None:
    root = _picture("loss", _store(ranks=1, steps=1))
    (dot,) = root.findall("{http://www.w3.org/2000/svg}circle")
    assert float(dot.attrib["r"]) == svg_curves.ALONE
    assert root.find("{http://www.w3.org/2000/svg}path") is None


def test_with_many_ranks_the_envelope_and_the_selected_ranks_are_drawn() -> None:
    store = _store(ranks=20, steps=10)
    envelope, *others = svg_curves.curves_of([Source(store, 100.0, chosen=[3, 17, 99])], "loss")
    assert [curve.label for curve in others] == ["rank 3", "rank 17"]
    assert envelope.low is not None
    assert envelope.high is not None
    single = svg_curves.curves_of([Source(store, 100.0, chosen=[0, 19])], "loss")[1:]
    assert (envelope.low == single[0].y).all()
    assert (envelope.high == single[1].y).all()
    drawing = svg_curves.svg("loss", [envelope, *others])
    assert drawing.count('fill-opacity=".22"') == 1
    assert "mean, range" in drawing
    assert "rank 17" in drawing


def test_two_hundred_thousand_points_make_a_small_image_quickly() -> None:
    store = _store(ranks=4, steps=49_000)
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    html = svg_curves.image("loss", svg_curves.curves_of([Source(store, 100.0)], "loss"), "")
    assert time.thread_time() - begin < 10
    assert len(html) < 60_000


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2.5, 5, 7.5, 10]),
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, 4.0, [-2, 0, 2, 4]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert np.allclose(svg_curves.ticks(low, high, 4), expected)


def _curve(label: str, x: list[float], y: list[float]) -> Curve:
    return Curve(label, np.array(x, dtype=float), np.array(y, dtype=float))


def _texts(title: str, curves: list[Curve]) -> list[ET.Element]:
    return list(ET.fromstring(svg_curves.svg(title, curves)).iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    ("x", "below"),
    [([0, 1, 2, 3], ["0", "1", "2", "3"]), ([100], ["99", "100", "101"]), ([0], ["0", "1"]), ([7.25], ["7 s", "8 s"])],
    ids=str,
)
def test_the_horizontal_axis_has_whole_steps_around_the_points(x: list[float], below: list[str]) -> None:
    texts = _texts("loss", [_curve("rank 0", x, [0.5] * len(x))])
    found = [str(text.text) for text in texts if text.get("text-anchor") == "middle"]
    assert [each for each in found if each.removesuffix(" s").isdigit()] == below


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_the_legend_covers_neither_the_title_nor_the_plot(count: int) -> None:
    curves = [_curve(f"run {run} · baseline", [0, 1], [run, 0]) for run in range(count)]
    drawing = ET.fromstring(svg_curves.svg("train/loss", curves))
    title, *texts = drawing.iter("{http://www.w3.org/2000/svg}text")
    legend = [text for text in texts if str(text.text).startswith("run ")]
    assert len(legend) == count
    boxes = [
        (float(text.get("x", 0)), float(text.get("y", 0)), svg_curves.LETTER * len(text.text or "")) for text in legend
    ]
    end = float(title.get("x", 0)) + svg_curves.BOLD * len("train/loss")
    assert all(x >= end or y > 20 for x, y, _ in boxes)
    assert all(x + width <= svg_curves.WIDTH for x, _, width in boxes)
    for row in {y for _, y, _ in boxes}:
        places = [(x, x + width) for x, y, width in boxes if y == row]
        assert all(before[1] < after[0] for before, after in itertools.pairwise(places))
    grid = [float(line.get("y1", 0)) for line in drawing.iter("{http://www.w3.org/2000/svg}line")]
    assert max(y for _, y, _ in boxes) <= min(grid)


def test_the_band_of_a_constant_metric_is_around_its_line() -> None:
    """The mean of equal values is rounded, here to the number after 0.1."""
    store = Store()
    for rank in range(12):
        store.add([Record(rank, 100.0, MetricEvent({"scale": 0.1}, step)) for step in range(3)])
    (curve,) = svg_curves.curves_of([Source(store, 100.0)], "scale")
    assert curve.low is not None
    assert curve.y.tolist() == curve.low.tolist() == [0.1] * 3
    rounded = curve._replace(y=np.nextafter(curve.y, 1))
    labels = [text.text for text in _texts("scale", [rounded]) if text.get("text-anchor") == "end"]
    assert "0.1" in labels
    assert len(set(labels)) == len(labels)


def test_curves_with_the_same_values_show_all_colours() -> None:
    drawing = ET.fromstring(svg_curves.svg("loss", [_curve(f"rank {rank}", [0, 1], [1, 2]) for rank in range(2)]))
    dashes = list(drawing.iter("{http://www.w3.org/2000/svg}use"))
    assert [(each.get("href"), each.get("stroke-dasharray")) for each in dashes] == [("#c0", "7 7"), ("#c1", "7 7")]
    assert [each.get("stroke-dashoffset") for each in dashes] == ["0", "-7"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (65536.0, "65,536"),
        (1234567.0, "1.23e6"),
        (0.00012, "0.00012"),
        (3.14159, "3.142"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) in (text, "1.2e-4")
