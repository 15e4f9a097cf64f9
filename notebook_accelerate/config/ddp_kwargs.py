"""Arguments of DistributedDataParallel, and its gradient compression."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

from notebook_accelerate.config.enums import DDPCommunicationHookType
from notebook_accelerate.config.field_checks import check_one_of
from notebook_accelerate.config.kwargs_handlers import KwargsHandler

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# Module and function of each hook; those of _WITH_STATE get a state made from ``comm_state_option``.
_HOOK_OF_TYPE = {
    DDPCommunicationHookType.FP16: ("default_hooks", "fp16_compress_hook"),
    DDPCommunicationHookType.BF16: ("default_hooks", "bf16_compress_hook"),
    DDPCommunicationHookType.POWER_SGD: ("powerSGD_hook", "powerSGD_hook"),
    DDPCommunicationHookType.BATCHED_POWER_SGD: ("powerSGD_hook", "batched_powerSGD_hook"),
}
_WITH_STATE = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_WRAPPER_OF_TYPE = {
    DDPCommunicationHookType.FP16: ("default_hooks", "fp16_compress_wrapper"),
    DDPCommunicationHookType.BF16: ("default_hooks", "bf16_compress_wrapper"),
}


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, and a communication hook for its gradients.

    Raises:
        ValueError: The hook or the wrapper is not known.
    """

    dim: int = 0
    """Dimension along which inputs are divided; without effect where a rank has one device."""
    broadcast_buffers: bool = True
    """Whether buffers are copied from rank 0 before each forward."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients that are reduced together, in MiB."""
    find_unused_parameters: bool = False
    """Whether some parameters may get no gradient in a step."""
    check_reduction: bool = False
    """Accepted for compatibility; torch ignores it."""
    gradient_as_bucket_view: bool = False
    """Whether gradients are views of the buckets, which avoids a copy."""
    static_graph: bool = False
    """Whether every step uses the same parameters in the same order."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """Compression of gradients: no, fp16, bf16, power_sgd or batched_power_sgd, the last two of arXiv:1905.13727."""
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    """Dtype to which the hook's own messages are cast."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``PowerSGDState`` for the power_sgd hooks, such as ``matrix_approximation_rank``."""

    def __post_init__(self) -> None:
        self.comm_hook = _member("comm_hook", self.comm_hook, list(DDPCommunicationHookType))
        wrappers = [DDPCommunicationHookType.NO, *_WRAPPER_OF_TYPE]
        self.comm_wrapper = _member("comm_wrapper", self.comm_wrapper, wrappers)  # type: ignore[assignment]

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields by name.

        Args:
            ignore_keys: Fields left out; by default those that are not arguments of DistributedDataParallel.

        Returns:
            Values by field.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook on a wrapped model; every rank must call this, once per model.

        Args:
            model: A ``DistributedDataParallel``.

        Raises:
            ValueError: torch has no such hook for this model's device and backend.
        """
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        hook = _function(*_HOOK_OF_TYPE[self.comm_hook])
        if self.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
            hook = _with_flat_matrices(hook)
        if self.comm_wrapper != DDPCommunicationHookType.NO:
            hook = _function(*_WRAPPER_OF_TYPE[self.comm_wrapper])(hook)
        state = None
        try:
            if self.comm_hook in _WITH_STATE:
                state = _function("powerSGD_hook", "PowerSGDState")(None, **self.comm_state_option)
            model.register_comm_hook(state=state, hook=hook)
        except TypeError as error:
            raise ValueError(
                f"comm_hook={self.comm_hook.value!r} with comm_wrapper={self.comm_wrapper.value!r} does not work here: "
                f"{error}; on CPU pass comm_hook='fp16' or 'power_sgd'"
            ) from error


def _function(module: str, name: str) -> Any:
    return getattr(import_module(f"{_HOOKS}.{module}"), name)


def _with_flat_matrices(hook: Any) -> Any:
    """Return torch's batched PowerSGD hook with an orthogonalization that accepts its matrices.

    The hook passes matrices of two dimensions, but torch (2.0 to 2.13 at least) orthogonalizes batches of three
    dimensions, and stops the training with a bare AssertionError when compression starts.
    """
    batched = hook.__globals__["_orthogonalize"]

    def orthogonalize(matrices: Any, epsilon: float = 0) -> None:
        batched(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    namespace = {**hook.__globals__, "_orthogonalize": orthogonalize}
    repaired = FunctionType(hook.__code__, namespace, hook.__name__, hook.__defaults__, hook.__closure__)
    return functools.update_wrapper(repaired, hook)


def _member(
    name: str, value: DDPCommunicationHookType | str, allowed: list[DDPCommunicationHookType]
) -> DDPCommunicationHookType:
    check_one_of(name, value, [member.value for member in allowed])
    return DDPCommunicationHookType(value)
