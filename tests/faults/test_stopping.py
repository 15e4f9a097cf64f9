"""Runs that are stopped by a button, a method or a time limit while they start, run or end, even if ranks resist."""

from __future__ import annotations

import time

import pytest

from tests.support.kernel import Cell, Kernel
from tests.support.launching import alive, patient, rank_pids, ready_kernel, said, wait_gone

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])
SOON = 60.0
"""The time limit in seconds for steps that take two on an idle machine. Functions run ten minutes unless stopped."""

STUCK = {
    "sleep": "time.sleep(600)",
    "collective": "group()\nif rank() == 0:\n    print('in')\n    dist.all_reduce(torch.ones(1))\ntime.sleep(600)",
    "C without the GIL": "ctypes.CDLL(None).sleep(600)",
    "C with the GIL": "ctypes.PyDLL(None).sleep(600)",
    "ignores SIGINT": "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)",
    "ignores SIGINT and SIGTERM": (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    ),
    "catches KeyboardInterrupt": (
        "while True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass"
    ),
    "busy": "while True:\n    pass",
    "thread": "t = threading.Thread(target=time.sleep, args=(600,))\nt.start()\nt.join()",
}


def _define(kernel: Kernel, body: str) -> None:
    lines = "\n".join("    " + line for line in ["print('in', flush=True)", *body.splitlines()])
    kernel.check(f"def train():\n{lines}")


def _started(kernel: Kernel, code: str, ranks: int = 2) -> Cell:
    cell = kernel.submit(code)
    kernel.wait_for(lambda: cell.stdout.count("] in") >= ranks or cell.finished)
    time.sleep(0.2)
    return cell


@METHODS
@pytest.mark.parametrize("kind", STUCK)
def test_stop_ends_within_the_grace_period_and_a_second(kernel: Kernel, method: str, kind: str) -> None:
    _define(kernel, STUCK[kind])
    cell = kernel.check(f"run = launch(train, start_method={method!r}, block=False)")
    kernel.wait_for(lambda: cell.stdout.count("] in") >= 2)
    pids = rank_pids(kernel)
    assert alive(pids) == pids
    time.sleep(0.2)
    took = kernel.value("(t := time.monotonic(), run.stop(grace=1.0), time.monotonic() - t)[2]")
    assert took < SOON
    assert alive(pids) == []
    assert kernel.value("[run.status, *(info.state for info in run.ranks)]") == ["stopped"] * 3


@METHODS
def test_the_stop_button_raises_a_short_keyboard_interrupt(kernel: Kernel, method: str) -> None:
    _define(kernel, "time.sleep(600)")
    before = descendants(kernel)
    cell = _started(kernel, f"launch(train, start_method={method!r})")
    pids = sorted(descendants(kernel) - before)
    assert len(pids) >= 2
    kernel.interrupt()
    kernel.finish(cell, timeout=SOON)
    assert cell.error is not None
    assert cell.error.ename in ("KeyboardInterrupt", "RunInterrupted")
    assert "KeyboardInterrupt" in said(cell)
    assert len(said(cell).splitlines()) < 8, said(cell)
    assert alive(pids) == []


def descendants(kernel: Kernel) -> set[int]:
    return {child.pid for child in kernel.process.children(recursive=True)}


@METHODS
def test_a_second_stop_kills_immediately(kernel: Kernel, method: str) -> None:
    _define(
        kernel,
        "signal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "while True:\n    time.sleep(0.1)",
    )
    with patient(kernel):  # The grace period is so long that only the second interrupt can end the run in time.
        cell = kernel.submit(f"launch(train, start_method={method!r})")
        kernel.wait_for(lambda: cell.stdout.count("] deaf") == 2)
        kernel.interrupt()
        # Wait for the first interrupt: if a second one arrives before the kernel handles it, the two count as one.
        kernel.wait_for(lambda: all(f"[rank {rank}] heard" in cell.stdout for rank in (0, 1)))
        kernel.pump(0.5)
        assert not cell.finished
        kernel.interrupt()
        kernel.finish(cell, timeout=SOON)
    assert "KeyboardInterrupt" in said(cell)


@pytest.mark.leaks_ok("the file's kernel has another zygote afterwards; the fixture checks its children")
def test_pressing_the_button_again_while_ranks_start_kills_them(kernel: Kernel) -> None:
    kernel.check("notebook_accelerate.shutdown()")
    _define(kernel, STUCK["ignores SIGINT and SIGTERM"])
    with patient(kernel):  # The grace period is so long that only further interrupts can end the run in time.
        cell = kernel.submit(
            "try:\n    launch(train, start_method='zygote')\nfinally:\n    print('back')\n    gate('never')"
        )
        kernel.wait_for(lambda: "▶ run" in cell.stdout)
        while not (cell.finished or "back" in cell.stdout):
            kernel.interrupt()
            kernel.pump(0.3)
        kernel.pump(1.0)  # If the last interrupt has already ended the gate, another one would hit IPython itself.
        if not cell.finished:
            kernel.interrupt()
        kernel.finish(cell, timeout=SOON)
        assert "KeyboardInterrupt" in said(cell)
        assert kernel.value("notebook_accelerate.runs()[-1].status") == "stopped"


def test_an_interrupt_at_any_time_ends_the_run_and_the_cell(kernel: Kernel) -> None:
    """The interrupt stops the run, or the cell says that the run had just ended. In both cases, the cell ends."""
    _define(kernel, "time.sleep(0.05)")
    kernel.check("before = list(notebook_accelerate.runs())")
    for delay in (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2):
        # The gate keeps the cell busy: ipykernel itself handles an interrupt between a cell's last line and its reply.
        cell = kernel.submit(f"print('here we go')\nlaunch(train)\ngate('after {delay}')")
        kernel.wait_for(lambda cell=cell: "here we go" in cell.stdout)
        kernel.pump(delay)
        kernel.interrupt()
        if delay > 0.1:  # If the launch has already returned, only the interrupt can end the gate.
            kernel.pump(0.5)
        kernel.finish(cell, timeout=SOON)
        assert "KeyboardInterrupt" in said(cell), said(cell)
        for number, status, over in kernel.value(
            "[[run.id, run.status, run.wait(0)] for run in notebook_accelerate.runs() if run not in before][-1:]"
        ):
            assert over
            assert status in ("stopped", "succeeded")
            if f"the interrupt arrived as run {number} ended" in said(cell):
                assert status == "succeeded"
            elif f"run {number} was stopped" in said(cell):
                assert status == "stopped"


def test_a_loop_of_launches_ends_with_the_interrupted_run(kernel: Kernel) -> None:
    """An interrupt that arrives just as a run succeeds must still stop the code that follows.

    The loop itself prints nothing, because ipykernel's flush is not safe against interrupts: one that arrives after the
    flush has locked an event, and before it waits for that event, leaves the output thread waiting for the lock.
    """
    _define(kernel, "pass")
    for press in range(12):
        cell = kernel.submit("while True:\n    launch(train)")
        kernel.wait_for(lambda cell=cell, press=press: cell.stdout.count("▶ run") > press % 3)
        kernel.pump(0.013 * press)
        kernel.interrupt()
        begun = cell.stdout.count("▶ run")
        kernel.finish(cell, timeout=SOON)
        assert "KeyboardInterrupt" in said(cell), said(cell)
        assert cell.stdout.count("▶ run") <= begun + 3, "only output that was already on its way may follow"


def _ended_as_said(kernel: Kernel, cell: Cell) -> None:
    """Check that the run, its ranks and the cell agree on whether the interrupt arrived in time."""
    kernel.check("last = notebook_accelerate.runs()[-1]")
    status, states = kernel.value("[last.status, [info.state for info in last.ranks]]")
    assert "KeyboardInterrupt" in said(cell)
    if "the interrupt arrived as run" in said(cell):
        assert (status, states) == ("succeeded", ["succeeded", "succeeded"])
    else:
        assert status == "stopped"


@pytest.mark.leaks_ok("the file's kernel has another zygote afterwards; the fixture checks its children")
def test_an_interrupt_while_the_zygote_starts_is_reported_truthfully(kernel: Kernel) -> None:
    kernel.check("notebook_accelerate.shutdown()")
    cell = kernel.submit("launch(rank, start_method='zygote')")
    kernel.wait_for(lambda: "▶ run" in cell.stdout)
    kernel.pump(0.2)
    kernel.interrupt()
    kernel.finish(cell)
    _ended_as_said(kernel, cell)
    assert kernel.check("launch(rank, start_method='zygote').results").result_text == "(0, 1)"


def test_an_interrupt_during_teardown_is_reported_truthfully(kernel: Kernel) -> None:
    _define(kernel, "import atexit\natexit.register(time.sleep, 1.0)\nreturn 1")
    cell = _started(kernel, "launch(train)")
    kernel.pump(0.2)
    kernel.interrupt()
    kernel.finish(cell)
    _ended_as_said(kernel, cell)


def test_clean_up_code_of_the_function_runs_and_its_result_is_kept(kernel: Kernel) -> None:
    _define(kernel, "try:\n    print('inside', flush=True)\n    time.sleep(600)\nfinally:\n    print('cleaned up')")
    with patient(kernel):
        cell = kernel.submit("launch(train)")
        kernel.wait_for(lambda: cell.stdout.count("] inside") == 2)
        kernel.interrupt()
        kernel.finish(cell)
    assert cell.stdout.count("cleaned up") == 2


@METHODS
def test_timeout_and_hang_timeout_stop_the_run(kernel: Kernel, method: str) -> None:
    _define(kernel, "ctypes.PyDLL(None).sleep(600)")
    for option, word in (("timeout=1.0", "timeout of 1 s"), ("hang_timeout=1.0", "hang_timeout")):
        cell = kernel.run(f"launch(train, start_method={method!r}, {option})")
        assert "RunTimeoutError" in said(cell)
        assert word in said(cell)


def test_a_suspended_kernel_counts_no_silence(kernel: Kernel) -> None:
    """The kernel is suspended, as it is when a laptop's lid is closed; that time must not count as a hang."""
    _define(kernel, "time.sleep(600)")
    _started(kernel, "run = launch(train, hang_timeout=8, block=False)")
    kernel.process.suspend()
    time.sleep(9.0)
    kernel.process.resume()
    kernel.pump(1.0)
    assert kernel.value("(run.status, run.wait(0), run.stop())[:2]") == ["running", False]


@METHODS
def test_killing_a_kernel_ends_all_ranks_and_grandchildren(method: str) -> None:
    with ready_kernel() as kernel:  # This kernel's zygote is running, and guards the processes that forked ranks start.
        cell = kernel.check(
            "def train():\n    child = subprocess.Popen(['sleep', '300'])\n    print('in', child.pid, flush=True)\n"
            "    ctypes.PyDLL(None).sleep(600) if rank() == 1 else time.sleep(600)\n"
            f"run = launch(train, start_method={method!r}, block=False)"
        )
        kernel.wait_for(lambda: cell.stdout.count("] in") >= 2)
        everything = [child.pid for child in kernel.process.children(recursive=True)]
        grandchildren = [int(line.split()[-1]) for line in cell.stdout.splitlines() if "] in" in line]
        pids = sorted({*everything, *rank_pids(kernel), *grandchildren})
        assert len(pids) >= 4
        kernel.kill()
        wait_gone(pids, SOON)


def test_shutting_down_a_kernel_ends_all_ranks() -> None:
    with ready_kernel() as kernel:
        cell = kernel.check("run = launch(lambda: (print('in', flush=True), time.sleep(600)), block=False)")
        kernel.wait_for(lambda: cell.stdout.count("] in") >= 2)
        pids = [child.pid for child in kernel.process.children(recursive=True)]
        kernel.client.shutdown()
        wait_gone(pids, SOON)
