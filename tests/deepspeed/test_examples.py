"""The example notebook that shows every kind of parallelism, with DeepSpeed installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.examples import run_all
from tests.support.kernel import ROOT, Kernel
from tests.support.launching import ready_kernel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with ready_kernel(env={"OMP_NUM_THREADS": "1"}) as kernel:
        yield kernel


def test_deepspeed_has_the_losses_of_the_other_strategies(kernel: Kernel) -> None:
    cells = run_all(kernel, ROOT / "examples" / "06_parallel.ipynb")
    assert "at most 0.1 % apart" in cells[-1].stdout
    assert "DeepSpeed ZeRO-2" in kernel.value("list(runs)")
    assert kernel.value("{name: run.status for name, run in runs.items() if run.status != 'succeeded'}") == {}
