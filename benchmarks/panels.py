"""The cost of a panel: for each update, compared with plotly and an HTML table, and for the training that it shows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets

from benchmarks.bench import Figure, alternate, compared, row
from notebook_accelerate.launch.report.curves import Source
from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.plot import Plot
from notebook_accelerate.widgets.run_panel import RunPanel
from tests.support.kernel import Kernel
from tests.support.runs import START, Clock, make_run

_POINTS = 20_000
_UPDATES = 50

_TRAIN = """
import os, time, torch
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent
torch.set_num_threads(1)
def train(steps=300):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    inputs = torch.randn(64, 256)
    begin = time.perf_counter()
    for step in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        telemetry.emit(MetricEvent({"loss": loss.item()}, step))
    return 1e3 * (time.perf_counter() - begin) / steps
"""


class _Counted:
    """Counts the bytes that a widget sends to the browser."""

    def __init__(self, widget: Any) -> None:
        self.sent = 0
        widget.comm.publish_msg = self._publish

    def _publish(self, kind: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any) -> None:
        self.sent += len(json.dumps(data, default=str)) + sum(len(buffer) for buffer in buffers or ())


def _log(store: Store, begin: int, end: int) -> None:
    store.add([
        Record(0, START + step / 100, MetricEvent({"loss": math.exp(-step / 5000)}, step)) for step in range(begin, end)
    ])  # fmt: skip


def _curve() -> tuple[Callable[[], float], _Counted]:
    store = Store()
    _log(store, 0, _POINTS)
    plot, state = Plot([Source(store, START)]), {"step": _POINTS}
    counted = _Counted(plot)
    plot.update(0.0)
    plot.update(1000.0)
    counted.sent = 0

    def update() -> float:
        _log(store, state["step"], state["step"] + 10)
        state["step"] += 10
        begin = time.perf_counter()
        plot.update(1000.1)
        return time.perf_counter() - begin

    return update, counted


def _plotly() -> tuple[Callable[[], float], _Counted]:
    import plotly.graph_objects as go

    steps = list(range(_POINTS))
    values = [math.exp(-step / 5000) for step in steps]
    figure = go.FigureWidget(go.Scattergl(x=steps, y=values))
    counted = _Counted(figure)

    def update() -> float:
        for _ in range(10):
            steps.append(len(steps))
            values.append(math.exp(-len(steps) / 5000))
        begin = time.perf_counter()
        with figure.batch_update():
            figure.data[0].x, figure.data[0].y = steps, values
        return time.perf_counter() - begin

    return update, counted


def _table() -> tuple[Callable[[], float], _Counted]:
    widget, state = ipywidgets.HTML(), {"step": 0}
    counted = _Counted(widget)

    def update() -> float:
        state["step"] += 10
        begin = time.perf_counter()
        rows = "".join(f"<tr><td>{rank}</td><td>{state['step']}</td><td>{0.5:.4f}</td></tr>" for rank in range(8))
        widget.value = f"<table>{rows}</table>"
        return time.perf_counter() - begin

    return update, counted


@row("panels", "one update of a curve of 20,000 points")
def updates() -> Iterator[Figure]:
    """Measure an update that appends ten points to a curve."""
    (ours, here), (table, small) = _curve(), _table()
    sides, counts = [ours, table], [here, small]
    note = "plotly is not installed"
    try:
        theirs, there = _plotly()
        sides, counts, note = [*sides, theirs], [*counts, there], "the peer is plotly's FigureWidget"
    except ImportError:
        pass
    measured = alternate(_UPDATES, *sides)
    kilobytes = [[count.sent / (_UPDATES + 1) / 1000] for count in counts]
    plotly_time = measured[2] if len(measured) > 2 else ()
    plotly_size = kilobytes[2] if len(kilobytes) > 2 else ()
    yield compared("time in the kernel", measured[0], plotly_time, unit="ms", scale=1e3, ratio=1.0, note=note)
    yield compared("sent to the browser", kilobytes[0], plotly_size, unit="kB", ratio=0.1, note=note)
    yield compared("a table of 8 ranks in an HTML widget: time", measured[1], unit="ms", scale=1e3)
    yield compared("a table of 8 ranks in an HTML widget: sent", kilobytes[1], unit="kB")


@row("panels", "a whole panel of 8 ranks")
def panel() -> Iterator[Figure]:
    """Measure the whole panel, rendered five times per second of a fake clock."""
    run, clock = make_run(ranks=8), Clock()
    for rank in range(8):
        run._internals.store.add(
            [Record(rank, START, MetricEvent({"loss": 1.0, "lr": 0.1}, step)) for step in range(20_000)]
        )
    begin = time.perf_counter()
    shown = RunPanel(run, clock)
    yield Figure(what="opening it with 320,000 points", unit="ms", ours=1e3 * (time.perf_counter() - begin),
                 goal="≤ 1000 ms", met=time.perf_counter() - begin <= 1.0)  # fmt: skip
    clock.turn(60.0)

    def update() -> float:
        clock.turn(0.2)
        for rank in range(8):
            run._internals.store.add([Record(rank, clock.now, MetricEvent({"loss": 1.0, "lr": 0.1}, 20_000))])
        start = time.perf_counter()
        shown.schedule.tick()
        return time.perf_counter() - start

    yield compared("one update", alternate(_UPDATES, update)[0], unit="ms", scale=1e3, limit=20)
    shown.close()


_FORM = """
import time, torch
from notebook_accelerate import configure
(torch.randn(512, 512) @ torch.randn(512, 512)).sum()
def train(a, b=2):
    return a
def timed():
    begin = time.perf_counter()
    form = configure(train)
    took = time.perf_counter() - begin
    form.close()
    return took
"""


@row("panels", "the form")
def form() -> Iterator[Figure]:
    """Measure opening the first config form, and later ones, in a kernel that has used torch's threads."""

    def first_form() -> float:
        with Kernel() as kernel:
            kernel.check(_FORM, timeout=60)
            return float(kernel.value("timed()", timeout=60))

    yield compared("opening the first form of a kernel", alternate(5, first_form)[0], unit="s", limit=0.3)
    with Kernel() as kernel:
        kernel.check(_FORM, timeout=60)
        later = alternate(10, lambda: float(kernel.value("timed()", timeout=60)))[0]
    yield compared("opening another form", later, unit="s", limit=0.3)


_FLOOD = """
import os, time
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent
def flood(points_per_second):
    step, begin = 0, time.monotonic()
    while True:
        step += 1
        telemetry.emit(MetricEvent({"loss": 1.0 / step}, step))
        if step % 50 == 0:
            time.sleep(max(0.0, begin + step / points_per_second - time.monotonic()))
"""


@row("panels", "replies at 10,000 points per second")
def replies() -> Iterator[Figure]:
    """Measure `1 + 1` in the kernel while two ranks each log 5,000 points per second to an open panel."""
    with Kernel() as kernel:
        kernel.check(_FLOOD, timeout=60)
        quiet = [_reply_seconds(kernel) for _ in range(_UPDATES)]
        kernel.check("run = notebook_launcher(flood, (5000,), num_processes=2, use_port=0, block=False)", timeout=60)
        kernel.pump(3.0)
        before = kernel.value("[time.monotonic(), run.ranks[0].last_step + run.ranks[1].last_step]")
        took = []
        for _ in range(_UPDATES):
            took.append(_reply_seconds(kernel))
            kernel.pump(0.05)
        after = kernel.value("[time.monotonic(), run.ranks[0].last_step + run.ranks[1].last_step]")
        kernel.check("run.stop(0.5)", timeout=60)
    note = f"{(after[1] - before[1]) / (after[0] - before[0]):,.0f} points per second arrived during the measurement"
    yield compared("`1 + 1` in an idle kernel", quiet, unit="ms", scale=1e3)
    yield compared("`1 + 1` under load, median", took, unit="ms", scale=1e3, limit=50, note=note)
    slowest = sorted(took)[int(len(took) * 0.95)]
    yield compared("`1 + 1` under load, 95th percentile", [slowest], unit="ms", scale=1e3, limit=50)


def _reply_seconds(kernel: Kernel) -> float:
    cell = kernel.check("1 + 1", timeout=30)
    assert cell.duration is not None
    return cell.duration


@row("panels", "cost to training")
def training() -> Iterator[Figure]:
    """Measure training on two ranks, launched from a kernel with and without the panel."""
    with Kernel() as kernel:
        kernel.check(_TRAIN, timeout=60)

        def side(panel: bool) -> float:
            launch = (
                f"notebook_launcher(train, num_processes=2, use_port=0, env={{'OMP_NUM_THREADS': '1'}}, panel={panel})"
            )
            return float(kernel.value(f"sum({launch}.results) / 2", timeout=120))

        shown, hidden = alternate(6, lambda: side(True), lambda: side(False))
    yield compared("a step with the panel open (peer: no panel)", shown, hidden, unit="ms", ratio=1.05)
