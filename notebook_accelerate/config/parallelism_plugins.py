"""Tensor, context and sequence parallelism; fields that are None are read from PARALLELISM_CONFIG_* variables."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.config import environ
from notebook_accelerate.config.field_checks import check_one_of, check_whole_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PREFIX = "PARALLELISM_CONFIG_"
_CP_STRATEGIES = ("allgather", "alltoall")
_SP_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism for models that split themselves, as transformers' models with ``tp_plan`` do.

    Raises:
        ValueError: ``tp_size`` is not a whole number above 0.
    """

    tp_size: int = 1
    """Number of ranks over which each tensor is split."""
    torch_device_mesh: DeviceMesh | None = None
    """The mesh over which the model was split; None: created when it is needed."""

    def __post_init__(self) -> None:
        check_whole_number("tp_size", self.tp_size)


@dataclass
class TorchTensorParallelConfig:
    """Settings of tensor parallelism in a ``ParallelismConfig``."""

    enable_async_tp: bool = False
    """Whether communication overlaps with computation; not supported: True only warns."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: asynchronous tensor parallelism is not supported", stacklevel=3
            )


@dataclass
class TorchContextParallelConfig:
    """Settings of context parallelism in a ``ParallelismConfig``.

    Raises:
        ValueError: The strategy is not known.
    """

    cp_comm_strategy: str | None = None
    """How ranks exchange keys and values: allgather or alltoall (PARALLELISM_CONFIG_CP_COMM_STRATEGY).

    Default: allgather.
    """

    def __post_init__(self) -> None:
        environ.fill_unset(self, _PREFIX, environ.text, cp_comm_strategy="allgather")
        check_one_of("cp_comm_strategy", self.cp_comm_strategy, _CP_STRATEGIES)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's sequence parallelism (Ulysses) in a ``ParallelismConfig``.

    Raises:
        ValueError: The attention is not known, or the length is missing although it is not variable.
    """

    sp_seq_length: int | None = None
    """Tokens of the whole sequence (PARALLELISM_CONFIG_SP_SEQ_LENGTH); None: that of each batch."""
    sp_seq_length_is_variable: bool | None = None
    """Whether it differs between batches (PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE); default: True."""
    sp_attn_implementation: str | None = None
    """flash_attention_2, flash_attention_3, sdpa or a kernel on the hub (PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION)."""

    def __post_init__(self) -> None:
        environ.fill_unset(self, _PREFIX, environ.integer, sp_seq_length=None)
        environ.fill_unset(self, _PREFIX, environ.flag, sp_seq_length_is_variable=True)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            raise ValueError(
                "sp_seq_length_is_variable=False needs the length: pass sp_seq_length, or set "
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        environ.fill_unset(self, _PREFIX, environ.text, sp_attn_implementation=None)
        chosen = self.sp_attn_implementation
        if chosen is not None and chosen not in _SP_ATTENTIONS and "/" not in chosen:
            raise ValueError(
                f"sp_attn_implementation={chosen!r} is not allowed; pass one of "
                f"{', '.join(map(repr, _SP_ATTENTIONS))}, or a kernel's name on the hub"
            )
