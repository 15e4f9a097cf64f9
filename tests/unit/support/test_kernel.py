"""The kernel harness: output, errors, interrupts and timeouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.kernel import Kernel, KernelTimeoutError

pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


def test_streams_results_and_displays_are_kept_apart(kernel: Kernel) -> None:
    cell = kernel.run(
        "import sys\nprint('out'); print('err', file=sys.stderr)\n"
        "handle = display('first', display_id=True); display('other'); handle.update('second')\n6 * 7"
    )
    assert (cell.stdout, cell.stderr, cell.result_text) == ("out\n", "err\n", "42")
    assert [data["text/plain"] for data in cell.displays] == ["'second'", "'other'"]
    assert cell.ok
    assert cell.error is None


def test_errors_have_a_name_a_value_and_a_traceback(kernel: Kernel) -> None:
    cell = kernel.run("def outer():\n    raise KeyError('lost')\nouter()")
    assert cell.error is not None
    assert (cell.error.ename, cell.error.evalue) == ("KeyError", "'lost'")
    assert "in outer()" in cell.error.text
    with pytest.raises(AssertionError, match="lost"):
        cell.expect_ok()


def test_a_cell_collects_output_after_its_end(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.run(
        "import asyncio, os\nasync def later():\n"
        f"    while not os.path.exists({str(go)!r}): await asyncio.sleep(0.05)\n    print('late')\n"
        "task = asyncio.ensure_future(later())"
    )
    assert cell.stdout == ""
    go.touch()
    kernel.wait_for(lambda: cell.stdout == "late\n", timeout=60)


def test_interrupt_works_like_the_stop_button(kernel: Kernel) -> None:
    # A single long sleep would miss an interrupt that arrives after Python's last check for signals.
    cell = kernel.submit("import time\nprint('in', flush=True)\nwhile True: time.sleep(0.05)")
    kernel.wait_for(lambda: "in" in cell.stdout, timeout=60)
    kernel.interrupt()
    assert kernel.finish(cell, timeout=60).error is not None
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"


def test_values_are_returned_and_waits_end(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.value("{'a': [1, 2.5, None]}") == {"a": [1, 2.5, None]}
    go = tmp_path / "go"
    with pytest.raises(KernelTimeoutError, match=r"time\.sleep"):
        kernel.run(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)", timeout=0.2)
    go.touch()
    assert kernel.value("1") == 1


def test_the_kernel_has_its_own_folders(kernel: Kernel) -> None:
    assert kernel.value("__import__('os').environ['IPYTHONDIR']").startswith(str(kernel.folder))
    assert kernel.value("__import__('os').getcwd()") == str(kernel.cwd)


def test_input_is_answered() -> None:
    asked = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "blue"

    with Kernel(answer=answer) as kernel:
        assert kernel.check("print(input('colour? ').upper())").stdout == "BLUE\n"
    assert asked == ["colour? "]


def test_kill_and_close_leave_nothing() -> None:
    with Kernel(env={"OF_THE_TEST": "1"}) as kernel:
        pid, folder = kernel.pid, kernel.folder
        assert kernel.value("__import__('os').environ['OF_THE_TEST']") == "1"
        child = kernel.value("__import__('subprocess').Popen(['sleep', '600']).pid")
        assert psutil.pid_exists(child)
        kernel.kill()
        assert not psutil.pid_exists(pid)
        with pytest.raises(KernelTimeoutError, match="died"):
            kernel.run("1", timeout=5)
        psutil.Process(child).kill()
    assert not folder.exists()


def test_close_ends_the_kernels_children() -> None:
    with Kernel() as kernel:
        child = kernel.value("__import__('subprocess').Popen(['sleep', '600'], start_new_session=True).pid")
    deadline = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
