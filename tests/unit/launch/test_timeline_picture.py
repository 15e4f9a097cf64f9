"""The picture of a timeline that saved notebooks contain."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree as ET

import pytest

from notebook_accelerate.launch.report.timeline_picture import LOOKS, MAX_RANKS, timeline_svg
from notebook_accelerate.profiling.timeline import Timeline
from tests.support.timelines import training


def _svg(image: str) -> ET.Element:
    found = re.search(r"base64,([^\"]+)", image)
    assert found
    return ET.fromstring(base64.b64decode(found[1]))


def _words(timeline: Timeline) -> list[str]:
    return [node.text or "" for node in _svg(timeline_svg(timeline)).iter() if node.tag.endswith("text")]


def _path(timeline: Timeline, category: str, index: int) -> str:
    """Return the path that draws a category in the index-th lane that has it."""
    nodes = [node for node in _svg(timeline_svg(timeline)).iter() if node.tag.endswith("path")]
    return [node.attrib["d"] for node in nodes if node.attrib["fill"] == LOOKS[category].picture][index]


def _width(path: str) -> float:
    return sum(float(width) for width in re.findall(r"h([\d.]+)v", path))


def test_ranks_steps_and_phases_are_named() -> None:
    words = _words(training(ranks=3, steps=2))
    assert {"rank 0", "rank 1", "rank 2", "step 40", "step 41"} <= set(words)
    assert {"forward", "backward", "optimizer", "data loading", "collective", "wait"} <= set(words)


def test_the_slow_rank_loads_longest_and_does_not_wait() -> None:
    timeline = training(ranks=3, steps=2, slow=1)
    widths = [_width(_path(timeline, "loader", rank)) for rank in range(3)]
    assert widths[1] > 5 * max(widths[0], widths[2])
    waits = [node for node in _svg(timeline_svg(timeline)).iter() if node.attrib.get("fill") == LOOKS["wait"].picture]
    assert len([node for node in waits if node.tag.endswith("path") and node.attrib["d"]]) == 2


def test_the_waiting_is_as_wide_as_its_duration() -> None:
    timeline = training(ranks=2, steps=1, slow=1)
    wait = timeline.waits[0]
    waited = (
        timeline.tracks[wait.to_track].start[wait.to_event] - timeline.tracks[wait.from_track].start[wait.from_event]
    )
    assert _width(_path(timeline, "wait", 0)) == pytest.approx(826 * waited / timeline.span, abs=3)


def test_the_alternative_text_names_the_rank_that_others_wait_for() -> None:
    assert "others wait longest for rank 1" in timeline_svg(training(ranks=3, slow=1))


def test_many_events_and_ranks_need_less_than_a_hundred_kilobytes() -> None:
    timeline = training(ranks=20, steps=150, ops=4)
    image = timeline_svg(timeline)
    assert len(image) < 100_000
    words = _words(timeline)
    assert f"{MAX_RANKS} of 20 ranks" in words
    assert "steps 40 to 189" in words


def test_an_empty_timeline_is_drawn() -> None:
    assert "0 events" in timeline_svg(Timeline())
