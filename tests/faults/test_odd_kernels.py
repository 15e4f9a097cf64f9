"""Kernels in unusual places or states: the user's modules shadow others, or the zygote hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import alive, open_gate, ready_kernel, said

pytestmark = pytest.mark.notebook

SHADOWED = (
    *("abc", "calendar", "code", "copy", "dataclasses", "enum", "html", "inspect", "io", "json", "logging", "numbers"),
    *("operator", "os", "pickle", "platform", "profile", "queue", "random", "secrets", "select", "selectors", "signal"),
    *("socket", "statistics", "string", "struct", "subprocess", "tempfile", "test", "threading", "token", "traceback"),
    *("types", "uuid", "numpy", "torch"),
)


@pytest.fixture(scope="module")
def plain_kernel() -> Iterator[Kernel]:
    """Yield a kernel that has not imported what a launch imports."""
    with ready_kernel(zygote=False, forked=False) as kernel:
        yield kernel


@pytest.fixture
def shadowing_kernel(plain_kernel: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """Yield a kernel in a folder whose modules shadow the standard library, torch and numpy."""
    kernel = plain_kernel
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('this is the {name}.py of the user')\n")
    (tmp_path / "mine.py").write_text("value = 42\n")
    kernel.check(f"notebook_accelerate.shutdown(); _path = list(sys.path); os.chdir({str(tmp_path)!r})")
    yield kernel
    kernel.check(f"notebook_accelerate.shutdown(); sys.path[:] = _path; os.chdir({str(kernel.cwd)!r})")


@pytest.mark.parametrize("where", ["''", "os.getcwd()"])
def test_modules_of_the_working_directory_shadow_nothing_that_a_launch_imports(
    shadowing_kernel: Kernel, where: str
) -> None:
    kernel = shadowing_kernel
    kernel.check(f"sys.path.insert(0, {where})")
    kernel.check(
        "def train():\n    import mine, random\n    dist.init_process_group('gloo')\n    tensor = torch.ones(1)\n"
        "    dist.all_reduce(tensor)\n    return tensor.item(), mine.value, random.random() < 1\n"
    )
    for method in ("fork", "zygote", "spawn"):
        cell = kernel.check(f"launch(train, start_method={method!r}).results")
        assert cell.result_text == "((2.0, 42, True), (2.0, 42, True))"


# ---- a zygote that is stopped or hangs

SERVER = "__import__('notebook_accelerate.launch.processes.zygote', fromlist=['x'])._zygote"
SOON = 60.0
"""The time limit in seconds for steps that take five. A kernel that kept its old zygote would wait two minutes."""
STUCK = {
    "stopped": f"os.kill({SERVER}.pid, signal.SIGSTOP)",
    # The zygote waits for the rest of this request.
    "hangs": f"{SERVER}._control.sendall((1 << 26).to_bytes(4, 'big'))",
}


@pytest.fixture
def served_kernel(kernel: Kernel) -> Iterator[Kernel]:
    """Yield the kernel with a running zygote, and end all zygotes afterwards."""
    kernel.check("launch(rank, start_method='zygote').results")
    yield kernel
    kernel.check("notebook_accelerate.shutdown()")


def _server(kernel: Kernel) -> int:
    return int(kernel.value(f"{SERVER}.pid"))


@pytest.mark.parametrize("how", STUCK)
def test_a_zygote_that_does_not_respond_is_replaced(served_kernel: Kernel, how: str) -> None:
    kernel = served_kernel
    before = _server(kernel)
    kernel.check(STUCK[how])
    assert kernel.check("launch(rank, start_method='zygote').results", SOON).result_text == "(0, 1)"
    assert _server(kernel) != before
    assert alive([before]) == []


@pytest.mark.parametrize("how", STUCK)
def test_the_stop_button_works_while_the_zygote_hangs(served_kernel: Kernel, how: str) -> None:
    kernel = served_kernel
    kernel.check(STUCK[how])
    kernel.check("sys.modules['notebook_accelerate.launch.processes.zygote'].STUCK_SECONDS = 600.0")
    cell = kernel.submit("launch(rank, start_method='zygote')")
    kernel.wait_for(lambda: "▶ run" in cell.stdout)
    kernel.pump(0.2)
    kernel.interrupt()
    kernel.finish(cell, SOON)
    assert "KeyboardInterrupt" in said(cell)
    kernel.check("sys.modules['notebook_accelerate.launch.processes.zygote'].STUCK_SECONDS = 5.0")
    assert kernel.value("notebook_accelerate.runs()[-1].status") == "stopped"


@pytest.mark.parametrize("ending", ["return", "exit", "stop"])
def test_ranks_end_while_their_zygote_is_stopped(served_kernel: Kernel, ending: str) -> None:
    kernel = served_kernel
    body = {"return": "return rank()", "exit": "os._exit(3)", "stop": "time.sleep(600)"}[ending]
    name = f"gate-{ending}"
    kernel.check(f"def train():\n    print('in', flush=True)\n    gate({name!r})\n    {body}")
    cell = kernel.check("run = launch(train, start_method='zygote', block=False)")
    kernel.wait_for(lambda: cell.stdout.count("] in") == 2)
    kernel.check(STUCK["stopped"])
    open_gate(kernel, name)
    if ending == "stop":
        kernel.check("run.stop(1.0)", SOON)
    assert kernel.value("run.wait(60)", SOON)
    states = kernel.value("[run.status, *(info.state for info in run.ranks)]")
    assert states == {"return": ["succeeded"] * 3, "exit": ["failed"] * 3, "stop": ["stopped"] * 3}[ending]
    if ending == "return":
        assert kernel.value("run.results") == [0, 1]


def test_the_ranks_of_another_run_outlive_the_replacement_of_their_zygote(served_kernel: Kernel) -> None:
    kernel = served_kernel
    cell = kernel.check(
        "def train():\n    print('in', flush=True)\n    gate('other')\n    return rank()\n"
        "other = launch(train, start_method='zygote', block=False)"
    )
    kernel.wait_for(lambda: cell.stdout.count("] in") == 2)
    kernel.check(STUCK["stopped"])
    assert kernel.check("launch(rank, start_method='zygote').results", SOON).result_text == "(0, 1)"
    assert kernel.value("other.status") == "running"
    open_gate(kernel, "other")
    assert kernel.value("other.wait(60)", SOON)
    assert kernel.value("other.results") == [0, 1]


def test_forked_ranks_do_not_wait_for_a_stopped_zygote(served_kernel: Kernel) -> None:
    kernel = served_kernel
    kernel.check(STUCK["stopped"])
    assert kernel.check("launch(rank, start_method='fork').results", SOON).result_text == "(0, 1)"


# ---- clocks


@pytest.mark.parametrize("step", [3600, -3600, 7200])
def test_a_step_of_the_system_clock_during_a_run_changes_nothing(kernel: Kernel, step: int) -> None:
    """If NTP corrects the clock or the machine wakes up, the kernel and its ranks see the step at the same moment."""
    name = f"step{step}"
    kernel.check(
        f"def train():\n    real = time.time\n    print('in', flush=True)\n    gate({name!r})\n"
        f"    time.time = lambda: real() + {step}\n"
        "    for number in range(20):\n        print(number)\n        time.sleep(0.1)\n    return number\n"
        "run = launch(train, block=False, timeout=600, hang_timeout=300)\n_time = time.time"
    )
    kernel.until("sum('in' in line for line in run.logs()) == 2", SOON)
    kernel.check(f"time.time = lambda: _time() + {step}")
    open_gate(kernel, name)
    try:
        elapsed = kernel.value("run.elapsed")
        assert kernel.value("run.wait(60)", SOON)
        assert kernel.value("run.results") == [19, 19]
        assert 0 < elapsed < kernel.value("run.elapsed") < 300
        times = kernel.value("[line.time for line in run._internals.store.log_lines(0)]")
        assert times == sorted(times)
        assert times[-1] - times[0] < 300
    finally:
        kernel.check("time.time = _time")


def test_a_kernel_that_is_suspended_while_its_ranks_run_counts_no_silence(kernel: Kernel) -> None:
    """The kernel's time limits count only while it runs, and it still gets the messages sent during its suspension."""
    kernel.check(
        "def train():\n    for number in range(100):\n        print(number, flush=True)\n        time.sleep(0.1)\n"
        "run = launch(train, block=False, timeout=18, hang_timeout=4)"
    )
    kernel.until("len(run.logs(0)) > 3", SOON)
    kernel.process.suspend()
    time.sleep(20.0)
    kernel.process.resume()
    assert kernel.value("run.wait(60)", SOON)
    assert kernel.value("[run.status, len(run.logs(0)), len(run.logs(1))]") == ["succeeded", 100, 100]
