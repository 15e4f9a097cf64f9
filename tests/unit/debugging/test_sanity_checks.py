"""The facts that ranks send, and the warnings that the kernel derives from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from notebook_accelerate import telemetry
from notebook_accelerate.debugging import sanity_checks
from notebook_accelerate.debugging.sanity_checks import SanityChecks
from notebook_accelerate.telemetry.debug_protocol import CheckEvent
from notebook_accelerate.worker.sanity_facts import UNPREPARED_STEPS, SanityFacts, fingerprint


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.time


@pytest.fixture
def clock() -> Clock:
    """Return a clock at 0."""
    return Clock()


def _send(found: SanityChecks, check: str, key: int, *rows: list[float]) -> list[str]:
    return [text for rank, row in enumerate(rows) for text in found.note(rank, CheckEvent(check, key, row))]


# ---- the kernel's part


def test_equal_parameters_cause_no_warning() -> None:
    found = SanityChecks(2)
    assert _send(found, "parameters", 0, [3.0, 1.0], [3.0, 1.0]) == []
    assert _send(found, "parameters", 1, [3.0, 1.0], [3.0, 1.0 + 1e-6]) == []
    assert _send(found, "parameters", 10, [3.0, math.nan], [3.0, math.nan]) == []


def test_unequal_parameters_are_reported_once() -> None:
    found = SanityChecks(3)
    [text] = _send(found, "parameters", 0, [3.0, 1.0], [3.0, 1.0], [3.0, 1.5])
    assert text.startswith("parameters of rank 2 differ from those of rank 0 after prepare; ")
    assert "set_seed(42)" in text
    assert _send(found, "parameters", 1, [3.0, 1.0], [3.0, 1.0], [3.0, 1.5]) == []


def test_parameters_that_drift_apart_are_reported() -> None:
    [text] = _send(SanityChecks(2), "parameters", 10, [3.0, 1.0], [3.0, 2.0])
    assert "after optimizer step 10; ranks train independently: model = accelerator.prepare(model)" in text


def test_a_second_model_is_compared_separately() -> None:
    found = SanityChecks(2)
    assert _send(found, "parameters", 0, [3.0, 1.0], [3.0, 1.0]) == []
    assert _send(found, "parameters", 0, [9.0, 5.0], [9.0, 5.0]) == []


def test_a_rank_may_prepare_several_models_before_another_prepares_one() -> None:
    mistakes = SanityChecks(2)
    first, second, third = CheckEvent("parameters", 0, [4.0, 1]), CheckEvent("parameters", 0, [9.0, 2]), 0.5
    for event in (first, second, CheckEvent("parameters", 0, [1.0, third])):
        assert mistakes.note(0, event) == []
    assert mistakes.note(1, first) == []
    assert mistakes.note(1, second) == []
    [warning] = mistakes.note(1, CheckEvent("parameters", 0, [1.0, third + 1]))
    assert warning.startswith("parameters of rank 1 differ from those of rank 0 after prepare; ")


def test_a_rank_may_train_several_models_before_another_trains_one() -> None:
    """With one Accelerator per fold, rank 0 may be in the second fold while rank 1 takes its first step."""
    found = SanityChecks(2)
    for fold in (1.0, 2.0, 3.0):
        assert found.note(0, CheckEvent("parameters", 1, [4.0, fold])) == []
    for fold in (1.0, 2.0):
        assert found.note(1, CheckEvent("parameters", 1, [4.0, fold])) == []
    [warning] = found.note(1, CheckEvent("parameters", 1, [4.0, 3.5]))
    assert "after optimizer step 1; ranks train independently" in warning


def test_equal_data_is_reported_after_two_batches() -> None:
    found = SanityChecks(2)
    assert _send(found, "batch", 1, [2.0, 1.0, 2.0], [2.0, 1.0, 2.0]) == []
    [text] = _send(found, "batch", 2, [2.0, 3.0, 4.0], [2.0, 3.0, 4.0])
    assert text.startswith("every rank trains on the same data")
    assert "for data from a loader: loader = accelerator.prepare(loader)" in text
    assert "for random data: set_seed(42, device_specific=True)" in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([2.0, 1.0, 2.0], [2.0, 1.0, 9.0]), ([2.0, 3.0, 4.0], [2.0, 3.0, 4.0])),
        (([2.0, 1.0, 2.0], [2.0, 1.0, 2.0]), ([2.0, 1.0, 2.0], [2.0, 1.0, 2.0])),
        (([2.0, 1.0, 1.0], [2.0, 1.0, 1.0]), ([2.0, 3.0, 3.0], [2.0, 3.0, 3.0])),
    ],
    ids=["one differs", "one batch on purpose", "made up"],
)
def test_correct_data_is_not_reported(first: Any, second: Any) -> None:
    found = SanityChecks(2)
    assert _send(found, "batch", 1, *first) + _send(found, "batch", 2, *second) == []


def test_a_loss_that_is_not_finite_on_one_rank_first_is_reported(clock: Clock) -> None:
    found = SanityChecks(2, clock)
    assert found.note(1, CheckEvent("loss", 37, [math.nan])) == []
    assert found.note(0, CheckEvent("loss", 38, [math.nan])) == []
    assert found.check_progress({}) == []
    clock.time = sanity_checks.COMPARE_SECONDS + 0.1
    [text] = found.check_progress({})
    assert text.startswith("the loss of rank 1 became nan at backward #37, before any other rank's; ")
    assert "run.ask('batch', ranks=[1])" in text
    assert found.check_progress({}) + found.finish() == []


@pytest.mark.parametrize(("world", "where"), [(1, ""), (2, " on all ranks")])
def test_a_loss_that_is_not_finite_on_all_ranks_is_reported(world: int, where: str) -> None:
    found = SanityChecks(world)
    for rank in range(world):
        found.note(rank, CheckEvent("loss", 4, [math.nan]))
    [text] = found.finish()
    assert text.startswith(f"the loss became nan{where} at backward #4; ")
    assert found.finish() == []


def test_gradients_that_are_not_finite_on_all_ranks_are_not_reported() -> None:
    found = SanityChecks(2)
    for rank in range(2):
        found.note(rank, CheckEvent("gradients", 4, [math.inf]))
    assert found.finish() == []


def test_gradients_at_the_end_of_the_run_are_reported() -> None:
    found = SanityChecks(2)
    found.note(0, CheckEvent("gradients", 4, [math.inf]))
    [text] = found.finish()
    assert text.startswith("the gradients' norm of rank 0 became inf at clip_grad_norm_ #4")


def test_a_rank_that_stays_far_behind_is_reported(clock: Clock) -> None:
    found = SanityChecks(2, clock)
    assert found.check_progress({0: 100, 1: 85}) == []
    assert found.check_progress({0: 130, 1: 90}) == []
    clock.time = 2.0
    assert found.check_progress({0: 130, 1: 129}) == []  # By now, rank 1 has caught up.
    assert found.check_progress({0: 160, 1: 120}) == []
    clock.time = 2.0 + sanity_checks.BEHIND_SECONDS
    assert found.check_progress({0: 170, 1: 130}) == [
        "rank 1 is 40 steps behind (at 130 of 170); run.stacks(ranks=[1]) shows what it does"
    ]
    assert found.check_progress({0: 300, 1: 130}) == []
    assert SanityChecks(2, clock).check_progress({0: 500}) == []  # Rank 1 has reported no steps.


def test_a_mistake_found_by_a_rank_is_reported_once() -> None:
    found = SanityChecks(2)
    event = CheckEvent("mistake", 0, [], "forgotten")
    assert [found.note(rank, event) for rank in range(2)] == [["forgotten"], []]


# ---- the rank's part


class RecordingSink:
    """Replaces the sink of a launched rank."""

    on_step = None

    def __init__(self) -> None:
        self.events: list[CheckEvent] = []

    def emit(self, event: Any) -> None:
        """Record an event."""
        self.events.append(event)

    def facts(self, check: str) -> list[tuple[int, list[float]]]:
        """Return the key and the values of all facts of one kind."""
        return [(event.key, event.values) for event in self.events if event.check == check]


@pytest.fixture
def sink() -> Iterator[RecordingSink]:
    """Yield a sink that records the facts that this process sends."""
    listener = RecordingSink()
    # An earlier run in this process may have left hooks that count later runs' steps.
    hooks = dict(_global_optimizer_post_hooks)
    _global_optimizer_post_hooks.clear()
    telemetry.install_sink(listener)  # type: ignore[arg-type]
    yield listener
    telemetry.install_sink(None)
    _global_optimizer_post_hooks.clear()
    _global_optimizer_post_hooks.update(hooks)


class _Prepared:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def test_nothing_is_installed_without_a_kernel_or_for_a_single_rank(sink: RecordingSink) -> None:
    model, optimizer = _training()
    alone = SanityFacts(several=False)
    alone.prepared([model], [_Prepared(optimizer)], [])
    telemetry.install_sink(None)
    disconnected = SanityFacts(several=True)
    disconnected.prepared([model], [_Prepared(optimizer)], [])
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert (alone.active, disconnected.active) == (False, False)
    disconnected.loss(torch.tensor(math.nan))
    assert sink.events == []


def test_parameters_are_sent_at_prepare_and_at_powers_of_ten(sink: RecordingSink) -> None:
    model, optimizer = _training()
    checks = SanityFacts(several=True)
    for _ in range(2):  # In the second call, all objects are already known.
        checks.prepared([model], [_Prepared(optimizer)], [model])
    for _ in range(20):
        _step(model, optimizer)
    assert [key for key, _ in sink.facts("parameters")] == [0, 1, 10]
    first = sink.facts("parameters")[0][1]
    assert first[0] == 4
    assert len(first) == 5


def test_ranks_that_train_apart_on_purpose_are_not_compared(sink: RecordingSink) -> None:
    model, optimizer = _training()
    model.require_backward_grad_sync = False  # type: ignore[assignment]
    checks = SanityFacts(several=True)
    checks.prepared([model], [_Prepared(optimizer)], [model])
    _step(model, optimizer)
    assert [key for key, _ in sink.facts("parameters")] == [0]


def test_the_first_two_training_batches_are_sent_and_the_hook_is_removed(sink: RecordingSink) -> None:
    model, _ = _training()
    SanityFacts(several=True).prepared([model], [], [])
    model.eval()
    model(torch.ones(2, 3))
    model.train()
    for value in range(4):
        model(torch.full((2, 3), float(value)))
    assert sink.facts("batch") == [(1, [6.0, *[0.0] * 6]), (2, [6.0, *[1.0] * 6])]
    assert not model._forward_pre_hooks


class Reading:
    """The state of an Accelerator whose prepared loader is being read."""

    in_dataloader = True


def test_batches_from_elsewhere_are_not_compared(sink: RecordingSink) -> None:
    """For example, a GAN's generator receives noise, which is rightly equal on ranks with the same seed."""
    model = torch.nn.Linear(2, 1)
    SanityFacts(several=True, gradient_state=Reading()).prepared([model], [], [])
    for _ in range(3):
        model(torch.randn(4, 2))
    assert [event.check for event in sink.events if isinstance(event, CheckEvent)] == ["parameters"]
    assert not model._forward_pre_hooks


def test_an_unprepared_optimizer_is_reported_once(sink: RecordingSink) -> None:
    model, optimizer = _training()
    checks = SanityFacts(several=True)
    checks.prepared([model], [], [])
    other, unrelated = _training()
    _step(other, unrelated)
    assert [event.text for event in sink.events if event.check == "mistake"] == []
    for _ in range(3):
        _step(model, optimizer)
    [text] = [event.text for event in sink.events if event.check == "mistake"]
    assert text.endswith("was not prepared itself: optimizer = accelerator.prepare(optimizer)")


def test_the_parameters_of_a_model_that_was_not_prepared_are_compared(sink: RecordingSink) -> None:
    checks = SanityFacts(several=True)
    model, optimizer = _training()
    other, second = _training()
    for _ in range(11):
        checks.loss(torch.tensor(1.0))
        _step(model, optimizer)
        _step(other, second)
    assert [key for key, _ in sink.facts("parameters")] == [1, 10]
    checks.prepared([model], [_Prepared(optimizer)], [])
    assert [key for key, _ in sink.facts("parameters")] == [1, 10, 0]


def test_the_hook_on_all_optimizers_is_removed(sink: RecordingSink) -> None:
    model, optimizer = _training()
    before = len(_global_optimizer_post_hooks)
    checks = SanityFacts(several=True)
    checks.prepared([model], [_Prepared(optimizer)], [])
    assert len(_global_optimizer_post_hooks) == before + 1
    for _ in range(UNPREPARED_STEPS + 1):
        checks.loss(torch.tensor(1.0))
        optimizer.step()
    assert len(_global_optimizer_post_hooks) == before


def test_the_first_number_that_is_not_finite_is_sent_once(sink: RecordingSink) -> None:
    checks = SanityFacts(several=True)
    for value in (1.0, math.inf, math.nan):
        checks.loss(torch.tensor(value, requires_grad=True))
    assert sink.facts("loss") == [(2, [math.inf])]
    assert checks.norm(torch.tensor(math.nan)).isnan()
    assert [key for key, _ in sink.facts("gradients")] == [1]
    checks.loss(torch.ones(3))  # This loss is not a single number.
    checks.loss("not a tensor")


def test_a_gradient_is_checked_before_averaging(sink: RecordingSink) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model.require_backward_grad_sync = True  # type: ignore[assignment]
    checks = SanityFacts(several=True)
    checks.prepared([], [], [model])
    for factor in (1.0, math.inf, math.nan):
        loss = model(torch.ones(2, 200)).sum()
        checks.loss(loss)
        (loss * factor).backward()
    assert [key for key, _ in sink.facts("local gradients")] == [2]


def test_a_gradient_scaler_may_cause_overflows(sink: RecordingSink) -> None:
    model, optimizer = _training()
    model.require_backward_grad_sync = True  # type: ignore[assignment]
    prepared = _Prepared(optimizer)
    prepared.scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    checks = SanityFacts(several=True)
    checks.prepared([model], [prepared], [model])
    (next(model.parameters()).sum() * math.inf).backward()
    assert sink.facts("local gradients") == []


def test_gradients_of_a_reported_loss_are_not_reported_again() -> None:
    found = SanityChecks(2)
    assert found.note(1, CheckEvent("loss", 5, [math.nan])) == []
    assert found.note(1, CheckEvent("local gradients", 5, [math.nan])) == []
    [text] = found.finish()
    assert text.startswith("the loss of rank 1 became nan at backward #5")


def test_a_loss_that_follows_from_reported_gradients_is_not_reported() -> None:
    found = SanityChecks(2)
    for rank in (0, 1):
        found.note(rank, CheckEvent("loss", 5, [math.nan]))
    found.note(1, CheckEvent("local gradients", 4, [math.nan]))
    [text] = found.finish()
    assert text.startswith("the gradients (before they are averaged) of rank 1 became nan at backward #4")


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.empty(0)],
        [torch.empty(3, device="meta")],
        [torch.eye(3).to_sparse()],
        [torch.nn.LazyLinear(2).weight],
    ],
    ids=["none", "empty", "meta", "sparse", "lazy"],
)
def test_a_fingerprint_never_fails(tensors: list[torch.Tensor]) -> None:
    assert fingerprint(tensors) == []


def test_a_fingerprint_samples_large_tensors() -> None:
    values = fingerprint([torch.arange(10_000), torch.ones(2, 2, dtype=torch.bfloat16)])
    assert values[0] == 10_004
    assert len(values) <= 65
    assert fingerprint([torch.arange(10_000)]) != fingerprint([torch.arange(10_000) + 1])


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_sent_a_few_steps_later(sink: RecordingSink) -> None:
    checks = SanityFacts(several=True)
    for number in range(1, 31):
        checks.loss(torch.tensor(math.nan if number == 5 else 1.0, device="cuda"))
    assert [key for key, _ in sink.facts("loss")] == [5]
