from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.telemetry import Channel, Event, MetricEvent, ProgressEvent, Sink, install_sink
from notebook_accelerate.telemetry.automatic_metrics import StepCounter


class Kernel:
    """A stand-in for the kernel at the other end of a rank's channel."""

    def __init__(self) -> None:
        mine, theirs = Channel.pair()
        self._rank, self._here = mine, Channel(theirs)
        self.sink = Sink(mine)

    def received(self) -> list[Event]:
        self.sink.flush()
        return [stamped.event for stamped in self._here.receive(timeout=1.0)]

    def close(self) -> None:
        self._rank.close()
        self._here.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    here = Kernel()
    install_sink(here.sink)
    yield here
    install_sink(None)
    here.close()


def test_optimizer_steps_and_logged_values_reach_the_kernel(kernel: Kernel) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, other = accelerator.prepare(
        torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    )
    for step in range(4):
        with accelerator.accumulate(first):
            accelerator.backward(first(torch.ones(1, 1)).sum() + second(torch.ones(1, 1)).sum())
            optimizer.step()
            other.step()
        accelerator.log({"loss": torch.tensor(0.5), "rate": 1}, step=step)
    events = kernel.received()
    progress = [event.step for event in events if isinstance(event, ProgressEvent)]
    metrics = [event for event in events if isinstance(event, MetricEvent)]
    assert progress == [1, 2]  # Only the first optimizer's steps count, one at the end of each window.
    assert [event.step for event in metrics] == [0, 1, 2, 3]
    assert metrics[0].values == {"loss": 0.5, "rate": 1}


def _optimizers(number: int) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []
    for _ in range(number):
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        found.append(torch.optim.SGD([weight], lr=0.1))
    return found


def _progress(kernel: Kernel) -> list[int]:
    return [event.step for event in kernel.received() if isinstance(event, ProgressEvent)]


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        pytest.param("BBBB", [1, 2, 3, 4], id="the first one is never used"),
        pytest.param("AABBB", [1, 2, 5], id="two phases"),
        pytest.param("A" * 20 + "B" * 10, [*range(1, 21), 29, 30], id="two long phases"),
        pytest.param("AABBAABB", [1, 2, 3, 4], id="two steps in turn"),
        pytest.param("ABABAB", [1, 2, 3], id="in turn"),
        pytest.param("ABCABC", [1, 2], id="three in turn"),
        pytest.param("ABBABB", [1, 3, 4, 5], id="one that steps twice as often"),
        pytest.param("BBABBA", [1, 2, 3, 4], id="one that steps half as often"),
    ],
)
@pytest.mark.parametrize("prepared", [True, False])
def test_one_of_several_optimizers_counts_the_steps(
    kernel: Kernel, steps: str, counted: list[int], prepared: bool
) -> None:
    optimizers: list[torch.optim.Optimizer] = _optimizers(3)
    counter = StepCounter()
    if prepared:
        optimizers = list(Accelerator(cpu=True).prepare(*optimizers))
        for each in steps:
            optimizers["ABC".index(each)].step()
        assert _progress(kernel) == counted
    else:
        numbers = [counter.count(optimizers["ABC".index(each)]) for each in steps]
        assert [number for number in numbers if number] == counted


def test_a_freed_optimizer_does_not_count(kernel: Kernel) -> None:
    counter = StepCounter()
    for number in range(1, 4):
        (optimizer,) = _optimizers(1)
        assert counter.count(optimizer) == number
        del optimizer
        gc.collect()


def test_a_value_that_is_not_a_number_raises(kernel: Kernel) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="log"):
        accelerator.log(3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="leaves out 'loss'"):
        accelerator.log({"loss": object()})
