"""Checkpoints of an engine: DeepSpeed's own files, by Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.config.constants import MODEL_NAME
from notebook_accelerate.errors import CheckpointMismatchError


def save_engine(engine: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write an engine into a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: A folder shared by all ranks; ``pytorch_model/``, ``latest`` and ``zero_to_fp32.py`` are written to it.
        options: Arguments of the engine's `save_checkpoint`.
    """
    _call_with_options("save_state", engine.save_checkpoint, str(folder), MODEL_NAME, **options)


def load_engine(engine: Any, folder: Path, options: dict[str, Any], ranks: int) -> None:
    """Read an engine from a folder; every rank must call this.

    Args:
        engine: The engine.
        folder: The checkpoint.
        options: Arguments of the engine's `load_checkpoint`; `strict`: whether names must be those of the model.
        ranks: Number of ranks.

    Raises:
        CheckpointMismatchError: The folder contains no such engine, or one for another number of ranks.
    """
    if "strict" in options:
        options["load_module_strict"] = options.pop("strict")
    saved = folder / MODEL_NAME
    shards = len(list(saved.glob("*_optim_states.pt")))
    optimizer = options.get("load_optimizer_states", True)
    if optimizer and shards not in {0, ranks} and not engine.load_universal_checkpoint():
        raise CheckpointMismatchError(
            f"{saved} contains the optimizer's state in {shards} shards, one per rank, and this run has {ranks} ranks. "
            "Convert it (python -m deepspeed.checkpoint.ds_to_universal) and set "
            '{"checkpoint": {"load_universal": true}} in the DeepSpeed configuration, or load the weights alone: '
            "load_state(folder, elastic=True, load_optimizer_states=False)"
        )
    with torch.serialization.safe_globals(_own_classes()):
        path, _ = _call_with_options("load_state", engine.load_checkpoint, str(folder), MODEL_NAME, **options)
    if path is None:
        raise CheckpointMismatchError(
            f"{folder} contains no {MODEL_NAME}/ that DeepSpeed can read. Prepare the same model as before saving."
        )


def _own_classes() -> list[Any]:
    """Return DeepSpeed's classes in its files, which are attributes without code: the rest is read as plain data."""
    scaler = import_module("deepspeed.runtime.fp16.loss_scaler")
    fragments = import_module("deepspeed.utils.tensor_fragment")
    stages = import_module("deepspeed.runtime.zero.config")
    return [scaler.LossScaler, scaler.DynamicLossScaler, fragments.fragment_address, stages.ZeroStageEnum]


def _call_with_options(call: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of the engine with the user's options; unknown ones raise ValueError."""
    try:
        return function(*args, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise ValueError(f"{call} with DeepSpeed: {error}; leave it out") from error
        raise
