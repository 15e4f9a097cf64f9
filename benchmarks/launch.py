"""Launches from real kernels: startup and stop times, printed lines, the cost of a logged metric, and memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bench import REPEATS, Figure, alternate, compared, row
from tests.support.kernel import Cell, Kernel, KernelTimeoutError

HERE, PEER = "notebook_accelerate", "accelerate"

# Both launchers run these functions. Their times can be subtracted, because all processes share the monotonic clock.
SETUP = """
import os, time, pathlib, socket, torch
{define}

FOLDER = pathlib.Path({folder!r})

def note(text):
    (FOLDER / os.environ["RANK"]).write_text(text)

def stamp():
    note(str(time.monotonic()))

def stamp_two_threads():
    note(str(time.monotonic()))
    torch.set_num_threads(2)
    x = torch.ones(512, 512)
    (x @ x).sum().item()

def launch(function, ranks, *args, **options):
    with socket.socket() as probe:  # Choose a new port each time: the peer's store keeps its port for a while.
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.monotonic()
    notebook_launcher(function, args, num_processes=ranks, use_port=str(port), **options)
    end = time.monotonic()
    return begin, end
"""

WARM_POOL = "x = torch.ones(1024, 1024); (x @ x).sum().item(); torch.get_num_threads()"


class Launcher:
    """A kernel that has imported a launcher.

    Args:
        package: The package of the launcher, or code that defines ``notebook_launcher``.
        env: Variables that override this process's own.
        forked: Whether the kernel may be forked from a process that has imported torch and torch._dynamo.
    """

    def __init__(self, package: str, env: Mapping[str, str | None] | None = None, *, forked: bool = True) -> None:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self.kernel = self._stack.enter_context(Kernel(env=env, timeout=120.0, forked=forked))
        define = f"from {package} import notebook_launcher" if package.isidentifier() else package
        self.kernel.check(SETUP.format(define=define, folder=str(self.folder)))

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def submit(self, function: str, ranks: int, options: str = "") -> Cell:
        """Start a launch, and return its cell without waiting for the cell to finish."""
        for file in self.folder.iterdir():
            file.unlink()
        return self.kernel.submit(f"times = launch({function}, {ranks}, {options})")

    def time(self, function: str, ranks: int, options: str = "", timeout: float = 120.0) -> tuple[float, float]:
        """Launch. Return the seconds from the call to the last rank's first line, and to the return."""
        self.kernel.finish(self.submit(function, ranks, options), timeout).expect_ok()
        begin, end = self.kernel.value("times")
        lines = [float(file.read_text()) for file in self.folder.iterdir()]
        assert len(lines) == ranks, f"{len(lines)} of {ranks} ranks wrote the time"
        return max(lines) - begin, end - begin

    def time_of_rank_0(self, function: str, ranks: int, options: str = "") -> float:
        """Launch, and return the seconds from the call to the moment that rank 0 records."""
        self.kernel.finish(self.submit(function, ranks, options), 300.0).expect_ok()
        begin, _ = self.kernel.value("times")
        return float((self.folder / "0").read_text()) - float(begin)

    def time_in_kernel(self, call: str) -> float:
        """Execute a call in a cell, and return the seconds that it takes."""
        self.kernel.check(f"begin = time.monotonic(); {call}; took = time.monotonic() - begin")
        return float(self.kernel.value("took"))

    def wait_for_ranks(self, ranks: int) -> None:
        """Wait until every rank has written its file."""
        self.kernel.wait_for(lambda: len(list(self.folder.iterdir())) == ranks, 60.0, what="the ranks")


# ---- times


@row("launch", "fork")
def fork_times() -> Iterator[Figure]:
    """Measure launches from a clean kernel, which has imported torch but has not used it."""
    with Launcher(HERE) as here, Launcher(PEER) as peer:
        for ranks in (2, 16):
            first: list[list[float]] = [[], []]

            def measure(side: int, launcher: Launcher, ranks: int = ranks, first: list[list[float]] = first) -> float:
                line, total = launcher.time("stamp", ranks)
                first[side].append(line)
                return total

            ours, theirs = alternate(REPEATS, lambda: measure(0, here), lambda: measure(1, peer))
            what, limit = f"{ranks} ranks: call to first line on all ranks", {2: 1.0, 16: 0.9}[ranks]
            yield compared(what, first[0][1:], first[1][1:], unit="s", ratio=limit)
            yield compared(f"{ranks} ranks: call to return", ours, theirs, unit="s", ratio=0.5)


@row("launch", "zygote")
def zygote_times() -> Iterator[Figure]:
    """Measure ranks that use two threads, when the kernel's OpenMP pool has already started."""
    env: dict[str, str | None] = {"OMP_NUM_THREADS": "2"}
    with Launcher(HERE, env) as here:
        here.kernel.check(WARM_POOL)
        for method in ("zygote", "auto"):
            for ranks in (2, 16):
                pairs = [here.time("stamp_two_threads", ranks, f"start_method={method!r}") for _ in range(REPEATS + 1)]
                lines, totals = zip(*pairs[1:], strict=True)
                label = f"{ranks} ranks, start_method={method!r}"
                yield compared(f"{label}: call to first line on all ranks", lines, unit="s")
                limit = {2: 0.15, 16: 0.35}[ranks] if method == "zygote" else None
                yield compared(f"{label}: call to return", totals, unit="s", limit=limit)
    yield _peer_with_warm_pool(env)


@row("launch", "first zygote")
def first_zygote() -> Iterator[Figure]:
    """Measure a kernel's first launch immediately after the import, while the zygote is still importing torch."""

    def first_launch() -> float:
        with Launcher(HERE) as here:
            begin = time.monotonic()
            here.time("stamp", 2, "start_method='zygote'")
            return time.monotonic() - begin

    def import_torch() -> float:
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch, os; os._exit(0)"], check=True, timeout=300)
        return time.monotonic() - begin

    ours, theirs = alternate(REPEATS, first_launch, import_torch)
    note = "the peer is `import torch` in a new interpreter"
    yield compared("2 ranks: first cell to return", ours, theirs, unit="s", ratio=1.2, note=note)


def _peer_with_warm_pool(env: dict[str, str | None], limit: float = 20.0) -> Figure:
    what = "the peer, 2 ranks"
    with Launcher(PEER, env) as peer:
        peer.kernel.check(WARM_POOL)
        try:
            _, total = peer.time("stamp_two_threads", 2, timeout=limit)
        except KernelTimeoutError:
            return Figure(
                what=what, unit="s", ours=None, note=f"did not return within {limit:.0f} s; its kernel was killed"
            )
    return Figure(what=what, unit="s", ours=None, peer=total)


# ---- stops

STUBBORN = """
import itertools, signal
def asleep():
    stamp()
    time.sleep(600)
def in_native_code():
    stamp()
    sum(itertools.repeat(0))  # Never returns to the interpreter, so no signal handler in Python runs.
def ignores_signals():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stamp()
    time.sleep(600)
"""
GRACE = 1.0


@row("launch", "stop")
def stopping() -> Iterator[Figure]:
    """Measure `run.stop(grace)` until all ranks are reaped. The goal is the grace period plus one second."""
    with Launcher(HERE) as here:
        here.kernel.check(STUBBORN)
        for function, what in (
            ("asleep", "asleep"),
            ("in_native_code", "busy in C"),
            ("ignores_signals", "ignoring SIGINT and SIGTERM"),
        ):
            took = []
            for _ in range(REPEATS):
                for file in here.folder.iterdir():
                    file.unlink()
                here.kernel.check(f"run = notebook_launcher({function}, num_processes=2, use_port=0, block=False)")
                here.wait_for_ranks(2)
                ask = f"(begin := time.monotonic(), run.stop({GRACE}), time.monotonic() - begin)[2]"
                took.append(float(here.kernel.value(ask, timeout=60)))
            yield compared(f"2 ranks {what}: stop({GRACE:g})", took, unit="s", limit=GRACE + 1)


@row("launch", "package import")
def importing() -> Iterator[Figure]:
    """Measure `import notebook_accelerate` in a new interpreter. The import does not load torch."""
    timed = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"

    def once(package: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", timed.format(package)], capture_output=True, text=True, check=True, timeout=300
        )
        return float(done.stdout.splitlines()[-1])

    ours, theirs = alternate(REPEATS, lambda: once(HERE), lambda: once(PEER))
    yield compared("import in a new interpreter", ours, theirs, unit="ms", scale=1e3, limit=50)


# ---- printed lines

PRINTING = """
def printing(lines, quiet):
    target = open(os.devnull, "w") if quiet else None
    for index in range(lines):
        print("line", index, "loss", 0.25, file=target)
    stamp()
"""


@row("launch", "printing")
def printing() -> Iterator[Figure]:
    """Measure how long lines take to reach the notebook, compared with the same function printing to /dev/null.

    In this package, the cell shows only the first and the last of many lines, and `run.logs()` returns all of them.
    """
    lines, few = 10_000, 500
    lost: list[int] = []
    with Launcher(HERE) as here, Launcher(PEER) as peer:
        for launcher in (here, peer):
            launcher.kernel.check(PRINTING)

        def measure(launcher: Launcher, count: int, quiet: bool) -> float:
            begin = time.monotonic()
            cell = launcher.kernel.finish(launcher.submit("printing", 2, f"{count}, {quiet}"), 300.0).expect_ok()
            end = time.monotonic()
            if launcher is here:
                last = f"line {count - 1} loss"
                here.kernel.wait_for(lambda: quiet or last in str(cell.displays), 5.0, what="the last line")
                return time.monotonic() - begin
            try:
                peer.kernel.wait_for(lambda: quiet or cell.stdout.count("0.25") >= 2 * count, 5.0, what="all lines")
            except KernelTimeoutError:
                lost.append(2 * count - cell.stdout.count("0.25"))
                return end - begin
            return time.monotonic() - begin

        loud, quiet, peer_loud, peer_quiet = alternate(
            REPEATS,
            lambda: measure(here, lines, quiet=False),
            lambda: measure(here, lines, quiet=True),
            lambda: measure(peer, few, quiet=False),
            lambda: measure(peer, few, quiet=True),
        )
    extra = [a - b for a, b in zip(loud, quiet, strict=True)]
    peer_extra = [a - b for a, b in zip(peer_loud, peer_quiet, strict=True)]
    yield compared(f"{lines:,} lines from each of 2 ranks: total extra time", extra, unit="s", limit=1.0)
    yield compared(
        "the same: extra time per line",
        [value / (2 * lines) for value in extra],
        [value / (2 * few) for value in peer_extra],
        unit="µs",
        scale=1e6,
        note=f"the peer prints {few} lines from each rank"
        + (f"; it lost up to {max(lost)} of {2 * few} in {len(lost)} of {REPEATS} launches" if lost else ""),
    )


# ---- metrics

LOGGING = """
from time import perf_counter_ns, process_time_ns, thread_time_ns

def logging_cost(blocks, count):
    # A step is about 2 ms of fixed work. In every other block, half of the steps log a metric: comparing adjacent steps
    # cancels the load of the machine. Comparing blocks gives the CPU time of the threads that send metrics.
    from notebook_accelerate import Accelerator
    accelerator = Accelerator()
    torch.set_num_threads(1)
    x = torch.ones(180, 180)
    found = []
    for block in range(2 * blocks + 2):
        walls, spent = [[], []], [0, 0]
        process, thread = process_time_ns(), thread_time_ns()
        for index in range(2 * count):
            logs = (index + (index >> 1)) % 2  # Plain, logged, logged, plain: neither kind always comes first.
            begin = perf_counter_ns()
            for _ in range({work}):
                x @ x
            before = thread_time_ns()  # In plain steps too: the scheduler prefers to switch threads at system calls.
            if logs and block % 2:
                accelerator.log({{"loss": 0.25}}, step=index)
            spent[logs] += thread_time_ns() - before
            walls[logs].append(perf_counter_ns() - begin)
        process, thread = process_time_ns() - process, thread_time_ns() - thread
        found.append((walls, (spent[1] - spent[0]) / count, (process - thread) / count, thread / (2 * count)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        import json
        note(json.dumps(found[2:]))
"""
CALIBRATE = """
torch.set_num_threads(1)
x = torch.ones(180, 180)
def once(count=200):
    begin = time.process_time()  # Not wall time: on a busy machine the step would become too short.
    for _ in range(count):
        x @ x
    return (time.process_time() - begin) / count
work = max(1, round(0.002 / sorted(once() for _ in range(9))[4]))
"""


@row("launch", "logging")
def logging_cost() -> Iterator[Figure]:
    """Measure what one `accelerator.log` per step costs a training loop in wall and CPU time."""
    import json

    with Launcher(HERE) as here:
        here.kernel.check(CALIBRATE)
        here.kernel.check(LOGGING.format(work=here.kernel.value("work")))
        for ranks, who in ((1, "1 rank"), (2, "2 ranks")):
            here.kernel.finish(here.submit("logging_cost", ranks, "20, 100, start_method='fork'"), 300.0).expect_ok()
            blocks = json.loads((here.folder / "0").read_text())
            quiet, loud = blocks[0::2], blocks[1::2]
            plain = [wall for walls, *_ in loud for wall in walls[0]]
            step = statistics.median(plain)
            # Take medians, because on a busy machine, means would measure other processes.
            shares = [statistics.median(b - a for a, b in zip(*walls, strict=True)) / step for walls, *_ in loud]
            note = f"the step took {step / 1e6:.2f} ms; {len(plain)} pairs of neighbours"
            yield compared(f"{who}, a step of 2 ms: wall clock", shares, unit="%", scale=100.0, limit=0.5, note=note)
            work = statistics.median(thread for *_, thread in quiet)
            idle = statistics.median(others for _, _, others, _ in quiet)
            shares = [(spent + others - idle) / work for _, spent, others, _ in loud]
            own = statistics.median(spent for _, spent, _, _ in loud)
            note = f"{own / 1e3:.1f} µs of a log are on the training thread, the rest on the sender threads"
            text = f"{who}, a step of 2 ms: CPU time of the rank"
            yield compared(text, shares, unit="%", scale=100.0, limit=0.5, note=note)


# ---- memory

WAITING = """
def waiting():
    note(str(os.getpid()))
    while not (FOLDER.parent / (FOLDER.name + "-go")).exists():
        time.sleep(0.01)
"""


@row("launch", "memory")
def memory() -> Iterator[Figure]:
    """Measure the PSS of the kernel and its ranks while the ranks wait inside their function.

    The kernels are not forked, because otherwise they would share memory with the process that they are forked from.
    """
    with (
        Launcher(HERE, forked=False) as here,
        Launcher(PEER, forked=False) as peer,
        Launcher(HERE, forked=False) as server,
    ):
        for launcher in (here, peer, server):
            launcher.kernel.check(WAITING)
        server.time("stamp", 2, "start_method='zygote'")
        for ranks in (2, 16):
            sides = (here, ""), (peer, ""), (server, "start_method='zygote'")
            rounds = [[_sizes(launcher, ranks, options) for launcher, options in sides] for _ in range(REPEATS)]
            fork, other, zygote = zip(*rounds, strict=True)
            for place, who in enumerate(("the kernel", "each rank")):
                ours = [sizes[place] for sizes in fork]
                theirs = [sizes[place] for sizes in other]
                yield compared(f"{ranks} ranks by fork: PSS of {who}", ours, theirs, unit="MiB", scale=2**-20)
                served = [sizes[place] for sizes in zygote]
                yield compared(f"{ranks} ranks by zygote: PSS of {who}", served, unit="MiB", scale=2**-20)


@row("launch", "memory of a model")
def memory_of_a_model() -> Iterator[Figure]:
    """Measure the PSS of the kernel and its ranks, which inherit the kernel's 1 GB model but do not change it."""
    with Launcher(HERE, forked=False) as here, Launcher(PEER, forked=False) as peer:
        for launcher in (here, peer):
            launcher.kernel.check(WAITING + "model = [torch.ones(1 << 22) for _ in range(64)]")
        for ranks in (2, 16):
            ours, theirs = zip(*[[_sizes(side, ranks, "") for side in (here, peer)] for _ in range(3)], strict=True)
            for place, who in enumerate(("the kernel", "each rank")):
                yield compared(
                    f"{ranks} ranks by fork: PSS of {who}",
                    [sizes[place] for sizes in ours],
                    [sizes[place] for sizes in theirs],
                    unit="MiB",
                    scale=2**-20,
                    ratio=1.1,
                )


@row("launch", "many runs")
def many_runs() -> Iterator[Figure]:
    """Measure a launch from a kernel with 200 finished runs, and the memory that each of these runs still uses."""
    work = (
        "def work():\n    from notebook_accelerate import telemetry\n"
        "    for step in range(100):\n        print('step', step)\n"
        "        telemetry.emit(telemetry.MetricEvent({'loss': 0.5}, step))\n    stamp()"
    )
    with Launcher(HERE) as new, Launcher(HERE) as old:
        for launcher in (new, old):
            launcher.kernel.check(work)
            launcher.time("work", 2)
        before = old.kernel.process.memory_info().rss
        for _ in range(200):
            old.time("work", 2)
        kept = (old.kernel.process.memory_info().rss - before) / 200
        late, early = alternate(REPEATS, lambda: old.time("stamp", 2)[1], lambda: new.time("stamp", 2)[1])
    yield compared("2 ranks: call to return, relative to a new kernel", late, early, unit="s", ratio=1.2)
    yield Figure(what="memory per finished run", unit="kB", ours=kept / 1e3)


FITTING = """
from torch import nn
from notebook_accelerate import Accelerator, sweep

def fit(seed):
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    inputs = torch.randn(128, 64)
    for step in range(500):
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.log({"loss": loss.item()}, step)

def in_turn():
    for seed in range(8):
        notebook_launcher(fit, (seed,), devices=1, panel=False)

def in_slots():
    assert sweep(fit, {"seed": list(range(8))}, devices=2, panel=False).wait(300)
"""


@row("launch", "sweep")
def sweeping() -> Iterator[Figure]:
    """Measure a sweep of eight runs on two cores, one for each run. The peer launches the runs one after the other."""
    with Launcher(HERE, {"OMP_NUM_THREADS": "1"}) as here:
        here.kernel.check(FITTING)
        sides = [lambda call=call: here.time_in_kernel(call) for call in ("in_slots()", "in_turn()")]
        slots, turns = alternate(2, *sides)
    note = "the peer launches the same runs one after the other"
    yield compared("8 runs in two slots", slots, turns, unit="s", ratio=0.6, note=note)


LARGE = """
def make(gigabytes):
    value = {f"w{i}": torch.ones(gigabytes << 25) for i in range(8)}
    stamp()
    return value

def returned(gigabytes):
    return make(gigabytes) if os.environ["RANK"] == "0" else None

def saved(gigabytes):
    if os.environ["RANK"] == "0":
        torch.save(make(gigabytes), FOLDER / "value")

def bring(gigabytes, here):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    begin = peak()
    run = notebook_launcher(returned if here else saved, (gigabytes,), num_processes=2)
    value = run.results[0] if here else torch.load(FOLDER / "value")
    end = time.monotonic()
    # Read every page with NumPy. With torch, the kernel would start its thread pool, and the peer's forked ranks hang.
    for each in value.values():
        assert each.numpy()[::1024].sum() == each.numel() // 1024, "wrong contents"
    used = peak() - begin
    if here:
        run.free_results()
    return end, used

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
"""


@row("launch", "large results")
def large_results() -> Iterator[Figure]:
    """Measure how long after the end of a function the kernel has its value, and the kernel's peak memory."""
    with Launcher(HERE) as here, Launcher(PEER) as peer:
        for side in (here, peer):
            side.kernel.check(LARGE)
        for gigabytes in (1, 3):
            peaks: list[list[float]] = [[], []]

            def bring(launcher: Launcher, gigabytes: int = gigabytes, peaks: list[list[float]] = peaks) -> float:
                for file in launcher.folder.iterdir():
                    file.unlink()
                end, peak = launcher.kernel.value(f"bring({gigabytes}, {launcher is here})", timeout=300.0)
                peaks[launcher is peer].append(peak)
                return float(end) - float((launcher.folder / "0").read_text())

            ours, theirs = alternate(3, lambda: bring(here), lambda: bring(peer))
            note = "the peer saves the value to a file and loads it in the kernel"
            what = f"{gigabytes} GB returned by one of 2 ranks"
            yield compared(f"{what}: until the kernel has it", ours, theirs, unit="s", limit=2.0 * gigabytes, note=note)
            yield compared(f"{what}: peak memory of the kernel", *peaks, unit="GiB", scale=2**-30)


def _sizes(launcher: Launcher, ranks: int, options: str) -> tuple[float, float]:
    """Return the PSS of the kernel and the mean PSS of its ranks, in bytes."""
    go = launcher.folder.with_name(launcher.folder.name + "-go")
    cell = launcher.submit("waiting", ranks, options)
    try:
        launcher.wait_for_ranks(ranks)
        time.sleep(0.2)
        pids = [int(file.read_text()) for file in launcher.folder.iterdir()]
        sizes = pss(launcher.kernel.pid), statistics.mean(pss(pid) for pid in pids)
        go.touch()
        launcher.kernel.finish(cell).expect_ok()
    finally:
        go.unlink(missing_ok=True)
    return sizes


def pss(pid: int) -> float:
    """Return the proportional set size of a process in bytes: its private pages and its share of shared ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/smaps_rollup has no Pss line")
