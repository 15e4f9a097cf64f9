"""What `deepspeed.initialize` is called with: a configuration without "auto", and what of the rest is the user's."""

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
from notebook_accelerate.strategies.deepspeed.op_compilation import compiling
from notebook_accelerate.strategies.strategy import kind_of

_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    f"{_ZERO}.reduce_bucket_size": lambda size: size * size,
    f"{_ZERO}.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    f"{_ZERO}.stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Sizes that the width of a transformer decides, as DeepSpeed's authors recommend for transformers."""


@dataclass(kw_only=True)
class Parts:
    """What is prepared together, and the world it is prepared for."""

    model: torch.nn.Module
    """The model that is trained."""
    optimizer: Any
    """A torch optimizer, or a `DummyOptim` where the configuration describes it."""
    scheduler: Any
    """A schedule, a `DummyScheduler`, or None."""
    batch_sizes: Sequence[int | None]
    """Samples per rank and batch, for each loader."""
    steps: int
    """Batches of a window of accumulation."""
    world_size: int
    """Number of ranks."""
    split_batches: bool
    """Whether ranks share each batch of a loader."""
    sequence_ranks: int = 1
    """How many ranks compute on a batch together, each on a piece of its sequences."""


def part_kind(item: Any) -> str:
    """Say which kind of training object something is, as `kind_of` does; stand-ins count as what they stand for.

    Args:
        item: What `prepare` was given.
    """
    stand_ins = {DummyOptim: "optimizer", DummyScheduler: "scheduler"}
    return stand_ins.get(type(item)) or kind_of(item)


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Go through what an optimizer trains; a stand-in's parameters are made a list.

    Args:
        optimizer: torch's optimizer, or a `DummyOptim`.

    Yields:
        The parameters.
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


# -- optimizers and schedules -----------------------------------------------------------------------------------------


def check_parts(parts: Parts, plugin: DeepSpeedPlugin) -> None:
    """Compare optimizer and schedule with what the configuration describes.

    Args:
        parts: What is prepared.
        plugin: The plugin.

    Raises:
        ValueError: They contradict each other; the message has a line for each contradiction.
    """
    config = plugin.deepspeed_config
    dummy, later = isinstance(parts.optimizer, DummyOptim), isinstance(parts.scheduler, DummyScheduler)
    has_callable = later and parts.scheduler.lr_scheduler_callable is not None
    wrong = []
    if "optimizer" in config and not dummy:
        wrong.append("an optimizer is in the configuration and in the code: pass DummyOptim(model.parameters())")
    if "optimizer" not in config and dummy:
        wrong.append('DummyOptim stands for an optimizer of the configuration, which has none: add "optimizer" to it')
    if "scheduler" in config and parts.scheduler is not None and not later:
        wrong.append("a scheduler is in the configuration and in the code: pass DummyScheduler(optimizer)")
    if "scheduler" in config and has_callable:
        wrong.append("a scheduler is in the configuration, and lr_scheduler_callable makes another: leave one out")
    if "scheduler" not in config and later and not has_callable:
        wrong.append(
            'DummyScheduler stands for a scheduler of the configuration, which has none: add "scheduler" to it, or '
            "pass DummyScheduler(optimizer, lr_scheduler_callable=...)"
        )
    if dummy and parts.scheduler is not None and not later:
        wrong.append(
            "the configuration makes the optimizer, and a scheduler in the code belongs to another one: pass "
            "DummyScheduler(optimizer, lr_scheduler_callable=...), or describe the scheduler in the configuration"
        )
    if wrong:
        lines = "\n".join(f"- {line}" for line in wrong)
        raise ValueError(f"the DeepSpeed configuration and what prepare() was given contradict each other:\n{lines}")


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's optimizer for main memory that does what one of torch's does.

    It has the same parameter groups, so that a schedule moves both.

    Args:
        optimizer: torch's optimizer.

    Returns:
        DeepSpeedCPUAdam, DeepSpeedCPUAdagrad or DeepSpeedCPULion; the optimizer itself where there is none for it.
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
    taken = ("lr", "betas", "eps", "weight_decay") if name != "Lion" else ("lr", "betas", "weight_decay")
    settings = {key: optimizer.defaults[key] for key in taken if key in optimizer.defaults}
    with compiling():  # its loop is compiled for this processor when it is first used
        mapped = kinds[name](optimizer.param_groups, **settings)
    _take_over_schedules(optimizer, mapped)
    return mapped


def _take_over_schedules(before: Any, after: Any) -> None:
    """Let schedules made for one optimizer know of the steps of another: they warn about steps that never come."""
    step = after.step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        before._opt_called = True
        return step(*args, **kwargs)

    after.step = noted


def _uses_cpu_optimizer(plugin: DeepSpeedPlugin) -> bool:
    return plugin.get_value(f"{_ZERO}.offload_optimizer.device", "none") in {"cpu", "nvme"}


def engine_arguments(parts: Parts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` for a training.

    Args:
        parts: What is prepared.
        plugin: The plugin, its "auto" values filled.

    Returns:
        The arguments.
    """
    config = config_of(plugin)
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
                    f"DeepSpeed has no {type(optimizer).__name__} for main memory, so torch's is used there, which is "
                    "slower than DeepSpeed's AdamW, Adam, Adagrad or Lion"
                )
        arguments["optimizer"] = optimizer
    scheduler = parts.scheduler
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif is_moved_by_engine(scheduler):
        arguments["lr_scheduler"] = scheduler
    return arguments


def config_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Return a copy of the plugin's configuration for an engine: DeepSpeed writes into what it gets.

    Args:
        plugin: The plugin.
    """
    config = copy.deepcopy(plugin.deepspeed_config)
    config.setdefault("steps_per_print", math.inf)  # what it prints there, the run panel shows
    return config


def inference_config(model: torch.nn.Module, plugin: DeepSpeedPlugin, world_size: int) -> dict[str, Any]:
    """Return the configuration of an engine that does not train.

    Args:
        model: The model.
        plugin: The plugin; it stays as it is.
        world_size: Number of ranks.
    """
    alone = copy.copy(plugin)
    sections = {key: value for key, value in plugin.deepspeed_config.items() if key not in {"optimizer", "scheduler"}}
    alone.hf_ds_config = HfDeepSpeedConfig(sections)
    alone.deepspeed_config = alone.hf_ds_config.config
    # Batch sizes are of no consequence without training, but DeepSpeed wants them.
    parts = Parts(
        model=model,
        optimizer=None,
        scheduler=None,
        batch_sizes=[1],
        steps=1,
        world_size=world_size,
        split_batches=False,
    )
    fill_config(parts, alone)
    return config_of(alone)


# -- "auto" -----------------------------------------------------------------------------------------------------------


def fill_config(parts: Parts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """Fill the "auto" values of a plugin's configuration, in place.

    Args:
        parts: What is prepared.
        plugin: The plugin.

    Returns:
        What was filled, by dotted key.

    Raises:
        ValueError: Values differ from what is known, or nothing tells them; the message lists them all.
    """
    config = plugin.deepspeed_config
    if _MICRO not in config and "train_batch_size" not in config:
        config[_MICRO] = AUTO
    config.setdefault(_STEPS, AUTO)
    config.setdefault("gradient_clipping", AUTO)
    autos = [key for key, value in _flat(config) if value == AUTO]
    known = {**_known_sizes(parts, plugin), **_known_of_code(parts), **_known_by_width(parts.model, plugin)}
    plugin.deepspeed_config_process(must_match=False, **known)
    if "train_batch_size" in known and "train_batch_size" not in autos:
        plugin.fill_match("train_batch_size", train_batch_size=known["train_batch_size"])
    return {key: plugin.get_value(key) for key in autos}


def refresh_autos(filled: dict[str, Any], plugin: DeepSpeedPlugin) -> None:
    """Make values "auto" again that an earlier `prepare` filled, and nobody has changed since.

    Args:
        filled: What `fill_config` returned.
        plugin: The plugin.
    """
    for key, value in filled.items():
        node, last = plugin.hf_ds_config.find_config_node(key)
        if node is not None and node.get(last) == value:
            node[last] = AUTO


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in config.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs


def _known_sizes(parts: Parts, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    known: dict[str, Any] = {
        _STEPS: parts.steps,
        "gradient_clipping": 0.0,  # clip_grad_norm_ says how far, step by step
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
        what = "a loader without a batch_size" if sizes else "no loader"
        raise ValueError(
            f"{_MICRO} is 'auto', and prepare() was given {what}: pass the loaders to prepare() together with the "
            f"model, or set accelerator.state.deepspeed_plugin.deepspeed_config[{_MICRO!r}] = 8, for instance, before"
        )
    return min(numbers) if smallest else max(numbers)


def _known_of_code(parts: Parts) -> dict[str, Any]:
    """Return what stand-ins in the code say of the optimizer and schedule that the configuration describes."""
    known: dict[str, Any] = {}
    optimizer, scheduler = parts.optimizer, parts.scheduler
    if isinstance(optimizer, DummyOptim):
        settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        known |= {f"optimizer.params.{name}": value for name, value in settings.items()}
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        rate = optimizer.lr if isinstance(optimizer, DummyOptim) else optimizer.defaults.get("lr")
        settings = {"warmup_min_lr": 0, "warmup_max_lr": rate, "warmup_num_steps": scheduler.warmup_num_steps}
        if scheduler.total_num_steps is not None:
            # Steps of one process; the engine moves the schedule once for all ranks.
            ranks = 1 if parts.split_batches else parts.world_size
            settings["total_num_steps"] = math.ceil(scheduler.total_num_steps / ranks)
        known |= {f"scheduler.params.{name}": value for name, value in {**settings, **scheduler.kwargs}.items()}
    return known


def _known_by_width(model: torch.nn.Module, plugin: DeepSpeedPlugin) -> dict[str, Any]:
    wanted = [key for key in _BY_HIDDEN_SIZE if plugin.is_auto(key)]
    width = hidden_size(model) if wanted else None
    if wanted and width is None:
        raise ValueError(
            f"{', '.join(wanted)} are 'auto', which follows from the model's width, and {type(model).__name__} has no "
            "config.hidden_size; write numbers in their place"
        )
    return {key: _BY_HIDDEN_SIZE[key](width) for key in wanted if width is not None}


def hidden_size(model: torch.nn.Module) -> int | None:
    """Return a transformer's width: `config.hidden_size`, or the largest of its `hidden_sizes`; None where it has none.

    Args:
        model: The model.
    """
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        if getattr(holder, "hidden_size", None) is not None:
            return int(holder.hidden_size)  # type: ignore[union-attr]
        if getattr(holder, "hidden_sizes", None):
            return int(max(holder.hidden_sizes))  # type: ignore[union-attr]
    return None


def is_moved_by_engine(scheduler: Any) -> bool:
    """Tell whether the engine moves a schedule: one that its configuration or a callable makes, or one of DeepSpeed's.

    Args:
        scheduler: The schedule.
    """
    return isinstance(scheduler, DummyScheduler) or type(scheduler).__module__.startswith("deepspeed.")


__all__ = [
    "Parts",
    "check_parts",
    "config_of",
    "engine_arguments",
    "fill_config",
    "hidden_size",
    "inference_config",
    "is_moved_by_engine",
    "map_pytorch_optim_to_deepspeed",
    "parameters_of",
    "part_kind",
    "refresh_autos",
]
