"""A run: what the user holds of a launch, while it lasts and afterwards."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from notebook_accelerate.debug.rank_requests import RankRequests
from notebook_accelerate.errors import RunNotFinishedError, WorkerError
from notebook_accelerate.launch.run_debugging import RunDebugging
from notebook_accelerate.launch.run_display import RunDisplay
from notebook_accelerate.launch.state.prompts import PromptQueue
from notebook_accelerate.telemetry import Metrics, RankFailure, Store

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.debug.diagnosis import Diagnosis
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.report.run_report import Report
    from notebook_accelerate.launch.supervisor.rank_group import GroupCall

ENDED = ("succeeded", "failed", "stopped")
DEFAULT_GRACE = 5.0

_numbers = itertools.count(1)


@dataclass
class RankInfo:
    """What is known of one rank.

    Attributes:
        rank: Global index.
        pid: Its process; None before it has one.
        state: "starting", "running", "succeeded", "failed" or "stopped".
        last_step: The last step it logged; None when it logged none.
        exit: How its process ended, as "exit 0" or "SIGKILL"; "" while it runs.
        result: What the function returned; None unless it succeeded.
        node: Index of the machine it runs on.
        host: Name of that machine; "" for this one.
    """

    rank: int
    pid: int | None = None
    state: str = "starting"
    last_step: int | None = None
    exit: str = ""
    result: Any = field(default=None, repr=False)
    node: int = 0
    host: str = ""


@dataclass
class Attempt:
    """One try at running the whole group.

    Attributes:
        number: From 0.
        started: Seconds since the epoch.
        ended: The same; None while it lasts.
        outcome: "running", "succeeded", "stopped" or what failed first.
    """

    number: int
    started: float
    ended: float | None = None
    outcome: str = "running"


class Run(RunDebugging, RunDisplay):
    """A launch in progress, or what is left of it.

    Made by ``notebook_launcher``; nothing here starts anything.
    """

    def __init__(self, config: LaunchConfig, function_name: str) -> None:
        self.id = next(_numbers)
        self.config = config
        self.function_name = function_name
        self.plan: LaunchPlan | None = None
        self.notes: list[str] = []
        self.attempts: list[Attempt] = []
        self.store = Store()
        self.started = time.time()
        self.ended: float | None = None
        self.failures: tuple[RankFailure, ...] = ()
        self._status = "starting"
        self._ranks: list[RankInfo] = []
        self._error: WorkerError | None = None
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Run], None]] = []
        self._views: list[Callable[[Run], None]] = []
        self._board = PromptQueue()
        self._desk = RankRequests()
        self._released = threading.Event()
        self._released.set()
        self.diagnoses: list[Diagnosis] = []
        self.warnings: list[str] = []
        self._stopper: Callable[[float], None] | None = None
        self._post: Callable[[GroupCall], None] = _nobody

    # ---- what the user reads

    @property
    def status(self) -> str:
        """One of "starting", "running", "stopping", "succeeded", "failed" and "stopped"."""
        return self._status

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """The ranks that are shown here, in order: in the other ones of several notebooks only their own."""
        with self._lock:
            for info in self._ranks:
                info.last_step = self.store.last_step.get(info.rank)
            return tuple(self._ranks)

    @property
    def results(self) -> tuple[Any, ...]:
        """What the function returned, one value per rank.

        Raises:
            RunNotFinishedError: The run has not ended.
            WorkerError: The run did not succeed; what single ranks returned is in ``run.ranks``.
        """
        if self.ended is None:
            raise RunNotFinishedError(f"run {self.id} is {self.status}; wait for it with run.wait() or await run")
        if self._error is not None:
            raise self._error
        return tuple(info.result for info in self._ranks)

    @property
    def error(self) -> WorkerError | None:
        """Why the run did not succeed; None while it lasts and when it did."""
        return self._error

    @property
    def metrics(self) -> Metrics:
        """The named series the ranks logged: a live mapping, with ``to_pandas()``."""
        return Metrics(self.store)

    @property
    def elapsed(self) -> float:
        """Seconds since the launch, until the end once it has ended."""
        return (self.ended or time.time()) - self.started

    def logs(self, rank: int | None = None, tail: int | None = None) -> list[str]:
        """Return the lines the ranks wrote, oldest first, as far back as the store keeps them.

        Args:
            rank: Only this rank's lines; None means all ranks', each line behind its label.
            tail: Only so many of the last ones.

        Raises:
            ValueError: No such rank, or a negative ``tail``.
        """
        if tail is not None and tail < 0:
            raise ValueError(f"tail={tail!r} is not allowed; pass a number of at least 0, or None for all lines")
        known = [info.rank for info in self._ranks]
        if rank is not None and rank not in known:
            raise ValueError(f"rank={rank!r} is not a rank that is shown here; there are {known}")
        if rank is not None:
            lines = [line.text for line in self.store.log_lines(rank)]
        else:
            stamped = [(line.time, f"[rank {r}] {line.text}") for r in known for line in self.store.log_lines(r)]
            lines = [text for _, text in sorted(stamped, key=lambda pair: pair[0])]
        return lines if tail is None else lines[max(0, len(lines) - tail) :]

    def report(self) -> Report:
        """Return the run as static HTML and as text, for reading now or in the saved notebook."""
        from notebook_accelerate.launch.report.run_report import Report

        return Report(self)

    # ---- what the user does

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, answering ranks that ask for input.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Returns:
            Whether the run has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            question = self._board.take(left)
            if question is not None:
                self._put_to_user(question, keep=not self.config.block)  # there an interrupt stops the run
            elif left == 0.0:
                break
        return self._done.is_set()

    def stop(self, grace: float = DEFAULT_GRACE) -> None:
        """End the run and return once every rank is reaped; does nothing when it has ended.

        Ranks get a KeyboardInterrupt, then SIGTERM, then, when ``grace`` seconds are over, SIGKILL. A second call
        while the first is under way kills at once.

        Args:
            grace: Seconds the ranks have to end by themselves.
        """
        if grace < 0:
            raise ValueError(f"grace={grace!r} is not allowed; pass seconds of at least 0")
        if self._stopper is not None and not (self._done.is_set() and self._released.is_set()):
            self._stopper(grace)
        # A subscriber may stop its run: the threads that call subscribers cannot wait for their own end.
        if threading.current_thread().name not in (f"notebook-accelerate-run-{self.id}", "notebook-accelerate-sampler"):
            self._done.wait()
            self._released.wait()

    def add_done_callback(self, callback: Callable[[Run], None]) -> None:
        """Call ``callback(run)`` when the run has ended, on the supervisor's thread; at once if it has."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _before_done(self, callback: Callable[[Run], None]) -> None:
        """Call ``callback(run)`` when the run has ended, before anybody who waits hears of that; at once if it has.

        What a view leaves in the notebook is there when ``stop()`` and ``wait()`` return: the cell that called them may
        be the last one, and the notebook saved at once.
        """
        with self._lock:
            if self.ended is None:
                self._views.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Run]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Run] = loop.create_future()

        def finish(run: Run) -> None:
            loop.call_soon_threadsafe(_resolve, future, run)

        self.add_done_callback(finish)
        return self._awaited(future).__await__()

    async def _awaited(self, future: asyncio.Future[Run]) -> Run:
        try:
            # ipykernel sees an interrupt of an await only when its loop wakes up for another reason.
            while not future.done():
                await asyncio.wait([future], timeout=0.2)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.stop()
            raise
        if self._error is not None:
            raise self._error
        return self

    # ---- how it looks

    def __repr__(self) -> str:
        count = len(self._ranks) or self.config.num_processes or 1
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        return f"<Run {self.id}: {self.function_name}, {self.status}, {ranks}, {self.elapsed:.1f} s>"

    # ---- what the launch room writes

    def _planned(self, plan: LaunchPlan, *, whole: bool = False) -> None:
        """Take the plan; ``whole``: the ranks of all notebooks are shown here, not only this one's."""
        first, count = (0, plan.world_size) if whole else (plan.first_rank, plan.num_processes)
        with self._lock:
            self.plan = plan
            self._ranks = [RankInfo(first + index, node=plan.node) for index in range(count)]

    def _begin_attempt(self, number: int) -> None:
        with self._lock:
            self.attempts.append(Attempt(number, time.time()))
            for info in self._ranks:
                info.state, info.pid, info.exit, info.result = "starting", None, "", None

    def _end_attempt(self, outcome: str) -> None:
        attempt = self.attempts[-1]
        attempt.ended, attempt.outcome = time.time(), outcome

    def _set_status(self, status: str) -> None:
        with self._lock:
            self._status = status

    def _info(self, rank: int) -> RankInfo:
        return self._ranks[rank - self._ranks[0].rank]

    def _hold(self, status: str, error: WorkerError | None) -> None:
        """The run has ended, but its ranks are kept for inspection until it is stopped."""
        self._released.clear()
        self._finish(status, error)
        self._board.reopen()

    def _release(self) -> None:
        self._board.close()
        self._released.set()

    def _finish(self, status: str, error: WorkerError | None) -> None:
        with self._lock:
            self.ended = time.time()
            self._status, self._error = status, error
            views, self._views = self._views, []
        try:
            _tell(self, views)
        finally:  # an inline run's views are told on the main thread: an interrupt there must not leave it without end
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                self._done.set()
            self._board.close()
        _tell(self, callbacks)


def _tell(run: Run, callbacks: list[Callable[[Run], None]]) -> None:
    for callback in callbacks:
        try:
            callback(run)
        except Exception as problem:  # noqa: BLE001 - the user's own code, on the supervisor's thread
            warnings.warn(f"a done callback failed: {type(problem).__name__}: {problem}", stacklevel=2)


def _nobody(_call: GroupCall) -> None:
    """Take the place of a supervisor where there is none: in an inline run."""


def _resolve(future: asyncio.Future[Run], run: Run) -> None:
    if not future.done():  # cancelled, perhaps
        future.set_result(run)
