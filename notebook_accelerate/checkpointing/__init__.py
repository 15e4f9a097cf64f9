"""Checkpoints: complete or absent, in Accelerate's files, written in the background where asked.

`save_state` and `load_state` keep a whole training, `save_model` one model's weights, `save` and `load` any object.
The room is loaded when something is saved or loaded: every Accelerator has it at hand, many never use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.checkpointing.model_weights import load, read_weights, save, save_model, write_weights
    from notebook_accelerate.checkpointing.sharded_state_dict import shard_checkpoint
    from notebook_accelerate.checkpointing.state_loading import load_model, load_state
    from notebook_accelerate.checkpointing.state_saving import save_state, wait_for_saves
    from notebook_accelerate.checkpointing.tied_tensors import clean_state_dict_for_safetensors

__all__ = [
    "clean_state_dict_for_safetensors",
    "load",
    "load_model",
    "load_state",
    "read_weights",
    "save",
    "save_model",
    "save_state",
    "shard_checkpoint",
    "wait_for_saves",
    "write_weights",
]

_HOMES = {
    "checkpointing.state_loading": ("load_model", "load_state"),
    "checkpointing.model_weights": ("load", "read_weights", "save", "save_model", "write_weights"),
    "checkpointing.state_saving": ("save_state", "wait_for_saves"),
    "checkpointing.sharded_state_dict": ("shard_checkpoint",),
    "checkpointing.tied_tensors": ("clean_state_dict_for_safetensors",),
}

__getattr__, __dir__, _ = attach(__name__, _HOMES)
