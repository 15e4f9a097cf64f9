"""Collectives for nested containers of tensors, and tools for these containers.

A call sends all tensors of the same dtype in one collective. With a single rank, nothing is sent.
"""

from __future__ import annotations

from notebook_accelerate.collectives.layouts import (
    find_device as find_device,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    is_container as is_container,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    leaves_of as leaves_of,
    map_children as map_children,
    recursively_apply as recursively_apply,
    with_tensors as with_tensors,
)
from notebook_accelerate.collectives.local_operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    child_of as child_of,
    concatenate as concatenate,
    convert_to_fp32 as convert_to_fp32,
    get_data_structure as get_data_structure,
    initialize_tensors as initialize_tensors,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from notebook_accelerate.collectives.operations import (
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_for_metrics as gather_for_metrics,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
)
