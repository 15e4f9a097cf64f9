"""A library with the interface of NVIDIA's NVML, for machines without a GPU: `LD_LIBRARY_PATH` makes pynvml load it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def build(folder: Path) -> Path:
    """Compile the library into `folder` and return its path; skip the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler on this machine")
    path = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=300)
    return path


__all__ = ["build"]
