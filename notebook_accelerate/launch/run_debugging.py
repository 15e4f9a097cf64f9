"""The debugging methods of ``Run``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain_values import check_number, check_seconds, check_whole_number
from notebook_accelerate.debugging.diagnosis import Diagnosis
from notebook_accelerate.debugging.session import Session, Stacks
from notebook_accelerate.launch.output.standard_streams import StandardStream, escape
from notebook_accelerate.launch.report.profile import Profile, ProfileFolder
from notebook_accelerate.launch.report.samples import RunMemory, Samples
from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
from notebook_accelerate.launch.state.run_events import WarningAdded
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.rank_devices import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.run_events import RunCommands
    from notebook_accelerate.launch.state.run_state import RankInfo
    from notebook_accelerate.telemetry import RankFailure

_SWITCH = re.compile(r"\s*rank\s+(\d+)\s*")
MAX_SAMPLE_SECONDS, MAX_SAMPLE_RATE = 600, 1000
DEFAULT_STEPS, MAX_PROFILE_STEPS = 3, 1000
SAMPLE_SECONDS = 0.5
"""Without a number of steps, a profile takes samples for at least so long."""
MEMORY_SECONDS = 30.0
"""Seconds that a rank has to count its memory."""
STOP_SECONDS = 5.0
"""Seconds that a rank has to reach the debugger after the request to stop."""


class Cast(dict[int, str]):
    """Replies of several ranks' debuggers to one command; the ``repr`` shows them side by side."""

    def __repr__(self) -> str:
        blocks = []
        for rank, text in self.items():
            head = f"rank {rank} │ "
            blocks.append(head + text.rstrip("\n").replace("\n", "\n" + " " * (len(head) - 2) + "│ "))
        return "\n".join(blocks)


class RunDebugging:
    """The debugging half of ``Run``."""

    commands: RunCommands
    journal: Journal

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """The failures of the last attempt, the first one first."""
        raise NotImplementedError

    @property
    def ended(self) -> float | None:
        """When the run ended, in seconds since the epoch; None while it runs."""
        raise NotImplementedError

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """The ranks of this machine, in order."""
        raise NotImplementedError

    def _session(self) -> Session:
        return Session(
            self.commands.requests, lambda: {info.rank: info.state for info in self.ranks}, tracebacks.frame_location
        )

    def diagnose(self) -> Diagnosis:
        """Find out, within about two seconds, where every rank is and why the run is stuck.

        Returns:
            A verdict in one sentence, and the ranks grouped by location, including ranks that cannot answer.
        """
        found = self._session().diagnose()
        if found.mistake:
            self.journal.append(WarningAdded(found.mistake))
        return found

    def stacks(self, ranks: Iterable[int] | None = None) -> Stacks:
        """Return the main thread's frames by rank, outermost first.

        Args:
            ranks: Global indices; None means all.

        Raises:
            ValueError: No such rank.
        """
        return self._session().stacks(ranks)

    def sample(self, seconds: float = 5.0, ranks: Iterable[int] | None = None, rate: float = 100.0) -> Samples:
        """Sample where the main threads of live ranks spend their time, without stopping them.

        A thread of each rank looks at the main thread's stack. A sample counts the time since the one before: while
        native code holds the interpreter lock no sample can be taken, and the next one counts for that time.

        Args:
            seconds: How long, at most 600; this call returns then.
            ranks: Global indices; None means all.
            rate: Samples per second, at most 1,000.

        Returns:
            The lines of your code by time, for each rank, and a flame graph; as the last line of a cell it is shown.

        Raises:
            ValueError: ``seconds`` or ``rate`` is not allowed, or there is no such rank.
        """
        check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS, zero=False)
        check_number("rate", rate, "samples a second", most=MAX_SAMPLE_RATE)
        return Samples(self._session().sample(seconds, ranks, rate), tracebacks.frame_location)

    def profile(
        self,
        steps: int | None = None,
        ranks: Iterable[int] | None = None,
        memory: bool = False,
        seconds: float | None = None,
    ) -> Profile:
        """Record steps of live ranks with torch's profiler, without a change of the code and without stopping it.

        Recording begins at the next step boundary (an optimizer step, or ``log`` where there is no optimizer), and
        this call returns after the last step. A trace grows with the number of operations: a few steps are enough.

        Args:
            steps: How many steps, at most 1,000. None: 3, and the stacks are sampled for at least half a second,
                through the steps that follow: three short steps give too few samples to find what takes a part of each.
            ranks: Global indices; None means all.
            memory: Whether allocations are recorded too.
            seconds: Record for at most so long (600 at most), and begin without a step boundary where there is none;
                None: as long as the steps take.

        Returns:
            Findings as sentences, tables of operations and lines, and the ranks' timeline; as the last line of a cell
            it is shown. ``missing`` tells why a rank has no trace.

        Raises:
            ValueError: ``steps`` or ``seconds`` is not allowed, or there is no such rank.
        """
        check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS, zero=False, none="as long as the steps take")
        samples = min(SAMPLE_SECONDS, seconds or SAMPLE_SECONDS) if steps is None else 0.0
        steps = DEFAULT_STEPS if steps is None else steps
        check_whole_number("steps", steps, most=MAX_PROFILE_STEPS)
        folder = ProfileFolder()
        replies = self._session().profile(folder.request(steps, seconds or 0.0, memory=memory, samples=samples), ranks)
        return Profile(folder, folder.traces(replies), tracebacks.frame_location)

    @property
    def profiles(self) -> list[Profile]:
        """What ``Accelerator.profile`` has recorded with ``output_trace_dir``, a profile for each folder, oldest first.

        The files are read on each access; ``missing`` tells which are gone, or on another machine.
        """
        return Profile.written((rank, path) for rank, path, _ in self.journal.store.traces())

    def memory(self, ranks: Iterable[int] | None = None, estimate: Any = None, seconds: float = 30.0) -> RunMemory:
        """Find out what the memory of live ranks holds, and what would fit.

        One step is recorded for the activations at the peak; without a step within ``seconds`` they are not known.

        Args:
            ranks: Global indices; None means all.
            estimate: What ``estimate_memory`` has returned for this training, to compare with.
            seconds: How long to wait for a step, at most 600; 0 means not at all.

        Returns:
            Bytes by rank: parameters, gradients, optimizer state, activations, other tensors, cache and process; by
            module, by variable and by line. As the last line of a cell it is shown as tables.

        Raises:
            ValueError: ``seconds`` is not allowed, or there is no such rank.
        """
        check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS)
        replies = self._session().memory(ranks, MEMORY_SECONDS)
        profile = self.profile(1, ranks, memory=True, seconds=seconds) if seconds > 0 else None
        return RunMemory(replies, profile, estimate, len(self.ranks), tracebacks.frame_location)

    def ask(
        self, expression: str, ranks: Iterable[int] | None = None, frame: str | None = None, timeout: float = 5.0
    ) -> dict[int, Any]:
        """Evaluate an expression in live ranks, between two steps, without stopping them.

        It is evaluated at the next step boundary (an optimizer step, or ``log``). Without one within half a second, it
        is evaluated at the main thread's next bytecode, and if the thread waits in native code, from outside. A rank
        that holds the interpreter lock in native code cannot evaluate; only its stacks can be read.

        Args:
            expression: Python, as "model.head.weight.norm()".
            ranks: Global indices; None means all.
            frame: Name of a function on the stack, whose variables to use; None means the launched function.
            timeout: Seconds to wait for the answers.

        Returns:
            The value by rank; an ``AskError`` for each rank without an answer.

        Raises:
            ValueError: Not an expression, or no such rank.
        """
        check_seconds("timeout", timeout)
        return self._session().ask(expression, ranks, frame, timeout)

    def complete(self, text: str, rank: int = 0, frame: str | None = None, timeout: float = 3.0) -> list[str]:
        """Complete the last name of an expression from a rank's frame.

        Args:
            text: The beginning of the expression, as "model.head.wei".
            rank: Global index.
            frame: Name of a function on the stack; None means the launched function, or where the debugger stopped.
            timeout: Seconds to wait for the answer.

        Returns:
            The completed texts; empty when there are none, or the rank does not answer.

        Raises:
            ValueError: No such rank.
        """
        check_seconds("timeout", timeout)
        return self._session().complete(text, rank, frame, timeout)

    def pause(self, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> dict[int, str]:
        """Have ranks wait at their next step boundary until ``resume``; the run's time limits are suspended meanwhile.

        A step boundary is an optimizer step, or ``log`` where there is no optimizer.

        Args:
            ranks: Global indices; None means all.
            timeout: Seconds to wait for the ranks to reach a boundary.

        Returns:
            By rank: "paused", or why it is not.

        Raises:
            ValueError: There is no such rank.
        """
        check_seconds("timeout", timeout)
        wanted = [info.rank for info in self.ranks] if ranks is None else list(ranks)
        for rank in wanted:
            self.commands.hold_clock(rank)
        said: dict[int, str] = {}
        try:
            said = self._session().pause(wanted, timeout)
        finally:
            for rank in wanted:
                if said.get(rank) != "paused":
                    self.commands.release_clock(rank)
        return said

    def _release_paused(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Let paused ranks continue; return the reply of each; None: all."""
        check_seconds("timeout", timeout)
        said = self._session().resume(ranks, timeout)
        for rank in said:
            self.commands.release_clock(rank)
        return said

    def attach(self, rank: int = 0, timeout: float = 30.0) -> str:
        """Start debugpy in a rank, for an editor to attach to, and print its address.

        Args:
            rank: Global index.
            timeout: Seconds to wait for the rank.

        Returns:
            The address, on loopback of the rank's machine, as "127.0.0.1:5678"; or why there was no reply.

        Raises:
            ValueError: There is no such rank.
            NotebookAccelerateError: debugpy is not installed there, or cannot listen.
        """
        check_seconds("timeout", timeout)
        address = self._session().attach(rank, timeout)
        print(f"debugpy of rank {rank} listens on {address}")  # noqa: T201 - the answer to a command typed in a cell
        return address

    def debug(self, rank: int | None = None) -> None:
        """Use the debugger of a rank in this cell, until it continues or quits.

        A running rank stops at its next bytecode; one that failed under ``debug=True`` opens at the failing line. For
        a rank that waits in ``input()``, its prompt is shown, even if it is also shown elsewhere.

        If several ranks are stopped, ``rank 1`` at the prompt switches to the debugger of rank 1.

        Args:
            rank: Global index; None means the first rank that is stopped, else the first that failed, else the
                first that waits for input, else rank 0.

        Raises:
            ValueError: No such rank, or it has ended.
        """
        chosen = self._rank_to_debug() if rank is None else rank
        if chosen not in self.commands.requests.open_ranks():
            raise ValueError(f"rank={chosen} cannot be debugged: {self._state_of(chosen)}; there are {self._open()}")
        if chosen not in self.commands.prompts.debugged() and not self.commands.prompts.is_open(chosen):
            self._session().break_into(chosen, STOP_SECONDS)
            self.commands.prompts.await_debugger(chosen, STOP_SECONDS)
            if chosen not in self.commands.prompts.debugged() and self.ended is None:
                print(  # noqa: T201 - the answer to a command typed in a cell
                    f"rank {chosen} has not come back to Python yet: {self.diagnose().line_of(chosen)}\n"
                    f"It stops when it does; notebook_accelerate.debug(rank={chosen}) then opens it."
                )
                return
        self.commands.prompts.stay_with(chosen)
        while (prompt := self.commands.prompts.take(rank=chosen)) is not None:
            self._show_prompt(prompt, keep=True)
            chosen = self.commands.prompts.current(chosen)

    def _show_prompt(self, prompt: Prompt, *, keep: bool) -> None:
        """Show a prompt that was taken from the queue; with ``keep``, an interrupt returns it to the queue."""
        try:
            ask_user(prompt, self.commands.prompts)
        except KeyboardInterrupt:
            if keep:
                self.commands.prompts.give_back(prompt)
            raise

    def cast(self, command: str, ranks: Iterable[int] | None = None, timeout: float = 10.0) -> Cast:
        """Send one debugger command to several stopped ranks and return the replies side by side.

        Args:
            command: The command as typed at the debugger's prompt, as "p loss".
            ranks: Global indices; None means all stopped ranks.
            timeout: Seconds to wait for the answers.

        Returns:
            What the debugger of each rank has written, by rank; "(goes on)" for a rank that has left it.

        Raises:
            ValueError: A rank is not stopped, or none is.
        """
        check_seconds("timeout", timeout)
        stopped = self.commands.prompts.debugged()
        wanted = stopped if ranks is None else list(ranks)
        if not wanted or any(rank not in stopped for rank in wanted):
            raise ValueError(f"ranks={wanted} are not all stopped at a breakpoint; stopped are {stopped}")
        asked = [prompt for rank in wanted if (prompt := self.commands.prompts.claim(rank)) is not None]
        for prompt in asked:
            prompt.answer(command)
        answers = {prompt.rank: self.commands.prompts.await_prompt(prompt.rank, timeout) for prompt in asked}
        return Cast({rank: next_.request.shown if next_ else "(goes on)" for rank, next_ in answers.items()})

    def _rank_to_debug(self) -> int:
        there = self.commands.requests.open_ranks()
        failed = [failure.rank for failure in self.failures if failure.rank in there]
        waiting = [prompt.rank for prompt in self.commands.prompts.open_prompts()]
        return next(iter([*self.commands.prompts.debugged(), *failed, *waiting, *there]), 0)

    def _state_of(self, rank: int) -> str:
        return next((f"it is {info.state}" for info in self.ranks if info.rank == rank), "there is no such rank")

    def _open(self) -> list[int]:
        return self.commands.requests.open_ranks()


def ask_user(prompt: Prompt, prompts: PromptQueue) -> None:
    """Show the prompt of a rank to the user of this cell and send the answer.

    At a debugger's prompt ``rank 1`` is no answer: it switches to the debugger of rank 1.

    Args:
        prompt: The prompt, which was taken from the queue.
        prompts: The queue.
    """
    label, stdout = f"[rank {prompt.rank}] ", StandardStream(sys.stdout, "stdout")
    if prompt.request.shown and not prompt.seen:
        stdout.write(label + prompt.request.shown.rstrip("\n").replace("\n", "\n" + label) + "\n")
    if prompt.of_debugger and (others := [rank for rank in prompts.debugged() if rank != prompt.rank]):
        stdout.write(f"({rank_names(others)} stopped too: type rank {others[0]} to switch)\n")
    question = escape(label + prompt.request.prompt, sys.stdout)
    try:
        if prompt.request.password:
            import getpass

            text: str | None = getpass.getpass(question)
        else:
            text = input(question)
    except Exception:  # noqa: BLE001 - the front end cannot prompt, or the user's sys.stdin or sys.stdout is broken
        text = None
    if prompt.over:
        stdout.write(f"{label}does not wait for this line any more\n")  # an interrupt has ended its prompt
        return
    if prompt.of_debugger and text is not None and (named := _SWITCH.fullmatch(text)) is not None:
        _switch(prompt, prompts, int(named[1]), stdout)
        return
    if prompt.of_debugger:
        prompts.stay_with(prompt.rank)
    prompt.answer(text)


def _switch(prompt: Prompt, prompts: PromptQueue, rank: int, stdout: StandardStream) -> None:
    """Show the prompt of another rank's debugger next; if none holds that rank, this one's again."""
    stopped, prompt.seen = prompts.debugged(), True
    if rank in stopped:
        prompts.stay_with(rank)
    else:
        stdout.write(f"rank {rank} is not stopped in a debugger; stopped: {rank_names(stopped)}\n")
        prompts.stay_with(prompt.rank)
    prompts.give_back(prompt)
