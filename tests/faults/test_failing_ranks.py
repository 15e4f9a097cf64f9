"""Ranks that raise, exit and die: the cell names the first failure, and the kernel is unchanged."""

from __future__ import annotations

import re

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import blames, said, wait_gone

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])


def _run(kernel: Kernel, body: str, method: str, options: str = "") -> str:
    """Launch a function with this body. Return the cell's error, which appears long before the body's sleeps end."""
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.run(f"def train():\n{lines}\nlaunch(train, start_method={method!r}{options})")
    text = said(cell)
    assert "supervisor.py" not in text
    assert "launch/starting.py" not in text
    assert "worker/entry.py" not in text
    return text


def _states(kernel: Kernel) -> list[str]:
    found: list[str] = kernel.value("[info.state for info in notebook_accelerate.runs()[-1].ranks]")
    return found


@METHODS
def test_an_exception_in_one_rank_ends_the_run(kernel: Kernel, method: str) -> None:
    text = _run(kernel, "if rank() == 1:\n    raise KeyError('lost')\ntime.sleep(600)", method)
    assert re.search(r"Cell In\[\d+\], line 3, in train\n    raise KeyError\('lost'\)", text), text
    assert "rank 1" in text
    assert "WorkerError" in text
    assert _states(kernel) == ["stopped", "failed"]


@METHODS
def test_an_exception_in_all_ranks_is_shown_once(kernel: Kernel, method: str) -> None:
    # Meet at a barrier: on a busy machine, one rank's function may otherwise be called much later than the other's.
    meet = "group()\ndist.barrier()\n"
    text = _run(kernel, meet + "raise KeyError(rank())", method)
    assert "KeyError" in text
    assert "ranks 0, 1 failed:" in text
    assert text.count("in train") == 1
    assert _states(kernel) == ["failed", "failed"]


@METHODS
def test_ranks_that_return_immediately_leave_no_other_one_connecting(kernel: Kernel, method: str) -> None:
    kernel.check(
        """
def train():
    from notebook_accelerate import Accelerator
    connect, connected = dist.init_process_group, []
    def late(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(1.0)
        connected.append(time.time())
    if rank() == 2:
        dist.init_process_group = late
    Accelerator(cpu=True)
    return connected, time.time()
"""
        f"found = launch(train, num_processes=3, start_method={method!r}).results"
    )
    assert kernel.value("min(returned for _, returned in found) >= found[2][0][0]")


@METHODS
def test_an_exception_before_a_collective_is_the_first_failure(kernel: Kernel, method: str) -> None:
    body = "group()\nif rank() == 1:\n    raise KeyError('before')\ndist.all_reduce(torch.ones(1))"
    text = _run(kernel, body, method)
    assert blames(text, 1)
    assert "KeyError: 'before'" in text
    message, page = text.rstrip().splitlines()[-2:]
    assert len(re.findall(r"rank 1( failed first)?: KeyError", message)) == 1
    assert page.startswith("see https://")


@METHODS
def test_an_exception_after_a_collective_is_the_first_failure(kernel: Kernel, method: str) -> None:
    body = (
        "group()\ndist.all_reduce(torch.ones(1))\nif rank() == 0:\n    raise KeyError('after')\n"
        "dist.all_reduce(torch.ones(1))"
    )
    text = _run(kernel, body, method)
    assert blames(text, 0)
    assert "KeyError: 'after'" in text


@METHODS
def test_a_rank_that_waits_for_a_dead_peer_is_reported_as_a_consequence(kernel: Kernel, method: str) -> None:
    body = "group()\nif rank() == 1:\n    time.sleep(0.3)\n    raise KeyError('x')\ndist.all_reduce(torch.ones(1))\n"
    text = _run(kernel, body, method)
    assert blames(text, 1)
    assert re.search(r"rank 1( failed first)?: KeyError: 'x'", text)
    failures = kernel.value("[[f.rank, f.consequence] for f in notebook_accelerate.runs()[-1].failures]")
    assert failures[0] == [1, False]
    assert failures[1:] in ([], [[0, True]])


@METHODS
@pytest.mark.parametrize(("code", "words"), [("3", "sys.exit(3)"), ("'a message'", "sys.exit('a message')")])
def test_sys_exit_with_a_message_fails_the_run(kernel: Kernel, method: str, code: str, words: str) -> None:
    assert words in _run(kernel, f"if rank() == 0:\n    sys.exit({code})", method)


@METHODS
@pytest.mark.parametrize("code", ["", "0", "None"])
def test_sys_exit_without_a_message_is_a_success(kernel: Kernel, method: str, code: str) -> None:
    cell = kernel.check(f"launch(lambda: sys.exit({code}), start_method={method!r}).results")
    assert cell.result_text == "(None, None)"


@METHODS
@pytest.mark.parametrize("code", [0, 7])
def test_os_exit_is_reported_with_its_status(kernel: Kernel, method: str, code: int) -> None:
    text = _run(kernel, f"if rank() == 1:\n    os._exit({code})\ntime.sleep(600)", method)
    assert f"exit status {code}" in text
    assert "WorkerDiedError" in text
    assert "rank 1" in text


@METHODS
@pytest.mark.parametrize(
    ("kill", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["SIGKILL", "another process sent it", "GB"]),
        ("ctypes.string_at(0)", ["SIGSEGV (signal 11)"]),
        ("os.abort()", ["SIGABRT"]),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", ["SIGTERM"]),
    ],
)
def test_a_death_by_signal_names_the_signal(kernel: Kernel, method: str, kill: str, words: list[str]) -> None:
    text = _run(kernel, f"group()\nif rank() == 1:\n    {kill}\ndist.all_reduce(torch.ones(1))", method)
    assert text.startswith("rank 1")
    assert "WorkerDiedError" in text
    for word in words:
        assert word in text, text


def test_a_crash_leaves_the_python_stack_in_stderr(kernel: Kernel) -> None:
    _run(kernel, "if rank() == 1:\n    ctypes.string_at(0)\ntime.sleep(600)", "fork")
    logs = kernel.value("notebook_accelerate.runs()[-1].logs(1)")
    assert any("Segmentation fault" in line for line in logs), logs
    assert any("train" in line for line in logs), logs


@METHODS
def test_out_of_memory_raises_a_memory_error(kernel: Kernel, method: str) -> None:
    body = (
        "import resource\nlimit = 1 << 30\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "if rank() == 1:\n    resource.setrlimit(resource.RLIMIT_AS, (held + limit, held + limit))\n"
        "    bytearray(4 << 30)\n"
    )
    assert "MemoryError" in _run(kernel, body, method)


@METHODS
def test_a_return_value_that_cannot_be_pickled_fails_only_its_reading(kernel: Kernel, method: str) -> None:
    kernel.check("def train():\n    return threading.Lock() if rank() == 1 else 'kept'")
    cell = kernel.check(f"run = launch(train, start_method={method!r}, panel=False)")
    assert "⚠ the return value (a lock) cannot be pickled" in cell.stderr
    text = said(kernel.run("run.results"))
    assert "rank 1: the return value (a lock) cannot be pickled" in text
    assert kernel.value("run.ranks[0].result") == "kept"
    assert _states(kernel) == ["succeeded", "succeeded"]


@METHODS
@pytest.mark.parametrize("error", ["ZeroDivisionError()", "SystemExit(3)", "KeyError('x' * 100_000)"])
def test_a_return_value_that_cannot_be_unpickled_fails_only_its_reading(
    kernel: Kernel, method: str, error: str
) -> None:
    kernel.check(f'class Trap:\n    def __reduce__(self):\n        return (exec, ("raise {error}",))\n')
    kernel.check("def train():\n    return Trap() if rank() == 0 else 5")
    kernel.check(f"run = launch(train, start_method={method!r})")
    assert f"cannot be unpickled: {error.partition('(')[0]}" in said(kernel.run("run.results"))
    assert kernel.value("run.ranks[1].result") == 5
    assert _states(kernel) == ["succeeded", "succeeded"]


@METHODS
def test_exceptions_that_cannot_be_pickled_are_reported(kernel: Kernel, method: str) -> None:
    kernel.check(
        "class TwoArguments(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a} and {b}')\n"
        "class WithLock(Exception):\n    def __init__(self):\n        super().__init__('locked')\n"
        "        self.lock = threading.Lock()\n"
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n"
    )
    assert "TwoArguments: 1 and 2" in _run(kernel, "raise TwoArguments(1, 2)", method)
    assert "WithLock: locked" in _run(kernel, "raise WithLock", method)
    assert "Mute" in _run(kernel, "raise Mute", method)
    assert "BaseException: odd" in _run(kernel, "raise BaseException('odd')", method)
    assert "GeneratorExit" in _run(kernel, "raise GeneratorExit", method)


@METHODS
def test_a_chained_exception_is_shown_with_its_cause(kernel: Kernel, method: str) -> None:
    text = _run(
        kernel, "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('top') from error", method
    )
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("ValueError: top")
    cause = kernel.check("type(notebook_accelerate.runs()[-1].failures[0].exception.__cause__).__name__")
    assert cause.result_text in ("'ZeroDivisionError'", "'NoneType'")


def test_the_exceptions_of_a_group_are_reported(kernel: Kernel) -> None:
    if kernel.value("sys.version_info < (3, 11)"):
        pytest.skip("exception groups need Python 3.11")
    text = _run(kernel, "raise ExceptionGroup('both', [ValueError('one'), KeyError('two')])", "fork")
    assert "ExceptionGroup: both (2 sub-exceptions)" in text
    assert "ValueError: one" in text
    assert "KeyError: 'two'" in text


def test_a_giant_message_is_shortened_in_the_headline(kernel: Kernel) -> None:
    cell = kernel.run("def train():\n    raise ValueError('x' * 2_000_000)\nlaunch(train)")
    assert cell.error is not None
    assert len(cell.error.evalue) < 5000


def test_unpicklable_arguments_work_with_fork_and_are_refused_by_the_zygote(kernel: Kernel) -> None:
    kernel.check("lock = threading.Lock()")
    assert (
        kernel.check("launch(lambda l: l.locked(), lock, start_method='fork').results").result_text == "(False, False)"
    )
    text = said(kernel.run("launch(lambda l: l.locked(), lock, start_method='zygote')"))
    assert "the function or its arguments cannot be pickled, because of 'l'" in text
    assert "create l in the function instead" in text
    kernel.check("class Holder:\n    def __init__(self):\n        self.inner = {'deep': [lock]}\nholder = Holder()")
    for name, body in (("lock", "lock.locked()"), ("holder", "len(holder.inner)")):
        text = said(kernel.run(f"launch(lambda: {body}, start_method='zygote')"))
        assert f"the function or its arguments cannot be pickled, because of {name!r}: TypeError" in text


@METHODS
def test_a_rank_that_closes_its_streams_still_ends(kernel: Kernel, method: str) -> None:
    body = "os.close(1); os.close(2)\nsys.stdout.close()\nreturn 3"
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.check(f"def train():\n{lines}\nlaunch(train, start_method={method!r}).results")
    assert cell.result_text == "(3, 3)"


@METHODS
def test_a_rank_that_closes_every_descriptor_is_reported(kernel: Kernel, method: str) -> None:
    text = _run(
        kernel, "if rank() == 1:\n    os.closerange(3, 4096)\n    time.sleep(0.5)\nelse:\n    time.sleep(600)", method
    )
    assert "rank 1" in text


@METHODS
@pytest.mark.parametrize("ending", ["returns", "fails"])
def test_processes_that_a_rank_leaves_behind_are_killed(kernel: Kernel, method: str, ending: str) -> None:
    """Processes that a rank has started are killed with its process group, even if they ignore other signals."""
    body = (
        "group()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and with it what is started here\n"
        "left = [subprocess.Popen(['sleep', '300']).pid for _ in range(2)]\n"
        "print('LEFT', *left, flush=True)\n"
        "dist.barrier()\n"
        f"assert rank() == 0 or {ending == 'returns'}\n"
        "return left"
    )
    lines = "\n".join("    " + line for line in body.splitlines())
    cell = kernel.run(f"def train():\n{lines}\nlaunch(train, start_method={method!r})")
    assert cell.ok == (ending == "returns")
    told = kernel.value("[line for line in notebook_accelerate.runs()[-1].logs() if 'LEFT' in line]")
    left = [int(pid) for line in told for pid in line.partition("LEFT ")[2].split()]
    assert len(left) == 4
    wait_gone(left, 60)


def test_a_rank_may_fork_by_itself(kernel: Kernel) -> None:
    body = "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\nreturn 1"
    lines = "\n".join("    " + line for line in body.splitlines())
    assert kernel.check(f"def train():\n{lines}\nlaunch(train).results").result_text == "(1, 1)"


@METHODS
def test_a_launch_without_enough_descriptors_fails(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        "import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "used = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + 9, hard))\n"
        f"try:\n    launch(rank, num_processes=8, start_method={method!r})\n"
        "finally:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))"
    )
    assert "Too many open files" in said(cell)
