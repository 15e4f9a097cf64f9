"""Offloading with a CUDA device: weights are copied ahead on a side stream, with bitwise equal results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from notebook_accelerate import cpu_offload, disk_offload, dispatch_model
from tests.support import gpu
from tests.unit.big_modeling.models import Deep

pytestmark = pytest.mark.gpu
WIDTH = gpu.size(2048, 32)
TOKENS = torch.arange(12).reshape(3, 4)


@pytest.mark.parametrize("where", ["cpu", "disk", "map"])
@pytest.mark.parametrize("own", [False, True])
def test_offloaded_models_give_the_same_outputs(tmp_path: Path, where: str, own: bool) -> None:
    model = Deep(blocks=8, width=512, own=own).eval()
    device = torch.device(gpu.DEVICE, 0)
    plain = model.to(device)(TOKENS.to(device))
    model.to("cpu")
    if where == "cpu":
        cpu_offload(model, device)
    elif where == "disk":
        disk_offload(model, tmp_path, device)
    else:
        first = "cpu" if gpu.DRY else 0
        device_map = {name: "cpu" if index % 2 else "disk" for index, name in enumerate([f"h.{i}" for i in range(8)])}
        rest = {"emb": first, "ln": first, "head": "disk", **({"scale": first} if own else {})}
        dispatch_model(model, {**device_map, **rest}, offload_dir=tmp_path)
    with torch.no_grad():
        for _ in range(20):
            assert torch.equal(model(TOKENS).to(device), plain)


def test_copies_do_not_overtake_the_computation() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)]).eval()
    device = torch.device(gpu.DEVICE, 0)
    x = torch.randn(2 * WIDTH, WIDTH, device=device)
    plain = model.to(device)(x)
    cpu_offload(model.to("cpu"), device)
    with torch.no_grad():
        for _ in range(50):
            assert torch.equal(model(x), plain)


@gpu.only_cuda
def test_a_map_that_overflows_the_device_is_refused() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1).expand(2**44), requires_grad=False)
    with pytest.raises(ValueError, match=r"puts 70.4 TB on device cuda:0, which has .* free"):
        dispatch_model(model, {"": 0})
    assert model.weight.device.type == "cpu"
