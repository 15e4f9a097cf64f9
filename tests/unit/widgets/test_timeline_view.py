"""The data of a timeline that the browser receives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from notebook_accelerate.profiling.timeline import EventWait, Timeline, Track
from notebook_accelerate.profiling.trace import CATEGORIES
from notebook_accelerate.widgets.profile_panel import SCRIPTS, TimelineView, encode
from tests.support.timelines import training

COLUMNS = {"start": "<u4", "duration": "<f4", "name": "<u2", "category": "u1"}


def _columns(sent: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(sent[name], kind) for name, kind in COLUMNS.items()}


def _events(sent: dict[str, Any], track: int) -> set[tuple[float, float, str, str, int]]:
    """Return a track's events as the browser reads them: start, duration, name, category, depth."""
    columns, found = _columns(sent), set()
    place = sum(sum(head["lanes"]) for head in sent["tracks"][:track])
    for depth, count in enumerate(sent["tracks"][track]["lanes"]):
        for at in range(place, place + count):
            names = sent["names"][columns["name"][at]], sent["categories"][columns["category"][at]]
            start = float(columns["start"][at]) * sent["tick"]
            found.add((round(start, 2), round(float(columns["duration"][at]), 2), *names, depth))
        place += count
    return found


def test_every_event_of_every_track_is_sent() -> None:
    timeline = training(ranks=3, steps=2)
    sent = encode(timeline)
    for index, track in enumerate(timeline.tracks):
        rows = zip(track.start, track.duration, track.names, track.category, track.depth, strict=True)
        wanted = {
            (round(start, 2), round(duration, 2), timeline.names[name], CATEGORIES[category], depth)
            for start, duration, name, category, depth in rows
        }
        assert _events(sent, index) == wanted
        assert sent["tracks"][index]["rank"] == track.rank
    assert sent["events"] == sum(map(len, timeline.tracks))
    assert sent["shortest"] == 0.0


def test_the_events_of_a_lane_are_sorted_by_start() -> None:
    sent = encode(training(ranks=2, steps=2))
    start, place = _columns(sent)["start"].astype(int), 0
    for head in sent["tracks"]:
        for count in head["lanes"]:
            assert (np.diff(start[place : place + count]) >= 0).all()
            place += count
    assert place == len(start)


def test_waits_refer_to_the_events_in_their_new_order() -> None:
    timeline = training(ranks=3, steps=2, slow=1)
    sent = encode(timeline)
    pairs, columns = np.frombuffer(sent["waits"], "<i4").reshape(-1, 2), _columns(sent)
    assert len(pairs) == len(timeline.waits) == 4
    for (waits, last), wait in zip(pairs, timeline.waits, strict=True):
        for place, track, event in ((waits, wait.from_track, wait.from_event), (last, wait.to_track, wait.to_event)):
            of = timeline.tracks[track]
            assert columns["start"][place] * sent["tick"] == pytest.approx(of.start[event], abs=0.01)
            assert columns["name"][place] == of.names[event]
    steps = np.frombuffer(sent["steps"], "<f8").reshape(-1, 4)
    assert [tuple(step) for step in steps] == [tuple(step) for step in timeline.steps]


def test_of_too_many_events_the_shortest_are_omitted_but_no_collective() -> None:
    timeline = Timeline(names=["op", "all_reduce"], span=2000.0)
    track = Track(0, "rank 0 · main thread")
    for place in range(100):
        track.start.append(20.0 * place)
        track.duration.append(1.0 + place % 10)
        track.names.append(int(place == 50))
        track.depth.append(0)
        track.category.append(CATEGORIES.index("collective" if place == 50 else "op"))
    timeline.tracks = [track, track]
    timeline.waits = [EventWait(0, 50, 1, 50), EventWait(0, 0, 1, 50)]
    sent = encode(timeline, limit=60)
    columns = _columns(sent)
    collectives = columns["category"] == CATEGORIES.index("collective")
    assert columns["duration"][collectives].tolist() == [1.0, 1.0]
    assert 20 < len(columns["duration"]) <= 62
    assert columns["duration"][~collectives].min() >= sent["shortest"] > 5
    assert sent["events"] == 200
    assert len(sent["waits"]) == 8, "the wait of an omitted event is not sent"


def test_more_names_than_two_bytes_can_count_are_sent() -> None:
    timeline = training(ranks=1, steps=1)
    timeline.names += [f"name {index}" for index in range(1 << 16)]
    timeline.tracks[0].names[3] = len(timeline.names) - 1
    sent = encode(timeline)
    assert len(timeline.names) - 1 in np.frombuffer(sent["name"], "<u4")


def test_an_empty_timeline_is_sent() -> None:
    sent = encode(Timeline())
    assert sent["events"] == 0
    assert sent["start"] == b""
    assert sent["span"] > 0


def test_events_are_sent_as_bytes_outside_the_json() -> None:
    timeline = training(ranks=2, steps=4)
    sent = encode(timeline)
    rest = {name: value for name, value in sent.items() if not isinstance(value, bytes)}
    assert len(json.dumps(rest)) < 3000
    assert sum(len(value) for value in sent.values() if isinstance(value, bytes)) < 12 * sent["events"]


def test_script_and_style_are_far_below_a_megabyte() -> None:
    view = TimelineView(training(ranks=1, steps=1))
    try:
        assert len(view._esm) + len(view._css) < 150_000
        assert "http://" not in str(view._esm)
        assert "https://" not in str(view._esm)
        assert SCRIPTS[-1] == "timeline.js"
    finally:
        view.close()


def test_a_profile_imports_no_widget_library() -> None:
    code = (
        "import sys, notebook_accelerate, notebook_accelerate.launch.report.profile as p; "
        "print({'ipywidgets', 'anywidget', 'notebook_accelerate.widgets.profile_panel'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
