"""Stubs of NVIDIA's NVML and driver for machines without a GPU. `LD_LIBRARY_PATH` makes processes load them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NVML, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
_SOURCES = {NVML: "fake_nvml.c", CUDA: "fake_cuda.c"}


def build(folder: Path, name: str = NVML) -> Path:
    """Compile a library into `folder` and return its path. Skip the test if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler on this machine")
    path = folder / name
    source = Path(__file__).with_name(_SOURCES[name])
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=300)
    return path


__all__ = ["CUDA", "NVML", "build"]
