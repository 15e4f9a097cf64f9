"""The sampler measures real processes, including this one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from notebook_accelerate.hardware.nvml import GpuReader
from notebook_accelerate.telemetry import DeviceUseEvent, ResourceEvent
from notebook_accelerate.telemetry.sampler import ResourceSampler, proportional_memory
from notebook_accelerate.telemetry.store import Record


def test_the_memory_of_a_missing_process_is_zero() -> None:
    assert 1 << 20 < proportional_memory(os.getpid()) < 1 << 40
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert proportional_memory(gone.pid) == 0


def test_the_sampler_feeds_records_until_it_is_stopped() -> None:
    got, enough = [], threading.Event()

    def sink(records: list[Record]) -> None:
        got.extend(records)
        if len(got) >= 3:
            enough.set()

    sampler = ResourceSampler({4: os.getpid()}, sink, period=0.02)
    sampler.start()
    assert enough.wait(60)
    sampler.stop()
    count = len(got)
    assert {record.rank for record in got} == {4}
    used = [record.event for record in got if not isinstance(record.event, DeviceUseEvent)]
    assert all(isinstance(event, ResourceEvent) and event.memory_bytes > 1 << 20 for event in used)
    assert len(got) == count


def test_an_exited_process_is_omitted() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    records = ResourceSampler({0: gone.pid, 1: os.getpid()}, lambda _: None).sample(GpuReader())
    assert {record.rank for record in records} == {1}
    assert sum(isinstance(record.event, ResourceEvent) for record in records) == 1


def test_a_sampler_stops_immediately_even_with_a_long_period() -> None:
    sampler = ResourceSampler({0: os.getpid()}, lambda _: None, period=3600)
    sampler.start()
    stopper = threading.Thread(target=sampler.stop)
    stopper.start()
    stopper.join(60)
    assert not stopper.is_alive()


def test_without_nvidia_the_gpu_reader_is_quiet() -> None:
    reader = GpuReader()
    found = reader.read()
    reader.close()
    assert isinstance(found, list)


@pytest.mark.parametrize("period", [0.01])
def test_a_failing_sink_is_reported(period: float) -> None:
    """The store handles failing subscribers, so a sink that raises is a bug. The thread must then end, not spin."""
    calls = []

    def sink(_: list[Record]) -> None:
        calls.append(1)
        raise RuntimeError("bug")

    sampler = ResourceSampler({0: os.getpid()}, sink, period=period)
    sampler._thread = threading.Thread(target=_swallow(sampler._run), daemon=True)
    sampler.start()
    sampler._thread.join(60)
    assert len(calls) == 1
    sampler.stop()


def _swallow(run: object) -> object:
    def body() -> None:
        with pytest.raises(RuntimeError):
            run()  # type: ignore[operator]

    return body
