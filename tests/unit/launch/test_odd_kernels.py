"""Launches from interpreters in unusual states. Unless a test chooses another start method, the ranks are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreters import InterpreterServer

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kernels are forked")

PRELUDE = """
import json, os, signal, sys, threading, time
from notebook_accelerate import notebook_launcher

def launch(function, *args, **options):
    options = {"num_processes": 2, "use_port": 0, "panel": False, "start_method": "fork", **options}
    return notebook_launcher(function, args, **options)

def report(value):
    print("\\nvalue:" + json.dumps(value), file=sys.__stdout__, flush=True)

def ended(function, **options):
    try:
        return launch(function, **options).results
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def evaluate(interpreters: InterpreterServer, script: str, **environment: str) -> Any:
    """Run a script that calls ``report(value)``, and return the value."""
    return _value(interpreters.run("-c", PRELUDE + textwrap.dedent(script), env={**os.environ, **environment}))


def run_interpreter(script: str, *, prefix: Sequence[str] = (), cwd: Path = ROOT, **environment: str) -> Any:
    """Run a script in a new interpreter, which the command ``prefix`` starts. Return the value that it reports."""
    command = [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    return _value(done)


def _value(done: subprocess.CompletedProcess[str]) -> Any:
    assert "\nvalue:" in done.stdout, done.stderr
    return json.loads(done.stdout.rpartition("\nvalue:")[2])


def test_ranks_are_reaped_by_a_python_without_p_pidfd() -> None:
    assert run_interpreter("del os.P_PIDFD\nreport(ended(lambda: 1))") == [1, 1]


# ---- processes that other code reaps

IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
REAPER = """
def reap():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.02)
threading.Thread(target=reap, daemon=True).start()
"""
ENDS = """
def train(what):
    if what == "raise":
        raise ValueError("wrong")
    if what == "exit":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid() > 0

found = {what: ended(lambda: train(what), start_method=method) for what in ("return", "raise", "exit", "kill")}
run = launch(time.sleep, 600, block=False, start_method=method)
run.stop(1.0)
found["stop"] = run.status
report(found)
"""


@pytest.mark.parametrize(
    ("reaping", "method"),
    [
        pytest.param(IGNORED, "fork", id="SIGCHLD ignored-fork"),
        pytest.param(IGNORED, "spawn", id="SIGCHLD ignored-spawn", marks=pytest.mark.nightly),
        pytest.param(REAPER, "fork", id="os.wait in a thread-fork"),
        pytest.param(REAPER, "spawn", id="os.wait in a thread-spawn", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_other_code_reaps_are_judged_by_their_messages(
    interpreters: InterpreterServer, reaping: str, method: str
) -> None:
    found = evaluate(interpreters, f"method = {method!r}\n" + reaping + ENDS)
    assert found["return"] == [True, True]
    assert "ValueError: wrong" in found["raise"]
    for kind in ("exit", "kill"):  # The thread may reap the rank later than the supervisor does.
        known = {"exit": "exit status 3", "kill": "SIGKILL"}[kind]
        unknown = "before the function returned; its exit status is unknown, because the kernel ignores SIGCHLD"
        assert unknown in found[kind] or (reaping == REAPER and known in found[kind]), found[kind]
    assert found["stop"] == "stopped"


# ---- standard streams that the user has replaced

STREAMS = """
import io
class Tee:
    def __init__(self):
        self.text = ""
    def write(self, text):
        self.text += text
class Broken:
    encoding = "utf-8"
    def write(self, text):
        raise RuntimeError("this stream is broken")
    def flush(self):
        raise OSError("this too")
class Detached(io.TextIOWrapper):
    pass
streams = {
    "Tee": Tee(),
    "None": None,
    "ASCII": io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"),
    "Broken": Broken(),
    "closed": open(os.devnull, "w"),
    "detached": io.TextIOWrapper(io.BytesIO()),
    "no stream": object(),
}
streams["closed"].close()
streams["detached"].detach()
"""
PRINTING = """
def train():
    print("é → wörld", flush=True)
    print("to stderr ✓", file=sys.stderr)
    sys.stdout.flush()
    return "é"

sys.stdout = sys.stderr = stream = streams[name]
try:
    found = ended(train, **options)
finally:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
run = notebook_accelerate.runs()[-1]
shown = stream.text if name == "Tee" else ""
if name == "ASCII":
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")
report([found, run.status, sorted(run.logs(0)), shown])
"""


@pytest.mark.parametrize("name", ["Tee", "None", "ASCII", "Broken", "closed", "detached", "no stream"])
@pytest.mark.parametrize("method", ["fork", "inline"])
def test_a_launch_works_with_any_standard_streams(interpreters: InterpreterServer, method: str, name: str) -> None:
    options = {"num_processes": 1, "start_method": method}
    script = f"import notebook_accelerate\nname, options = {name!r}, {options!r}\n" + STREAMS + PRINTING
    found, status, lines, shown = evaluate(interpreters, script, PYTHONUTF8="1")
    assert (found, status) == (["é"], "succeeded")
    assert {"to stderr ✓", "é → wörld"} <= set(lines)
    if name == "Tee":
        assert "é → wörld\n" in shown
    if name == "ASCII":
        assert "\\xe9 \\u2192 w\\xf6rld\n" in shown


def test_a_rank_that_asks_through_a_broken_stream_gets_no_answer(interpreters: InterpreterServer) -> None:
    script = """
    def train():
        try:
            return input("naïve? ")
        except EOFError:
            return "no answer"
    sys.stdout = streams["Broken"]
    found = ended(train, num_processes=1)
    sys.stdout = sys.__stdout__
    report(found)
    """
    assert evaluate(interpreters, STREAMS + textwrap.dedent(script)) == ["no answer"]


# ---- descriptors above 1,024, names that are not UTF-8, no /proc

MANY_FILES = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
files = [open(os.devnull) for _ in range(2000)]
"""
COLLECTIVE = """
def train():
    import torch, torch.distributed as dist
    from notebook_accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    return accelerator.reduce(torch.ones(1)).item()

report([ended(train, start_method=method) for method in methods])
"""


def test_launches_work_with_more_open_files_than_select_supports(interpreters: InterpreterServer) -> None:
    script = MANY_FILES + "methods = ['fork', 'auto', 'zygote']" + COLLECTIVE
    assert evaluate(interpreters, script) == [[2.0, 2.0]] * 3


NOT_UTF8 = """
import ctypes, mmap, tempfile
libc = ctypes.CDLL(None)
def name_thread():
    libc.prctl(15, b"caf\\xe9 \\xff", 0, 0, 0)  # PR_SET_NAME
    named.set()
    time.sleep(600)
named = threading.Event()
threading.Thread(target=name_thread, daemon=True).start()
named.wait()
folder = tempfile.TemporaryDirectory()
path = os.path.join(os.fsencode(folder.name), b"lib\\xff\\xe9.so")
with open(path, "wb") as file:
    file.write(bytes(4096))
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
libc.prctl(15, b"\\xe9t\\xe9", 0, 0, 0)
"""


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}])
def test_names_of_threads_and_files_may_be_any_bytes(locale: dict[str, str]) -> None:
    script = NOT_UTF8 + "methods = ['fork']" + COLLECTIVE
    assert run_interpreter(script, **locale) == [[2.0, 2.0]]


def _need_privileges(namespace: str) -> None:
    if subprocess.run(["unshare", namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a separate mount or network namespace needs privileges")


def test_a_system_without_proc_can_launch() -> None:
    """Some containers have no /proc. There, only the zygote is forked, and never the kernel itself."""
    _need_privileges("-m")
    hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    script = "methods = ['auto', 'zygote', 'spawn', 'fork']" + COLLECTIVE
    *found, refused = run_interpreter(script, prefix=hidden)
    assert found == [[2.0, 2.0]] * 3
    assert refused == (
        "ValueError: start_method='fork' is not safe now: there is no /proc, which shows whether forking is safe; "
        "pass 'auto' or 'zygote'"
    )


# ---- import paths


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_a_relative_pythonpath_does_not_follow_the_kernel_to_another_folder(tmp_path: Path, method: str) -> None:
    """If PYTHONPATH named that folder, a .pth file or a flag could make interpreters import its `types` at once."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (there / "types.py").write_text("raise RuntimeError('this is the types.py of the user')\n")
    script = f"""
    from pathlib import Path
    os.chdir({str(there)!r})
    sys.path.insert(0, Path({str(there)!r}))  # Python ignores what is no string
    report(ended(lambda: os.environ["PYTHONPATH"], start_method={method!r}))
    """
    path = f":{ROOT}"
    assert run_interpreter(script, cwd=here, PYTHONPATH=path, PYTHONSTARTUP="") == [path] * 2


# ---- ports and the loopback interface

TAKEN_NAMES = """
import socket
first, last = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
held = []
for port in range(first, last + 1):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    held[-1].bind(f"\\0notebook_accelerate.port.{port}")
"""
TAKEN_PORTS = """
import socket
held = []
while True:
    held.append(socket.socket())
    try:
        held[-1].bind(("127.0.0.1", 0))
        held[-1].listen()
    except OSError:
        break
"""
NETWORK = ["unshare", "-n", "sh", "-c"]
FEW_PORTS = [*NETWORK, 'ip link set lo up && sysctl -qw net.ipv4.ip_local_port_range="40000 40099" && exec "$@"', "sh"]


@pytest.mark.parametrize("taken", [TAKEN_NAMES, TAKEN_PORTS], ids=["names", "ports"])
def test_a_search_for_a_port_ends_if_all_are_taken(taken: str) -> None:
    _need_privileges("-n")
    search = """
    from notebook_accelerate.launch.processes import ports
    begin = time.monotonic()
    try:
        found = ports.reserve(1, 0, fixed=False)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    report([found, time.monotonic() - begin])
    """
    found, took = run_interpreter(taken + textwrap.dedent(search), prefix=FEW_PORTS)
    assert found.startswith("PortInUseError: no free port was found on this machine")
    assert took < 60, "the search must not go on forever"


@pytest.mark.parametrize("setup", ["true", "ip link set lo up && ip link set lo down"])
def test_a_loopback_interface_that_is_down_is_reported_immediately(setup: str) -> None:
    _need_privileges("-n")
    script = 'methods = ["fork"]' + COLLECTIVE
    (found,) = run_interpreter(script, prefix=[*NETWORK, f'{setup}; exec "$@"', "sh"])
    assert found.startswith("LaunchError: ranks cannot reach each other: connections to 127.0.0.1 fail (")


# ---- other states of a kernel


def test_a_kernel_out_of_descriptors_gets_a_clear_error_and_can_launch_later(
    interpreters: InterpreterServer,
) -> None:
    script = """
    import resource
    opened = lambda: len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    launch(os.getpid)
    before, found = opened(), set()
    for spare in range(1, 24, 4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
        found.add(str(ended(lambda: "started")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    last = ended(lambda: 1)
    deadline = time.monotonic() + 30
    while opened() > before and time.monotonic() < deadline:
        time.sleep(0.05)  # The thread of a finished run prepares the next one.
    report([sorted(found - {"['started', 'started']", "('started', 'started')"}), last, opened() - before])
    """
    refused, found, left = evaluate(interpreters, script)
    # Exclude failures that the limit causes in the rank itself.
    refused = [text for text in refused if "its process ended with exit status 1" not in text]
    assert refused
    assert all(text.startswith("LaunchError: ") and "Too many open files" in text for text in refused), refused
    assert found == [1, 1]
    assert left <= 0


@pytest.mark.parametrize("block", [True, False])
def test_an_exception_of_a_signal_handler_ends_the_cell_and_its_run(
    interpreters: InterpreterServer, block: bool
) -> None:
    script = f"""
    import notebook_accelerate
    def ring(*_):
        raise TimeoutError("the alarm of the user")
    signal.signal(signal.SIGALRM, ring)
    def ring_when_started():
        while not any(run.status == "running" for run in notebook_accelerate.runs()):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGALRM)
    alarm = threading.Thread(target=ring_when_started)
    try:
        if {block}:
            alarm.start()
        run = launch(time.sleep, 600, block={block})
        alarm.start()
        run.wait()
    except TimeoutError as error:
        found = str(error)
    run = notebook_accelerate.runs()[-1]
    report([found, run.status])
    run.stop(0.5)
    """
    assert evaluate(interpreters, script) == ["the alarm of the user", "stopped" if block else "running"]


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_interpreters_start_in_a_folder_that_was_deleted(tmp_path: Path, method: str) -> None:
    """Even without this package, torch's libraries cannot be loaded in such a folder."""
    script = f"""
    os.mkdir("gone"), os.chdir("gone"), os.rmdir("../gone")
    def train():
        import torch
        return (torch.ones(4, 4) @ torch.ones(4, 4)).sum().item()
    report(ended(train, start_method={method!r}))
    """
    assert run_interpreter(script, cwd=tmp_path) == [64.0, 64.0]


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_a_kernel_without_its_own_interpreter_gets_an_error_that_says_what_to_do(method: str) -> None:
    script = f"""
    sys.executable = None
    found = ended(os.getpid, start_method={method!r})
    opened = len(os.listdir("/proc/self/fd"))
    ended(os.getpid, start_method={method!r})
    report([found, len(os.listdir("/proc/self/fd")) - opened])
    """
    found, left = run_interpreter(script)
    assert left == 0
    assert found.startswith("LaunchError: sys.executable=None does not name an interpreter"), found


def test_a_rank_can_launch_if_another_thread_held_locks_during_its_fork(interpreters: InterpreterServer) -> None:
    script = """
    from notebook_accelerate.launch import run_registry
    from notebook_accelerate.launch.processes import rank_process, zygote
    inside = launch
    def outer():
        return list(inside(os.getppid, start_method="fork", num_processes=1).results) == [os.getpid()]
    def hold(held):
        with run_registry._lock, zygote._lock, rank_process.orphan_guard._lock:
            held.set()
            forked.wait()
    def begin():
        forked.clear()
        held = threading.Event()
        threading.Thread(target=hold, args=(held,)).start()
        held.wait()
    forked = threading.Event()
    os.register_at_fork(before=begin, after_in_parent=forked.set)
    report(ended(outer, num_processes=1))
    """
    assert evaluate(interpreters, script) == [True]
