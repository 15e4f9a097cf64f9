"""How FullyShardedDataParallel wraps a model; what is None is read from FSDP_* variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate.config import constants, environ

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )

_FLAGS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
_VERSION_1_FLAGS = ("forward_prefetch", "use_orig_params", "sync_module_states")


@dataclass
class FullyShardedDataParallelPlugin:
    """Settings of FSDP 1 and 2; choices given by name become torch's objects when a model is wrapped."""

    fsdp_version: int | None = None
    """1 or 2 (FSDP_VERSION); default: 1."""
    sharding_strategy: str | ShardingStrategy | None = None
    """FSDP 1: what is sharded (FSDP_SHARDING_STRATEGY); default: FULL_SHARD."""
    reshard_after_forward: str | ShardingStrategy | bool | None = None
    """FSDP 2: whether parameters are freed after the forward (FSDP_RESHARD_AFTER_FORWARD); default: True."""
    backward_prefetch: str | BackwardPrefetch | None = None
    """FSDP 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH (FSDP_BACKWARD_PREFETCH)."""
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None
    auto_wrap_policy: Callable[..., Any] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = None
    cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = None
    """Whether parameters rest in main memory (FSDP_OFFLOAD_PARAMS); default: False."""
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: str | StateDictType | None = None
    """FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT (FSDP_STATE_DICT_TYPE)."""
    state_dict_config: FullStateDictConfig | ShardedStateDictConfig | None = None
    optim_state_dict_config: FullOptimStateDictConfig | ShardedOptimStateDictConfig | None = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    """Whether rank 0 alone loads the weights (FSDP_CPU_RAM_EFFICIENT_LOADING); default: False."""
    transformer_cls_names_to_wrap: list[str] | None = None
    """Classes that become units of their own (FSDP_TRANSFORMER_CLS_TO_WRAP, separated by commas)."""
    min_num_params: int | None = None
    """Modules with more parameters than this become units of their own (FSDP_MIN_NUM_PARAMS)."""

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = environ.integer("FSDP_VERSION", 1)
        if self.fsdp_version not in {1, 2}:
            raise ValueError(f"fsdp_version={self.fsdp_version!r} is not allowed; allowed: 1, 2")
        for name in (*_FLAGS, *(_VERSION_1_FLAGS if self.fsdp_version == 1 else ())):
            if getattr(self, name) is None:
                setattr(self, name, environ.flag(f"FSDP_{name.upper()}"))
        if self.cpu_offload is None:
            self.cpu_offload = environ.flag("FSDP_OFFLOAD_PARAMS")
        self._read_units()
        self._read_choices()
        if self.cpu_ram_efficient_loading and self.fsdp_version == 1:
            self.sync_module_states = True  # the other ranks receive what rank 0 has loaded

    def _read_units(self) -> None:
        if self.transformer_cls_names_to_wrap is None and (names := environ.text("FSDP_TRANSFORMER_CLS_TO_WRAP")):
            self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",")]
        if self.min_num_params is None:
            self.min_num_params = environ.integer("FSDP_MIN_NUM_PARAMS")

    def _read_choices(self) -> None:
        if self.fsdp_version == 1:
            self.sharding_strategy = _choice(
                "sharding_strategy", self.sharding_strategy, constants.FSDP_SHARDING_STRATEGY, "FULL_SHARD"
            )
            self.backward_prefetch = _choice(
                "backward_prefetch", self.backward_prefetch, constants.FSDP_BACKWARD_PREFETCH, None
            )
        elif self.reshard_after_forward is None:
            self.reshard_after_forward = environ.flag("FSDP_RESHARD_AFTER_FORWARD", default=True)
        allowed = constants.FSDP_STATE_DICT_TYPE if self.fsdp_version == 1 else constants.FSDP2_STATE_DICT_TYPE
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.state_dict_type = _choice("state_dict_type", self.state_dict_type, allowed, default)

    @staticmethod
    def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
        """Deprecated: call ``get_module_class_from_name`` of ``utils.dataclasses``.

        Args:
            module: A model.
            name: Name of a class.
        """
        return get_module_class_from_name(module, name)


def _choice(name: str, value: Any, allowed: list[str], default: str | None) -> Any:
    """Return a choice given by name in upper case, checked; torch's own objects as they are."""
    if value is None:
        value = environ.text(f"FSDP_{name.upper()}", default)
    if value is None or not isinstance(value, str):
        return value
    if value.isdigit() and 1 <= int(value) <= len(allowed):  # older files number the choices from 1
        return allowed[int(value) - 1]
    if value.upper() not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {', '.join(allowed)}")
    return value.upper()


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """Return the class of a name among the modules of a model; None where it has none.

    Args:
        module: The model.
        name: Name of the class.
    """
    return next((type(child) for child in module.modules() if type(child).__name__ == name), None)


__all__ = ["FullyShardedDataParallelPlugin", "get_module_class_from_name"]
