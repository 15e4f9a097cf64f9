"""Many launches in a row leave nothing behind, however they end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import children

pytestmark = pytest.mark.notebook

LOOK = """
import collections, re

def descriptors(eventfd=False):
    # Not counted: files that IPython's history thread opens briefly (its database, a journal, their folder), and the
    # pipe that ipykernel keeps per thread that has published something. It closes pipes of ended threads every 10 s.
    found = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = re.sub(r"[0-9]+", "N", os.readlink("/proc/self/fd/" + name))
        except OSError:
            continue
        if not re.search("history.sqlite|profile_default$", kind) and ("eventfd" in kind) == eventfd:
            found[kind] += 1
    return found

def look():
    gc.collect()
    return {
        "threads": sorted(t.name for t in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": descriptors(),
        "environment": dict(os.environ),
        "handlers": [str(signal.getsignal(s)) for s in (2, 15, 1, 17, 10)],
        "streams": [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
        "cwd": os.getcwd(),
        "torch threads": torch.get_num_threads(),
    }
"""


LIMIT = 60.0
"""The time limit in seconds for things that disappear by themselves a moment later."""
LOOKS = 4


def _settled(kernel: Kernel) -> dict[str, Any]:
    """Return the state of the kernel once several consecutive samples agree."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + LIMIT
    while len(found) < LOOKS or any(look != found[-1] for look in found[-LOOKS:]):
        assert time.monotonic() < deadline, found[-LOOKS:]
        kernel.pump(0.3)
        found.append(kernel.value("look()"))
    return found[-1]


def _as_before(kernel: Kernel, before: dict[str, Any]) -> None:
    """Wait until the state equals the earlier one: ended processes may remain visible for a moment."""
    deadline = time.monotonic() + LIMIT
    while (after := kernel.value("look()")) != before and time.monotonic() < deadline:
        kernel.pump(0.3)
    assert after == before


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_twenty_launches_in_a_row_leave_nothing(kernel: Kernel, method: str) -> None:
    kernel.check(LOOK)
    kernel.check(f"launch(rank, start_method={method!r})")
    # Make zmq start the thread that it needs for large messages.
    kernel.check("launch(time.sleep, 1.0, panel=True)")
    before = _settled(kernel)
    cell = kernel.check(
        f"""
outcomes = []
def fail():
    if rank() == 1: raise KeyError
    time.sleep(600)
for number in range(20):
    try:
        launch(fail if number % 5 == 4 else rank, start_method={method!r})
        outcomes.append(1)
    except notebook_accelerate.WorkerError:
        outcomes.append(0)
sum(outcomes)
""",
        timeout=150,
    )
    assert cell.result_text == "16"
    _as_before(kernel, before)
    assert children(kernel) == []


def test_ipykernels_pipes_of_ended_threads_do_not_accumulate(kernel: Kernel) -> None:
    kernel.check(LOOK)
    before = kernel.value("descriptors(eventfd=True).total()")
    kernel.check("for _ in range(20): launch(rank)")
    deadline = time.monotonic() + LIMIT
    while kernel.value("descriptors(eventfd=True).total()") > before + 2:
        assert time.monotonic() < deadline
        kernel.pump(0.5)


@pytest.mark.timeout(400)
def test_every_kind_of_end_leaves_nothing(kernel: Kernel) -> None:
    kernel.check(LOOK)
    # Make zmq start the thread that it needs for large messages.
    kernel.check("launch(time.sleep, 1.0, panel=True)")
    before = _settled(kernel)
    kernel.check(
        """
def attempt(function, **options):
    try:
        run = launch(function, **options)
        run.stop(grace=0.2)
    except (notebook_accelerate.NotebookAccelerateError, ValueError):
        pass
attempt(lambda: os._exit(3))
attempt(lambda: os.kill(os.getpid(), 9))
attempt(lambda: time.sleep(600), timeout=0.2)
attempt(lambda: time.sleep(600), block=False)
attempt(lambda: 1 / 0, max_restarts=2)
attempt(lambda: threading.Lock())
attempt(threading.Lock(), start_method="zygote")
attempt(lambda: 1, num_processes=1)
attempt(lambda: 1 / 0, num_processes=1)
attempt(lambda: 1, num_nodes=2, use_port=29733, rdzv_conf={"join_timeout": 1})
"""
    )
    _as_before(kernel, before)
    assert children(kernel) == []


def test_one_of_two_concurrent_launches_may_fail(kernel: Kernel) -> None:
    cell = kernel.check(
        """
def meet(bad):
    group()
    time.sleep(0.3)
    if bad and rank() == 1: raise KeyError("bad")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()
runs = [launch(meet, bad, block=False, use_port="29533") for bad in (False, True)]
for run in runs:
    run.wait()
[run.status for run in runs], runs[0].results
"""
    )
    assert cell.result_text == "(['succeeded', 'failed'], (2.0, 2.0))"


def test_a_taken_port_is_reported_in_one_line(kernel: Kernel) -> None:
    cell = kernel.check(
        """
import socket
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
def meet():
    group()
    dist.barrier()  # gloo returns once this rank is connected: exiting now would break the other rank's connections
    return int(os.environ["MASTER_PORT"]) != port
results = launch(meet, use_port=port).results
server.close()
results
"""
    )
    assert cell.result_text == "(True, True)"
    assert len([line for line in cell.stdout.splitlines() if "is taken, using" in line]) == 1
    refused = kernel.run(
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "try:\n    launch(rank, use_port=server.getsockname()[1], num_nodes=2)\nfinally:\n    server.close()"
    )
    assert refused.error is not None
    assert refused.error.ename == "PortInUseError"
    assert "\n" not in refused.error.evalue
