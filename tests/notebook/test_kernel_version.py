"""The kernels of this test run are those it is about: `make test-kernels` and `make test-colab` set the version."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.notebook


def test_the_kernel_has_the_version_that_was_asked_for(kernel: Kernel) -> None:
    kernel.check("import ipykernel")
    assert kernel.value("ipykernel.__version__") == os.environ.get("TEST_KERNEL_VERSION", version("ipykernel"))
