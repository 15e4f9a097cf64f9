"""DDP through an Accelerator gives the same results as plain DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from notebook_accelerate import Accelerator, DistributedDataParallelKwargs
from tests.support.ranks import run_ranks

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "static_graph of unused": {"static_graph": True, "find_unused_parameters": True},
}


class Branches(nn.Module):
    """A model that can skip one of its branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, branch: int) -> dict[str, Any]:
        """Use the left branch (0), the right one (1), or both (2)."""
        hidden = self.left(x) if branch == 0 else self.right(x) if branch == 1 else self.left(x) + self.right(x)
        return {"scores": [self.head(torch.tanh(hidden))], "branch": branch}


def losses(model: nn.Module, step: int, rank: int, settings: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the losses of the two batches that make a step."""
    for batch in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * batch + rank))
        branch = (step + batch + rank * (step % 3 == 0)) % 2 if settings.get("find_unused_parameters") else 2
        branch = 0 if len(settings) == 2 else branch  # With a static graph, every batch uses the same branch.
        yield model(x, branch)["scores"][0].pow(2).sum()


def weights_of(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def plain(settings: dict[str, Any]) -> Any:
    """Train with plain DDP. As torch requires, the first backward pass with a static graph exchanges gradients."""
    rank = Accelerator(cpu=True).process_index
    inner = Branches()
    model = DistributedDataParallel(inner, **settings)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batches = losses(model, step, rank, settings)
        with nullcontext() if settings.get("static_graph") and step == 0 else model.no_sync():
            next(batches).backward()
        next(batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(inner)


def prepared(settings: dict[str, Any]) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**settings)])
    inner = Branches()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(inner, optimizer)
    return accelerator, inner, model, optimizer


def triggered(settings: dict[str, Any]) -> Any:
    accelerator, inner, model, optimizer = prepared(settings)
    for step in range(STEPS):
        with accelerator.no_sync(model):
            first, second = losses(model, step, accelerator.process_index, settings)
            accelerator.backward(first)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(inner)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_exchanged_by_hand_equal_plain_ddp(settings: dict[str, Any]) -> None:
    wanted = run_ranks(plain, settings)
    assert wanted[0] == wanted[1]
    found = run_ranks(triggered, settings)
    if settings.get("static_graph"):  # In the first step, the gradients are added in another order.
        assert found[0] == found[1]
        for one, other in zip(found[0], wanted[0], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    else:
        assert found == wanted


def windows(settings: dict[str, Any]) -> Any:
    accelerator, inner, model, optimizer = prepared(settings)
    accelerator.gradient_state.plugin_kwargs["num_steps"] = 2
    for step in range(STEPS):
        batches = losses(model, step, accelerator.process_index, settings)
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(next(batches) * 2)
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(inner)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_accumulation_windows_equal_plain_ddp(settings: dict[str, Any]) -> None:
    assert run_ranks(windows, settings) == run_ranks(plain, settings)


def no_forward() -> None:
    accelerator, _, model, _ = prepared(SETTINGS["find_unused_parameters"])
    loss = next(losses(model, 0, 0, {}))
    with (
        pytest.raises(ValueError, match=r"needs a forward of the prepared model under accelerator\.no_sync"),
        accelerator.trigger_sync_in_backward(model),
    ):
        accelerator.backward(loss)
    assert model.require_backward_grad_sync
    copy.deepcopy(accelerator.unwrap_model(model))


def test_unused_parameters_cannot_be_found_without_a_forward() -> None:
    run_ranks(no_forward)


def unprepared() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inner = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.accumulate(inner):
            pass
        quiet = len(caught)
        accelerator.step = 0
        model = accelerator.prepare(inner)
        with accelerator.accumulate(inner):
            pass
    with pytest.raises(ValueError, match=r"takes a list: accelerator\.join_uneven_inputs\(\[model\]\)"):
        accelerator.join_uneven_inputs(model).__enter__()
    return quiet, [str(warning.message) for warning in caught]


def test_accumulating_for_an_unprepared_model_is_reported() -> None:
    for quiet, warned in run_ranks(unprepared):
        assert quiet == 0
        assert len(warned) == 1
        assert "accumulate() was given no prepared model" in warned[0]


def nested() -> Any:
    accelerator, inner, model, _ = prepared({})
    rank = accelerator.process_index
    own = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    seen = []

    def backward() -> None:
        inner.zero_grad()
        accelerator.backward(model(own, 2)["scores"][0].sum())
        seen.append(inner.left.weight.grad.sum().item())

    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            backward()
        backward()  # Leaving the inner block must not end the outer one.
        with pytest.raises(KeyError), accelerator.no_sync(model):
            raise KeyError("in the block")
        backward()
    backward()
    with pytest.raises(KeyError), accelerator.no_sync(model):
        raise KeyError("in the block")
    backward()
    context = accelerator.no_sync(model)
    for _ in range(2):  # The same context can be entered again.
        with context:
            backward()
    backward()
    return seen


def test_blocks_without_exchange_can_be_nested() -> None:
    first, second = run_ranks(nested)
    apart = [True, True, True, False, False, True, True, False]
    assert [one != other for one, other in zip(first, second, strict=True)] == apart


def uneven(settings: dict[str, Any], here: bool) -> Any:
    """Train on two batches on rank 0 and on five batches on rank 1."""
    accelerator, inner, model, optimizer = prepared(settings)
    rank = accelerator.process_index
    with accelerator.join_uneven_inputs([model]) if here else Join([model]):
        for step in range(2 + 3 * rank):
            accelerator.backward(next(losses(model, step, rank, settings)))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(inner)


@pytest.mark.parametrize("name", ["default", "find_unused_parameters"])
def test_ranks_with_fewer_batches_behave_as_in_torchs_join(name: str) -> None:
    wanted = run_ranks(uneven, SETTINGS[name], False)
    assert wanted[0] == wanted[1]
    assert run_ranks(uneven, SETTINGS[name], True) == wanted


def assigned_handler() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)
    model: Any = accelerator.prepare(Branches())
    return model.find_unused_parameters, model.bucket_bytes_cap // 2**20


def test_a_handler_that_is_assigned_before_prepare_is_used() -> None:
    """transformers' Trainer assigns a handler in this way."""
    assert run_ranks(assigned_handler) == [(True, 7)] * 2
