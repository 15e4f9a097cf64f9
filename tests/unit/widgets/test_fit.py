"""The config panel warns before a launch whose training will not fit the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import FullyShardedDataParallelPlugin
from notebook_accelerate.config.deepspeed import DeepSpeedPlugin
from notebook_accelerate.config.launch import LaunchConfig
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch import KernelFacts
from notebook_accelerate.widgets.config_panel import ConfigPanel, configure
from notebook_accelerate.widgets.fit import strategy_of
from notebook_accelerate.widgets.training_options import TrainingOptions

WEIGHTS = 4 * 1000 * 1000
"""Bytes of the model: training takes four times as many, and DDP's buckets once more."""


def model() -> nn.Module:
    return nn.Linear(1000, 1000, bias=False)


def panel(memory_bytes: int, processes: int = 2, **values: Any) -> ConfigPanel:
    machine = HardwareInfo(
        accelerator="cpu", count=0, cpu_count=8, memory_bytes=memory_bytes, host="jupyter", loopback="lo"
    )
    config = LaunchConfig(num_processes=processes, cpu=True, block=False)
    return ConfigPanel(machine=machine, facts=lambda: KernelFacts(environment={}), config=config, model=model, **values)


def test_what_will_not_fit_is_said_in_every_form_and_can_be_launched() -> None:
    made = panel(30_000_000)
    assert made.warning.startswith("This will not fit: training needs about ")
    assert "optimizer most of it" in made.warning
    assert "for 2 on this machine" in made.warning
    assert made.warning in made._outlook.value
    assert made.warning in made.html
    assert made.warning in made.text
    assert not made.errors
    assert not made._go.disabled


def test_what_fits_is_not_said() -> None:
    assert panel(2 * 5 * WEIGHTS).warning == ""
    assert panel(2 * 5 * WEIGHTS - 1).warning
    assert panel(30_000_000, processes=1).warning == "", "half as many processes take half as much, and no buckets"
    assert configure().warning == "", "no model is known"


def test_the_warning_follows_the_options() -> None:
    made = panel(2 * 3 * WEIGHTS, memory={"optimizer": "sgd"})
    assert made.warning == ""
    made = panel(2 * 3 * WEIGHTS)
    assert made.warning
    made.change(fsdp_plugin=FullyShardedDataParallelPlugin())
    assert "This will not fit" not in made.warning
    with_inputs = panel(2 * 3 * WEIGHTS, memory={"optimizer": "sgd", "inputs": torch.zeros(10_000, 1000)})
    assert "activations most of it" in with_inputs.warning


def test_a_model_that_cannot_be_made_does_not_stop_the_panel() -> None:
    def broken() -> nn.Module:
        raise KeyError("width")

    made = ConfigPanel(
        config=LaunchConfig(num_processes=2, cpu=True, block=False),
        facts=lambda: KernelFacts(environment={}),
        model=broken,
    )
    assert "could not be estimated (KeyError: 'width')" in made.warning
    assert not made.errors


@pytest.mark.parametrize(
    ("options", "ranks", "expected"),
    [
        ({}, 1, "single"),
        ({}, 4, "ddp"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, 4, "fsdp"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)}, 4,
         "shard_grad_op"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP")}, 4,
         "shard_grad_op"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="NO_SHARD")}, 4, "ddp"),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, 4, "zero3"),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=0)}, 4, "ddp"),
    ],
)  # fmt: skip
def test_strategies(options: Any, ranks: int, expected: str) -> None:
    assert strategy_of(TrainingOptions(**options), ranks) == expected
