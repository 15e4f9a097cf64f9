"""Checkpoints that are either complete or absent, in Accelerate's file formats, optionally written in the background.

`save_state` and `load_state` handle a complete training state, `save_model` handles the weights of a model, and `save`
and `load` handle any object. The modules are imported on first use.
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
        shard_checkpoint as shard_checkpoint,
        write_weights as write_weights,
    )
    from notebook_accelerate.checkpointing.single_files import (
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    )
    from notebook_accelerate.checkpointing.state_functions import (
        load_accelerator_state as load_accelerator_state,
        load_custom_state as load_custom_state,
        save_accelerator_state as save_accelerator_state,
        save_custom_state as save_custom_state,
    )
    from notebook_accelerate.checkpointing.state_loading import load_model as load_model, load_state as load_state
    from notebook_accelerate.checkpointing.state_saving import (
        save_state as save_state,
        wait_for_saves as wait_for_saves,
    )
    from notebook_accelerate.config.constants import (
        MODEL_NAME as MODEL_NAME,
        OPTIMIZER_NAME as OPTIMIZER_NAME,
        RNG_STATE_NAME as RNG_STATE_NAME,
        SAFE_MODEL_NAME as SAFE_MODEL_NAME,
        SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
        SAMPLER_NAME as SAMPLER_NAME,
        SCALER_NAME as SCALER_NAME,
        SCHEDULER_NAME as SCHEDULER_NAME,
        WEIGHTS_NAME as WEIGHTS_NAME,
    )

reexport(__name__)
