"""Kernels have the version that is being tested: `make test-kernels` and `make test-colab` set it."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.notebook


def test_the_kernel_has_the_requested_version(kernel: Kernel) -> None:
    kernel.check("import ipykernel")
    assert kernel.value("ipykernel.__version__") == os.environ.get("TEST_KERNEL_VERSION", version("ipykernel"))
