"""Several kernels that run one cell together, as notebooks on several machines would."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.support import launching
from tests.support.kernel import Cell, Kernel
from tests.support.ports import free_port

LIMIT = 150.0
"""The time limit in seconds for steps that take a few seconds on an idle machine."""
LOOK = """
import gc
def look():
    gc.collect()
    join_runs()
    return {
        "threads": sorted(t.name for t in threading.enumerate() if not t.name.startswith("Thread-")),  # ipykernel's
        "sockets": len([name for name in os.listdir("/proc/self/fd") if fd_is_socket(name)]),
        "environment": dict(os.environ),
        "handlers": [str(signal.getsignal(s)) for s in (2, 15, 1, 17, 10)],
        "elastic": "torch.distributed.elastic.rendezvous.dynamic_rendezvous" in sys.modules,
        "group": dist.is_initialized(),
    }
def fd_is_socket(name):
    try:
        return os.readlink("/proc/self/fd/" + name).startswith("socket:")
    except OSError:
        return False
"""
"""A cell that defines `look()`, which returns the state of a kernel that a launch must not change."""
SETUP = (
    """
import re
def meet(fail=-1, pause=0.0):
    group()
    value = torch.tensor([float(rank())])
    dist.all_reduce(value)
    print("sum", value.item(), "of", os.environ["WORLD_SIZE"], "here", os.environ["LOCAL_WORLD_SIZE"])
    if rank() == fail:
        raise KeyError("bad batch")
    time.sleep(pause)
    dist.barrier()
    return value.item()
"""
    + LOOK
)


class Notebooks:
    """The kernels of several notebooks, in the order of their nodes."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = list(kernels)

    def submit(self, *calls: str) -> list[Cell]:
        """Send each kernel its own cell."""
        return [kernel.submit(call) for kernel, call in zip(self.kernels, calls, strict=False)]

    def launch(self, function: str, *own: str, **options: Any) -> list[Cell]:
        """Send each kernel a launch of a function.

        Args:
            function: The function and its arguments, for example "meet, 1".
            own: Further arguments for each notebook's launcher, such as "num_processes=2", one string per notebook.
            options: Arguments for all launchers. `num_nodes` and a free port are added.
        """
        given = {"num_nodes": len(own), "use_port": free_port(), "panel": True, **options}
        common = ", ".join(f"{name}={value!r}" for name, value in given.items())
        static = given.get("rdzv_backend", "static") == "static"
        places = [f", node_rank={index}" if static else "" for index in range(len(own))]
        return self.submit(
            *(f"run = launch({function}, {mine}, {common}{at})" for mine, at in zip(own, places, strict=True))
        )

    def finish(self, cells: Sequence[Cell], timeout: float = LIMIT) -> list[Cell]:
        """Wait until each kernel's cell has finished."""
        return [kernel.finish(cell, timeout) for kernel, cell in zip(self.kernels, cells, strict=False)]

    def wait_until_all_print(self, cells: Sequence[Cell], text: str, counts: Sequence[int]) -> None:
        """Wait until each cell shows `text` this many times."""
        for kernel, cell, count in zip(self.kernels, cells, counts, strict=False):
            shown = partial(_shows, cell, text, count)
            kernel.wait_for(shown, LIMIT, f"{count} lines with {text!r}")
            assert cell.error is None, (cell.stdout, cell.stderr, cell.error)

    def wait_until_all(self, condition: str) -> None:
        """Wait until an expression is true in every kernel."""
        deadline = time.monotonic() + LIMIT
        while not all(self.values(condition)):
            assert time.monotonic() < deadline, f"still false after {LIMIT} s: {condition}"
            time.sleep(0.1)

    def changed(self, before: Sequence[dict[str, Any]], seconds: float = LIMIT) -> list[dict[str, Any]]:
        """Return how `look()` differs from `before` in each kernel. Differences that disappear in time do not count."""
        deadline = time.monotonic() + seconds
        while True:
            pairs = zip(before, self.values("look()"), strict=True)
            found = [{name: (was[name], now[name]) for name in was if was[name] != now[name]} for was, now in pairs]
            if not any(found) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)  # ipykernel releases a thread's resources a little after the thread has ended.

    def values(self, expression: str) -> list[Any]:
        """Return the value of an expression in each kernel."""
        return [kernel.value(expression, LIMIT) for kernel in self.kernels]


def _shows(cell: Cell, text: str, count: int) -> bool:
    return cell.error is not None or cell.stdout.count(text) >= count


@contextmanager
def notebooks(count: int, prefixes: Sequence[Sequence[str]] = ()) -> Iterator[Notebooks]:
    """Start kernels and run `SETUP` in each.

    Args:
        count: The number of kernels.
        prefixes: For each kernel, the prefix of its command.
    """
    kernels: list[Kernel] = []
    try:
        # Don't use threads to start the kernels: on each, jupyter_client would create an event loop and never close it.
        for prefix in prefixes or [()] * count:
            kernels.append(Kernel(prefix=prefix, timeout=LIMIT))  # noqa: PERF401 - those that started are closed
        found = Notebooks(kernels)
        # The launch makes zmq start the thread that it needs for large messages.
        for code in (launching.SETUP, SETUP, "launch(time.sleep, 1.0, panel=True)", "look()"):
            for cell in found.finish(found.submit(*[code] * count)):
                cell.expect_ok()
        yield found
    finally:
        for kernel in kernels:
            kernel.close()


__all__ = ["LIMIT", "Notebooks", "notebooks"]
