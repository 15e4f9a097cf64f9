"""If random processes of a run on three hosts are killed or suspended, every surviving host ends and says why.

Each round starts one run with three hosts (the first notebook, another notebook and a command), each with one or two
ranks. At a random moment, the round kills or suspends one process: the first kernel, another host or a rank. The seed
determines all choices.
"""

from __future__ import annotations

import os
import platform
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.join_commands import JOIN, JoinCommand
from tests.support.kernel import Cell, Kernel, KernelTimeoutError
from tests.support.launching import children, ready_kernel, said
from tests.support.nightly import rest_nightly
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.timeout(400),
    pytest.mark.leaks_ok("kernels are kept for the next round; each round checks its own processes"),
]
HOST = re.escape(platform.node())
SECRET = "hush-4711"
FIRST, NOTEBOOK, COMMAND = 0, 1, 2
"""The numbers of the nodes."""
NAMES = ["the first notebook", "the other notebook", "the command"]
KINDS = [(verb, what) for verb in ("kill", "suspend") for what in ("first", "host", "rank")]
"""The kinds of faults. A seed modulo their number selects one."""
DAILY = (0, 25, 8, 21, 11)
"""The seeds that run daily: one for each kind of fault, except for a suspended host.

test_a_suspended_host_is_lost_after_the_time_of_the_heartbeats tests that kind.
"""
ROUNDS = 56
JOIN_SECONDS = 60.0
SILENT_SECONDS = [8.0, 8.0, 15.0]
"""The seconds of silence after which each host treats another as lost.

Commands use the default, because they do not know the run's ``rdzv_conf``. Shorter limits could be exceeded on a busy
machine without any fault.
"""
HANG_SECONDS = 30.0
"""The ``hang_timeout`` of rounds that suspend a rank. On a busy machine, ranks may take 20 seconds to start."""
LIMIT = 60.0
"""The time limit in seconds from the fault to the end of every surviving host, if all ranks were running."""
MARGIN = 20.0
"""The time limit in seconds for steps that take two seconds on an idle machine."""

TRAIN = """
def train(folder):
    child = subprocess.Popen(["sleep", "600"])
    path = os.path.join(folder, os.environ["RANK"])
    with open(path + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {os.environ['GROUP_RANK']}")
    os.replace(path + ".part", path)
    group()
    while True:
        value = torch.ones(8)
        dist.all_reduce(value)
        time.sleep(0.05)
"""


def join_command(where: str, processes: int) -> JoinCommand:
    """Start a command that joins a run.

    Args:
        where: The address and port of the first notebook, as ADDRESS:PORT.
        processes: The number of ranks that the command starts.
    """
    options = ("--num_processes", str(processes), "--join_timeout", str(JOIN_SECONDS))
    return JoinCommand(*JOIN, where, *options, env={**os.environ, "NOTEBOOK_ACCELERATE_SECRET": SECRET})


class Kernels:
    """The kernels of both notebooks. A kernel that a round has killed is replaced for the next round."""

    def __init__(self) -> None:
        self._kernels: list[Kernel | None] = [None, None]

    def ready(self) -> list[Kernel]:
        """Return both kernels, idle and with the training function defined."""
        for index, kernel in enumerate(self._kernels):
            if kernel is not None and not kernel.alive():
                self.close(index)
            if self._kernels[index] is None:
                self._kernels[index] = fresh = ready_kernel()
                fresh.check(TRAIN)
        return [kernel for kernel in self._kernels if kernel is not None]

    def close(self, *indices: int) -> None:
        """Close the kernels at these indices; the next round starts new ones."""
        for index in indices:
            kernel, self._kernels[index] = self._kernels[index], None
            if kernel is not None:
                kernel.close()


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Yield the kernels that all rounds share."""
    found = Kernels()
    try:
        yield found
    finally:
        found.close(FIRST, NOTEBOOK)


@dataclass
class Rank:
    """A rank that has started the function, its child process, and its node."""

    process: psutil.Process
    child: psutil.Process
    node: int


@dataclass
class Round:
    """One run and its fault.

    Args:
        seed: The number that determines all choices.
        kernels: The kernels of the two notebooks.
        folder: The folder to which the ranks write their process ids.
    """

    seed: int
    kernels: list[Kernel]
    folder: Path
    lines: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    recorded: set[psutil.Process] = field(default_factory=set)
    stopped: psutil.Process | None = None

    def __post_init__(self) -> None:
        """Choose the fault and its moment."""
        self.random = random.Random(self.seed)
        self.verb, self.what = KINDS[self.seed % len(KINDS)]
        self.node = FIRST if self.what == "first" else self.random.choice([NOTEBOOK, COMMAND])
        self.sizes = [self.random.choice([1, 2]) for _ in range(3)]
        self.joining = self.what != "rank" and self.random.random() < 0.25
        self.delay = self.random.uniform(0.0, 4.0)
        self.continues = self.random.random() < 0.5
        self.victim_rank = self.random.randrange(sum(self.sizes)) if self.what == "rank" else -1
        self.begin = time.monotonic()
        self.fault = 0.0
        self.before = [_descendants(kernel.pid) for kernel in self.kernels]

    @property
    def story(self) -> str:
        """The seed, the numbers of ranks, and the events so far."""
        return "\n  ".join([f"seed {self.seed}, ranks {self.sizes}", *self.lines])

    def note(self, text: str) -> None:
        """Add a line to the story."""
        self.lines.append(f"{time.monotonic() - self.begin:5.1f} s: {text}")

    def play(self) -> None:
        """Launch, cause the fault and check its consequences."""
        self.begin = time.monotonic()
        port = free_port()
        conf = {
            "secret": SECRET,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 8,
            "join_timeout": JOIN_SECONDS,
        }
        hang = HANG_SECONDS if (self.verb, self.what) == ("suspend", "rank") else LIMIT
        for node, kernel in enumerate(self.kernels):
            options = f"num_nodes=3, use_port={port}, hang_timeout={hang}, rdzv_conf={conf}, node_rank={node}"
            call = f"run = launch(train, {str(self.folder)!r}, num_processes={self.sizes[node]}, {options})"
            self.cells.append(kernel.submit(call))
        self.command = join_command(f"127.0.0.1:{port}", self.sizes[COMMAND])
        self.note("launched")
        try:
            self.wait_for_moment()
            self.cause_fault()
            self.check()
        except psutil.NoSuchProcess as error:
            raise AssertionError(f"a process ended before its fault: {error}") from error
        finally:
            self.clean_up()

    # ---- the fault

    def wait_for_moment(self) -> None:
        """Wait until the fault is due."""
        if not self.joining:
            wanted = 1 if self.what == "rank" and self.delay < 1.0 else sum(self.sizes)
            deadline = time.monotonic() + LIMIT
            while len(found := self.ranks()) < wanted or (self.what == "rank" and self.victim_rank not in found):
                assert time.monotonic() < deadline, f"only ranks {sorted(found)} started"
                self.assert_running()
                self.pump(0.05)
            self.note(f"ranks {sorted(found)} run")
        until = time.monotonic() + self.delay
        while (left := until - time.monotonic()) > 0:
            self.pump(min(left, 0.1))
        self.assert_running()

    def pump(self, seconds: float) -> None:
        """Collect the output of the kernels for about this many seconds."""
        for kernel in self.kernels:
            kernel.pump(seconds / 2)

    def assert_running(self) -> None:
        """Fail if a host ended before the fault."""
        for node, cell in enumerate(self.cells):
            assert not cell.finished, f"{NAMES[node]} ended before the fault:\n{said(cell)}"
        assert self.command.process.poll() is None, f"the command ended before the fault:\n{self.command.err[-2000:]}"

    def cause_fault(self) -> None:
        """Kill or suspend the chosen process."""
        pid = self.ranks()[self.victim_rank].process.pid if self.what == "rank" else self.pids[self.node]
        self.all_running = len(self.ranks()) == sum(self.sizes)
        self.record()
        process = psutil.Process(pid)
        who = f"rank {self.victim_rank}" if self.what == "rank" else NAMES[self.node]
        self.fault = time.monotonic()
        if self.verb == "kill":
            process.kill()
        else:
            process.suspend()
            self.stopped = process
        self.note(f"{self.verb} {who} ({pid}); ranks {sorted(self.ranks())} had begun")

    @property
    def pids(self) -> list[int]:
        """The process ids of the three hosts."""
        return [*(kernel.pid for kernel in self.kernels), self.command.process.pid]

    def ranks(self) -> dict[int, Rank]:
        """Return the ranks that have started the function."""
        found = {}
        for path in self.folder.glob("*"):
            if path.name.isdigit():
                pid, child, node = map(int, path.read_text().split())
                if (number := int(path.name)) not in self._known:
                    with suppress(psutil.NoSuchProcess):
                        self._known[number] = Rank(psutil.Process(pid), psutil.Process(child), node)
                if number in self._known:
                    found[number] = self._known[number]
        return found

    _known: dict[int, Rank] = field(default_factory=dict)

    def record(self) -> None:
        """Record the round's current processes, to check at the end that none of them is left."""
        known = set().union(*self.before)
        for node, pid in enumerate(self.pids):
            found = _descendants(pid)
            killed = self.what != "rank" and self.node == node and self.verb == "kill"
            self.recorded |= {psutil.Process(pid), *found} if killed else found - known
        for rank in self.ranks().values():
            self.recorded |= {rank.process, rank.child}

    # ---- the expected consequences

    def check(self) -> None:
        """Check how every host ended, and that nothing is left."""
        gone = None if self.what == "rank" else self.node
        left = [node for node in (FIRST, NOTEBOOK, COMMAND) if node != gone]
        for node in left:
            self.check_host(node)
        if self.what == "first":
            self.check_ranks_of_survivors(left)
        if gone is not None and self.verb == "suspend":
            self.resume_or_kill(gone)
        self.record_late()
        self.check_nothing_left()

    def deadline(self) -> float:
        """Return the deadline for all hosts to end."""
        return self.fault + (LIMIT if self.all_running else JOIN_SECONDS + MARGIN + LIMIT / 2)

    def check_host(self, node: int) -> None:
        """Wait for a host to end, and check the reason that it gives."""
        text = self.end_of(node, self.deadline())
        self.note(f"{NAMES[node]} ended: {_short(text)}")
        pattern = self.pattern(node)
        assert re.search(pattern, text), f"the error of {NAMES[node]} does not match {pattern!r}:\n{text[-3000:]}"

    def end_of(self, node: int, deadline: float) -> str:
        """Return the error that a host ended with."""
        seconds = max(0.1, deadline - time.monotonic())
        if node == COMMAND:
            try:
                code = self.command.process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the command is still running:\n{self.command.err[-2000:]}") from None
            assert code == 1, f"the command ended with {code}:\n{self.command.err[-2000:]}"
            return self.command.err.rpartition("notebook-accelerate join: ")[2]
        kernel, cell = self.kernels[node], self.cells[node]
        try:
            kernel.finish(cell, seconds)
        except KernelTimeoutError:
            raise AssertionError(f"{NAMES[node]} is still running:\n{cell.plain[-2000:]}\n{_stacks(kernel)}") from None
        return said(cell)

    def pattern(self, node: int) -> str:
        """Return the pattern that a host's error must match."""
        if self.what == "rank":
            rank = self.victim_rank
            return rf"rank {rank}\b.*killed by SIGKILL" if self.verb == "kill" else r"\(hang_timeout\)"
        if self.what == "first":
            lost = rf"node 0( \({HOST}\))? was lost|the first notebook was lost"
            return lost if self.all_running else f"{lost}|node 0 did not join within"
        lost = rf"node {self.node}( \({HOST}\))? (was lost|has left)"
        # Commands get their numbers only once all hosts have joined, so the missing host may have either number.
        return lost if self.all_running else rf"{lost}|nodes? [12, ]+ did not join within"

    def check_ranks_of_survivors(self, nodes: list[int]) -> None:
        """Check that the hosts that have lost the first notebook end their ranks in time."""
        for node in nodes:
            silent = 0.0 if self.verb == "kill" else SILENT_SECONDS[node]
            processes = [rank.process for rank in self.ranks().values() if rank.node == node]
            limit = silent + MARGIN if self.all_running else LIMIT
            left = _wait_gone(processes, self.fault + limit)
            assert not left, f"ranks of {NAMES[node]} are still running {limit:g} s after the fault: {left}"

    def resume_or_kill(self, node: int) -> None:
        """Resume a suspended host, which must then end as well, or kill it."""
        assert self.stopped is not None
        if not self.continues:
            self.recorded |= {self.stopped, *_descendants(self.stopped.pid)}
            self.stopped.kill()
            self.note(f"killed {NAMES[node]}")
            return
        self.stopped.resume()
        self.note(f"continued {NAMES[node]}")
        text = self.end_of(node, time.monotonic() + JOIN_SECONDS + MARGIN)
        self.note(f"{NAMES[node]} ended: {_short(text)}")
        other = r"(node|nodes) [012, ]+( \(\S+\))? (was lost|has left|did not join)"
        assert re.search(rf"{other}|the first notebook was lost", text), f"{NAMES[node]}:\n{text[-3000:]}"

    def record_late(self) -> None:
        """Record the ranks that started the function after the fault."""
        for rank in self.ranks().values():
            self.recorded |= {rank.process, rank.child}

    def check_nothing_left(self) -> None:
        """Check that no process of the round is left, and that the kernels respond and have no child processes."""
        left = _wait_gone(self.recorded, time.monotonic() + MARGIN)
        assert not left, f"processes are left: {left}"
        for node, kernel in enumerate(self.kernels):
            if kernel.alive():
                kernel.expect_answer(LIMIT)
                assert children(kernel) == [], f"{NAMES[node]} still has child processes"

    def clean_up(self) -> None:
        """Kill all processes that must not outlive the round."""
        self.record_late()
        for process in self.recorded:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.stopped is not None and self.stopped.pid not in self.pids[:COMMAND]:
            with suppress(psutil.NoSuchProcess):
                self.stopped.kill()
        self.command.close()


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no text"


def _descendants(pid: int) -> set[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _wait_gone(processes: set[psutil.Process] | list[psutil.Process], deadline: float) -> list[str]:
    """Wait until no process is running. Return those that are still running at the deadline, except for zombies."""
    while (left := [text for each in processes if (text := _running(each))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _running(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and (status := process.status()) != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {status} {' '.join(process.cmdline())[-100:]}"
    return ""


def _stacks(kernel: Kernel) -> str:
    """Return the stacks of a kernel that does not respond, and kill it."""
    written = len(kernel.log)
    with suppress(ProcessLookupError):
        os.kill(kernel.pid, signal.SIGABRT)
    time.sleep(1.0)
    return kernel.log[written:][-6000:]


@pytest.mark.parametrize("seed", rest_nightly([(seed,) for seed in range(ROUNDS)], lambda seed: seed in DAILY))
def test_every_host_ends_with_the_reason(kernels: Kernels, seed: int, tmp_path: Path) -> None:
    chaos = Round(seed, kernels.ready(), tmp_path)
    try:
        chaos.play()
    except AssertionError as error:
        kernels.close(FIRST, NOTEBOOK)
        raise AssertionError(f"{chaos.story}\n{str(error)[:8000]}") from None
    print(chaos.story)
