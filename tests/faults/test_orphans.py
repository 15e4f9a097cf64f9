"""Processes that ranks have started are killed with the kernel, whatever their session, group and parent."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.kernel import Cell, Kernel
from tests.support.launching import alive, rank_pids, ready_kernel, wait_gone

pytestmark = pytest.mark.notebook
SOON = 10.0
"""The number of seconds within which all processes must be gone."""

GRANDCHILDREN = """
def train():
    import multiprocessing
    from torch.utils.data import DataLoader
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    found = [subprocess.Popen(["sleep", "300"]).pid]
    found.append(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
    found.append(subprocess.Popen(["sleep", "300"], start_new_session=True, env={}).pid)
    for kind in ("fork", "spawn"):
        child = multiprocessing.get_context(kind).Process(target=time.sleep, args=(300,))
        child.start()
        found.append(child.pid)
    loader = iter(DataLoader(list(range(100)), num_workers=2))
    next(loader)
    found += [worker.pid for worker in loader._workers]
    reader, writer = os.pipe()
    if os.fork() == 0:  # like a daemon: its parent has exited, and it leads a new session
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            time.sleep(300)
        os._exit(0)
    found.append(int(os.read(reader, 100)))
    os.wait()
    print("in", *found, flush=True)
    ctypes.PyDLL(None).sleep(300) if rank() == 1 else time.sleep(300)
"""
NO_SERVER = "from notebook_accelerate.launch.processes import zygote\nzygote.close_zygote()\n"


def _started(kernel: Kernel, method: str, before: str) -> tuple[Cell, list[int]]:
    """Launch ranks that start other processes. Return the cell, and the ids of all processes."""
    cell = kernel.check(f"{GRANDCHILDREN}\n{before}run = launch(train, start_method={method!r}, block=False)")
    kernel.wait_for(lambda: cell.stdout.count("] in") >= 2, timeout=60)
    lines = [line for line in cell.stdout.splitlines() if "] in" in line]
    grandchildren = [int(pid) for line in lines for pid in line.partition("] in ")[2].split()]
    assert len(grandchildren) == 16
    others = [child.pid for child in kernel.process.children(recursive=True)]
    return cell, sorted({*others, *grandchildren, *rank_pids(kernel)})


@pytest.mark.parametrize(
    ("method", "before"),
    [
        pytest.param("fork", "", id="fork"),
        pytest.param("fork", NO_SERVER, id="fork without server"),
        pytest.param("zygote", "", id="zygote"),
        pytest.param("spawn", "", id="spawn", marks=pytest.mark.nightly),
        pytest.param("spawn", NO_SERVER, id="spawn without server"),
    ],
)
def test_grandchildren_do_not_outlive_a_killed_kernel(method: str, before: str) -> None:
    with ready_kernel() as kernel:
        _, pids = _started(kernel, method, before)
        kernel.kill()
        wait_gone(pids, SOON)


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_rank_that_left_its_process_group_is_killed(method: str) -> None:
    with ready_kernel() as kernel:
        cell = kernel.check(
            "def train():\n"
            "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
            "        signal.signal(number, signal.SIG_IGN)\n"
            "    os.setpgid(0, os.getpgid(os.getppid()))\n"
            "    print('in', flush=True)\n    time.sleep(300)\n"
            f"run = launch(train, start_method={method!r}, block=False)"
        )
        kernel.wait_for(lambda: cell.stdout.count("] in") >= 2, timeout=60)
        pids = rank_pids(kernel)
        kernel.check("run.stop(grace=1.0)")
        wait_gone(pids, SOON)
        assert kernel.value("run.status") == "stopped"


def test_the_end_of_a_run_leaves_no_guard() -> None:
    with ready_kernel() as kernel:
        kernel.check(f"{NO_SERVER}results = launch(rank, start_method='fork').results")
        shells = [
            child for child in kernel.process.children(recursive=True) if "Max file locks" in str(child.cmdline())
        ]
        assert shells == []


def test_a_killed_kernel_does_not_affect_ranks_of_another_one() -> None:
    start = (
        "def train():\n    print('in', subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)\n"
        "    time.sleep(300)\nrun = launch(train, block=False, start_method='fork')"
    )
    with ready_kernel() as one, ready_kernel() as other:
        cells = [kernel.check(start) for kernel in (one, other)]
        for kernel, cell in zip((one, other), cells, strict=True):
            kernel.wait_for(lambda cell=cell: cell.stdout.count("] in") >= 2, timeout=60)
        mine, theirs = (
            [int(line.split()[-1]) for line in cell.stdout.splitlines() if "] in" in line] for cell in cells
        )
        ranks = rank_pids(other)
        one.kill()
        wait_gone(mine, SOON)
        assert set(alive([*theirs, *ranks])) == {*theirs, *ranks}
        other.kill()
        wait_gone([*theirs, *ranks], SOON)


def test_ranks_of_a_rank_do_not_outlive_a_killed_kernel() -> None:
    with ready_kernel() as kernel:
        cell = kernel.check(
            "def inner():\n"
            "    print('in', subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)\n"
            "    time.sleep(300)\n"
            "def outer():\n"
            "    if rank() == 0:\n        notebook_launcher(inner, num_processes=2, start_method='fork')\n"
            "    time.sleep(300)\n"
            "run = launch(outer, block=False, start_method='fork')"
        )
        kernel.wait_for(lambda: cell.stdout.count("] in") >= 2, timeout=60)
        pids = [int(line.split()[-1]) for line in cell.stdout.splitlines() if "] in" in line]
        pids += [child.pid for child in kernel.process.children(recursive=True)]
        kernel.kill()
        wait_gone(pids, SOON)


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_rank_that_executes_another_program_is_stopped(method: str) -> None:
    with ready_kernel() as kernel:
        kernel.check(
            f"run = launch(lambda: os.execvp('sleep', ['sleep', '300']), block=False, start_method={method!r})"
        )
        kernel.pump(1.0)
        pids = rank_pids(kernel)
        kernel.check("run.stop(grace=1.0)")
        wait_gone(pids, SOON)


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_rank_stopped_by_a_signal_ends_with_the_run(method: str) -> None:
    with ready_kernel() as kernel:
        kernel.check(f"run = launch(lambda: os.kill(os.getpid(), 19), block=False, start_method={method!r})")
        kernel.pump(1.0)
        pids = rank_pids(kernel)
        kernel.check("run.stop(grace=1.0)")
        wait_gone(pids, SOON)


def test_a_stopped_zygote_is_replaced_as_guard() -> None:
    with ready_kernel() as kernel:
        kernel.check("launch(rank, start_method='zygote')")
        server = kernel.value("__import__('notebook_accelerate.launch.processes.zygote', fromlist=['x'])._zygote.pid")
        os.kill(server, signal.SIGSTOP)
        try:
            _, pids = _started(kernel, "fork", "")
            kernel.kill()
            wait_gone([pid for pid in pids if pid != server], SOON)
        finally:
            os.kill(server, signal.SIGKILL)


def test_a_zygote_stopped_while_its_ranks_run_is_replaced_as_guard() -> None:
    with ready_kernel() as kernel:
        _, pids = _started(kernel, "zygote", "")
        server = kernel.value("__import__('notebook_accelerate.launch.processes.zygote', fromlist=['x'])._zygote.pid")
        os.kill(server, signal.SIGSTOP)
        try:
            kernel.pump(3.0)
            kernel.kill()
            wait_gone([pid for pid in pids if pid != server], SOON)
        finally:
            os.kill(server, signal.SIGKILL)


def test_a_zygote_that_dies_before_its_kernel_is_replaced_as_guard() -> None:
    with ready_kernel() as kernel:
        cell, pids = _started(kernel, "fork", "")
        kernel.check("from notebook_accelerate.launch.processes import zygote\nos.kill(zygote.ensure_zygote().pid, 9)")
        kernel.pump(3.0)
        assert cell.ok
        kernel.kill()
        wait_gone(pids, SOON)
