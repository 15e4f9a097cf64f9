"""Scenes, each of which makes something happen to a run and checks that the run reports it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

from tests.support.kernel import Kernel
from tests.support.launching import said

SETUP = """
from pathlib import Path
from notebook_accelerate import Accelerator

def work(seconds=0.2):
    accelerator = Accelerator()
    end = time.monotonic() + seconds
    while accelerator.reduce(torch.tensor(float(time.monotonic() < end)), "sum") >= accelerator.num_processes:
        accelerator.log({"time": time.monotonic()})
        print("a line")
        time.sleep(0.01)
    return accelerator.process_index

def failing():
    Accelerator().wait_for_everyone()
    if rank() == 1:
        raise RuntimeError("on purpose")
    time.sleep(600)

def killed(number):
    Accelerator().wait_for_everyone()
    if rank() == 0:
        os.kill(os.getpid(), number)
    time.sleep(600)

def exiting(code):
    if rank() == 1:
        os._exit(code)
    time.sleep(600)

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt")
    return "second"

def large(megabytes):
    return torch.full((megabytes, 2**18), float(rank()))

def parent():
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.3,))
    process.start()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return process.pid

def train(folder, seconds, blocking=True):
    accelerator = Accelerator()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    if Path(folder).exists():
        accelerator.load_state(folder)
    end = time.monotonic() + seconds
    while accelerator.reduce(torch.tensor(float(time.monotonic() < end)), "sum") >= accelerator.num_processes:
        loss = model(torch.randn(8, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(folder, blocking=blocking)
    accelerator.end_training()
"""

GUARD = 300.0
"""The time limit in seconds for each step. A busy machine needs more than a minute to start three interpreters."""
Scene = Callable[[Kernel, random.Random], None]
SCENES: dict[str, tuple[int, Scene]] = {}


def scene(weight: int) -> Callable[[Scene], Scene]:
    """Register a scene with its relative frequency."""

    def register(function: Scene) -> Scene:
        SCENES[function.__name__] = weight, function
        return function

    return register


def _options(chance: random.Random, least: int = 2) -> str:
    method = chance.choice(["auto", "auto", "fork", "zygote", "zygote", "spawn"])
    return f"num_processes={chance.randint(least, 3)}, start_method={method!r}"


def _fails(kernel: Kernel, call: str, pattern: str, seconds: float = GUARD) -> None:
    text = said(kernel.run(call, seconds))
    assert re.search(pattern, text), f"{call} ended with {text[-2000:]}, not with {pattern!r}"


def _background(kernel: Kernel, call: str) -> None:
    kernel.check(f"run = {call}")
    kernel.until("run.status != 'starting' and all(info.pid for info in run.ranks)", GUARD)


def _ends(kernel: Kernel, status: str, seconds: float = GUARD) -> None:
    ended = kernel.value(f"(run.wait({seconds}), run.status, [str(one) for one in run.failures])", seconds + 30)
    assert ended[:2] == [True, status], f"the run did not end as {status!r}: {ended}"


@scene(6)
def succeeds(kernel: Kernel, chance: random.Random) -> None:
    """A run that succeeds."""
    kernel.check(f"assert sorted(launch(work, {_options(chance, 1)}).results)[0] == 0")


@scene(2)
def raises(kernel: Kernel, chance: random.Random) -> None:
    """A rank raises while the others sleep."""
    _fails(kernel, f"launch(failing, {_options(chance)})", r"rank 1.*|on purpose")


@scene(2)
def is_killed(kernel: Kernel, chance: random.Random) -> None:
    """A rank is killed or crashes."""
    number = chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    _fails(kernel, f"launch(killed, {int(number)}, {_options(chance)})", number.name)


@scene(1)
def exits(kernel: Kernel, chance: random.Random) -> None:
    """A rank exits without a message."""
    code = chance.randint(2, 99)
    _fails(kernel, f"launch(exiting, {code}, {_options(chance)})", rf"rank 1.*\b{code}\b")


@scene(2)
def is_stopped(kernel: Kernel, chance: random.Random) -> None:
    """The user stops a run at a random moment."""
    _background(kernel, f"launch(work, 600.0, block=False, {_options(chance)})")
    time.sleep(chance.random())
    kernel.check("run.stop(grace=30)", GUARD)
    _ends(kernel, "stopped")


@scene(1)
def is_stopped_by_force(kernel: Kernel, chance: random.Random) -> None:
    """The user stops ranks that ignore signals."""
    _background(kernel, f"launch(deaf, block=False, {_options(chance)})")
    kernel.check("run.stop(grace=0.5)", GUARD)
    _ends(kernel, "stopped")


@scene(2)
def is_interrupted(kernel: Kernel, chance: random.Random) -> None:
    """The user presses the stop button while the cell waits for the run."""
    cell = kernel.submit(f"run = None; launch(work, 600.0, {_options(chance)})")
    kernel.wait_for(lambda: "a line" in cell.stdout, 90.0, what="a line of a rank")
    kernel.interrupt()
    assert kernel.finish(cell, GUARD).error is not None
    kernel.check("join_runs()")


@scene(1)
def times_out(kernel: Kernel, chance: random.Random) -> None:
    """A run exceeds its time limit."""
    _fails(kernel, f"launch(work, 600.0, timeout=1.0, {_options(chance)})", r"timeout|1 s")


@scene(1)
def restarts(kernel: Kernel, chance: random.Random) -> None:
    """The first attempt fails, and the second one succeeds."""
    results = f"list(launch(once, max_restarts=1, {_options(chance)}).results)"
    assert set(kernel.value(results, GUARD)) == {"second"}


@scene(2)
def returns_much(kernel: Kernel, chance: random.Random) -> None:
    """Ranks return large results, which nothing keeps."""
    megabytes = chance.choice([4, 64, 200])
    call = f"launch(large, {megabytes}, {_options(chance)}).results"
    assert kernel.value(f"[float(one.mean()) for one in {call}][:2]", GUARD) == [0.0, 1.0]


@scene(1)
def leaves_children(kernel: Kernel, chance: random.Random) -> None:
    """Ranks start two processes: one that they wait for, and one that must not outlive the run."""
    kernel.check(f"launch(parent, {_options(chance)}).results", GUARD)


@scene(3)
def saves(kernel: Kernel, chance: random.Random) -> None:
    """A run that saves in each step is killed at a random moment, twice, and resumes from its checkpoint."""
    kernel.check("import tempfile; folder = tempfile.TemporaryDirectory(); place = folder.name + '/saved'")
    blocking, options = chance.random() < 0.5, _options(chance)
    for _ in range(2):
        _background(kernel, f"launch(train, place, 600.0, {blocking}, block=False, {options})")
        kernel.until("Path(place).exists() or run.done", GUARD)
        time.sleep(chance.random())
        pid = kernel.value("[info.pid for info in run.ranks]")[chance.randint(0, 1)]
        os.kill(pid, signal.SIGKILL)
        _ends(kernel, "failed")
    kernel.check(f"launch(train, place, 0.1, {options})", GUARD)
    kernel.check("folder.cleanup()")


@scene(2)
def is_suspended(kernel: Kernel, chance: random.Random) -> None:
    """A rank or the kernel is suspended for a moment and then resumed."""
    _background(kernel, f"launch(work, 3.0, block=False, {_options(chance)})")
    ranks = kernel.value("[info.pid for info in run.ranks]")
    pid = chance.choice([*ranks, kernel.pid])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(chance.uniform(0.2, 3.0))
    os.kill(pid, signal.SIGCONT)
    _ends(kernel, "succeeded")


@scene(1)
def loses_its_server(kernel: Kernel, chance: random.Random) -> None:
    """Between two launches, the zygote is killed or suspended."""
    pid = kernel.value("getattr(sys.modules['notebook_accelerate.launch.processes.zygote']._zygote, 'pid', 0)")
    if pid:
        os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGSTOP]))
    kernel.check("launch(work, start_method='zygote')", GUARD)


@scene(1)
def runs_at_once(kernel: Kernel, chance: random.Random) -> None:
    """Several runs overlap, and one of them fails."""
    kernel.check(f"good = [launch(work, 1.0, block=False, {_options(chance)}) for _ in range(2)]", GUARD)
    kernel.check(f"bad = launch(failing, block=False, {_options(chance)})", GUARD)
    found = kernel.value("[(one.wait(90), one.status) for one in [*good, bad]]", 300.0)
    assert found == [[True, "succeeded"], [True, "succeeded"], [True, "failed"]], found
    kernel.check("del good, bad")
