"""Fully sharded data parallel: what both versions of torch's FSDP have in common."""

from __future__ import annotations

import copy
from typing import Any

from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy


class FSDPStrategy(ShardedStrategy):
    """Units of a model are gathered while they compute, and their gradients are summed into shards."""

    @property
    def plugin(self) -> Any:
        """A copy of the user's plugin, its choices replaced by torch's objects."""
        plugin = copy.copy(self.setup.state.fsdp_plugin)
        dtype = self.setup.precision.compute_dtype
        if plugin.mixed_precision_policy is not None or dtype is not None:
            plugin.set_mixed_precision(dtype)
        plugin.validate_cpu_offload()
        return plugin

    @property
    def state_dict_kind(self) -> str:
        """How checkpoints hold the shards, as the plugin says."""
        return str(self.plugin.state_dict_kind)
