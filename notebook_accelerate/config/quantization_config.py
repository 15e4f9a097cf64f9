"""Configuration of bitsandbytes' quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.enums import CustomDtype
from notebook_accelerate.config.plain_values import check_one_of, is_number

if TYPE_CHECKING:
    import torch

_QUANT_TYPES = ("fp4", "nf4")
_COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """Quantization of weights to 8 or 4 bits; one of ``load_in_8bit`` and ``load_in_4bit`` must be True.

    Raises:
        ValueError: A value is not allowed, or both or none of the two are True.
    """

    load_in_8bit: bool = False
    """Whether weights have 8 bits (LLM.int8(), arXiv:2208.07339)."""
    llm_int8_threshold: float = 6.0
    """Columns with activations whose absolute values exceed this are computed in fp16 (8 bits only)."""
    load_in_4bit: bool = False
    """Whether weights have 4 bits (QLoRA, arXiv:2305.14314)."""
    bnb_4bit_quant_type: str = "fp4"
    """fp4 or nf4."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales are quantized too."""
    bnb_4bit_compute_dtype: str = "fp16"
    """fp32, fp16 or bf16, or a torch dtype; converted to a torch dtype."""
    torch_dtype: torch.dtype | None = None
    """Dtype of the modules that are not quantized, or its name; None: fp16, or the compute dtype with 4 bits."""
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
                f"load_in_4bit and load_in_8bit can't be both {self.load_in_4bit}; set one of them to True"
            )
        if not is_number(self.llm_int8_threshold):
            raise ValueError(f"llm_int8_threshold={self.llm_int8_threshold!r} must be a number")
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
