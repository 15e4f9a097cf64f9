"""A panel that is open in JupyterLab: its cost to the training, and to the main thread of the browser.

It needs chromium, and the environment of the browser tests: ``make bench`` uses it.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.benchmarks.bench import Figure, alternate, compared, row
from tests.support.browser import Browser, NotebookPage, Server, missing

ROUNDS, SECONDS = 10, 4.0
"""Trainings of so many seconds, in turns with and without a panel."""
TRACES, TRACE_SECONDS = 5, 10.0
TIMELINES, SCALES = 5, (1.0, 1 / 8, 1 / 64)
"""Timelines that are opened, and the parts of each that are visible while it is dragged."""
FRAME = 16.7
"""Milliseconds between two frames of a screen of 60 Hz."""
LONG_TASK = 50.0
"""Milliseconds of a task that delays a click noticeably."""

# A hundred steps a second: a rank computes, then waits as for an accelerator.
_TRAIN = """
import json, math, time, torch
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent
def train(seconds):
    torch.set_num_threads(1)
    steps, inputs = int(100 * seconds), torch.randn(128, 128)
    clock, processor = time.perf_counter(), time.process_time()
    for step in range(steps):
        inputs @ inputs @ inputs
        values = {f"part {i // 5}/metric {i}": math.exp(-step / 500) + 0.1 * math.sin(step * i) for i in range(20)}
        telemetry.emit(MetricEvent(values, step))
        telemetry.emit(ProgressEvent(step + 1, steps, "step"))
        if step % 5 == 0:
            print(f"step {step}: loss {values['part 0/metric 0']:.4f}")
        time.sleep(0.009)
    return [(time.perf_counter() - clock) / steps, (time.process_time() - processor) / steps]
"""
_LAUNCH = """
run = notebook_launcher(train, ({},), num_processes=2, use_port=0, env={{'OMP_NUM_THREADS': '1'}}, panel={})
open('{}', 'w').write(json.dumps(run.results))
"""
_RESULT = "result.json"
_DRAWN = """() => {
    document.querySelector('.na-charts')?.scrollIntoView({ block: 'start' });  // curves out of sight are not drawn
    return document.querySelectorAll('.na-chart canvas').length >= 9;
}"""

_TIMELINE = """
from notebook_accelerate.widgets.timeline_view import TimelineView
from tests.support.timelines import large
data = large(8, 200_000)
"""
_NOTE_DRAWING = """() => {
    const begin = performance.now();
    const look = () => {
        if (document.querySelector('.na-tl')?.dataset.to) window.drawnAfter = performance.now() - begin;
        else requestAnimationFrame(look);
    };
    look();
}"""
# Zooms with the keys W and S, then moves the pointer by some pixels in each of 150 frames.
_DRAG = """async (share) => {
    const root = document.querySelector('.na-tl'), canvas = root.querySelector('.na-tl-canvas');
    root.scrollIntoView({ block: 'center' });
    const frame = () => new Promise(requestAnimationFrame), scroll = root.querySelector('.na-tl-scroll');
    const press = (key) => scroll.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
    const visible = () => root.dataset.to - root.dataset.from;
    press('0');
    for (let i = 0; i < 60; i++) await frame();
    const whole = visible();
    while (visible() > 1.2 * share * whole) { press('w'); for (let i = 0; i < 12; i++) await frame(); }
    const box = canvas.getBoundingClientRect(), y = box.top + 60;
    const at = (name, x) => canvas.dispatchEvent(new PointerEvent(name, {
        pointerId: 1, pointerType: 'mouse', clientX: x, clientY: y, button: 0, bubbles: true, isPrimary: true,
    }));
    canvas.setPointerCapture = () => {};
    at('pointerdown', box.left + 700);
    const intervals = [];
    let last = await frame();
    for (let i = 0; i < 150; i++) {
        at('pointermove', box.left + 700 - 4 * (i < 75 ? i : 150 - i));
        const now = await frame();
        intervals.push(now - last);
        last = now;
    }
    at('pointerup', box.left + 700);
    return intervals;
}"""


@contextmanager
def _page(*cells: str) -> Iterator[NotebookPage]:
    """Open a notebook with these cells, of which the first is executed."""
    with Server() as server, Browser() as browser:
        server.write("benchmark.ipynb", [_TRAIN, *cells])
        page = server.open(browser, "benchmark.ipynb")
        page.run(0)
        page.idle()
        yield page
        page.shut_down()


@row("browser", "panel in the browser: training")
def training() -> Iterator[Figure]:
    """Train in two ranks that log 20 metrics a hundred times a second, with the panel and without."""
    if reason := missing():
        yield Figure(what="a step with the panel open", unit="ms", ours=None, note=reason)
        return
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    with _page(*(_LAUNCH.format(SECONDS, panel, _RESULT) for panel in (False, True))) as page:

        def side(*, panel: bool) -> float:
            page.run(1 + panel)
            page.idle()
            ranks = json.loads((page.server.notebooks / _RESULT).read_text())
            found[panel].append([statistics.mean(values) for values in zip(*ranks, strict=True)])
            return 0.0

        alternate(ROUNDS, lambda: side(panel=True), lambda: side(panel=False))
    for index, what in enumerate(("a step with the panel open; the peer has none", "its processor time in the rank")):
        sides = [[values[index] for values in found[panel][1:]] for panel in (True, False)]
        yield compared(what, *sides, unit="ms", scale=1e3, ratio=1.02)


class MainThread(NamedTuple):
    """What a trace has about the main thread of a page; on the clock, and in processor time.

    Attributes:
        busy: Share of the time in tasks, in percent.
        frame: Milliseconds of the tasks that draw a frame in which scripts ran; the 95th percentile.
        long: Tasks that took more than `LONG_TASK`, in a second.
    """

    busy: float
    frame: float
    long: float


@row("browser", "panel in the browser: main thread")
def main_thread() -> Iterator[Figure]:
    """Trace JupyterLab while its panel draws nine or more of these 20 metrics of two ranks."""
    if reason := missing():
        yield Figure(what="main thread: busy", unit="%", ours=None, note=reason)
        return
    traces = [_trace() for _ in range(TRACES)]
    for kind, name in (("dur", ""), ("tdur", ", processor time")):
        found = [measured(trace, kind) for trace in traces]
        yield compared(f"main thread: busy{name}", [each.busy for each in found], unit="%", limit=25)
        what = f"main thread: of 20 frames the slowest{name}"
        yield compared(what, [each.frame for each in found], unit="ms", limit=FRAME)
        what = f"main thread: tasks of more than {LONG_TASK:.0f} ms{name}"
        yield compared(what, [each.long for each in found], unit="per s")


@row("browser", "timeline in the browser")
def timeline() -> Iterator[Figure]:
    """Open the timeline of 8 ranks with 200,000 events each, and drag it along at three scales."""
    if reason := missing():
        yield Figure(what="timeline: opened", unit="ms", ours=None, note=reason)
        return
    found = [_timeline_times() for _ in range(TIMELINES)]
    what = "timeline of 8 × 200,000 events: from the cell to the drawing"
    yield compared(what, [times[0] for times in found], unit="ms", limit=2000)
    for index, share in enumerate(SCALES, 1):
        part = f"1/{1 / share:.0f}" if share < 1 else "all"
        what = f"timeline, {part} of it visible, dragged: of 20 frames the slowest"
        yield compared(what, [times[index] for times in found], unit="ms", limit=1000 / 30)


def _timeline_times() -> list[float]:
    """Return milliseconds until the timeline is drawn, then of the slowest frame of 20 at each scale."""
    with _page(_TIMELINE, "TimelineView(data)") as page:
        page.run(1)
        page.idle()
        page.page.evaluate(_NOTE_DRAWING)
        page.run(2)
        page.wait_for("() => window.drawnAfter")
        times = [float(page.page.evaluate("() => window.drawnAfter"))]
        page.idle()
        for share in SCALES:
            intervals = sorted(page.page.evaluate(_DRAG, share))
            times.append(intervals[int(0.95 * len(intervals))])
    return times


def _trace() -> list[dict[str, Any]]:
    """Return the events of chromium's trace of a training that has gone on for three seconds."""
    with _page(_LAUNCH.format(TRACE_SECONDS + 15, True, _RESULT)) as page:
        page.run(1)
        page.wait_for(_DRAWN)
        page.page.wait_for_timeout(3000)
        browser = page.page.context.browser
        assert browser is not None
        browser.start_tracing(page=page.page, categories=["-*", "toplevel", "devtools.timeline"])
        page.page.wait_for_timeout(1000 * TRACE_SECONDS)
        events: list[dict[str, Any]] = json.loads(browser.stop_tracing())["traceEvents"]
    return events


def measured(events: Sequence[dict[str, Any]], kind: str) -> MainThread:
    """Return the figures of the busiest main thread.

    Args:
        events: Chromium's trace.
        kind: "dur" for the clock, "tdur" for processor time.
    """
    tasks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["name"] == "ThreadControllerImpl::RunTask" and event["ph"] == "X":
            tasks[event["pid"], event["tid"]].append(event)
    threads = [
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    ]
    thread = max(threads, key=lambda name: sum(task["dur"] for task in tasks[name]))
    scripts = [
        event["ts"]
        for event in events
        if event["name"] == "FireAnimationFrame" and (event["pid"], event["tid"]) == thread
    ]
    return _figures(sorted(tasks[thread], key=lambda task: float(task["ts"])), scripts, kind)


def _figures(tasks: Sequence[dict[str, Any]], scripts: Sequence[float], kind: str) -> MainThread:
    seconds = (tasks[-1]["ts"] + tasks[-1]["dur"] - tasks[0]["ts"]) / 1e6
    taken = [task.get(kind, 0) / 1e3 for task in tasks]
    frames = sorted(
        task.get(kind, 0) / 1e3 for task in tasks if any(task["ts"] <= at <= task["ts"] + task["dur"] for at in scripts)
    )
    return MainThread(
        busy=sum(taken) / 10 / seconds,
        frame=frames[int(0.95 * len(frames))],
        long=sum(time > LONG_TASK for time in taken) / seconds,
    )
