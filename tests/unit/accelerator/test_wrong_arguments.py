"""Wrong arguments immediately raise an error that says what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, AutocastKwargs
from notebook_accelerate.utils import RNGType

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"rng_types": ["foo"]}, r"rng_types contains 'foo'; allowed: 'torch', 'cuda'"),
    ({"rng_types": "torch"}, r"rng_types takes a list of 'torch', .*; got str \('torch'\)"),
    ({"project_config": {"project_dir": "x"}}, r"project_config takes ProjectConfiguration\(\.\.\.\); got dict"),
    ({"dataloader_config": {}}, r"dataloader_config takes DataLoaderConfiguration\(\.\.\.\); got dict"),
    ({"gradient_accumulation_plugin": 4}, r"gradient_accumulation_plugin takes GradientAccumulationPlugin"),
    ({"dynamo_plugin": "inductor"}, r"dynamo_plugin takes TorchDynamoPlugin\(\.\.\.\); got str"),
    ({"kwargs_handlers": AutocastKwargs()}, r"write kwargs_handlers=\[AutocastKwargs\(\.\.\.\)\]"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True, **settings)


def test_generators_may_be_members_of_the_enum() -> None:
    assert Accelerator(cpu=True, rng_types=[RNGType.TORCH, "generator"]).rng_types == ["torch", "generator"]
    assert Accelerator(cpu=True).rng_types == ["generator"]


def _loss() -> torch.Tensor:
    return nn.Linear(2, 1)(torch.ones(1, 2)).sum()


class _Output:
    def __init__(self) -> None:
        self.loss = _loss()


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda a: a.prepare(nn.Linear(2, 2), device_placement=True),
        "a list with True or False for each object; got bool",
    ),
    (lambda a: a.prepare_model(3), r"prepare_model takes a torch\.nn\.Module; got int \(3\)"),
    (lambda a: a.prepare_optimizer(nn.Linear(2, 2)), "prepare_optimizer takes a torch optimizer; got Linear"),
    (lambda a: a.prepare_scheduler(3), "prepare_scheduler takes a learning rate scheduler; got int"),
    (lambda a: a.backward(_loss().item()), r"backward\(\) takes the loss, a tensor; got float .*before loss\.item\(\)"),
    (lambda a: a.backward({"loss": _loss()}), r"got dict .*accelerator\.backward\(output\.loss\)"),
    (lambda a: a.backward(_Output()), r"got _Output .*accelerator\.backward\(output\.loss\)"),
    (lambda a: a.backward(None), "got NoneType"),
    (lambda a: a.autocast(3), r"autocast_handler takes AutocastKwargs\(\.\.\.\); got int"),
    (lambda a: a.clip_grad_norm_(nn.Linear(2, 2), 1.0), r"not a Linear; write .*model\.parameters\(\)"),
    (lambda a: a.clip_grad_value_(nn.Linear(2, 2), 1.0), r"not a Linear; write .*model\.parameters\(\)"),
    (lambda a: a.register_save_state_pre_hook(3), r"a hook must be callable; got int \(3\): pass a function"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_calls_are_refused(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Accelerator(cpu=True))


def test_an_object_with_backward_may_be_a_loss() -> None:
    class Loss:
        calls = 0

        def backward(self) -> None:
            self.calls += 1

    loss = Loss()
    Accelerator(cpu=True).backward(loss)
    assert loss.calls == 1


def test_clipping_parameters_without_gradients_returns_zero() -> None:
    accelerator = Accelerator(cpu=True)
    parameters = list(nn.Linear(2, 2).parameters())
    accelerator.clip_grad_value_(parameters, 1.0)
    assert accelerator.clip_grad_norm_(iter(parameters), 1.0) == 0
    parameters[0].grad = torch.full((2, 2), 5.0)
    accelerator.clip_grad_value_(iter(parameters), 1.0)
    assert parameters[0].grad.tolist() == [[1, 1], [1, 1]]
    accelerator.clip_grad_value_(parameters[0], 0.5)
    assert parameters[0].grad.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_strings_and_single_numbers_may_be_logged() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": torch.ones(1), "note": "warm-up", "parts": {"a": 1, "b": 2.0}, "flag": True})
    accelerator.log({"picture": object()})  # Without trackers, any value is accepted.
    accelerator.log({"weights": torch.ones(2), "nothing": None})
