"""The probe that finds out if a kernel is safe to fork. Each hazard is real, and is created in a separate process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.launch.processes import fork_probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kernels are forked")


def _told(script: str, **environment: str) -> Any:
    """Run a script in a new interpreter. Return the JSON on its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", "import json, os, threading, time\n" + textwrap.dedent(script)],
        env={**os.environ, **environment},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HAZARD = """
from notebook_accelerate.launch.processes import fork_probe
print(json.dumps(fork_probe.fork_hazard()))
"""


def test_a_plain_kernel_is_safe() -> None:
    assert not _told(HAZARD)


def test_a_warm_openmp_team_of_the_main_thread_is_no_hazard() -> None:
    """Like the ranks, the probe is forked from a thread other than the one that the team belongs to."""
    script = """
    import torch
    torch.set_num_threads(2)
    (torch.ones(1 << 20) * 2).sum()
    """
    assert not _told(textwrap.dedent(script) + HAZARD, OMP_NUM_THREADS="2")


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc"])
def test_another_allocator_is_recognized_by_its_library(tmp_path: Path, name: str) -> None:
    """Any library will do: the check looks for its name in the memory map, and LD_PRELOAD puts it there."""
    found = re.search(r"/\S+/libm[.-]\S+", Path("/proc/self/maps").read_text())
    if found is None:
        pytest.skip("this interpreter has its libraries built in")
    library = shutil.copy(found.group(), tmp_path / f"lib{name}.so.2")
    assert _told(HAZARD, LD_PRELOAD=str(library)) == f"{name} is the kernel's allocator"


def test_an_open_process_group_is_a_hazard() -> None:
    script = """
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    """
    assert _told(textwrap.dedent(script) + HAZARD) == "a process group is open in the kernel"


def test_a_computing_thread_is_a_hazard() -> None:
    script = """
    def spin():
        while True:
            sum(range(1000))
    threading.Thread(target=spin, name="cruncher", daemon=True).start()
    from notebook_accelerate.launch.processes import fork_probe
    found, end = "", time.monotonic() + 60
    while not found and time.monotonic() < end:  # a busy machine may have it wait during one look
        found = fork_probe.fork_hazard()
    print(json.dumps(found))
    """
    assert _told(script) == "thread 'cruncher' is computing in the kernel"


def test_a_computing_thread_of_the_kernel_is_no_hazard() -> None:
    """Garbage may be collected in any thread, such as the one that polls the kernel's parent."""
    script = """
    def spin():
        while True:
            sum(range(1000))
    Poller = type("Poller", (threading.Thread,), {"__module__": "ipykernel.parentpoller"})
    Poller(target=spin, daemon=True).start()
    from notebook_accelerate.launch.processes import fork_probe
    print(json.dumps({fork_probe.fork_hazard() for _ in range(5)} == {""}))
    """
    assert _told(script) is True


@pytest.mark.parametrize("broken", ["time.sleep(600)", "os._exit(3)", "os.kill(os.getpid(), 11)"])
def test_a_probe_that_fails_is_a_hazard(broken: str) -> None:
    """Library code may kill a forked child, or hang in it until the probe kills it. Nothing is left behind."""
    script = f"""
    import psutil
    from notebook_accelerate.launch.processes import fork_probe
    os.register_at_fork(after_in_child=lambda: {broken})
    fork_probe.PROBE_SECONDS = 0.5
    begin = time.monotonic()
    hazards = [fork_probe.probe(0.5), fork_probe.probe_if_changed(), fork_probe.probe_if_changed()]
    took = time.monotonic() - begin
    descriptors = len(os.listdir("/proc/self/fd"))
    hazards.append(fork_probe.probe(0.5))
    left = len(os.listdir("/proc/self/fd")) - descriptors
    print(json.dumps([hazards, took, len(psutil.Process().children()), left]))
    """
    hazards, took, children, descriptors = _told(script)
    assert hazards == ["a probe forked from the kernel did not finish"] * 4  # Failures are not cached.
    assert (children, descriptors) == (0, 0)
    assert took < 60, "the child sleeps for ten minutes, so its time limit ended it"


def test_a_launch_from_an_unsafe_kernel_forks_from_the_zygote() -> None:
    script = """
    import notebook_accelerate
    os.register_at_fork(after_in_child=lambda: time.sleep(600))
    run = notebook_accelerate.notebook_launcher(os.getpid, num_processes=2, use_port=0, panel=False)
    notebook_accelerate.shutdown()
    print(json.dumps([run.plan.start_method, run.plan.reason, len(set(run.results))]))
    """
    method, reason, ranks = _told(script)
    assert (method, ranks) == ("zygote", 2)
    assert "a probe forked from the kernel did not finish" in reason


def test_a_probe_is_not_repeated_while_the_kernel_is_unchanged(tmp_path: Path) -> None:
    """Libraries that are loaded later and new threads may make forking unsafe, so the probe is repeated after them."""
    script = f"""
    import ctypes, re, shutil
    from notebook_accelerate.launch.processes import fork_probe
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    def probed():
        before = len(forks)
        assert not fork_probe.probe_if_changed()
        return len(forks) - before
    def wait(name):
        hold = threading.Event()
        threading.Thread(target=hold.wait, name=name, daemon=True).start()
    found = [probed(), probed()]
    wait("worker-1")
    found += [probed(), probed()]
    wait("worker-2")
    found.append(probed())
    library = re.search(r"/\\S+/libm[.-]\\S+", open("/proc/self/maps").read())
    if library:
        ctypes.CDLL(shutil.copy(library.group(), {str(tmp_path / "libother.so")!r}))
        found += [probed(), probed()]
    print(json.dumps(found))
    """
    assert _told(script)[:7] in ([1, 0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0])


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/env/site-packages/psygnal/_evented_decorator.cpython-311-x86_64-linux-gnu.so", False),
        ("/env/site-packages/ac51d50a4f4b6d748b8c__mypyc.cpython-311-x86_64-linux-gnu.so", False),
        ("/env/psygnal/site-packages/torch/lib/libtorch.so", True),
        ("/env/site-packages/numba/_dispatcher.cpython-311-x86_64-linux-gnu.so (deleted)", True),
    ],
)
def test_a_new_library_requires_a_probe_unless_it_was_compiled_from_python(path: str, *, changes: bool) -> None:
    line = f"7f00-7f01 r-xp 00000000 00:00 1    {path}\n"
    libraries, _ = fork_probe._libraries_and_threads(line)
    assert (libraries != fork_probe._libraries_and_threads("")[0]) is changes


def test_an_interrupt_while_waiting_for_the_probe_leaves_no_child() -> None:
    script = """
    import psutil, signal
    from notebook_accelerate.launch.processes import fork_probe
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    os.register_at_fork(after_in_child=lambda: time.sleep(600))
    wait = fork_probe.wait_readable
    def press():
        os.kill(os.getpid(), signal.SIGINT)
    def wait_and_press(*arguments):
        assert len(psutil.Process().children()) == 1
        threading.Thread(target=press, daemon=True).start()
        return wait(*arguments)
    fork_probe.wait_readable = wait_and_press  # not sooner: the fork must have returned
    try:
        fork_probe.probe(60)
    except KeyboardInterrupt:
        print(json.dumps(len(psutil.Process().children())))
    """
    assert _told(script) == 0
