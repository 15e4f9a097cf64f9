"""Tensor, context and sequence parallelism; what is None is read from PARALLELISM_CONFIG_* variables."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.config import environ

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CP_STRATEGIES = ("allgather", "alltoall")
_SP_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism for models that split themselves, as transformers' do with ``tp_plan``."""

    tp_size: int = 1
    """Over how many ranks each tensor is split."""
    torch_device_mesh: DeviceMesh | None = None
    """The mesh that the model was split over; None: made when it is needed."""

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ValueError(f"tp_size={self.tp_size!r} is not allowed; pass a whole number of at least 1")


@dataclass
class TorchTensorParallelConfig:
    """How tensor parallelism in a ``ParallelismConfig`` behaves."""

    enable_async_tp: bool = False
    """Whether communication overlaps with computation; not supported yet, and said so."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: asynchronous tensor parallelism is not supported", stacklevel=3
            )


@dataclass
class TorchContextParallelConfig:
    """How context parallelism in a ``ParallelismConfig`` behaves."""

    cp_comm_strategy: str | None = None
    """How ranks exchange keys and values: allgather or alltoall (PARALLELISM_CONFIG_CP_COMM_STRATEGY).

    Default: allgather.
    """

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = environ.text("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in _CP_STRATEGIES:
            allowed = ", ".join(_CP_STRATEGIES)
            raise ValueError(f"cp_comm_strategy={self.cp_comm_strategy!r} is not allowed; allowed: {allowed}")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's sequence parallelism in a ``ParallelismConfig`` behaves."""

    sp_seq_length: int | None = None
    """Length of the whole sequence (PARALLELISM_CONFIG_SP_SEQ_LENGTH)."""
    sp_seq_length_is_variable: bool | None = None
    """Whether it differs between batches (PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE); default: True."""
    sp_attn_implementation: str | None = None
    """flash_attention_2, flash_attention_3, sdpa or a kernel on the hub (PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION)."""

    def __post_init__(self) -> None:
        if self.sp_seq_length is None:
            self.sp_seq_length = environ.integer("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
        if self.sp_seq_length_is_variable is None:
            name = "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"
            self.sp_seq_length_is_variable = environ.flag(name, default=True)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            raise ValueError(
                "sp_seq_length_is_variable=False needs the length: pass sp_seq_length, or set "
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = environ.text("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        self._check_attention()

    def _check_attention(self) -> None:
        chosen = self.sp_attn_implementation
        if chosen is None or chosen in _SP_ATTENTIONS or "/" in chosen:
            return
        allowed = ", ".join(_SP_ATTENTIONS)
        raise ValueError(
            f"sp_attn_implementation={chosen!r} is not allowed; allowed: {allowed}, or a kernel's hub name"
        )


__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]
