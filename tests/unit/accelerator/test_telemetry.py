from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.telemetry import Channel, Event, MetricEvent, ProgressEvent, Sink, install_sink


class Kernel:
    """The other end of a rank's channel."""

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
    assert progress == [1, 2]  # complete windows, of the first optimizer only
    assert [event.step for event in metrics] == [0, 1, 2, 3]
    assert metrics[0].values == {"loss": 0.5, "rate": 1}


def test_a_value_that_is_not_a_number_raises(kernel: Kernel) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="log"):
        accelerator.log(3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="'loss' .* left out"):
        accelerator.log({"loss": object()})
