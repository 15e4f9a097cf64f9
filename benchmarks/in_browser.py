"""The cost of a panel that is open in JupyterLab, for training and for the browser's main thread.

The rows need Chromium and the environment of the browser tests, which ``make bench`` provides.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from benchmarks.bench import Figure, alternate, compared, row
from tests.support.browser import Browser, NotebookPage, Server, missing

T = TypeVar("T")

ROUNDS, SECONDS = 10, 4.0
"""The number of training runs, and their duration in seconds. Runs with and without a panel alternate."""
TRACES, TRACE_SECONDS = 5, 10.0
TIMELINES, SCALES = 5, (1.0, 1 / 8, 1 / 64)
"""The number of timelines to open, and the shares of each that are visible while it is dragged."""
FRAME = 16.7
"""The number of milliseconds between two frames at 60 Hz."""
LONG_TASK = 50.0
"""The number of milliseconds above which a task noticeably delays clicks."""

# A rank takes a hundred steps per second. In each, it computes, and then sleeps as if it waited for an accelerator.
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
    document.querySelector('.na-charts')?.scrollIntoView({ block: 'start' });  // Only visible curves are drawn.
    return document.querySelectorAll('.na-chart canvas').length >= 9;
}"""

_TIMELINE = """
from notebook_accelerate.widgets.profile_panel import TimelineView
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
# Zoom in with the W key until only this share of the timeline can be seen.
_ZOOM = """async (share) => {
    const root = document.querySelector('.na-tl'), scroll = root.querySelector('.na-tl-scroll');
    root.scrollIntoView({ block: 'center' });
    const frames = async (count) => { for (let i = 0; i < count; i++) await new Promise(requestAnimationFrame); };
    const press = (key) => scroll.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
    const visible = () => root.dataset.to - root.dataset.from;
    press('0');
    await frames(60);
    const whole = visible();
    while (visible() > 1.2 * share * whole) { press('w'); await frames(12); }
}"""
# Move the pointer by four pixels in each of 150 frames. Return the milliseconds between frames.
_DRAG = """async () => {
    const canvas = document.querySelector('.na-tl-canvas'), frame = () => new Promise(requestAnimationFrame);
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
    """Open a notebook with a cell that defines the training, and with these cells after it. Execute the first cell."""
    with Server() as server, Browser() as browser:
        server.write("benchmark.ipynb", [_TRAIN, *cells])
        page = server.open(browser, "benchmark.ipynb")
        page.run(0)
        page.idle()
        yield page
        page.shut_down()


@row("browser", "panel in the browser: training")
def training() -> Iterator[Figure]:
    """Measure two ranks that log 20 metrics a hundred times per second, with and without an open panel."""
    if reason := missing():
        yield Figure(what="a step with the panel open (peer: no panel)", unit="ms", ours=None, note=reason)
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
    whats = ("a step with the panel open (peer: no panel)", "a step with the panel open: CPU time of the rank")
    for index, what in enumerate(whats):
        sides = [[values[index] for values in found[panel][1:]] for panel in (True, False)]
        yield compared(what, *sides, unit="ms", scale=1e3, ratio=1.02)


class MainThread(NamedTuple):
    """The load of a page's main thread according to a trace, in wall or CPU time.

    Attributes:
        busy: The percentage of the time that is spent in tasks.
        frame: The 95th percentile, in milliseconds, of tasks that draw a frame in which scripts run.
        long: The number of tasks per second that take more than `LONG_TASK`.
    """

    busy: float
    frame: float
    long: float


@row("browser", "panel in the browser: main thread")
def main_thread() -> Iterator[Figure]:
    """Trace JupyterLab while its panel draws at least nine of the 20 metrics that two ranks log."""
    if reason := missing():
        yield Figure(what="main thread: busy", unit="%", ours=None, note=reason)
        return
    traces = [_trace() for _ in range(TRACES)]
    for kind, name in (("dur", ""), ("tdur", ", CPU time")):
        found = [measured(trace, kind) for trace in traces]
        yield compared(f"main thread: busy{name}", [each.busy for each in found], unit="%", limit=25)
        what = f"main thread: 95th percentile of frame time{name}"
        yield compared(what, [each.frame for each in found], unit="ms", limit=FRAME)
        what = f"main thread: tasks over {LONG_TASK:.0f} ms{name}"
        yield compared(what, [each.long for each in found], unit="per s")


@row("browser", "timeline in the browser")
def timeline() -> Iterator[Figure]:
    """Trace how the timeline of 8 ranks with 200,000 events each is opened, and dragged at three scales."""
    if reason := missing():
        yield Figure(what="timeline of 8 × 200,000 events", unit="ms", ours=None, note=reason)
        return
    found = [_timeline_times() for _ in range(TIMELINES)]
    for index, kind in enumerate(("from running the cell to the first drawing", "CPU time of the main thread")):
        what = f"timeline of 8 × 200,000 events: {kind}"
        yield compared(what, [times[index] for times in found], unit="ms", limit=2000)
    for index, share in enumerate(SCALES):
        part = f"1/{1 / share:.0f}" if share < 1 else "all"
        what = f"timeline dragged, {part} of it visible: 95th percentile of frame time"
        for offset, name in enumerate(("", ", CPU time")):
            values = [times[2 + 2 * index + offset] for times in found]
            yield compared(what + name, values, unit="ms", limit=1000 / 30)


def _timeline_times() -> list[float]:
    """Open and drag one timeline, and measure it in milliseconds.

    Returns:
        The time until it is drawn, the CPU time of the main thread until then, and two values for each scale: the 95th
        percentiles of the time between frames and of the CPU time of the tasks that draw a frame.
    """
    with _page(_TIMELINE, "TimelineView(data)") as page:
        page.run(1)
        page.idle()

        def opened() -> float:
            page.page.evaluate(_NOTE_DRAWING)
            page.run(2)
            page.wait_for("() => window.drawnAfter")
            return float(page.page.evaluate("() => window.drawnAfter"))

        drawn, events = _traced(page, opened)
        times = [drawn, sum(task.get("tdur", 0) for task in _main_thread(events)[0]) / 1e3]
        page.idle()
        for share in SCALES:
            page.page.evaluate(_ZOOM, share)
            intervals, events = _traced(page, lambda: sorted(page.page.evaluate(_DRAG)))
            times += [intervals[int(0.95 * len(intervals))], measured(events, "tdur").frame]
    return times


def _traced(page: NotebookPage, action: Callable[[], T]) -> tuple[T, list[dict[str, Any]]]:
    """Run an action while Chromium traces it. Return the action's result, and the events of the trace."""
    browser = page.page.context.browser
    assert browser is not None
    browser.start_tracing(page=page.page, categories=["-*", "toplevel", "devtools.timeline"])
    found = action()
    return found, json.loads(browser.stop_tracing())["traceEvents"]


def _trace() -> list[dict[str, Any]]:
    """Trace an open panel in Chromium, starting three seconds after its curves were drawn. Return the events."""
    with _page(_LAUNCH.format(TRACE_SECONDS + 15, True, _RESULT)) as page:
        page.run(1)
        page.wait_for(_DRAWN)
        page.page.wait_for_timeout(3000)
        return _traced(page, lambda: page.page.wait_for_timeout(1000 * TRACE_SECONDS))[1]


def measured(events: Sequence[dict[str, Any]], kind: str) -> MainThread:
    """Return the load of the busiest main thread.

    Args:
        events: The events of a trace by Chromium.
        kind: The kind of time to measure: "dur" for wall time, "tdur" for CPU time.
    """
    return _figures(*_main_thread(events), kind)


def _main_thread(events: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the tasks of the busiest main thread in order, and the times at which its scripts draw a frame."""
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
    return sorted(tasks[thread], key=lambda task: float(task["ts"])), scripts


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
