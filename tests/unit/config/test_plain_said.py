"""Settings as a report shows them."""

from __future__ import annotations

from notebook_accelerate import LaunchConfig
from notebook_accelerate.config.plain_values import said
from notebook_accelerate.utils import AutocastKwargs, DataLoaderConfiguration, FullyShardedDataParallelPlugin


def test_only_what_differs_from_the_defaults_is_said() -> None:
    assert said(3) == "3"
    assert said("gloo") == "'gloo'"
    given = {"dataloader_config": DataLoaderConfiguration(data_seed=1), "gradient_accumulation_steps": 2}
    assert said(given) == "dataloader_config=DataLoaderConfiguration(data_seed=1), gradient_accumulation_steps=2"
    assert said([AutocastKwargs(enabled=False)]) == "[AutocastKwargs(enabled=False)]"
    text = said({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)})
    assert text.startswith("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2")
    assert "forward_prefetch" not in text


def test_no_arguments_are_none() -> None:
    assert LaunchConfig(accelerator={}) == LaunchConfig()
