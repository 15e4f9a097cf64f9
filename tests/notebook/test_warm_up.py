"""A kernel starts the zygote after the cell that imports the launcher has finished."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.notebook


@pytest.fixture(
    scope="module",
    params=[{}, {"COLAB_RELEASE_TAG": "release"}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}],
    ids=["jupyter", "colab", "kaggle"],
)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Yield a kernel that has not imported the package."""
    # A forked kernel has a spare child process, which becomes the zygote.
    with Kernel(request.param, forked=False) as kernel:
        yield kernel


def test_the_zygote_starts_once_after_the_first_cell(kernel: Kernel) -> None:
    kernel.check("import psutil, time")
    hooks = "len(get_ipython().events.callbacks['post_run_cell'])"
    children = "[child.pid for child in psutil.Process().children()]"
    before = kernel.value(hooks)
    cell = kernel.check(f"from notebook_accelerate import notebook_launcher\ntime.sleep(0.5); print({children})")
    assert cell.stdout.strip() == "[]", "importing starts no process"
    (server,) = kernel.value(children)
    assert kernel.value(hooks) == before
    kernel.check("1")
    assert kernel.value(children) == [server]
    kernel.check("import notebook_accelerate; notebook_accelerate.shutdown()")
    assert kernel.value(children) == []
