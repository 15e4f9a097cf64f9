"""Record the loss, learning rates, gradient norm and steps per second of a rank without calls to ``log``.

They are sampled at the end of an optimizer step, a few times a second. Only steps that are multiples of a power of two
are sampled, so that all ranks sample the same steps. A step without a sample costs only one reading of a clock. A
number on a CUDA device is copied without waiting for the device, and sent with a later sample. Numbers on other
accelerators are omitted, because reading them would wait for the device or compile a graph.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accelerate.telemetry.events import Event
from notebook_accelerate.telemetry.sink import Sink, current_sink, emit

if TYPE_CHECKING:
    import torch


PERIOD = 0.25
"""Minimum seconds between two samples. Most samples follow within twice that time."""
LATEST = 4 * PERIOD
"""After this many seconds without a sample, the next step is sampled, whatever its number, because steps are slow."""
LOSS, RATE, NORM, SPEED = "auto/loss", "auto/lr", "auto/grad_norm", "auto/steps_per_second"
CPU, MEMORY, GPU, GPU_MEMORY = "system/cpu_percent", "system/memory_gb", "system/gpu_percent", "system/gpu_memory_gb"
"""The names of the host and device metrics. Sizes are in GB (1e9 bytes)."""
MAX_RATES = 4
"""Maximum number of parameter groups whose learning rates are sampled if they differ."""


@dataclass(slots=True)
class AutomaticMetricEvent(Event):
    """The numbers of one training step that are recorded without calling ``log``."""

    droppable: ClassVar[bool] = True
    boundary: ClassVar[bool] = True

    values: dict[str, float]
    step: int


@dataclass
class _Reading:
    """Numbers that are being copied from a CUDA device."""

    step: int
    names: list[str]
    host: Any
    arrivals: list[Any]


@dataclass
class TrainingSampler:
    """Samples the training of one rank, once `start` has been called."""

    _armed: bool = False  # Whether to record the numbers of the current step.
    _due: float = math.inf
    _stride: int = 1  # Sampled steps are multiples of this number.
    _before: float = 0.0
    _since: float = 0.0
    _step: int | None = None
    _numbers: dict[str, Any] = field(default_factory=dict)
    _readings: list[_Reading] = field(default_factory=list)

    def start(self, *, enabled: bool) -> None:
        """Start sampling a new run, or stop sampling."""
        self._armed, self._due, self._step, self._stride = enabled, math.inf, None, 1
        self._before = perf_counter()
        self._send_readings()  # Send the readings of the previous run.
        self._numbers, self._readings = {}, []

    def loss(self, loss: Any) -> None:
        """Record the loss of a batch, if this step is sampled."""
        if self._armed:
            self._numbers[LOSS] = _detached(loss)

    def norm(self, norm: Any) -> None:
        """Record the norm of the gradients, if this step is sampled."""
        if self._armed:
            self._numbers[NORM] = _detached(norm)

    def end_step(self, step: int, optimizer: Any) -> None:
        """Handle the end of an optimizer step: send its sample, or decide to sample the next step if a sample is due.

        Args:
            step: The number of the step, from 1.
            optimizer: The optimizer that has taken the step.
        """
        now = perf_counter()
        if not self._armed:
            if now >= self._due and ((step + 1) % self._stride == 0 or now >= self._since + LATEST):
                self._armed, self._before = True, now
            return
        values = learning_rates(optimizer)
        if self._step is not None and step > self._step:
            values[SPEED] = rate = (step - self._step) / (now - self._since)
            self._stride = 1 << (math.ceil(rate * PERIOD) - 1).bit_length()
        for name, number in self._numbers.items():
            if (value := _on_host(number)) is not None:
                values[name] = value
        self._read_devices(step)
        self._numbers = {}
        self._step, self._since, self._due = step, now, now + PERIOD / 2
        self._armed, self._before = now - self._before >= PERIOD, now
        if values:
            emit(AutomaticMetricEvent(values, step))

    def _read_devices(self, step: int) -> None:
        """Send the numbers that have arrived from a CUDA device, and start copying those of this step."""
        found = {name: number for name, number in self._numbers.items() if _is_cuda(number)}
        if not (found or self._readings):
            return
        import torch

        if torch.cuda.is_current_stream_capturing():
            return  # The calls below would break the user's CUDA graph.
        self._send_readings()
        if not found or len(self._readings) > 1:
            return
        host = torch.empty(len(found), dtype=torch.float64, pin_memory=True)
        for place, number in zip(host, found.values(), strict=True):
            place.copy_(number.reshape(()), non_blocking=True)
        arrivals = [event_on(device) for device in {number.device for number in found.values()}]
        self._readings.append(_Reading(step, list(found), host, arrivals))

    def _send_readings(self) -> None:
        while self._readings and all(arrival.query() for arrival in self._readings[0].arrivals):
            reading = self._readings.pop(0)
            emit(AutomaticMetricEvent(dict(zip(reading.names, reading.host.tolist(), strict=True)), reading.step))


def event_on(device: torch.device) -> Any:
    """Record an event on the current stream of a CUDA device, even if it is not the thread's current device.

    Args:
        device: The CUDA device on whose stream to record.
    """
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def learning_rates(optimizer: Any) -> dict[str, float]:
    """Return the learning rate of an optimizer's first parameter group, and those of groups with a different rate.

    Args:
        optimizer: An optimizer. The result is empty if it has no ``param_groups``.
    """
    groups = getattr(optimizer, "param_groups", None) or ()
    found: dict[str, float] = {}
    for index, group in enumerate(groups[:MAX_RATES]):
        rate = _on_host(group.get("lr") if isinstance(group, dict) else None)
        if rate is not None and rate not in found.values():
            found[f"{RATE}_group_{index}" if found else RATE] = rate
    return found


def _detached(number: Any) -> Any:
    return number.detach() if hasattr(number, "detach") else number


def _kind(number: Any) -> str:
    """Return "number" for a Python number, the device type of a tensor with one element, or "" for other values."""
    if isinstance(number, (int, float)):
        return "number"
    if not hasattr(number, "numel") or hasattr(number, "placements") or number.numel() != 1:
        return ""
    return str(number.device.type)


def _is_cuda(number: Any) -> bool:
    return _kind(number) == "cuda"


def _on_host(number: Any) -> float | None:
    return float(number) if _kind(number) in ("number", "cpu") else None


sampler = TrainingSampler()
"""The sampler of this process. There is only one, because a process trains one model at a time."""


# ---- which source and which optimizer count a rank's steps, and which numbers have already been reported

OPTIMIZER, LIBRARY, ACCELERATOR = range(3)
"""The sources that can count steps. The steps of the highest one that reports any are used."""

_source = OPTIMIZER
_copied: ContextVar[bool] = ContextVar("copied", default=False)


def claim_steps(source: int) -> bool:
    """Return whether ``source`` counts this rank's steps from now on, which it does unless a higher source does."""
    global _source  # noqa: PLW0603 - one training run per process
    _source = max(_source, source)
    return source == _source


def step_source() -> int:
    """Return the source that counts this rank's steps."""
    return _source


def reset_step_source() -> None:
    """Let any source count steps again. A new rank calls this, because it has inherited the kernel's source."""
    global _source  # noqa: PLW0603 - one training run per process
    _source = OPTIMIZER


@contextmanager
def reported() -> Iterator[None]:
    """Mark everything that trackers and writers receive in the block as reported, so that it is not reported again."""
    token = _copied.set(True)
    try:
        yield
    finally:
        _copied.reset(token)


def is_reported() -> bool:
    """Return whether the numbers that are being written have already been reported."""
    return _copied.get()


PHASE_STEPS = 8
"""After this many consecutive steps, an optimizer's steps are counted, however many another one has taken."""


class StepCounter:
    """Counts the steps of a run that may have several optimizers.

    The steps of the first optimizer that takes one are counted. Another optimizer replaces it by taking more
    consecutive steps than the first one ever did, or more than `PHASE_STEPS`. If a training run has several phases, the
    steps of all phases are counted.
    """

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._counted: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._in_a_row = self._longest = self._steps = 0

    def count(self, optimizer: Any) -> int:
        """Return the number of an optimizer's latest step, from 1, or 0 if another optimizer's steps are counted."""
        if self._sink is not (sink := current_sink()):  # A new run has started in this process.
            self._sink, self._counted, self._last = sink, None, None
            self._in_a_row = self._longest = self._steps = 0
        if self._last is not None and self._last() is optimizer:
            self._in_a_row += 1
        else:
            self._last, self._in_a_row = weakref.ref(optimizer), 1
        counted = self._counted() if self._counted is not None else None
        if counted is optimizer:
            self._longest = max(self._longest, self._in_a_row)
            self._steps += 1
            return self._steps
        if counted is not None and self._in_a_row <= min(self._longest, PHASE_STEPS):
            return 0
        self._counted, self._longest = weakref.ref(optimizer), self._in_a_row
        self._steps += self._in_a_row
        return self._steps
