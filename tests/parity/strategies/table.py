"""The strategies that must train like plain torch, and the numbers of ranks that they support."""

from __future__ import annotations

from typing import Any

from tests.parity.strategies.scripts import Case

WORLD = -1
"""A degree that stands for the number of ranks."""
_UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
_FIRST = {"fsdp_version": 1, "sync_module_states": True, "use_orig_params": True, **_UNITS}
_PREFETCHING = {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False}
_SECOND = {"fsdp_version": 2, **_UNITS}
# AOT_EAGER traces and partitions both passes like the default backend, but omits slow parts such as building kernels.
_COMPILED = {"backend": "AOT_EAGER"}
_KERNELS = {"backend": "INDUCTOR"}
_REGIONS = {**_COMPILED, "use_regional_compilation": True}

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp1": {"fsdp": _FIRST},
    "fsdp1, gradients and optimizer": {"fsdp": {**_FIRST, "sharding_strategy": "SHARD_GRAD_OP"}},
    "fsdp1, checkpointed activations": {"fsdp": {**_FIRST, "activation_checkpointing": True}},
    "fsdp1, offloaded, other prefetching": {"fsdp": {**_FIRST, **_PREFETCHING, "cpu_offload": True}},
    "fsdp1, rank 0 loads": {"fsdp": {**_FIRST, "cpu_ram_efficient_loading": True}},
    "fsdp2": {"fsdp": _SECOND},
    "fsdp2, one unit": {"fsdp": {"fsdp_version": 2}},
    "fsdp2, units by size": {"fsdp": {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 200}},
    "fsdp2, whole in backward": {"fsdp": {**_SECOND, "reshard_after_forward": False}},
    "fsdp2, checkpointed activations": {"fsdp": {**_SECOND, "activation_checkpointing": True}},
    "fsdp2, offloaded": {"fsdp": {**_SECOND, "cpu_offload": True}},
    "fsdp2, rank 0 loads": {"fsdp": {**_SECOND, "cpu_ram_efficient_loading": True}},
    "fsdp2 by degrees": {"fsdp": _SECOND, "degrees": {"dp_shard_size": WORLD}},
    "tp": {"degrees": {"tp_size": WORLD}},
    "ddp, compiled": {"dynamo": _COMPILED},
    "ddp, compiled to kernels": {"dynamo": _KERNELS},
    "ddp, compiled regions": {"dynamo": _REGIONS},
    "fsdp2, compiled": {"fsdp": _SECOND, "dynamo": _COMPILED},
    "fsdp2, compiled regions": {"fsdp": _SECOND, "dynamo": _REGIONS},
    "tp, compiled regions": {"degrees": {"tp_size": WORLD}, "dynamo": _REGIONS},
}
"""The strategies for any number of ranks: the fields of a `Case`, by name."""

SLOW = {
    "ddp, compiled to kernels",
    "ddp, compiled regions",
    "fsdp2, compiled regions",
    "tp, compiled regions",
    "fsdp2, rank 0 loads, and tp",
    "fsdp1, replicas of gradients and optimizer",
}
"""Slow strategies that resemble a faster one. They are only in the nightly table."""

ON_FOUR: dict[str, dict[str, Any]] = {
    "fsdp1, replicas of shards": {"fsdp": {**_FIRST, "sharding_strategy": "HYBRID_SHARD"}, "ranks_of_a_machine": 2},
    "fsdp1, replicas of gradients and optimizer": {
        "fsdp": {**_FIRST, "sharding_strategy": "HYBRID_SHARD_ZERO2"},
        "ranks_of_a_machine": 2,
    },
    "fsdp2, replicas of shards": {"fsdp": _SECOND, "degrees": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    "fsdp2 and tp": {"fsdp": _SECOND, "degrees": {"dp_shard_size": 2, "tp_size": 2}},
    "fsdp2, rank 0 loads, and tp": {
        "fsdp": {**_SECOND, "cpu_ram_efficient_loading": True},
        "degrees": {"dp_shard_size": 2, "tp_size": 2},
    },
}
"""Strategies that arrange four ranks in two dimensions."""

_OFFLOADED = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"deepspeed": {"zero_stage": stage}} for stage in (0, 1, 2, 3)},
    # This entry uses torch's optimizer in CPU memory. Another test covers DeepSpeed's own C++ optimizer.
    "stage 3, offloaded": {
        "deepspeed": {"hf_ds_config": {"zero_optimization": _OFFLOADED, "zero_force_ds_cpu_optimizer": False}}
    },
}
"""DeepSpeed's strategies, whose tests have a separate environment."""

FORMS: dict[str, dict[str, Any]] = {
    "fsdp1, whole": _FIRST,
    "fsdp1, sharded": {**_FIRST, "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp1, local": {**_FIRST, "state_dict_type": "LOCAL_STATE_DICT"},
    "fsdp2, sharded": _SECOND,
    "fsdp2, whole": {**_SECOND, "state_dict_type": "FULL_STATE_DICT"},
}
"""The ways in which checkpoints can be written."""


def case_of(name: str, ranks: int, **more: Any) -> Case:
    """Return the case that trains with a strategy on a number of ranks.

    Args:
        name: A name in one of the tables.
        ranks: The number of ranks.
        more: Further fields of `Case`.
    """
    settings = {**STRATEGIES, **ON_FOUR, **ZERO}[name]
    degrees = {degree: ranks if size == WORLD else size for degree, size in settings.get("degrees", {}).items()}
    return Case(**{**settings, "degrees": degrees or None, **more})
