"""Functions for model sizes, device maps and loading."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from notebook_accelerate._lazy import reexport
from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.precision import make_precision
from notebook_accelerate.state import AcceleratorState

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.checkpoint_loading import (
        load_checkpoint_in_model as load_checkpoint_in_model,
        load_offloaded_weights as load_offloaded_weights,
        load_state_dict as load_state_dict,
    )
    from notebook_accelerate.big_modeling.device_map import (
        check_device_map as check_device_map,
        clean_device_map as clean_device_map,
        get_balanced_memory as get_balanced_memory,
        get_max_memory as get_max_memory,
        infer_auto_device_map as infer_auto_device_map,
    )
    from notebook_accelerate.big_modeling.module_tree import (
        calculate_maximum_sizes as calculate_maximum_sizes,
        compute_module_sizes as compute_module_sizes,
        compute_module_total_buffer_size as compute_module_total_buffer_size,
        convert_file_size_to_int as convert_file_size_to_int,
        dtype_byte_size as dtype_byte_size,
        get_max_layer_size as get_max_layer_size,
        get_module_leaves as get_module_leaves,
        get_non_persistent_buffers as get_non_persistent_buffers,
        named_module_tensors as named_module_tensors,
    )
    from notebook_accelerate.big_modeling.module_tensors import (
        align_module_device as align_module_device,
        check_device_same as check_device_same,
        check_tied_parameters_in_config as check_tied_parameters_in_config,
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
        find_tied_parameters as find_tied_parameters,
        get_module_size_with_ties as get_module_size_with_ties,
        get_state_dict_from_offload as get_state_dict_from_offload,
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
        has_offloaded_params as has_offloaded_params,
        retie_parameters as retie_parameters,
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from notebook_accelerate.checkpointing.model_weights import shard_checkpoint as shard_checkpoint

reexport(__name__)

logger = accelerate_logger("utils.modeling")


def _get_proper_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype for a name such as "float16" or "torch.float16". Libraries call this private function."""
    from notebook_accelerate.big_modeling.module_tree import dtype_of

    return dtype_of(dtype)


def is_peft_model(model: Any) -> bool:
    """Return whether a model is a `PeftModel`, without importing peft.

    Args:
        model: The model, wrapped or not.
    """
    model = getattr(model, "module", model)
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft") for kind in type(model).__mro__)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return an identifier of a tensor's memory: the device, the address and the size of its storage in bytes.

    Args:
        tensor: The tensor to identify.
    """
    if tensor.device.type == "meta":  # The tensor has no memory and no address, so use the identity of the object.
        return tensor.device, id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


# ---- precision


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast context for the process's precision.

    Args:
        native_amp: If False, the context does nothing.
        autocast_kwargs: An `AutocastKwargs`.
    """
    state = AcceleratorState()
    precision = make_precision(state.mixed_precision, state.device.type)
    precision.native_amp = native_amp
    return precision.autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Return a gradient scaler.

    Args:
        distributed_type: The `DistributedType` of the launch. With FSDP, the scaler checks the gradients of all ranks.
        kwargs: Arguments of the scaler.
    """
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    accelerator = torch.accelerator.current_accelerator()
    # Without an accelerator, the scaler does nothing.
    return torch.amp.GradScaler(accelerator.type if accelerator is not None else "cuda", **kwargs)
