"""A forked kernel behaves like a kernel in a new interpreter, except for its imports."""

from __future__ import annotations

import psutil
import pytest

from tests.support import kernel_forks
from tests.support.kernel import Kernel
from tests.support.waiting import until

_FACTS = """
import faulthandler, ipywidgets, os, signal, sys, threading
from notebook_accelerate import notebook_launcher
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
    "comms": sorted(get_ipython().kernel.comm_manager.targets),
    "hooks": [str(each).split(" at ")[0] for each in get_ipython().events.callbacks["post_run_cell"]],
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
    with Kernel(server=False) as forked, Kernel(server=False, forked=False) as own:
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


_START_TWO = """
import json
from notebook_accelerate.launch.processes import interpreters
program = open(PATH).read()
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
os.environ["ADDED"] = "later"
os.mkdir("below")
os.chdir("below")
reader, writer = os.pipe()
found = []
for _ in range(2):
    with open("log", "w+b") as log:
        with interpreters.uninterrupted():
            process = interpreters.start_interpreter(program, [writer], log.fileno())
        code = process.wait(60)
        log.seek(0)
        assert code == 3, log.read()
        found.append(json.loads(log.read()))
"""
_INTERPRETER_FACTS = """
import json, os, resource, signal, sys, threading
from notebook_accelerate.launch.processes import zygote
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path,
    "main": [__name__, sys.modules["__main__"].__dict__ is globals()],
    "environment": dict(os.environ),
    "handlers": [str(signal.getsignal(each)).split(" at ")[0] for each in signal.Signals],
    "blocked": list(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "threads": [each.name for each in threading.enumerate()],
    "descriptors": sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)),
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid()],
    "limits": [resource.getrlimit(limit) for limit in range(16)],
    "folder": os.getcwd(),
    "stdin": os.readlink("/proc/self/fd/0"),
}))
sys.exit(3)
"""


def test_the_spare_process_becomes_the_first_interpreter_that_a_kernel_starts() -> None:
    with Kernel() as kernel:
        (spare,) = kernel.process.children()
        (kernel.cwd / "program.py").write_text(_INTERPRETER_FACTS)
        kernel.check(f"import os, resource\nPATH = {str(kernel.cwd / 'program.py')!r}" + _START_TWO)
        forked, own = kernel.value("found")
        assert forked == own
        assert forked["session"] == [True, True, kernel.pid]
        assert not spare.is_running()


def test_the_spare_process_ends_with_its_kernel() -> None:
    with Kernel() as kernel:
        (spare,) = kernel.process.children()
        kernel.kill()
        until(lambda: not spare.is_running() or spare.status() == psutil.STATUS_ZOMBIE, seconds=60)
