"""Automatic metrics are sampled without waiting for a device, and at most a few times a second."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accelerate import LaunchConfig, notebook_launcher
from notebook_accelerate.telemetry import DeviceMemoryEvent, DeviceUseEvent, ResourceEvent, automatic_metrics
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent, TrainingSampler, learning_rates
from notebook_accelerate.telemetry.events import Event
from tests.support.runs import feed, make_run


def _train(steps: int) -> None:
    import time

    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum() * 0.0 + 8.0)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.005)


def _plain(steps: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.5}, {"params": [], "lr": 0.25}])
    for _ in range(steps):
        parameter.sum().backward()
        optimizer.step()


def test_a_run_has_curves_of_values_that_it_does_not_log() -> None:
    run = notebook_launcher(_train, (150,), 2, use_port=0)
    assert dict(run.metrics) == {}
    found = run.automatic_metrics
    assert set(found["auto/loss"].values) == {8.0}, (
        "the loss of a batch, before it is divided by the number of batches in a window"
    )
    assert set(found["auto/lr"].values) == {0.5}
    assert set(found["auto/grad_norm"].values) == {0.0}
    assert set(found["auto/loss"].ranks) == {0, 1}
    assert (found["auto/steps_per_second"].values > 0).all()
    seconds = run.elapsed
    assert len(found["auto/loss"].rank(0).values) <= 2 + seconds / automatic_metrics.PERIOD, "not every step is sampled"
    assert (found["system/memory_gb"].values > 0.01).all()

    plain = notebook_launcher(_plain, (3,), 1, use_port=0)
    assert plain.automatic_metrics["auto/lr"].values[0] == 0.5
    off = notebook_launcher(_train, (20,), 1, config=LaunchConfig(automatic_metrics=False, use_port=0))
    assert dict(off.automatic_metrics) == {}
    assert [name for name in off._internals.store.automatic.metric_names() if name.startswith("auto/")] == []


class _Watched(torch.Tensor):
    """A loss on a device, which counts how often it is read."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("item", "__float__", "tolist"):
            _Watched.reads += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_loss_is_not_read_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Event] = []
    monkeypatch.setattr(automatic_metrics, "emit", sent.append)
    clock = [0.0]
    monkeypatch.setattr(automatic_metrics, "perf_counter", lambda: clock[0])
    sampler, optimizer = TrainingSampler(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    sampler.start(enabled=True)
    loss = torch.tensor(2.0).as_subclass(_Watched)
    for step in range(1, 1001):
        clock[0] += 0.001
        sampler.loss(loss)
        sampler.end_step(step, optimizer)
    assert 3 <= len(sent) <= 5
    assert _Watched.reads <= 5
    last = sent[-1]
    assert isinstance(last, AutomaticMetricEvent)
    assert last.values["auto/loss"] == 2.0
    assert last.values["auto/steps_per_second"] == pytest.approx(1000.0)
    sampler.start(enabled=False)
    clock[0] += 10.0
    sampler.loss(loss)
    sampler.end_step(2000, optimizer)
    assert sent[-1] is last


@pytest.mark.parametrize("seconds", [0.001, 0.0237, 0.2, 0.7])
def test_ranks_with_different_speeds_sample_the_same_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    sampled: list[list[int]] = []
    for factor in (1.0, 1.04):
        sent: list[AutomaticMetricEvent] = []
        clock = [0.0]
        monkeypatch.setattr(automatic_metrics, "emit", sent.append)
        monkeypatch.setattr(automatic_metrics, "perf_counter", lambda clock=clock: clock[0])
        sampler, optimizer = TrainingSampler(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        sampler.start(enabled=True)
        for step in range(1, 1 + int(30 / seconds)):
            clock[0] += factor * seconds
            sampler.end_step(step, optimizer)
        sampled.append([event.step for event in sent])
    one, other = map(set, sampled)
    assert len(one & other) >= 0.9 * len(one)
    apart = max(2 * automatic_metrics.PERIOD, seconds)
    assert len(one) >= 30 / apart - 2
    for later in (1, 2):  # The training has become slower.
        clock[0] += 2.0
        sampler.end_step(step + later, optimizer)
    assert sent[-1].step == step + 2


def test_numbers_that_cannot_be_read_without_waiting_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Event] = []
    monkeypatch.setattr(automatic_metrics, "emit", sent.append)
    sampler = TrainingSampler()
    sampler.start(enabled=True)
    sampler.loss(torch.tensor(1.0, device="meta"))
    sampler.norm(torch.ones(3))
    sampler.end_step(1, object())
    assert sent == []


def test_groups_with_another_learning_rate_have_a_separate_curve() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.5, 0.5, 0.25)]
    assert learning_rates(torch.optim.SGD(groups, lr=1.0)) == {"auto/lr": 0.5, "auto/lr_group_2": 0.25}


def test_figures_of_hosts_and_devices_become_curves() -> None:
    run = make_run()
    for rank in range(2):
        memory = [DeviceMemoryEvent(f"cuda:{index}", 1, 10**9, 1, 0, "", f"{rank}{index}") for index in range(2)]
        feed(
            run,
            ResourceEvent(50.0 + rank, 2 * 10**9),
            *memory,
            *memory,
            DeviceUseEvent(f"{rank}0", 40.0, 1, 2),
            rank=rank,
        )
    curves = run.automatic_metrics
    assert curves["system/cpu_percent"].rank(1).values.tolist() == [51.0]
    assert curves["system/memory_gb"].rank(0).values.tolist() == [2.0]
    assert curves["system/gpu_memory_gb"].rank(1).values[-1] == 2.0, "the curve adds up both devices of the rank"
    assert curves["system/gpu_percent"].rank(1).values.tolist() == [40.0]
