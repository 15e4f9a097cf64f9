"""The FSDP plugin as torch's FSDP takes it."""

from __future__ import annotations

import copy
from typing import Any

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.strategies.strategy_setup import Setup


def resolved_plugin(setup: Setup) -> FullyShardedDataParallelPlugin:
    """Return a copy of the user's plugin with torch's objects in place of names.

    Args:
        setup: The settings of the `Accelerator`.

    Raises:
        ValueError: `cpu_offload` or `mixed_precision_policy` belong to the other version of FSDP.
    """
    plugin: FullyShardedDataParallelPlugin = copy.copy(setup.state.fsdp_plugin)
    dtype: Any = setup.precision.compute_dtype
    if plugin.mixed_precision_policy is not None or dtype is not None:
        plugin.set_mixed_precision(dtype)
    plugin.validate_cpu_offload()
    return plugin
