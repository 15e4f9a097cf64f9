"""A rank exits like any Python process: its exit handlers run, and it waits for its threads and child processes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.kernel import Cell, Kernel
from tests.support.launching import open_gate, said
from tests.support.nightly import rest_nightly

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
"""Spawned ranks exit like the zygote's, but each imports torch, for 4 s in all, so only two tests use them daily."""
ALL_METHODS = pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
ENDINGS = ["pass", "raise KeyError('end')", "sys.exit(0)", "sys.exit(3)"]


def _run(kernel: Kernel, body: str, method: str, options: str = "") -> Cell:
    lines = "\n".join("    " + line for line in body.splitlines())
    return kernel.run(
        f"import atexit, gzip, logging, multiprocessing, tempfile, weakref, zipfile, io\nfrom pathlib import Path\n"
        f"def train():\n    import atexit, gzip, logging, multiprocessing, tempfile, weakref, zipfile, io\n{lines}\n"
        f"run = launch(train, start_method={method!r}{options})\nrun.status"
    )


REGISTERED = """
kept = {}
class Thing: pass
def record(name):
    Path(f"{name}-{rank()}").touch()
thing = Thing()
kept["thing"] = thing
weakref.finalize(thing, record, "finalized")
atexit.register(record, "atexit")
kept["folder"] = tempfile.TemporaryDirectory(prefix="exit-", dir=".")
(Path(kept["folder"].name) / "file").touch()
kept["file"] = tempfile.NamedTemporaryFile(prefix="exit-", dir=".")
kept["text"] = open(f"text-{rank()}", "w")
kept["text"].write("a buffered line")
kept["gzip"] = gzip.open(f"gzip-{rank()}", "wt")
kept["gzip"].write("a compressed line")
kept["raw"] = open(f"raw-{rank()}", "wb")
kept["raw"].write(b"buffered bytes")
kept["zip"] = zipfile.ZipFile(f"zip-{rank()}", "w")
kept["zip"].writestr("member", "text")
class Late(logging.StreamHandler):
    def flush(self):
        super().flush()
        record("handler-flushed")
kept["handler"] = Late(io.StringIO())
sys.modules["torch"].kept_of_test = kept  # as a global of a module: it lives until the process ends
"""


@pytest.mark.parametrize(
    ("method", "ending"),
    rest_nightly(
        product(["fork", "zygote", "spawn"], ENDINGS), lambda method, ending: method != "spawn" or ending == "pass"
    ),
)
def test_exit_handlers_of_a_rank_run(kernel: Kernel, method: str, ending: str) -> None:
    for path in kernel.cwd.glob("*-[01]"):
        path.unlink()
    _run(kernel, f"{REGISTERED}\n{ending}", method)
    names = {path.name for path in kernel.cwd.iterdir()}
    assert not [name for name in names if name.startswith("exit-")]
    ended = [0, 1] if ending in ("pass", "sys.exit(0)") else _failed(kernel)
    for number in ended:
        assert {f"finalized-{number}", f"atexit-{number}", f"handler-flushed-{number}"} <= names
        assert (kernel.cwd / f"text-{number}").read_text() == "a buffered line"
        assert (kernel.cwd / f"raw-{number}").read_bytes() == b"buffered bytes"
        assert _unpacked(kernel, f"gzip.open('gzip-{number}', 'rt').read()") == "a compressed line"
        assert _unpacked(kernel, f"zipfile.ZipFile('zip-{number}').read('member').decode()") == "text"


def _failed(kernel: Kernel) -> list[int]:
    return kernel.value("[info.rank for info in notebook_accelerate.runs()[-1].ranks if info.state == 'failed']")


def _unpacked(kernel: Kernel, expression: str) -> str:
    return str(kernel.value(expression))


@ALL_METHODS
def test_exit_handlers_of_the_kernel_do_not_run_in_ranks(kernel: Kernel, method: str) -> None:
    for path in kernel.cwd.glob("of-kernel*"):
        path.unlink()
    kernel.check(
        """
import atexit, logging, logging.handlers, tempfile, weakref
class Thing: pass
thing = Thing()
kernel_finalizer = weakref.finalize(thing, lambda: Path("of-kernel-finalized").touch())
kernel_callback = lambda: Path("of-kernel-atexit").touch()
atexit.register(kernel_callback)
folder = tempfile.TemporaryDirectory(prefix="of-kernel-", dir=".")
target = logging.FileHandler("of-kernel-log")
memory = logging.handlers.MemoryHandler(100, logging.CRITICAL + 1, target)
memory.emit(logging.makeLogRecord({"msg": "once", "levelno": 20}))
text = open("of-kernel-text", "w")
written = text.write("once")
"""
    )
    assert _run(kernel, "return 1", method).ok
    names = {path.name for path in kernel.cwd.glob("of-kernel*")}
    assert not {"of-kernel-finalized", "of-kernel-atexit"} & names
    assert (kernel.cwd / kernel.value("folder.name")).is_dir()
    kernel.check("text.close(); memory.close(); target.close(); kernel_finalizer.detach(); folder.cleanup()")
    kernel.check("atexit.unregister(kernel_callback)")
    assert (kernel.cwd / "of-kernel-text").read_text() == "once"
    assert (kernel.cwd / "of-kernel-log").read_text() == "once\n"


@METHODS
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_children_of_multiprocessing_are_joined(kernel: Kernel, method: str, kind: str) -> None:
    for path in kernel.cwd.glob("child-*"):
        path.unlink()
    (kernel.cwd / "children.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "def work(name):\n    time.sleep(1.0)\n    Path(name).touch()\n"
        "def forever():\n    time.sleep(600)\n"
    )
    body = f"""sys.path.insert(0, os.getcwd())
import children
context = multiprocessing.get_context({kind!r})
context.Process(target=children.work, args=(f"child-{{rank()}}",)).start()
context.Process(target=children.forever, daemon=True).start()"""
    assert _run(kernel, body, method).result_text == "'succeeded'"
    assert sorted(path.name for path in kernel.cwd.glob("child-*")) == ["child-0", "child-1"]


@METHODS
def test_children_of_multiprocessing_in_the_kernel_are_left_alone(kernel: Kernel, method: str) -> None:
    kernel.check(
        "import multiprocessing\nprocess = multiprocessing.get_context('fork').Process\n"
        "mine = process(target=time.sleep, args=(600,), daemon=True)\nmine.start()"
    )
    try:
        assert _run(kernel, "multiprocessing.active_children()", method).result_text == "'succeeded'"
        assert kernel.value("mine.is_alive()")
    finally:
        kernel.check("mine.kill(); mine.join(); mine.close()")


def test_a_multiprocessing_queue_of_the_kernel_works_in_ranks(kernel: Kernel) -> None:
    kernel.check(
        "import multiprocessing\nchannel = multiprocessing.get_context('fork').Queue()\n"
        "channel.put('of the kernel'); channel.get()"
    )
    assert _run(kernel, "channel.put(rank())", "fork").result_text == "'succeeded'"
    assert sorted(kernel.value("[channel.get(timeout=20) for _ in range(2)]")) == [0, 1]
    kernel.check("channel.close(); channel.join_thread()")


@METHODS
def test_a_thread_that_never_ends_is_reported_with_its_target(kernel: Kernel, method: str) -> None:
    open_name = f"thread-gate-{method}"
    kernel.check(f"def endless(name):\n    gate(name)\nname = {open_name!r}")
    body = f"if rank() == 1:\n    threading.Thread(target=endless, args=({open_name!r},)).start()\nreturn 'done'"
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.check(f"def train():\n{lines}\nrun = launch(train, start_method={method!r}, block=False)")
    kernel.wait_for(lambda: "endless" in cell.stderr, timeout=30)
    assert "rank 1" in cell.stderr
    assert "its function has ended" in cell.stderr
    assert "Cell In[" in cell.stderr
    text = kernel.value("str(run.diagnose())")
    assert "endless" in text
    open_gate(kernel, open_name)
    assert kernel.check("run.wait(60); run.results").result_text == "('done', 'done')"
    assert kernel.value("run.status") == "succeeded"


@METHODS
def test_a_child_that_never_ends_is_reported(kernel: Kernel, method: str) -> None:
    name = f"child-gate-{method}"
    kernel.check("import multiprocessing")
    body = f"""import multiprocessing
def endless_child():
    gate({name!r})
if rank() == 0:
    multiprocessing.get_context("fork").Process(target=endless_child).start()
return 'done'"""
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.check(f"def train():\n{lines}\nrun = launch(train, start_method={method!r}, block=False)")
    kernel.wait_for(lambda: "waits for the process 'Fork" in cell.stderr, timeout=30)
    open_gate(kernel, name)
    assert kernel.check("run.wait(60); run.results").result_text == "('done', 'done')"


@METHODS
def test_stopping_ends_a_rank_that_waits_for_a_thread(kernel: Kernel, method: str) -> None:
    body = """threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(lambda: Path(f"stopped-{rank()}").touch())
print("waits", flush=True)"""
    for path in kernel.cwd.glob("stopped-*"):
        path.unlink()
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.check(
        f"import atexit\nfrom pathlib import Path\ndef train():\n{lines}\n"
        f"run = launch(train, start_method={method!r}, block=False)"
    )
    kernel.wait_for(lambda: cell.stdout.count("waits") == 2)
    kernel.pump(0.5)
    kernel.check("run.stop(grace=30)")
    assert kernel.value("run.status") in ("stopped", "succeeded")
    assert sorted(path.name for path in kernel.cwd.glob("stopped-*")) == ["stopped-0", "stopped-1"]


@METHODS
def test_output_of_native_code_arrives(kernel: Kernel, method: str) -> None:
    cell = _run(kernel, "ctypes.CDLL(None).printf(b'from C\\n')", method)
    assert cell.stdout.count("from C") == 2


def test_a_failing_thread_in_a_failing_rank_delays_nothing(kernel: Kernel) -> None:
    body = "threading.Thread(target=time.sleep, args=(600,)).start()\nraise KeyError('first')"
    assert "KeyError: 'first'" in said(_run(kernel, body, "fork"))
