"""What sampling and profiling cost a rank's steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Figure, alternate, compared, row
from notebook_accelerate import notebook_launcher


def steps() -> None:
    """Run training steps on a rank until the run is stopped, and count them in `accelerator.steps_done`."""
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.ones(64, 64)
    accelerator.steps_done = 0  # type: ignore[attr-defined]
    while True:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.steps_done += 1  # type: ignore[attr-defined]


@row("debugging", "sampling")
def sampling() -> Iterator[Figure]:
    """Measure a step while the rank is sampled 100 times per second, and without sampling."""
    run = notebook_launcher(steps, (), 1, use_port=0, start_method="fork", block=False, panel=False)
    try:
        while not isinstance(run.ask("accelerator.steps_done")[0], int):
            time.sleep(0.5)

        def seconds_of_a_step(rate: float) -> float:
            before, begin = run.ask("accelerator.steps_done")[0], time.perf_counter()
            if rate:
                run.sample(2.0, rate=rate)
            else:
                time.sleep(2.0)
            after = run.ask("accelerator.steps_done")[0]
            return float((time.perf_counter() - begin) / (after - before))

        sampled, plain = alternate(9, lambda: seconds_of_a_step(100.0), lambda: seconds_of_a_step(0.0))
        yield compared("a step while sampled at 100 Hz", sampled, plain, unit="µs", scale=1e6, ratio=1.03)
    finally:
        run.stop(grace=1.0)


class Meter:
    """Measures the steps of a rank and, on request, records three of them with torch's own profiler.

    Attributes:
        seconds: The duration of each step since `begin`.
        with_torch: Whether torch's profiler has yet to record.
    """

    BEFORE, AFTER = 20, 60
    """The numbers of steps around the first recorded one that count, as preparing and writing a trace takes time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.with_torch = False
        self._first = 0
        self._folder = tempfile.TemporaryDirectory()
        self._profiler: Any = None
        self._left = 0

    def begin(self, *, with_torch: bool = False) -> None:
        """Forget earlier steps and start a new measurement."""
        self.seconds, self._first, self.with_torch = [], 0, with_torch

    @property
    def done(self) -> bool:
        """Whether all steps after a recording have run."""
        return 0 < self._first <= len(self.seconds) - self.AFTER

    def window(self) -> range:
        """Return the indices of the steps that count. Both sides have equally many, because each step adds noise."""
        return range(max(0, self._first - self.BEFORE), self._first + self.AFTER)

    def lost(self) -> float:
        """Return the seconds lost in the window: in steps longer than 1.5 medians, the time above the median."""
        usual = sorted(self.seconds)[len(self.seconds) // 2]
        return sum(self.seconds[each] - usual for each in self.window() if self.seconds[each] > 1.5 * usual)

    def _export(self, profiler: Any) -> None:
        profiler.export_chrome_trace(f"{self._folder.name}/trace.json")

    def after_step(self) -> None:
        """Start, advance or stop torch's profiler, if it was requested or is running."""
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        from notebook_accelerate.torch_internals import profiler_enabled

        if self.with_torch and len(self.seconds) > self.BEFORE:
            self.with_torch, self._left = False, 3
            self._profiler = profile(
                activities=[ProfilerActivity.CPU],
                record_shapes=True,
                schedule=lambda _: ProfilerAction.RECORD,
                on_trace_ready=self._export,
            )
            self._profiler.start()
        elif self._left:
            self._left -= 1
            self._profiler.step() if self._left else self._profiler.stop()
        if not self._first and profiler_enabled():
            self._first = len(self.seconds)


def metered() -> None:
    """Run training steps with a `Meter` on a rank until the run is stopped."""
    import torch

    meter = Meter()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.ones(64, 64)
    while True:
        begin = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.after_step()
        meter.seconds.append(time.perf_counter() - begin)


@row("debugging", "profiling")
def profiling() -> Iterator[Figure]:
    """Measure the time that training loses to `run.profile` with 3 steps, and to torch's profiler in the function."""
    run = notebook_launcher(metered, (), 1, use_port=0, start_method="fork", block=False, panel=False)
    try:
        while run.ask("meter.done")[0] is not False:
            time.sleep(0.5)
        run.profile(steps=1)  # Import the profiler's modules before the measurement.

        def lost() -> float:
            while not run.ask("meter.done")[0]:
                time.sleep(0.2)
            return float(run.ask("meter.lost()")[0])

        def by_run() -> float:
            run.ask("meter.begin()")
            time.sleep(0.5)
            run.profile(steps=3)
            return lost()

        def by_torch() -> float:
            run.ask("meter.begin(with_torch=True)")
            time.sleep(0.5)
            return lost()

        ours, torch_own = alternate(7, by_run, by_torch)
        yield compared("time lost to a profile of 3 steps", ours, torch_own, unit="ms", scale=1e3, ratio=1.1)
    finally:
        run.stop(grace=1.0)
