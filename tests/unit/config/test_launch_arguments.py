"""Arguments that a launch passes to every Accelerator in its ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from notebook_accelerate import Accelerator, LaunchConfig
from notebook_accelerate.config.launch_config import (
    ACCELERATOR_ARGUMENTS,
    launch_arguments_set,
    takes_launch_arguments,
)
from notebook_accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    MegatronLMPlugin,
)


def test_every_argument_of_the_accelerator_is_known() -> None:
    parameters = set(inspect.signature(Accelerator).parameters)
    assert parameters - {"mixed_precision", "cpu"} == set(ACCELERATOR_ARGUMENTS)


class Example:
    """A class that records its arguments."""

    @takes_launch_arguments
    def __init__(
        self, fsdp_plugin: Any = None, gradient_accumulation_steps: int = 1, gradient_accumulation_plugin: Any = None
    ) -> None:
        self.given = (fsdp_plugin, gradient_accumulation_steps, gradient_accumulation_plugin)


def test_passed_arguments_take_precedence() -> None:
    with launch_arguments_set({"fsdp_plugin": "a plugin", "gradient_accumulation_steps": 4}):
        assert Example().given == ("a plugin", 4, None)
        assert Example("mine").given == ("mine", 4, None)
        assert Example(fsdp_plugin=None).given == (None, 4, None)
        assert Example(gradient_accumulation_plugin="in detail").given == ("a plugin", 1, "in detail")
    assert Example().given == (None, 1, None)


def test_an_accelerator_takes_the_launch_arguments() -> None:
    loader = DataLoaderConfiguration(even_batches=False)
    with launch_arguments_set({"gradient_accumulation_steps": 3, "dataloader_config": loader}):
        accelerator = Accelerator(cpu=True)
        assert accelerator.gradient_accumulation_steps == 3
        assert accelerator.even_batches is False
        own = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
        assert own.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"accelerator=\[\] is not allowed; pass the arguments of Accelerator by name"),
        ({"mixed_precision": "bf16"}, r"write LaunchConfig\(mixed_precision='bf16'\) instead"),
        ({"fsdp": 1}, "Accelerator has no such argument; it has device_placement"),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(), "megatron_lm_plugin": MegatronLMPlugin()},
            "fsdp_plugin and megatron_lm_plugin, which cannot be combined",
        ),
    ],
)
def test_bad_arguments_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaunchConfig(accelerator=given)


def test_an_empty_dict_of_arguments_equals_none() -> None:
    assert LaunchConfig(accelerator={}) == LaunchConfig()
