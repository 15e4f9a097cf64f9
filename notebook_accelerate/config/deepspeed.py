"""DeepSpeed: its plugin, and the stand-ins for an optimizer and scheduler that its own configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from notebook_accelerate.config import environ


@dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed; what is None is read from ACCELERATE_DEEPSPEED_* variables."""

    hf_ds_config: Any = None
    """A DeepSpeed configuration: a path, a dict or an ``HfDeepSpeedConfig`` (ACCELERATE_DEEPSPEED_CONFIG_FILE)."""
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    """0, 1, 2 or 3 (ACCELERATE_DEEPSPEED_ZERO_STAGE); default: 2."""
    is_train_batch_min: bool = True
    """Whether the smaller of several loaders' batch sizes counts."""
    offload_optimizer_device: str | None = None
    """none, cpu or nvme (ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE); default: none."""
    offload_param_device: str | None = None
    """none, cpu or nvme (ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE); default: none."""
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    """Whether models are split while they are made (ACCELERATE_DEEPSPEED_ZERO3_INIT); default: False."""
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        if self.hf_ds_config is None:
            self.hf_ds_config = environ.text("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if self.zero_stage is None:
            self.zero_stage = environ.integer("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)
        if self.zero_stage not in {0, 1, 2, 3}:
            raise ValueError(f"zero_stage={self.zero_stage!r} is not allowed; allowed: 0, 1, 2, 3")
        for name in ("zero3_init_flag", "zero3_save_16bit_model"):
            if getattr(self, name) is None:
                variable = f"ACCELERATE_DEEPSPEED_{name.upper().removesuffix('_FLAG')}"
                setattr(self, name, environ.flag(variable))
        for name in ("offload_optimizer_device", "offload_param_device"):
            if getattr(self, name) is None:
                setattr(self, name, environ.text(f"ACCELERATE_DEEPSPEED_{name.upper()}", "none"))
            if getattr(self, name) not in {"none", "cpu", "nvme"}:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: none, cpu, nvme")


class DummyOptim:
    """Holds parameters where a DeepSpeed configuration describes the optimizer.

    Args:
        params: Parameters, or dicts that define groups of them.
        lr: Learning rate.
        weight_decay: Weight decay.
        **kwargs: Anything else.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Holds an optimizer where a DeepSpeed configuration describes the scheduler.

    Args:
        optimizer: The optimizer.
        total_num_steps: How many steps there will be.
        warmup_num_steps: How many of them warm up.
        lr_scheduler_callable: Makes the scheduler of an optimizer.
        **kwargs: Anything else.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


__all__ = ["DeepSpeedPlugin", "DummyOptim", "DummyScheduler"]
