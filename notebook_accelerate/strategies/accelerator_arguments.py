"""Arguments of an `Accelerator` that exclude each other, have an older form, or come from the environment."""

from __future__ import annotations

import os
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DynamoBackend, RNGType
from notebook_accelerate.config.training_config import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from notebook_accelerate.state import AcceleratorState
from notebook_accelerate.state.warn_once import warn_once

UNSET: Any = object()
"""The default of an argument that should not be used any more."""


def check_type(name: str, value: Any, allowed: type | tuple[type, ...], what: str) -> None:
    """Refuse an argument that is of another type.

    Args:
        name: Who got it.
        value: The argument.
        allowed: Its types.
        what: The types in words, or the line to type.

    Raises:
        ValueError: It is of none of them.
    """
    if not isinstance(value, allowed):
        raise ValueError(f"{name} takes {what}; got {type(value).__name__} ({value!r:.60})")


def check_loss(loss: Any) -> None:
    """Refuse a loss that has no graph, unless it knows itself what backward is.

    Args:
        loss: What `backward` was given, no tensor.

    Raises:
        ValueError: It has no method `backward`.
    """
    if callable(getattr(loss, "backward", None)):
        return
    hint = ""
    if isinstance(loss, (int, float)):
        hint = ": call it before loss.item()"
    elif hasattr(loss, "loss") or (isinstance(loss, dict) and "loss" in loss):
        hint = ": pass the loss that it holds, accelerator.backward(output.loss)"
    raise ValueError(f"backward() takes the loss, a tensor; got {type(loss).__name__} ({loss!r:.60}){hint}")


def generators(kinds: Any) -> list[Any]:
    """Return which random generators are made equal over ranks.

    Args:
        kinds: What `rng_types` was given.

    Returns:
        The kinds; the loader's own generator where none were given.

    Raises:
        ValueError: It is no list, or names a generator that does not exist.
    """
    if kinds is None:
        return ["generator"]
    check_type("rng_types", kinds, (list, tuple), f"a list of {', '.join(map(repr, RNGType.list()))}")
    for kind in kinds:
        if kind not in RNGType.list():
            raise ValueError(f"rng_types holds {kind!r}; there are {', '.join(map(repr, RNGType.list()))}")
    return list(kinds)


def project_configuration(
    config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the folders of a project.

    Args:
        config: What `project_config` was given.
        project_dir: What `project_dir` was given; used where the configuration has no folder.

    Returns:
        The configuration.
    """
    folder = None if project_dir is None else os.fspath(project_dir)
    if config is None:
        return ProjectConfiguration(project_dir=folder)
    check_type("project_config", config, ProjectConfiguration, "ProjectConfiguration(...)")
    if folder is not None and config.project_dir is None:
        config.set_directories(folder)
    return config


def loader_configuration(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    """Return how loaders are shared between ranks.

    Args:
        config: What `dataloader_config` was given.
        split_batches: What the deprecated argument was given; UNSET where it was not.

    Returns:
        The configuration.
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
    """Return how gradients are accumulated.

    Args:
        plugin: What `gradient_accumulation_plugin` was given.
        steps: What `gradient_accumulation_steps` was given; ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins.

    Returns:
        The plugin.

    Raises:
        ValueError: Both were given.
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
    return GradientAccumulationPlugin(num_steps=environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps))


def dynamo(plugin: TorchDynamoPlugin | None, backend: DynamoBackend | str | None) -> TorchDynamoPlugin | None:
    """Return how models are compiled.

    Args:
        plugin: What `dynamo_plugin` was given.
        backend: What `dynamo_backend` was given.

    Returns:
        The plugin; None keeps what the state has.

    Raises:
        ValueError: Both were given.
    """
    if backend is not None:
        either("dynamo_plugin", plugin, "dynamo_backend", backend)
        return TorchDynamoPlugin(backend=backend)  # type: ignore[arg-type]
    if plugin is not None:
        check_type("dynamo_plugin", plugin, TorchDynamoPlugin, "TorchDynamoPlugin(...)")
    # A later Accelerator that says nothing keeps what the first one found in the environment.
    return plugin if plugin is not None or AcceleratorState._shared_state else TorchDynamoPlugin()


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the one of two arguments that was given.

    Args:
        name: Name of the first.
        value: Its value; None where it was not given.
        other_name: Name of the second.
        other: Its value.

    Returns:
        The value, or None.

    Raises:
        ValueError: Both were given.
    """
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} were both given; pass one of them")
    return value if value is not None else other
