"""The training options: the arguments of an `Accelerator` that a form can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.low_precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.config.parallelism_config import ParallelismConfig, TorchTensorParallelPlugin
from notebook_accelerate.config.plain_values import check_whole_number
from notebook_accelerate.config.settings import setting, settings_of
from notebook_accelerate.widgets.fields import fields_of, groups_of

DYNAMO_KEYS = {each.name: str(each.option) for each in settings_of(TorchDynamoPlugin).values()}
"""The fields of `TorchDynamoPlugin`, and their names in a configuration file."""
_DATA = "Data, projects, compilation"
_ARGUMENTS = "Arguments of torch and fp8 recipes"
_SHARDED = "Sharded and parallel training"


@dataclass(kw_only=True)
class TrainingOptions:
    """The training options of a form: arguments of `Accelerator`, or handlers that are passed to it.

    Raises:
        ValueError: A value is not allowed, or two options are mutually exclusive.
    """

    batch_size: int | None = setting()
    """Batch size of the data loader in the training function. It is only used to show the effective batch size."""
    gradient_accumulation_steps: int = setting(1)
    """Number of batches per optimizer step."""
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = setting(
        group=_DATA, label="Gradient accumulation"
    )
    """Settings of gradient accumulation. If None, ``gradient_accumulation_steps`` applies."""
    dataloader_config: DataLoaderConfiguration | None = setting(group=_DATA, label="Data loaders")
    """Settings of data loaders, such as how they divide their data among ranks. If None, the defaults."""
    project_config: ProjectConfiguration | None = setting(group=_DATA, label="Project folders")
    """Folders for checkpoints and logs. If None, they are not set."""
    dynamo_plugin: TorchDynamoPlugin | None = setting(group=_DATA, label="Compile models")
    """Settings of ``torch.compile``. If None, models are not compiled."""
    log_with: list[str] | None = setting(group=_DATA, label="Experiment trackers")
    """Experiment trackers: all, aim, tensorboard, wandb, comet_ml, mlflow, trackio, clearml, dvclive, swanlab."""
    step_scheduler_with_optimizer: bool = setting(True, group=_DATA, label="Step schedulers with the optimizer")
    """Whether a scheduler advances with the optimizer's steps (True) or when you call it (False)."""
    ddp_kwargs: DistributedDataParallelKwargs | None = setting(group=_ARGUMENTS, label="DistributedDataParallel")
    """Arguments of ``DistributedDataParallel``. If None, torch's defaults."""
    autocast_kwargs: AutocastKwargs | None = setting(group=_ARGUMENTS, label="Autocast")
    """Arguments of ``torch.autocast``. If None, torch's defaults."""
    scaler_kwargs: GradScalerKwargs | None = setting(group=_ARGUMENTS, label="Gradient scaler")
    """Arguments of the gradient scaler of fp16. If None, torch's defaults."""
    process_group_kwargs: InitProcessGroupKwargs | None = setting(group=_ARGUMENTS, label="Process group")
    """Backend and time limit of collectives. If None, the defaults for the device."""
    profile_kwargs: ProfileKwargs | None = setting(group=_ARGUMENTS, label="Profile")
    """Arguments of ``Accelerator.profile``. If None, every step is recorded."""
    torchao_recipe: AORecipeKwargs | None = setting(group=_ARGUMENTS, label="torchao recipe")
    """fp8 recipe of torchao."""
    transformer_engine_recipe: TERecipeKwargs | None = setting(group=_ARGUMENTS, label="Transformer Engine recipe")
    """fp8 recipe of Transformer Engine."""
    msamp_recipe: MSAMPRecipeKwargs | None = setting(group=_ARGUMENTS, label="MS-AMP recipe")
    """fp8 recipe of MS-AMP."""
    fsdp_plugin: FullyShardedDataParallelPlugin | None = setting(group=_SHARDED, label="FSDP")
    """Settings of FSDP. If None, FSDP is not used."""
    deepspeed_plugin: DeepSpeedPlugin | None = setting(group=_SHARDED, label="DeepSpeed")
    """Settings of DeepSpeed. If None, DeepSpeed is not used."""
    megatron_lm_plugin: MegatronLMPlugin | None = setting(group=_SHARDED, label="Megatron-LM")
    """Settings of Megatron-LM. If None, Megatron-LM is not used."""
    torch_tp_plugin: TorchTensorParallelPlugin | None = setting(group=_SHARDED, label="Tensor parallelism of torch")
    """Tensor parallelism for models that split themselves. If None, it is not used."""
    parallelism_config: ParallelismConfig | None = setting(group=_SHARDED, label="Degrees of parallelism")
    """The degree of each kind of parallelism. If None, there is only data parallelism."""

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_whole_number("batch_size", self.batch_size)
        check_whole_number("gradient_accumulation_steps", self.gradient_accumulation_steps)
        plugin = self.gradient_accumulation_plugin
        if plugin is not None and plugin.num_steps is not None and self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} and gradient_accumulation_plugin with "
                f"num_steps={plugin.num_steps} were both given; clear one of them"
            )

    @property
    def steps(self) -> int:
        """Number of batches per optimizer step, from either option."""
        plugin = self.gradient_accumulation_plugin
        return (plugin.num_steps if plugin is not None else None) or self.gradient_accumulation_steps

    @property
    def _splits_batches(self) -> bool:
        return self.dataloader_config is not None and self.dataloader_config.split_batches

    @property
    def strategy(self) -> str:
        """How the model is distributed across ranks, in a few words, or "" if each rank holds the whole model."""
        parts = []
        if self.fsdp_plugin is not None:
            parts.append(f"FSDP {self.fsdp_plugin.fsdp_version}")
        if self.deepspeed_plugin is not None:
            parts.append(f"DeepSpeed ZeRO-{self.deepspeed_plugin.zero_stage}")
        if self.megatron_lm_plugin is not None:
            parts.append("Megatron-LM")
        if self.torch_tp_plugin is not None:
            parts.append(f"tp {self.torch_tp_plugin.tp_size}")
        if self.parallelism_config is not None:
            degrees = self.parallelism_config.active_mesh_dims
            parts.append(" × ".join(f"{name} {getattr(self.parallelism_config, f'{name}_size')}" for name in degrees))
        return " ".join(filter(None, parts))

    def dynamo_config(self) -> dict[str, Any]:
        """Return the settings of ``torch.compile`` as in a configuration file. The dict may be empty."""
        if self.dynamo_plugin is None:
            return {}
        given = vars(self.dynamo_plugin)
        config = {key: getattr(given[name], "value", given[name]) for name, key in DYNAMO_KEYS.items()}
        return {key: value for key, value in config.items() if value is not None}

    def accelerator(self) -> dict[str, Any]:
        """Return these options as arguments of `Accelerator`, which a launch passes to its ranks."""
        arguments = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in _HANDLED and getattr(self, entry.name) != entry.default
        }
        accumulation = self.gradient_accumulation_plugin
        if accumulation is not None and set(accumulation.to_kwargs()) - {"num_steps"}:
            arguments["gradient_accumulation_plugin"] = replace(accumulation, num_steps=self.steps)
        elif self.steps != 1:
            arguments["gradient_accumulation_steps"] = self.steps
        handlers = [getattr(self, name) for name in HANDLERS if getattr(self, name) is not None]
        return arguments | ({"kwargs_handlers": handlers} if handlers else {})

    def with_arguments(self, given: Mapping[str, Any]) -> tuple[TrainingOptions, dict[str, Any]]:
        """Return a copy with the values from arguments of `Accelerator`, and the arguments that have no field.

        Args:
            given: Arguments of `Accelerator` by name.
        """
        known = {entry.name for entry in fields(self)} - {"batch_size", *HANDLERS}
        values = {name: value for name, value in given.items() if name in known}
        kinds = {kind: name for name, kind in HANDLERS.items()}
        handlers = given.get("kwargs_handlers") or ()
        values |= {kinds[type(handler)]: handler for handler in handlers if type(handler) in kinds}
        others = [handler for handler in handlers if type(handler) not in kinds]
        rest = {name: value for name, value in given.items() if name not in known and name != "kwargs_handlers"}
        rest |= {"kwargs_handlers": others} if others else {}
        return TrainingOptions(batch_size=self.batch_size, **values), rest

    def effective_batch(self, world_size: int) -> str:
        """Return the number of samples of one optimizer step as a short text.

        Args:
            world_size: The number of ranks on all machines.
        """
        factor = self.steps * (1 if self._splits_batches else world_size)
        if self.batch_size is not None:
            return f"effective batch: {self.batch_size * factor}"
        return f"effective batch: {factor} × your loader's" if factor > 1 else "effective batch: your loader's"

    def batch_sum(self, world_size: int) -> str:
        """Return the factors of the effective batch size, or "" if it is the loader's batch size.

        Args:
            world_size: The number of ranks on all machines.
        """
        split = self._splits_batches
        parts = [f"{self.batch_size} per process" if self.batch_size and not split else str(self.batch_size or "batch")]
        if world_size > 1 and not split:
            parts.append(f"{world_size} processes")
        if self.steps > 1:
            parts.append(f"{self.steps} accumulation steps")
        return " × ".join(parts) if len(parts) > 1 else ""


HANDLERS = {
    entry.name: entry.nested for entry in fields_of(TrainingOptions, names=dict(groups_of(TrainingOptions))[_ARGUMENTS])
}
"""The fields that are passed as ``kwargs_handlers``, and their classes."""
_HANDLED = {"batch_size", "gradient_accumulation_steps", "gradient_accumulation_plugin", *HANDLERS}
