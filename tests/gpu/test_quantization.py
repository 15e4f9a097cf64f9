"""Quantization with bitsandbytes' CUDA kernels. Offloaded weights are loaded for each forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accelerate import init_empty_weights
from notebook_accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
from notebook_accelerate.utils.imports import is_bnb_available
from tests.support import gpu

pytestmark = [
    pytest.mark.gpu,
    gpu.only_cuda,  # bitsandbytes' kernels need CUDA.
    pytest.mark.skipif(not is_bnb_available(), reason="bitsandbytes is not installed"),
]
EIGHT: dict[str, Any] = {"load_in_8bit": True}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp16"}
MAPS: dict[str, dict[str, Any]] = {
    "gpu": {"": 0},
    "cpu": {"0": 0, "1": 0, "2": 0, "3": "cpu", "4": 0},
    "disk": {"0": "disk", "1": 0, "2": 0, "3": "cpu", "4": 0},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 10))


@pytest.mark.parametrize("place", MAPS)
@pytest.mark.parametrize(("how", "tolerance"), [(EIGHT, 0.02), (NF4, 0.15)], ids=["8", "nf4"])
def test_outputs_are_near_the_full_model(tmp_path: Path, how: Any, tolerance: float, place: str) -> None:
    whole, x = network().eval(), torch.randn(8, 256)
    plain = whole(x).detach()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = network().eval()
    model: Any = load_and_quantize_model(
        empty, BnbQuantizationConfig(**how), tmp_path, device_map=MAPS[place], offload_folder=tmp_path / "away"
    )
    for name, device in MAPS[place].items():
        if device in ("cpu", "disk"):
            layer = model[int(name)]
            assert layer.weight.is_meta
            assert (layer.weight.dtype == torch.int8) == (how is EIGHT), (
                "in 4 bits, offloaded weights are not quantized"
            )
    with torch.no_grad():
        for _ in range(5):
            found = model(x.half().cuda()).float().cpu()
            assert ((found - plain).norm() / plain.norm()).item() < tolerance
