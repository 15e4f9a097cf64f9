"""How ``torch.compile`` compiles prepared models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DynamoBackend
from notebook_accelerate.config.kwargs_handlers import KwargsHandler
from notebook_accelerate.config.plain_values import check_one_of, check_whole_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``; fields that are None are read from ACCELERATE_DYNAMO_* variables.

    Raises:
        ValueError: The backend or the mode is not known.
    """

    backend: DynamoBackend | None = None
    """The compiler (ACCELERATE_DYNAMO_BACKEND); default: NO, no compilation."""
    mode: str | None = None
    """default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs (ACCELERATE_DYNAMO_MODE).

    None and no variable: default.
    """
    fullgraph: bool | None = None
    """Whether a graph break is an error (ACCELERATE_DYNAMO_USE_FULLGRAPH); default: False."""
    dynamic: bool | None = None
    """Whether shapes are dynamic (ACCELERATE_DYNAMO_USE_DYNAMIC); default: torch decides."""
    options: Any = None
    """Options of the backend."""
    disable: bool = False
    """Whether ``torch.compile`` does nothing."""
    use_regional_compilation: bool | None = None
    """Whether repeated blocks are compiled once instead of the whole model; default: False.

    Read from ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION.
    """

    def __post_init__(self) -> None:
        self.backend = _backend(self.backend or environ.text("ACCELERATE_DYNAMO_BACKEND", "NO") or "NO")
        environ.fill_unset(self, "ACCELERATE_DYNAMO_", environ.text, mode="default")
        check_one_of("mode", self.mode, _MODES)
        if self.fullgraph is None:
            self.fullgraph = environ.flag("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        environ.fill_unset(self, "ACCELERATE_DYNAMO_", environ.flag, use_regional_compilation=False)
        if self.dynamic is None and environ.text("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = environ.flag("ACCELERATE_DYNAMO_USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name, with the backend in torch's spelling."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from its defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


def _backend(value: DynamoBackend | str) -> DynamoBackend:
    name = str(value).upper()
    if name not in DynamoBackend.list():
        raise ValueError(f"backend={value!r} is not a valid DynamoBackend; allowed: {', '.join(DynamoBackend.list())}")
    if name == "IPEX":
        warnings.warn("DynamoBackend.IPEX is deprecated: write INDUCTOR, which has its optimisations", FutureWarning, 4)
    return DynamoBackend(name)


# Tensor, context and sequence parallelism; fields that are None are read from PARALLELISM_CONFIG_* variables.

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
