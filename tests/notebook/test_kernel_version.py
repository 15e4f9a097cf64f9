"""Kernels have the version of ipykernel that `make test-kernels` or `make test-colab` has chosen."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.notebook


def test_the_kernel_has_the_requested_version(kernel: Kernel) -> None:
    kernel.check("import ipykernel")
    assert kernel.value("ipykernel.__version__") == os.environ.get("TEST_KERNEL_VERSION", version("ipykernel"))
