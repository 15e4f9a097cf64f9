"""Detection of real GPUs without initializing them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import gpu

pytestmark = [pytest.mark.gpu, gpu.only_cuda]

# cuDeviceGetCount returns CUDA_ERROR_NOT_INITIALIZED (3) until the process calls cuInit.
_REPORT = """
import ctypes, json, sys
from notebook_accelerate.hardware import detect, nvml
from notebook_accelerate.utils import check_cuda_fp8_capability, get_gpu_info, is_cuda_available
found = detect()
gpu = nvml.visible_gpu(0)
report = {"accelerator": found.accelerator, "count": found.count, "names": get_gpu_info()[0],
          "cuda": is_cuda_available(),
          "fp8": check_cuda_fp8_capability(), "first": gpu and gpu.name, "memory": gpu and gpu.memory_bytes,
          "capability": gpu and gpu.capability, "torch": "torch" in sys.modules}
number = ctypes.c_int()
report["driver"] = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(number))
print(json.dumps(report))
"""


def _report(**variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_gpus_are_counted_as_by_torch_without_initialising_the_driver() -> None:
    import torch

    report = _report()
    properties = torch.cuda.get_device_properties(0)
    assert (report["accelerator"], report["count"]) == ("cuda", torch.cuda.device_count())
    assert report["first"] == properties.name
    assert tuple(report["capability"]) == (properties.major, properties.minor)
    assert report["fp8"] == ((properties.major, properties.minor) >= (8, 9))
    assert report["torch"] is False
    assert report["driver"] == 3


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,99", 1)])
def test_hidden_gpus_are_not_counted(visible: str, count: int) -> None:
    report = _report(CUDA_VISIBLE_DEVICES=visible)
    assert report["count"] == count
    assert report["cuda"] is (count > 0)
    assert report["driver"] == 3
