"""Checkpoints: complete or absent, in Accelerate's files, written in the background where asked.

`save_state` and `load_state` keep a whole training, `save_model` one model's weights, `save` and `load` any object.
The package is loaded on the first save or load: every Accelerator refers to it, many never use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

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
    __getattr__, __dir__, __all__ = attach(__name__)
