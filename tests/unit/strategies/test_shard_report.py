"""A rank's shard report equals the bytes that the rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.telemetry import Channel, ShardingEvent, Sink, install_sink
from notebook_accelerate.telemetry.sharding import KINDS, ShardSizes, to_report


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": optim.Adam,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "centered": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_counted_before_the_first_step(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    raw = _net()
    raw[0].bias.requires_grad_(False)
    model, optimizer = accelerator.prepare(raw, OPTIMIZERS[name](raw.parameters()))
    report = accelerator.strategy.sharding()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    # Leave out frozen parameters, for which Adagrad also has a state.
    states = [state for p, state in optimizer.optimizer.state.items() if p.requires_grad]
    real = sum(item.nbytes for state in states for item in state.values() if torch.is_tensor(item) and item.dim())
    assert report.held["optimizer state"].here == real
    assert report.held["optimizer state"].whole == real
    assert report.held["gradients"].here == sum(p.grad.nbytes for p in raw.parameters() if p.grad is not None)
    assert report.held["parameters"].here == sum(p.nbytes for p in raw.parameters())
    assert (report.strategy, report.axes, report.place) == ("single", {}, {})


def test_the_state_of_an_unknown_optimizer_is_not_counted() -> None:
    class Custom(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    accelerator = Accelerator(cpu=True)
    raw = _net()
    accelerator.prepare(raw, Custom(raw.parameters()))
    assert accelerator.strategy.sharding().held["optimizer state"] == ShardSizes(None, None)


def test_tied_parameters_count_once() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    accelerator.prepare(model)
    assert accelerator.strategy.sharding().held["parameters"].here == 8 * 4 * 4


@pytest.fixture
def events() -> Iterator[Callable[[], list[ShardingEvent]]]:
    ours, socket = Channel.pair()
    theirs = Channel(socket)
    sink = Sink(theirs)
    install_sink(sink)

    def received() -> list[ShardingEvent]:
        sink.flush()
        found = ours.receive(0) if ours.readable() else []
        return [one.event for one in found if isinstance(one.event, ShardingEvent)]

    yield received
    install_sink(None)
    ours.close()
    theirs.close()


def test_a_report_is_sent_once_and_again_after_a_change(events: Callable[[], list[ShardingEvent]]) -> None:
    accelerator = Accelerator(cpu=True)
    model = _net()
    model, _optimizer = accelerator.prepare(model, optim.Adam(model.parameters()))
    (event,) = events()
    report = to_report(event)
    assert report == accelerator.strategy.sharding()
    assert list(event.held) == list(KINDS)
    accelerator.prepare(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    assert events() == [], "a loader must not change the report"
    accelerator.prepare(_net())
    (event,) = events()
    assert event.held["parameters"]["here"] == 2 * sum(p.nbytes for p in model.parameters())


def test_training_continues_if_counting_fails(
    events: Callable[[], list[ShardingEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("no such thing in this version")

    monkeypatch.setattr(shard_report, "count_shards", broken)
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match=r"the sharding of this rank cannot be shown \(AttributeError: no such thing"):
        model = accelerator.prepare(_net())
    assert isinstance(model, nn.Module)
    assert events() == []
