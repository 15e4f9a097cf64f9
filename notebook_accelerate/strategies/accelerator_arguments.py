"""Resolve an `Accelerator`'s arguments: fill in defaults, reject contradictions, sort handlers, set up its strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeAlias, TypeVar

import torch

from notebook_accelerate.config import environ
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DynamoBackend, RNGType
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.low_precision import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.config.plain_values import check_type
from notebook_accelerate.precision import Precision
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.state.warn_once import warn_once

UNSET: Any = object()
"""The default of deprecated arguments, which shows that an argument was not given."""


@dataclass(kw_only=True)
class Setup:
    """The settings of one `Accelerator`, as its strategy needs them."""

    state: AcceleratorState
    """This rank, the number of ranks, and the active plugins."""
    gradient_state: GradientState
    """The current position in the accumulation window."""
    precision: Precision
    """The precision that models compute in."""
    scaler: torch.amp.GradScaler | None
    """The loss scaler, or None if the precision does not need one."""
    device: torch.device
    """The device that this rank had when the `Accelerator` was created."""
    dynamo_plugin: Any = None
    """How models are compiled (`TorchDynamoPlugin`), or None if they are not compiled."""
    device_placement: bool = True
    """Whether models, batches and optimizer states are moved to the rank's device."""
    dataloader_config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    """How the batches of loaders are divided among ranks."""
    rng_types: list[Any] | None = None
    """The random number generators to synchronize at the start of each pass. If None, the strategy chooses them."""
    step_scheduler_with_optimizer: bool = True
    """Whether schedulers step only when optimizers do."""
    ddp_handler: DistributedDataParallelKwargs | None = None
    """The settings for DDP. If None, torch's defaults are used."""


def check_loss(loss: Any) -> None:
    """Check that a loss that is not a tensor has a `backward` method.

    Args:
        loss: The argument of `Accelerator.backward`.

    Raises:
        ValueError: The loss has no `backward` method.
    """
    if callable(getattr(loss, "backward", None)):
        return
    hint = ""
    if isinstance(loss, (int, float)):
        hint = ": call it before loss.item()"
    elif hasattr(loss, "loss") or (isinstance(loss, dict) and "loss" in loss):
        hint = ": pass its loss, accelerator.backward(output.loss)"
    raise ValueError(f"backward() takes the loss, a tensor; got {type(loss).__name__} ({loss!r:.60}){hint}")


def generators(kinds: Any) -> list[Any]:
    """Return the random number generators that are synchronized across ranks.

    Args:
        kinds: The argument `rng_types`.

    Returns:
        The names of the generators. By default, only the loader's own generator is synchronized.

    Raises:
        ValueError: `kinds` is not a list, or names an unknown generator.
    """
    if kinds is None:
        return ["generator"]
    check_type("rng_types", kinds, (list, tuple), f"a list of {', '.join(map(repr, RNGType.list()))}")
    for kind in kinds:
        if kind not in RNGType.list():
            raise ValueError(f"rng_types contains {kind!r}; allowed: {', '.join(map(repr, RNGType.list()))}")
    return list(kinds)


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the configuration of a project's folders.

    Args:
        config: The argument `project_config`.
        project_dir: The argument `project_dir`, used if `config` has no folder.

    Returns:
        The given configuration, or a new one, with the folder set.
    """
    folder = None if project_dir is None else os.fspath(project_dir)
    if config is None:
        return ProjectConfiguration(project_dir=folder)
    check_type("project_config", config, ProjectConfiguration, "ProjectConfiguration(...)")
    if folder is not None and config.project_dir is None:
        config.set_directories(folder)
    return config


def loader_configuration(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    """Return the settings that loaders are prepared with.

    Args:
        config: The argument `dataloader_config`.
        split_batches: The deprecated argument `split_batches`, or UNSET.

    Returns:
        The given configuration, or a new one.
    """
    config = config if config is not None else DataLoaderConfiguration()
    check_type("dataloader_config", config, DataLoaderConfiguration, "DataLoaderConfiguration(...)")
    if split_batches is not UNSET:
        warn_once(
            "Accelerator(split_batches=...) is deprecated: write "
            f"Accelerator(dataloader_config=DataLoaderConfiguration(split_batches={split_batches}))",
            FutureWarning,
        )
        config.split_batches = split_batches
    return config


def accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return the plugin for gradient accumulation.

    Args:
        plugin: The argument `gradient_accumulation_plugin`.
        steps: The argument `gradient_accumulation_steps`. The environment variable
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides it.

    Returns:
        The given plugin, or a new one with the number of steps.

    Raises:
        ValueError: Both arguments were given.
    """
    if plugin is not None:
        check_type(
            "gradient_accumulation_plugin", plugin, GradientAccumulationPlugin, "GradientAccumulationPlugin(...)"
        )
        if steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given; write "
                f"gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={steps}) alone"
            )
        return plugin
    return GradientAccumulationPlugin(num_steps=environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int(steps)))


def dynamo(plugin: TorchDynamoPlugin | None, backend: DynamoBackend | str | None) -> TorchDynamoPlugin | None:
    """Return the plugin that configures how models are compiled.

    Args:
        plugin: The argument `dynamo_plugin`.
        backend: The argument `dynamo_backend`.

    Returns:
        The plugin, or None to keep the one that `AcceleratorState` already has.

    Raises:
        ValueError: Both arguments were given.
    """
    if backend is not None:
        either("dynamo_plugin", plugin, "dynamo_backend", backend)
        return TorchDynamoPlugin(backend=backend)  # type: ignore[arg-type]
    if plugin is not None:
        check_type("dynamo_plugin", plugin, TorchDynamoPlugin, "TorchDynamoPlugin(...)")
    # A later Accelerator without this argument keeps the plugin that the first one read from environment variables.
    return plugin if plugin is not None or AcceleratorState._shared_state else TorchDynamoPlugin()


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the value of whichever of two mutually exclusive arguments was given.

    Args:
        name: The name of the first argument.
        value: Its value, or None if it was not given.
        other_name: The name of the second argument.
        other: Its value, or None if it was not given.

    Returns:
        The value, or None if neither was given.

    Raises:
        ValueError: Both arguments were given.
    """
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} were both given; pass one of them")
    return value if value is not None else other


# ---- kwargs_handlers

_Handler = TypeVar("_Handler", bound=KwargsHandler)
Fp8Recipe: TypeAlias = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs
_FIELD_OF_CLASS: tuple[tuple[type[KwargsHandler] | UnionType, str], ...] = (
    (DistributedDataParallelKwargs, "ddp"),
    (GradScalerKwargs, "scaler"),
    (InitProcessGroupKwargs, "init"),
    (AutocastKwargs, "autocast"),
    (ProfileKwargs, "profile"),
    (Fp8Recipe, "fp8"),
)


@dataclass(kw_only=True)
class Handlers:
    """The handlers of an `Accelerator`, by kind. The attribute is None if no handler of that kind was given."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: Fp8Recipe | None = None


def sort_handlers(handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Sort handlers by their kinds.

    Args:
        handlers: The argument `kwargs_handlers`.

    Returns:
        The sorted handlers.

    Raises:
        ValueError: An object is not a handler, or two handlers have the same kind.
    """
    if isinstance(handlers, KwargsHandler):
        raise ValueError(f"kwargs_handlers takes a list; write kwargs_handlers=[{type(handlers).__name__}(...)]")
    found: dict[str, Any] = {}
    for handler in handlers or ():
        field = next((name for kind, name in _FIELD_OF_CLASS if isinstance(handler, kind)), None)
        if field is None:
            raise ValueError(
                f"kwargs_handlers contains {handler!r}, which is not one of AutocastKwargs, "
                "DistributedDataParallelKwargs, FP8RecipeKwargs (or another recipe), GradScalerKwargs, "
                "InitProcessGroupKwargs, ProfileKwargs"
            )
        if field in found:
            raise ValueError(f"kwargs_handlers contains two {type(handler).__name__}; pass at most one of each kind")
        found[field] = handler
    return Handlers(**found)


def check_handler(name: str, handler: _Handler | None, kind: type[_Handler]) -> _Handler | None:
    """Return a handler, after checking that an attribute of an `Accelerator` may be set to it.

    Args:
        name: The name of the attribute.
        handler: The value to assign.
        kind: The class of handlers that the attribute accepts.

    Raises:
        ValueError: The value is neither None nor an instance of `kind`.
    """
    check_type(name, handler, (kind, type(None)), f"{kind.__name__}(...) or None")
    return handler
