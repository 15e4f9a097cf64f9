"""The enums of the public API.

Every member is a string and equals its value, so ``precision == "bf16"`` and ``"bf16" in PrecisionType`` both hold.
"""

from __future__ import annotations

import enum
import warnings
from typing import TYPE_CHECKING, Any, cast

# The current names of renamed members, by enum and older name.
_RENAMED = {("DistributedType", "TPU"): "XLA"}


class EnumWithContains(enum.EnumMeta):
    """Makes ``value in Enum`` accept values on every Python version, and resolves older member names."""

    def __contains__(cls, item: object) -> bool:
        """Return whether ``item`` is a member, or the value of one."""
        return any(item is member or item == member.value for member in cast("type[enum.Enum]", cls))

    if not TYPE_CHECKING:  # If type checkers saw this method, they would accept every name.

        def __getattr__(cls, name: str) -> Any:
            """Return the member for an older name, with a FutureWarning."""
            newer = _RENAMED.get((cls.__name__, name))
            if newer is None:
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            _warn_renamed(cls.__name__, name, newer)
            return cls[newer]


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """Enum that lists its values and supports ``in`` for them."""

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values of all members, in order of definition."""
        return [member.value for member in cls]


class _StringEnum(str, BaseEnum):
    """Enum whose members are their values: they compare, hash, print and serialise as strings."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, format_spec: str) -> str:
        return format(str(self.value), format_spec)


class _NamedEnum(_StringEnum):
    """Enum whose members equal their values and print as ``Class.MEMBER``."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        newer = _RENAMED.get((cls.__name__, str(value)))
        if newer is None:
            return None
        _warn_renamed(cls.__name__, str(value), newer)
        return cls[newer]


class DistributedType(_NamedEnum):
    """Kinds of distributed training."""

    NO = "NO"
    """One process."""
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_TPU = "MULTI_TPU"
    """TPUs that are used through torch_tpu. Those used through torch_xla have the type XLA."""


class SageMakerDistributedType(_NamedEnum):
    """Kinds of distributed training on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(_NamedEnum):
    """Environments that training can run in."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(_StringEnum):
    """Libraries that compute in fp8."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class DynamoBackend(_StringEnum):
    """Compilers that ``torch.compile`` can use; see ``torch.compiler.list_backends()``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"
    IPEX = "IPEX"
    """Deprecated, because Intel has discontinued its extension for PyTorch. INDUCTOR includes its optimisations."""


class LoggerType(_StringEnum):
    """Names of experiment trackers."""

    ALL = "all"
    """All installed trackers."""
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(_StringEnum):
    """Floating-point formats of mixed precision."""

    NO = "no"
    """No mixed precision: all computations are in fp32."""
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(_StringEnum):
    """Random number generators that can be synchronised across ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"
    """A ``torch.Generator`` that the caller passes."""


class CustomDtype(_StringEnum):
    """Dtypes that torch does not name, for size estimates and device maps."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(_StringEnum):
    """Communication hooks that compress the gradients of DistributedDataParallel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def _warn_renamed(enum_name: str, older: str, newer: str) -> None:
    warnings.warn(
        f"{enum_name}.{older} is deprecated: use {enum_name}.{newer}",
        FutureWarning,
        stacklevel=3,
    )
