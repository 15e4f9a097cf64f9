"""Accelerate's functions for writing and reading the files of a checkpoint, without the manifest of `save_state`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from notebook_accelerate.checkpointing import state_files, state_loading
from notebook_accelerate.checkpointing.single_files import atomic_write, is_writer, write_file
from notebook_accelerate.files.weight_files import read_torch
from notebook_accelerate.state import PartialState


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[dict[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the files of a checkpoint to an existing folder; every rank must call this.

    Args:
        output_dir: The folder to write to.
        model_states: One state dict for each model.
        optimizers: The optimizers to save.
        schedulers: The schedulers to save.
        dataloaders: The prepared loaders whose states are saved.
        process_index: This process's rank, which is a part of the name of the file with its random states.
        step: The number of batches so far, as in `Accelerator.step`.
        scaler: The loss scaler, or None if no scaler is used.
        save_on_each_node: Whether the first rank of each machine writes, instead of only the main rank.
        safe_serialization: Whether to write models as safetensors.

    Returns:
        The path to the folder.
    """
    folder, state = Path(output_dir), PartialState()
    objects: Any = _objects(optimizers, schedulers, dataloaders, scaler, process_index, step)
    files = [state_files.rank_file(objects)]
    if is_writer(folder, state, save_on_each_node):
        files += state_files.model_files(model_states, safe_serialization)
        files += state_files.training_files(objects, with_optimizers=True)
    for file in files:
        with atomic_write(folder / file.name) as temporary:
            suffixed = temporary.with_suffix(Path(file.name).suffix)
            write_file(file.value, suffixed)
            suffixed.replace(temporary)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read the files of a checkpoint into the same objects; every rank must call this.

    Args:
        input_dir: The folder to read.
        models: The models to load, in the order they were saved.
        optimizers: The optimizers to load, in the order they were saved.
        schedulers: The schedulers to load, in the order they were saved.
        dataloaders: The prepared loaders whose states are restored.
        process_index: The rank whose random states are restored.
        scaler: The loss scaler, or None if no scaler is used.
        map_location: "cpu" or "on_device". Neither value has an effect.
        load_kwargs: Arguments for `torch.load`.
        load_model_func_kwargs: Arguments for ``model.load_state_dict``.

    Returns:
        The Accelerator attributes that the checkpoint contains: only `step`.

    Raises:
        TypeError: `map_location` has any other value.
        CheckpointError: A file is missing or corrupt, or contains more than plain data.
    """
    objects: Any = _objects(optimizers, schedulers, dataloaders, scaler, process_index, None)
    state_loading.load_files(objects, models, Path(input_dir), map_location, load_kwargs or {}, load_model_func_kwargs)
    return {} if objects.step is None else {"step": objects.step}


def _objects(
    optimizers: Sequence[Any], schedulers: Sequence[Any], loaders: Sequence[Any], scaler: Any, rank: int, step: Any
) -> SimpleNamespace:
    """Return the objects under the names that they have in an Accelerator."""
    return SimpleNamespace(
        _optimizers=optimizers, _schedulers=schedulers, _dataloaders=loaders, _custom_objects=[], scaler=scaler,
        process_index=rank, step=step, device=PartialState().device,
    )  # fmt: skip


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to ``custom_checkpoint_{index}.pkl`` in a folder.

    Args:
        obj: The object to save, which must have a `state_dict` method.
        path: The folder to write to.
        index: The number of the object, which is a part of the file's name.
        save_on_each_node: Whether the first rank of each machine writes, instead of only the main rank.
    """
    if is_writer(Path(path), PartialState(), save_on_each_node):
        with atomic_write(Path(path) / state_files.custom_file(index)) as temporary:
            torch.save(obj.state_dict(), temporary)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state of an object from a folder, if it is plain data.

    Args:
        obj: The object to load, which must have a `load_state_dict` method.
        path: The folder that contains the file.
        index: The number of the object, which is a part of the file's name.

    Raises:
        CheckpointError: The file is corrupt, or contains more than plain data.
    """
    obj.load_state_dict(read_torch(Path(path) / state_files.custom_file(index)))
