"""The cell that launches a run: it waits for the start or the end, and turns interrupts into stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accelerate.errors import RunInterrupted, WorkerError
from notebook_accelerate.launch.processes.interrupts import handle_interrupts
from notebook_accelerate.launch.run_debugging import ask_user
from notebook_accelerate.launch.run_display import LIVE_AFTER_SECONDS
from notebook_accelerate.launch.state.run_events import DEFAULT_GRACE
from notebook_accelerate.launch.state.waits import wait_for

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.state.prompts import Prompt
    from notebook_accelerate.launch.supervisor.supervisor import RunThread


class LaunchingCell:
    """Waits for a supervised run on the thread that launches it.

    While it waits, SIGINT does not raise KeyboardInterrupt, which could arrive between any two instructions of this
    package: it stops the run, and a second one kills. When the run is over, an interrupt that arrived at any time
    during it is raised, even if the run succeeded: the code after the launch must not continue.

    Args:
        run: The run to wait for.
        make_runner: Makes what runs it. It may open a listener, so no exception must cut it in two either.
    """

    def __init__(self, run: Run, make_runner: Callable[[], RunThread]) -> None:
        self._run, self._make_runner = run, make_runner
        self._interrupted = self._asking = False

    def launch(self) -> None:
        """Start the run, and wait for its end if it blocks the cell.

        Raises:
            RunInterrupted: The cell was interrupted meanwhile.
            BaseException: The error that prevented the start of the ranks.
        """
        with handle_interrupts(self._on_signal):
            runner = self._make_runner()
            runner.thread.start()
            try:
                self._wait_for_run(runner)
            except BaseException:  # raised by a handler of the user, as SIGALRM's: it ends the cell and its run
                self._run.commands.stop(DEFAULT_GRACE)
                wait_for(runner.over)
                raise
        if self._interrupted:
            raise RunInterrupted(self._run)
        if (problem := runner.problem) is not None:
            if isinstance(problem, WorkerError) and problem.run is None:  # stopped before the ranks had started
                problem.run = self._run
            raise problem

    def _wait_for_run(self, runner: RunThread) -> None:
        wait_for(runner.started)
        if runner.problem is not None or self._interrupted:
            wait_for(runner.over)
        elif not self._run.config.block:
            self._run.show_live()  # after the start of the ranks: creating widgets takes as long as starting them
        else:
            self._wait(runner)
        if self._interrupted and not self._run.held:  # it may have arrived after the start of the ranks
            wait_for(runner.over)

    def _wait(self, runner: RunThread) -> None:
        """Wait for the end of the run, or until its ranks are held, and show prompts and the live panel meanwhile."""
        show_at: float | None = time.monotonic() + LIVE_AFTER_SECONDS
        run = self._run
        while not run.done:
            left = None if show_at is None else max(0.0, show_at - time.monotonic())
            if (prompt := run.commands.prompts.take(left, until=lambda: run.done)) is not None:
                self._ask(prompt)
            elif show_at is not None and time.monotonic() >= show_at:
                show_at = None
                run.show_live()
        if show_at is not None:
            self._run.show_live()
        if not self._run.held:
            wait_for(runner.over)

    def _ask(self, prompt: Prompt) -> None:
        self._asking = True
        try:
            if self._interrupted:
                prompt.answer(None)  # the run is being stopped: do not prompt the user
            else:
                ask_user(prompt, self._run.commands.prompts)
        except KeyboardInterrupt:
            self._interrupt()
        finally:
            self._asking = False

    # ---- interrupts

    def _interrupt(self) -> None:
        self._interrupted = True
        self._run.commands.stop(DEFAULT_GRACE)

    def _on_signal(self) -> None:
        if self._asking:  # input() ends by an exception only
            self._asking = False
            raise KeyboardInterrupt
        self._interrupt()


__all__ = ["LaunchingCell"]
