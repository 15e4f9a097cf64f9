"""Skips the tests here, with the reason, where there is no CUDA device."""

from __future__ import annotations

import pytest

from notebook_accelerate import hardware


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    found = hardware.detect()
    if found.accelerator != "cuda":
        pytest.skip(f"needs a CUDA device; this machine has: {found.accelerator}")
