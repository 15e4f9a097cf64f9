"""A forked kernel behaves like a kernel in a new interpreter, except for its imports."""

from __future__ import annotations

import pytest

from tests.support import kernel_forks
from tests.support.kernel import Kernel

_FACTS = """
import faulthandler, os, signal, sys, threading
links = sorted(os.readlink(f"/proc/self/fd/{name}").split(":")[0] for name in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{name}"))
facts = {
    "arguments": [os.path.basename(sys.argv[0]), *sys.argv[1:2]],
    "path": sys.path,
    "flags": [str(sys.flags), faulthandler.is_enabled()],
    "environment": {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"},
    "handlers": {each.name: str(signal.getsignal(each)).split(" at ")[0] for each in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": sorted(each.name for each in threading.enumerate()),
    "descriptors": [link for link in links if not link.startswith("/tmp")],
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "main": sys.modules["__main__"].__name__,
    "user": get_ipython().user_ns is sys.modules["__main__"].__dict__,
    "limit": sys.getrecursionlimit(),
}
"""


@pytest.fixture(autouse=True)
def _forked() -> None:
    if not kernel_forks.can_fork({}):
        pytest.skip("kernels are separate interpreters here")


def _facts(kernel: Kernel) -> dict[str, object]:
    kernel.check(_FACTS)
    facts: dict[str, object] = kernel.value("facts")
    return {name: str(value).replace(str(kernel.folder), "FOLDER") for name, value in facts.items()}


def test_a_forked_kernel_behaves_like_any_other() -> None:
    with Kernel() as forked, Kernel(forked=False) as own:
        assert forked.process.cmdline() != own.process.cmdline()
        assert _facts(forked) == _facts(own)


def test_a_forked_kernel_can_be_interrupted_and_killed() -> None:
    with Kernel() as kernel:
        # A single long sleep would miss a signal that arrives just before it starts.
        cell = kernel.submit("import time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.05)")
        kernel.wait_for(lambda: "begun" in cell.stdout)
        kernel.interrupt()
        error = kernel.finish(cell, timeout=60).error
        assert error is not None
        assert error.ename == "KeyboardInterrupt"
        kernel.check("import os; os.write(2, b'written by the kernel')")
        assert "written by the kernel" in kernel.log
        kernel.kill()
        assert not kernel.alive()
