"""Collectives over nested containers of tensors, and tools for such containers.

A call moves all tensors of one dtype in one collective. In a world of one rank it sends nothing.
"""

from __future__ import annotations

from notebook_accelerate.collectives.communicator import COMMUNICATORS, Communicator, communicator
from notebook_accelerate.collectives.containers import (
    find_batch_size,
    find_device,
    honor_type,
    ignorant_find_batch_size,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    leaves_of,
    listify,
    recursively_apply,
    with_leaves,
)
from notebook_accelerate.collectives.fp32_outputs import ConvertOutputsToFp32, convert_outputs_to_fp32
from notebook_accelerate.collectives.gather_metrics import gather_for_metrics
from notebook_accelerate.collectives.legacy_operations import (
    TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT,
    GatheredParameters,
    chained_operation,
    gather_tensor_shape,
    get_shape,
    is_torch_xpu_tensor,
    verify_operation,
)
from notebook_accelerate.collectives.local_operations import (
    CannotPadNestedTensorWarning,
    concatenate,
    convert_to_fp32,
    get_data_structure,
    initialize_tensors,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from notebook_accelerate.collectives.operations import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from notebook_accelerate.errors import DistributedOperationException

__all__ = [
    "COMMUNICATORS",
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "CannotPadNestedTensorWarning",
    "Communicator",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "communicator",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "leaves_of",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
    "with_leaves",
]
