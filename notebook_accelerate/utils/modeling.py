"""Re-exports: model sizes, device maps and loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.checkpoint_loading import (
        load_checkpoint_in_model as load_checkpoint_in_model,
        load_offloaded_weights as load_offloaded_weights,
        load_state_dict as load_state_dict,
    )
    from notebook_accelerate.big_modeling.device_map import (
        check_device_map as check_device_map,
        clean_device_map as clean_device_map,
        infer_auto_device_map as infer_auto_device_map,
    )
    from notebook_accelerate.big_modeling.device_map import (
        get_balanced_memory as get_balanced_memory,
        get_max_memory as get_max_memory,
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
        id_tensor_storage as id_tensor_storage,
        is_peft_model as is_peft_model,
        named_module_tensors as named_module_tensors,
    )
    from notebook_accelerate.big_modeling.module_tensors import (
        align_module_device as align_module_device,
        check_device_same as check_device_same,
        get_state_dict_from_offload as get_state_dict_from_offload,
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
        has_offloaded_params as has_offloaded_params,
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from notebook_accelerate.big_modeling.module_tensors import (
        check_tied_parameters_in_config as check_tied_parameters_in_config,
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
        find_tied_parameters as find_tied_parameters,
        get_module_size_with_ties as get_module_size_with_ties,
        retie_parameters as retie_parameters,
    )
    from notebook_accelerate.checkpointing import shard_checkpoint as shard_checkpoint
    from notebook_accelerate.precision.autocast_helpers import (
        get_grad_scaler as get_grad_scaler,
        get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    )

reexport(__name__)
