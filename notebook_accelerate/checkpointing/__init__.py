"""Checkpoints that are complete or absent, in Accelerate's file formats, optionally written in the background.

`save_state` and `load_state` handle a complete training state, `save_model` a model's weights, `save` and `load` any
object. The modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.checkpointing.model_weights import (
        load as load,
        read_weights as read_weights,
        save as save,
        save_model as save_model,
        write_weights as write_weights,
    )
    from notebook_accelerate.checkpointing.sharded_state_dict import shard_checkpoint as shard_checkpoint
    from notebook_accelerate.checkpointing.state_loading import load_model as load_model, load_state as load_state
    from notebook_accelerate.checkpointing.state_saving import (
        save_state as save_state,
        wait_for_saves as wait_for_saves,
    )
    from notebook_accelerate.checkpointing.tied_tensors import (
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    )
else:
    __getattr__, __dir__, __all__ = reexport(__name__)
