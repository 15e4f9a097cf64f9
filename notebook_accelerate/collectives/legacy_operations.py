"""Older helpers of `accelerate.utils.operations` that other libraries import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from notebook_accelerate.collectives import shape_checks
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.containers import recursively_apply
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState

Operation = TypeVar("Operation", bound=Callable[..., Any])

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
"""Numbers that represent dtypes between ranks."""
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = dict(enumerate(_DTYPES, start=1))
"""The dtype of each number."""


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Tell whether `tensor` is a tensor on an xpu device (an Intel GPU)."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def get_shape(data: Any) -> Any:
    """Describe the shapes of a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure, with a list of sizes in place of each tensor.
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size | None, int | None]:
    """Send the shape of a tensor that only one rank has to all ranks; every rank must call this.

    Args:
        tensor: The tensor, on one rank; None on the others.

    Returns:
        Its shape, and the number of its dtype in `TENSOR_TYPE_TO_INT`; None and None if no rank has one.
    """
    state = PartialState()
    mine = None if tensor is None else (tensor.shape, TENSOR_TYPE_TO_INT[tensor.dtype])
    gathered = COMMUNICATORS[state.communicator].all_gather_object(mine, state.num_processes)
    return next((found for found in gathered if found is not None), (None, None))


def verify_operation(function: Operation) -> Operation:
    """Decorate a collective to check, in debug mode, that all ranks pass the same shapes.

    Args:
        function: A function whose first argument is a nested structure of tensors.

    Returns:
        The function; it raises `DistributedOperationException` if ranks pass different shapes.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.num_processes > 1:
            data = kwargs.get("tensor", args[0] if args else None)
            shape_checks.check(getattr(function, "__name__", "operation"), data, state)
        return function(*args, **kwargs)

    return cast("Operation", checked)


def chained_operation(function: Operation) -> Operation:
    """Add the function's name to the errors of collectives that it calls.

    Args:
        function: A function that calls collectives.
    """

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"while calling {name!r}: {error}") from error

    return cast("Operation", named)


@contextmanager
def GatheredParameters(  # noqa: N802 - Accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters that DeepSpeed's ZeRO stage 3 sharded, for a block; every rank must enter it.

    It does nothing for other parameters.

    Args:
        params: The parameters.
        modifier_rank: The rank whose changes inside the block are sent to all ranks; None: changes are lost.
        fwd_module: The module that uses them.
        enabled: False does nothing.

    Yields:
        Nothing.
    """
    sharded = [item for item in (params if isinstance(params, (list, tuple)) else [params]) if hasattr(item, "ds_id")]
    if not (enabled and sharded):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
        yield
