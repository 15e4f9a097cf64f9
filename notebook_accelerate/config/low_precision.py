"""Recipes of the libraries that compute in fp8, and settings of quantization with bitsandbytes."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import CustomDtype
from notebook_accelerate.config.kwargs_handlers import KwargsHandler
from notebook_accelerate.config.plain_values import check_one_of, is_number
from notebook_accelerate.config.settings import (
    SettingsSection,
    check_choices,
    fill_unset,
    from_environment,
    setting,
    settings_of,
)

if TYPE_CHECKING:
    import torch
    from torchao.float8 import Float8LinearConfig


_SECTION = SettingsSection("fp8_config", "fp8_", "ACCELERATE_FP8_", title="fp8")


def _require(module: str, install: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{name} needs {module}, which is not installed: {install}")


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Settings of torchao's conversion of linear layers to fp8.

    Raises:
        ImportError: torchao is not installed.
    """

    settings = _SECTION

    config: Float8LinearConfig | None = None
    """torchao's configuration. If None, the default configuration is used, with the two flags below."""
    module_filter_func: Callable[..., Any] | None = None
    """Called with a module and its name; returns whether to convert the module.

    If None, all linear layers except the first and the last are converted.
    """
    pad_inner_dim: bool | None = setting(unset=True, preset=1, parse=environ.str_to_bool)
    """Whether inner dimensions are padded to multiples of 16 (torchao)."""
    enable_fsdp_float8_all_gather: bool | None = setting(unset=True, preset=1, parse=environ.str_to_bool)
    """Whether FSDP gathers weights in fp8 (torchao)."""

    def __post_init__(self) -> None:
        _require("torchao", "pip install torchao", "AORecipeKwargs")
        fill_unset(self)
        if self.config is None:
            from torchao.float8 import Float8LinearConfig

            self.config = Float8LinearConfig(
                enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather, pad_inner_dim=self.pad_inner_dim
            )


def _flags(text: str) -> tuple[bool, bool, bool]:
    flags = [environ.parse_flag(part) for part in text.strip("()").split(",")]
    if len(flags) != 3:
        raise ValueError(f"override_linear_precision={text!r} is not allowed; pass three flags: fprop, dgrad, wgrad")
    return flags[0], flags[1], flags[2]


def _overridden(variable: str, _: Any) -> tuple[bool, bool, bool]:
    prefix = f"{_SECTION.variable}OVERRIDE_"
    each = ",".join(str(environ.flag(f"{prefix}{name}")) for name in ("FPROP", "DGRAD", "WGRAD"))
    return _flags(environ.text(variable, each) or each)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Recipe of Transformer Engine: ``transformer_engine.common.recipe.DelayedScaling``, by its field names.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: A value is not allowed.
    """

    settings = _SECTION

    use_autocast_during_eval: bool | None = setting(unset=False, switch=True)
    """Whether evaluation also computes in fp8 (Transformer Engine)."""
    margin: int | None = setting(unset=0)
    """The scaling factor is divided by 2 to this power (Transformer Engine)."""
    interval: int | None = setting(unset=1)
    """Number of steps between computations of the scaling factor (Transformer Engine)."""
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = setting(unset="HYBRID", closed=True)
    """Format: HYBRID, E4M3 or E5M2 (Transformer Engine)."""
    amax_history_len: int | None = setting(unset=1024, former="fp8_amax_history_length")
    """Number of steps in the history of largest absolute values (Transformer Engine)."""
    amax_compute_algo: Literal["max", "most_recent"] | None = setting(unset="most_recent", closed=True)
    """How the scale is computed from the history: max or most_recent (Transformer Engine)."""
    override_linear_precision: tuple[bool, bool, bool] | None = setting(
        read=_overridden, preset=(False, False, False), parse=environ.flags_text
    )
    """Whether outputs, input and weight gradients use higher precision, as true,false,false (Transformer Engine).

    Also read from ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD. By default, all are False.
    """
    use_mxfp8_block_scaling: bool | None = setting(unset=False, option=None)
    """Whether blocks of 32 values share a scale (Transformer Engine)."""

    def __post_init__(self) -> None:
        _require("transformer_engine", "pip install 'transformer_engine[pytorch]'", type(self).__name__)
        fill_unset(self, *settings_of(TERecipeKwargs))
        self.fp8_format = str(self.fp8_format).upper()  # type: ignore[assignment]
        self.amax_compute_algo = str(self.amax_compute_algo).lower()  # type: ignore[assignment]
        check_choices(self, "fp8_format", "amax_compute_algo")
        _flags(",".join(str(flag) for flag in self.override_linear_precision or ()))


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Recipe of MS-AMP.

    Raises:
        ValueError: The level is not O1 or O2.
    """

    settings = _SECTION

    opt_level: Literal["O1", "O2"] | None = setting(unset="O2", closed=True)
    """Level of MS-AMP: O1 (gradients and their reduction in fp8) or O2 (optimizer states, too)."""

    def __post_init__(self) -> None:
        fill_unset(self, "opt_level")
        check_choices(self, "opt_level")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated: use `TERecipeKwargs`, `MSAMPRecipeKwargs` or `AORecipeKwargs`."""

    backend: Literal["MSAMP", "TE"] | None = setting(option=None)
    """MSAMP or TE. If None, TE is used, unless only MS-AMP is installed."""

    def __post_init__(self) -> None:
        message = "FP8RecipeKwargs is deprecated: use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs"
        warnings.warn(message, FutureWarning, stacklevel=3)
        found: Any = self.backend or from_environment(FP8RecipeKwargs, "backend") or _installed_backend()
        self.backend = found.upper()
        check_choices(self, "backend")
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)
        else:
            TERecipeKwargs.__post_init__(self)


def _installed_backend() -> str:
    return "MSAMP" if importlib.util.find_spec("msamp") and not importlib.util.find_spec("transformer_engine") else "TE"


# ---- bitsandbytes

_QUANT_TYPES = ("fp4", "nf4")
_COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """Quantization of weights to 8 or 4 bits. Either ``load_in_8bit`` or ``load_in_4bit`` must be True.

    Raises:
        ValueError: A value is not allowed, or ``load_in_8bit`` and ``load_in_4bit`` are equal.
    """

    load_in_8bit: bool = False
    """Whether weights are quantized to 8 bits (LLM.int8(), arXiv:2208.07339)."""
    llm_int8_threshold: float = 6.0
    """Columns with activations whose absolute values exceed this are computed in fp16 (8 bits only)."""
    load_in_4bit: bool = False
    """Whether weights are quantized to 4 bits (QLoRA, arXiv:2305.14314)."""
    bnb_4bit_quant_type: str = "fp4"
    """Format of the 4-bit weights: fp4 or nf4."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales are quantized, too."""
    bnb_4bit_compute_dtype: str = "fp16"
    """Dtype of computations with 4-bit weights: fp32, fp16, bf16 or a torch dtype. Names become torch dtypes."""
    torch_dtype: torch.dtype | None = None
    """Dtype of the modules that are not quantized, or its name. If None, fp16 (8 bits) or the compute dtype (4)."""
    skip_modules: list[str] | None = None
    """Modules that are not quantized."""
    keep_in_fp32_modules: list[str] | None = None
    """Modules that stay in fp32."""

    def __post_init__(self) -> None:
        import torch

        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a boolean")
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError(
                f"load_in_4bit and load_in_8bit can't both be {self.load_in_4bit}; set one of them to True"
            )
        if not is_number(self.llm_int8_threshold):
            raise ValueError(f"llm_int8_threshold={self.llm_int8_threshold!r} must be a number")
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn("llm_int8_threshold has no effect on a model that is loaded in 4 bits", stacklevel=3)
        check_one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, _QUANT_TYPES)
        compute: Any = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        self.bnb_4bit_compute_dtype = compute
        default = compute if self.load_in_4bit else torch.float16
        self.torch_dtype = default if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, tuple, type(None))):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a list of module names")
        self.target_dtype: torch.dtype | CustomDtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8


def _dtype(name: str, value: Any) -> torch.dtype:
    import torch

    if isinstance(value, torch.dtype):
        return value
    check_one_of(name, value, _COMPUTE_DTYPES)
    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[value])
    return dtype
