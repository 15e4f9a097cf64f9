"""A persistent group of ranks that runs notebook cells and keeps its variables."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import LaunchError, RunInterrupted, WorkerDiedError, WorkerError, with_page
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.run_debugging import ask_user
from notebook_accelerate.launch.starting import start
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.failures import ordered
from notebook_accelerate.launch.state.interrupts import wait_for
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import ExceptionInfo, RankFailure, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, CellRequest
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.worker.warm_cells import warm_rank

PROMPT_SECONDS = 0.05
"""Seconds between checks for prompts from ranks while a cell waits."""
READY_SECONDS = 120.0
"""Seconds that ranks may take to start, once the other nodes have joined."""
END_SECONDS = 10.0
"""Seconds to wait for the reason after a group has ended."""


@dataclass(frozen=True)
class CellResult:
    """The results of a cell on its ranks.

    Attributes:
        shown: The ``repr`` of the cell's last expression, by rank, or "" if there is nothing to show.
        fetched: The requested variables, by rank.
    """

    shown: dict[int, str]
    fetched: dict[int, dict[str, Any]]


class WarmRanks:
    """A group of ranks that persists between cells.

    Args:
        config: The launch configuration. Its ``block`` and ``panel`` are ignored.

    Raises:
        LaunchError: The group did not start.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config.changed(block=False, panel=False)
        self._numbers = itertools.count(1)
        self.run = self._start()

    def _start(self) -> Run:
        run = start(self._config, warm_rank)
        internals(run).commands.prompts.shown_in_cell = True
        deadline = None
        try:
            while run.status == "starting" and (deadline is None or time.monotonic() < deadline):
                run.wait(PROMPT_SECONDS)
                # Before the first attempt, the run waits for other notebooks, without a deadline.
                if deadline is None and run.attempts:
                    deadline = time.monotonic() + READY_SECONDS
        except KeyboardInterrupt:
            run.stop(grace=1.0)
            raise
        if run.status != "running":
            raise LaunchError(f"the warm ranks did not start: {run.error or run.status}")
        return run

    @property
    def alive(self) -> bool:
        """Whether the group can run a cell."""
        return self.run.status == "running"

    @property
    def size(self) -> int:
        """Number of ranks that this notebook has started."""
        assert self.run.plan is not None, "a group that has started has a plan"
        return self.run.plan.num_processes

    def restart(self) -> None:
        """End the group and start a new one. The variables of the old group are lost."""
        self.stop()
        self.run = self._start()

    def stop(self) -> None:
        """End the group of ranks."""
        self.run.stop(grace=1.0)

    def execute(
        self,
        source: str,
        filename: str,
        ranks: Iterable[int] | None = None,
        send: Mapping[str, Any] | None = None,
        fetch: Iterable[str] = (),
    ) -> CellResult:
        """Run a cell on ranks and wait for it to finish, without a time limit.

        Args:
            source: The source of the cell.
            filename: The cell's file name in tracebacks.
            ranks: The global indices of the ranks. None means all ranks.
            send: Variables to set on the ranks before the cell runs.
            fetch: The names of the variables to return.

        Raises:
            ValueError: There is no such rank.
            WorkerError: The cell failed on a rank. The group is still alive.
            WorkerDiedError: A rank died, which ended the whole group.
            KeyboardInterrupt: The cell was interrupted. If that ended the group, the error is a ``RunInterrupted``.
        """
        wanted = self._wanted(ranks)
        names = list(fetch)
        payload = dump_bytes(dict(send), f"one of {', '.join(send)}") if send else b""
        kernel = running_kernel()
        if kernel is not None:
            internals(self.run).commands.show_under(kernel.get_parent())
        hand_out = self._send_apart if payload else self._send
        waiting, pressed = hand_out(wanted, lambda number: CellRequest(number, source, filename, names, payload))
        replies, interrupted = self._collect(waiting, pressed)
        failed = [reply.chain[-1].type for reply in replies.values() if reply.chain]
        if interrupted and self.alive and all(kind == "KeyboardInterrupt" for kind in failed):
            raise CellInterrupt
        return self._result(wanted, replies)

    def _send(self, wanted: list[int], make: Callable[[int], CellRequest]) -> tuple[dict[int, int], bool]:
        """Send the cell to ranks. Return the number of each rank's request, and False (not interrupted)."""
        return internals(self.run).commands.requests.send(wanted, make), False

    def _send_apart(self, wanted: list[int], make: Callable[[int], CellRequest]) -> tuple[dict[int, int], bool]:
        """Send the cell from another thread. Return the requests' numbers, and whether an interrupt arrived.

        Sending variables takes time. If an interrupt reached the sending thread, it would truncate a message, and the
        rank would wait forever for the rest.
        """
        sent: dict[int, int] = {}
        over = threading.Event()

        def send() -> None:
            try:
                sent.update(self._send(wanted, make)[0])
            finally:
                over.set()

        pressed = False
        threading.Thread(target=send, name="notebook-accelerate-cell", daemon=True).start()
        while not over.is_set():
            try:
                wait_for(over)
            except KeyboardInterrupt:
                if pressed:
                    self._kill(wanted)
                pressed = True
        return sent, pressed

    def _collect(self, waiting: dict[int, int], pressed: bool) -> tuple[dict[int, CellReply], bool]:
        """Wait for the replies. A first interrupt is passed on to the ranks, and a second one ends the group."""
        replies: dict[int, CellReply] = {}
        interrupted: float | None = None
        while len(replies) < len(waiting) and self.alive:
            try:
                if pressed:
                    pressed = False
                    raise KeyboardInterrupt
                self._poll(waiting, replies)
            except KeyboardInterrupt:
                busy = [rank for rank in waiting if rank not in replies]
                if interrupted is not None:
                    self._kill(busy)
                interrupted = time.monotonic()
                internals(self.run).commands.interrupt(busy)
            if interrupted is not None and time.monotonic() - interrupted > DEFAULT_GRACE:
                self._kill([rank for rank in waiting if rank not in replies])
        return replies, interrupted is not None

    def _kill(self, busy: list[int]) -> NoReturn:
        """End the group, because the ranks in ``busy`` do not stop."""
        self.run.stop(grace=0.0)
        raise GroupInterrupt(self.run, busy) from None

    def _poll(self, waiting: dict[int, int], replies: dict[int, CellReply]) -> None:
        prompt = internals(self.run).commands.prompts.claim_next(
            PROMPT_SECONDS / 10, among=waiting.keys() - replies.keys()
        )
        if prompt is not None:
            ask_user(prompt, internals(self.run).commands.prompts)
        for rank, reply in internals(self.run).commands.requests.collect(waiting, PROMPT_SECONDS).items():
            assert isinstance(reply, CellReply), "a CellRequest is answered with a CellReply"
            replies[rank] = reply

    def _result(self, wanted: list[int], replies: dict[int, CellReply]) -> CellResult:
        if not self.alive or any(rank not in replies for rank in wanted):  # A rank may have died before the request.
            self.run.wait(END_SECONDS)
            raise self.run.error or WorkerDiedError("the warm ranks have ended", self.run)
        found = [
            RankFailure(rank, "exception", reply.time, _headline(chain), chain)
            for rank, reply in replies.items()
            if (chain := tracebacks.name_cells_of(reply.chain))
        ]
        if found:
            raise CellError(self.run, tuple(ordered(found)))
        fetched = {rank: load_bytes(reply.payload) for rank, reply in replies.items() if reply.payload}
        return CellResult({rank: replies[rank].shown for rank in wanted}, fetched)

    def _wanted(self, ranks: Iterable[int] | None) -> list[int]:
        known = [info.rank for info in self.run.ranks]
        wanted = known if ranks is None else list(ranks)
        if unknown := [rank for rank in wanted if rank not in known]:
            raise ValueError(f"ranks={unknown} are not ranks of this group; its ranks are {known}")
        return wanted


def _headline(chain: tuple[ExceptionInfo, ...]) -> str:
    last = chain[-1]
    return f"{last.type}: {last.message}".rstrip(": ")


class CellInterrupt(KeyboardInterrupt):
    """The user interrupted a cell on warm ranks. The ranks and their variables are kept."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt: the cell was interrupted on its ranks; the ranks keep running"]


class GroupInterrupt(RunInterrupted):
    """The user interrupted a cell on warm ranks. Some ranks did not react, so the whole group was ended."""

    def __init__(self, run: Run, busy: list[int]) -> None:
        super().__init__(run)
        who = rank_names(busy)
        ended = "the warm ranks were ended, and their variables are gone; %%ranks starts new ones"
        self.args = (f"{who} could not be interrupted: {ended}",)


class CellError(WorkerError):
    """A cell failed on warm ranks. The ranks and their variables are kept."""

    def __init__(self, run: Run, found: tuple[RankFailure, ...]) -> None:
        super().__init__(failures.headline(found), run, found)

    def _render_traceback_(self) -> list[str]:
        lines = [*failures.failure_lines(self.failures), "", f"WorkerError: {self}"]
        return with_page(lines, self.documented_kind)
