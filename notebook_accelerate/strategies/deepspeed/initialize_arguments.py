"""Build the arguments of `deepspeed.initialize`: a configuration without "auto" values, an optimizer and a schedule."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from notebook_accelerate.config.deepspeed_config import AUTO, HfDeepSpeedConfig
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.deepspeed.deepspeed_engine import compilation_context
from notebook_accelerate.strategies.strategy import kind_of
from notebook_accelerate.torch_internals import mark_stepped

_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    f"{_ZERO}.reduce_bucket_size": lambda size: size * size,
    f"{_ZERO}.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    f"{_ZERO}.stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Settings that are computed from a transformer's hidden size, as DeepSpeed's authors recommend."""


@dataclass(kw_only=True)
class EngineParts:
    """The objects that an engine is created from, and the sizes that determine its "auto" values."""

    model: torch.nn.Module
    """The model to train."""
    optimizer: Any = None
    """A torch optimizer, a `DummyOptim` if the configuration defines the optimizer, or None for inference."""
    scheduler: Any = None
    """A schedule of the learning rate, a `DummyScheduler`, or None."""
    batch_sizes: Sequence[int | None]
    """The number of samples in a rank's batch, for each loader, or None for a loader without a batch size."""
    steps: int
    """The number of batches per accumulation window."""
    world_size: int
    """The number of ranks."""
    split_batches: bool = False
    """Whether each batch of a loader is split among the ranks."""
    sequence_ranks: int = 1
    """The number of ranks that share a batch. Each of them has a piece of every sequence."""


def object_kind(item: Any) -> str:
    """Return the kind of a training object. Unlike `kind_of`, this also recognizes DeepSpeed's placeholders.

    Args:
        item: An argument of `prepare`.
    """
    placeholders = {DummyOptim: "optimizer", DummyScheduler: "scheduler"}
    return placeholders.get(type(item)) or kind_of(item)


def trained_parameters(optimizer: Any) -> Iterator[Any]:
    """Iterate over the parameters of an optimizer.

    If a placeholder has a generator of parameters, a list replaces it, so that the parameters can be read again.

    Args:
        optimizer: A torch optimizer, or a `DummyOptim`.

    Yields:
        The parameters of all groups.
    """
    if isinstance(optimizer, DummyOptim):
        optimizer.params = list(optimizer.params)
        groups = optimizer.params
    else:
        groups = optimizer.param_groups
    for group in groups:
        if isinstance(group, dict):
            group["params"] = list(group["params"])
            yield from group["params"]
        else:
            yield group


# ---- optimizers and schedules


def check_parts(parts: EngineParts, plugin: DeepSpeedPlugin) -> None:
    """Check that the optimizer and the schedule agree with the configuration.

    Args:
        parts: The objects that the engine is created from.
        plugin: The plugin that holds the configuration.

    Raises:
        ValueError: The objects contradict the configuration. The message has a line for each contradiction.
    """
    config = plugin.deepspeed_config
    dummy, later = isinstance(parts.optimizer, DummyOptim), isinstance(parts.scheduler, DummyScheduler)
    has_callable = later and parts.scheduler.lr_scheduler_callable is not None
    wrong = []
    if "optimizer" in config and not dummy:
        wrong.append("an optimizer is in the configuration and in the code: pass DummyOptim(model.parameters())")
    if "optimizer" not in config and dummy:
        wrong.append('DummyOptim needs an optimizer in the configuration, which has none: add "optimizer" to it')
    if "scheduler" in config and parts.scheduler is not None and not later:
        wrong.append("a scheduler is in the configuration and in the code: pass DummyScheduler(optimizer)")
    if "scheduler" in config and has_callable:
        wrong.append("a scheduler is in the configuration, and lr_scheduler_callable creates another: leave one out")
    if "scheduler" not in config and later and not has_callable:
        wrong.append(
            'DummyScheduler needs a scheduler in the configuration, which has none: add "scheduler" to it, or '
            "pass DummyScheduler(optimizer, lr_scheduler_callable=...)"
        )
    if dummy and parts.scheduler is not None and not later:
        wrong.append(
            "the configuration defines the optimizer, and a scheduler in the code belongs to another one: pass "
            "DummyScheduler(optimizer, lr_scheduler_callable=...), or define the scheduler in the configuration"
        )
    if wrong:
        lines = "\n".join(f"- {line}" for line in wrong)
        raise ValueError(f"the DeepSpeed configuration and the arguments of prepare() contradict each other:\n{lines}")


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's CPU optimizer that is equivalent to a torch optimizer.

    The two optimizers share their parameter groups, so that a schedule changes both.

    Args:
        optimizer: The torch optimizer to replace.

    Returns:
        A DeepSpeedCPUAdam, DeepSpeedCPUAdagrad or DeepSpeedCPULion, or the optimizer itself if it has no equivalent.
    """
    name = type(optimizer).__name__
    if name.startswith("DeepSpeed") or optimizer.defaults.get("amsgrad"):
        return optimizer
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    kinds: dict[str, Callable[..., Any]] = {
        "AdamW": functools.partial(DeepSpeedCPUAdam, adamw_mode=True),
        "Adam": functools.partial(DeepSpeedCPUAdam, adamw_mode=False),
        "Adagrad": DeepSpeedCPUAdagrad,
        "Lion": DeepSpeedCPULion,
    }
    if name not in kinds:
        return optimizer
    names = ("lr", "betas", "eps", "weight_decay") if name != "Lion" else ("lr", "betas", "weight_decay")
    settings = {key: optimizer.defaults[key] for key in names if key in optimizer.defaults}
    with compilation_context():  # On first use, DeepSpeed compiles the optimizer for this CPU.
        mapped = kinds[name](optimizer.param_groups, **settings)
    _forward_step_calls(optimizer, mapped)
    return mapped


def _forward_step_calls(before: Any, after: Any) -> None:
    """Mark ``before`` as stepped whenever ``after`` steps, so that schedules of ``before`` do not warn."""
    step = after.step

    @functools.wraps(step)
    def marking_step(*args: Any, **kwargs: Any) -> Any:
        mark_stepped(before)
        return step(*args, **kwargs)

    after.step = marking_step


def _uses_cpu_optimizer(plugin: DeepSpeedPlugin) -> bool:
    return plugin.get_value(f"{_ZERO}.offload_optimizer.device", "none") in {"cpu", "nvme"}


def engine_arguments(parts: EngineParts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` for an engine that trains.

    Args:
        parts: The objects that the engine is created from.
        plugin: The plugin, with its "auto" values filled.

    Returns:
        The arguments, by name.
    """
    config = engine_config(plugin)
    arguments: dict[str, Any] = {"model": parts.model, "config": config}
    if isinstance(parts.optimizer, DummyOptim):
        arguments["model_parameters"] = parts.optimizer.params
    else:
        optimizer = parts.optimizer
        config.setdefault("zero_allow_untested_optimizer", True)
        if _uses_cpu_optimizer(plugin) and config.get("zero_force_ds_cpu_optimizer", True):
            optimizer = map_pytorch_optim_to_deepspeed(optimizer)
            if optimizer is parts.optimizer and not type(optimizer).__name__.startswith("DeepSpeedCPU"):
                config["zero_force_ds_cpu_optimizer"] = False
                warn_once(
                    f"DeepSpeed has no CPU version of {type(optimizer).__name__}, so torch's is used, which is slower "
                    "than DeepSpeed's AdamW, Adam, Adagrad or Lion"
                )
        arguments["optimizer"] = optimizer
    scheduler = parts.scheduler
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif is_stepped_by_engine(scheduler):
        arguments["lr_scheduler"] = scheduler
    return arguments


def engine_config(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return a copy of the plugin's configuration for an engine, because DeepSpeed changes its argument.

    Args:
        plugin: The plugin whose configuration is copied.
    """
    config = copy.deepcopy(plugin.deepspeed_config)
    config.setdefault("steps_per_print", math.inf)  # Never print, because the run panel shows the same numbers.
    return config


def inference_config(model: torch.nn.Module, plugin: DeepSpeedPlugin, world_size: int) -> dict[str, Any]:
    """Return the configuration of an engine for inference.

    Args:
        model: The model to evaluate.
        plugin: The plugin with the configuration for training, which is not changed.
        world_size: The number of ranks.
    """
    alone = copy.copy(plugin)
    sections = {key: value for key, value in plugin.deepspeed_config.items() if key not in {"optimizer", "scheduler"}}
    alone.hf_ds_config = HfDeepSpeedConfig(sections)
    alone.deepspeed_config = alone.hf_ds_config.config
    # Batch sizes have no effect without training, but DeepSpeed requires them.
    fill_config(EngineParts(model=model, batch_sizes=[1], steps=1, world_size=world_size), alone)
    return engine_config(alone)


# ---- "auto"


def fill_config(parts: EngineParts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Replace the "auto" values of a plugin's configuration in place.

    Args:
        parts: The objects that the engine is created from.
        plugin: The plugin whose configuration is filled.

    Returns:
        The values that replaced "auto", by dotted key.

    Raises:
        ValueError: Some values contradict the objects, or cannot be determined. The message lists all of these values.
    """
    config = plugin.deepspeed_config
    if _MICRO not in config and "train_batch_size" not in config:
        config[_MICRO] = AUTO
    config.setdefault(_STEPS, AUTO)
    config.setdefault("gradient_clipping", AUTO)
    autos = [key for key, value in _dotted_items(config) if value == AUTO]
    known = {
        **_values_from_sizes(parts, plugin),
        **_values_from_placeholders(parts),
        **_values_from_hidden_size(parts.model, plugin),
    }
    plugin.deepspeed_config_process(must_match=False, **known)
    if "train_batch_size" in known and "train_batch_size" not in autos:
        plugin.fill_match("train_batch_size", train_batch_size=known["train_batch_size"])
    return {key: plugin.get_value(key) for key in autos}


def refresh_autos(filled: dict[str, Any], plugin: DeepSpeedPlugin) -> None:
    """Reset the values that an earlier `prepare` filled to "auto", unless they have been changed since.

    Args:
        filled: The result of the earlier call to `fill_config`.
        plugin: The plugin whose configuration is reset.
    """
    for key, value in filled.items():
        node, last = plugin.hf_ds_config.find_config_node(key)
        if node is not None and node.get(last) == value:
            node[last] = AUTO


def _dotted_items(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in config.items():
        pairs += _dotted_items(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs


def _values_from_sizes(parts: EngineParts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    known: dict[str, Any] = {
        _STEPS: parts.steps,
        "gradient_clipping": 0.0,  # clip_grad_norm_ sets this for each step.
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": True,
    }
    micro = plugin.get_value(_MICRO)
    if micro == AUTO:
        micro = known[_MICRO] = _batch_size(parts.batch_sizes, plugin.is_train_batch_min)
    if micro is not None and not plugin.get_value("sequence_parallel_size"):
        steps = plugin.get_value(_STEPS)
        batches = parts.world_size // parts.sequence_ranks
        known["train_batch_size"] = micro * batches * (parts.steps if steps == AUTO else steps)
    return known


def _batch_size(sizes: Sequence[int | None], smallest: bool) -> int:
    numbers = [size for size in sizes if size is not None]
    if not numbers or len(numbers) < len(sizes):
        given = "a loader without a batch_size" if sizes else "no loader"
        raise ValueError(
            f"{_MICRO} is 'auto', but prepare() was given {given}: pass the loaders to prepare() together with the "
            f"model, or first set a number: accelerator.state.deepspeed_plugin.deepspeed_config[{_MICRO!r}] = 8"
        )
    return min(numbers) if smallest else max(numbers)


def _values_from_placeholders(parts: EngineParts) -> dict[str, Any]:
    """Return the settings of the configuration's optimizer and schedule that the placeholders contain."""
    known: dict[str, Any] = {}
    optimizer, scheduler = parts.optimizer, parts.scheduler
    if isinstance(optimizer, DummyOptim):
        settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        known |= {f"optimizer.params.{name}": value for name, value in settings.items()}
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        rate = optimizer.lr if isinstance(optimizer, DummyOptim) else optimizer.defaults.get("lr")
        settings = {"warmup_min_lr": 0, "warmup_max_lr": rate, "warmup_num_steps": scheduler.warmup_num_steps}
        if scheduler.total_num_steps is not None:
            # The number of steps is counted as if one process read all batches, but the engine steps the schedule only
            # once for all ranks.
            ranks = 1 if parts.split_batches else parts.world_size
            settings["total_num_steps"] = math.ceil(scheduler.total_num_steps / ranks)
        known |= {f"scheduler.params.{name}": value for name, value in {**settings, **scheduler.kwargs}.items()}
    return known


def _values_from_hidden_size(model: torch.nn.Module, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    autos = [key for key in _BY_HIDDEN_SIZE if plugin.is_auto(key)]
    size = hidden_size(model) if autos else None
    if autos and size is None:
        raise ValueError(
            f"{', '.join(autos)} are 'auto', which needs the model's hidden size, but {type(model).__name__} has no "
            "config.hidden_size; write numbers instead"
        )
    return {key: _BY_HIDDEN_SIZE[key](size) for key in autos if size is not None}


def hidden_size(model: torch.nn.Module) -> int | None:
    """Return a model's `config.hidden_size` or the largest of its `hidden_sizes`, or None if it has neither.

    Args:
        model: The model whose configuration is read.
    """
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        if getattr(holder, "hidden_size", None) is not None:
            return int(holder.hidden_size)  # type: ignore[union-attr]
        if getattr(holder, "hidden_sizes", None):
            return int(max(holder.hidden_sizes))  # type: ignore[union-attr]
    return None


def is_stepped_by_engine(scheduler: Any) -> bool:
    """Return whether the engine steps a schedule.

    The engine does so if the configuration defines the schedule, if a callable creates it, or if its class belongs to
    DeepSpeed.

    Args:
        scheduler: The schedule to check.
    """
    return isinstance(scheduler, DummyScheduler) or type(scheduler).__module__.startswith("deepspeed.")
