"""Debug a run from a cell by sending requests to its ranks and showing the prompts of their debuggers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain_values import check_number, check_seconds, check_whole_number
from notebook_accelerate.debugging.session import Session
from notebook_accelerate.launch.output.standard_streams import StandardStream, escape
from notebook_accelerate.launch.report.profile import Profile, ProfileFolder
from notebook_accelerate.launch.report.samples import RunMemory, Samples
from notebook_accelerate.launch.state.run_events import WarningAdded
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
    from notebook_accelerate.launch.state.run_commands import RunCommands
    from notebook_accelerate.launch.state.run_view import RunView

_SWITCH = re.compile(r"\s*rank\s+(\d+)\s*")
MAX_SAMPLE_SECONDS, MAX_SAMPLE_RATE = 600, 1000
DEFAULT_STEPS, MAX_PROFILE_STEPS = 3, 1000
SAMPLE_SECONDS = 0.5
"""The minimum time in seconds that a profile samples stacks for if no number of steps is given."""
MEMORY_SECONDS = 30.0
"""Seconds to wait for a rank's memory report."""
STOP_SECONDS = 5.0
"""Seconds that a rank has to stop in its debugger after the request."""


def diagnose(session: Session, journal: Journal) -> Diagnosis:
    """Find out where every rank is. Record the mistake if one explains why the run is stuck; see ``Run.diagnose``."""
    found = session.diagnose()
    if found.mistake:
        journal.append(WarningAdded(found.mistake))
    return found


# ---- time and memory


def sample(session: Session, seconds: float, ranks: Iterable[int] | None, rate: float) -> Samples:
    """Sample the main threads of ranks; see ``Run.sample``."""
    check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS, zero=False)
    check_number("rate", rate, "samples a second", most=MAX_SAMPLE_RATE)
    return Samples(session.sample(seconds, ranks, rate), tracebacks.frame_location)


def profile(
    session: Session, steps: int | None, ranks: Iterable[int] | None, seconds: float | None, *, memory: bool
) -> Profile:
    """Record steps of ranks; see ``Run.profile``."""
    check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS, zero=False, none="until the last step")
    samples = min(SAMPLE_SECONDS, seconds or SAMPLE_SECONDS) if steps is None else 0.0
    steps = DEFAULT_STEPS if steps is None else steps
    check_whole_number("steps", steps, most=MAX_PROFILE_STEPS)
    folder = ProfileFolder()
    replies = session.profile(folder.request(steps, seconds or 0.0, memory=memory, samples=samples), ranks)
    return Profile(folder, folder.traces(replies), tracebacks.frame_location)


def memory_of(session: Session, run: RunView, ranks: Iterable[int] | None, estimate: Any, seconds: float) -> RunMemory:
    """Find out what the memory of ranks holds; see ``Run.memory``."""
    check_seconds("seconds", seconds, most=MAX_SAMPLE_SECONDS)
    replies = session.memory(ranks, MEMORY_SECONDS)
    recorded = profile(session, 1, ranks, seconds, memory=True) if seconds > 0 else None
    return RunMemory(replies, recorded, estimate, len(run.ranks), tracebacks.frame_location)


# ---- ranks that wait for the user


def pause(session: Session, commands: RunCommands, ranks: list[int], timeout: float) -> dict[int, str]:
    """Make ranks wait at their next step boundary; see ``Run.pause``."""
    check_seconds("timeout", timeout)
    for rank in ranks:
        commands.hold_clock(rank)
    said: dict[int, str] = {}
    try:
        said = session.pause(ranks, timeout)
    finally:
        for rank in ranks:
            if said.get(rank) != "paused":
                commands.release_clock(rank)
    return said


def unpause(session: Session, commands: RunCommands, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
    """Let paused ranks continue; see ``Run.unpause``."""
    check_seconds("timeout", timeout)
    said = session.unpause(ranks, timeout)
    for rank in said:
        commands.release_clock(rank)
    return said


def debug(session: Session, run: RunView, commands: RunCommands, journal: Journal, rank: int | None) -> None:
    """Use a rank's debugger in this cell; see ``Run.debug``."""
    prompts, there = commands.prompts, commands.requests.open_ranks()
    chosen = _rank_to_debug(run, commands) if rank is None else rank
    if chosen not in there:
        state = next((f"it is {info.state}" for info in run.ranks if info.rank == chosen), "there is no such rank")
        raise ValueError(f"rank={chosen} cannot be debugged: {state}; running ranks: {there}")
    if chosen not in prompts.debugged() and not prompts.is_open(chosen):
        session.break_into(chosen, STOP_SECONDS)
        prompts.await_debugger(chosen, STOP_SECONDS)
        if chosen not in prompts.debugged() and run.ended is None:
            print(  # noqa: T201 - the answer to a command typed in a cell
                f"rank {chosen} has not come back to Python yet: {diagnose(session, journal).line_of(chosen)}\n"
                f"It stops when it does; notebook_accelerate.debug(rank={chosen}) then opens it."
            )
            return
    prompts.stay_with(chosen)
    while (prompt := prompts.claim_next(rank=chosen)) is not None:
        show_prompt(prompt, prompts, keep=True)
        chosen = prompts.current(chosen)


def _rank_to_debug(run: RunView, commands: RunCommands) -> int:
    there = commands.requests.open_ranks()
    failed = [failure.rank for failure in run.failures if failure.rank in there]
    waiting = [prompt.rank for prompt in commands.prompts.open_prompts()]
    return next(iter([*commands.prompts.debugged(), *failed, *waiting, *there]), 0)


class DebuggerReplies(dict[int, str]):
    """The replies of several ranks' debuggers to one command, by rank. The ``repr`` shows them one below the other."""

    def __repr__(self) -> str:
        blocks = []
        for rank, text in self.items():
            head = f"rank {rank} │ "
            blocks.append(head + text.rstrip("\n").replace("\n", "\n" + " " * (len(head) - 2) + "│ "))
        return "\n".join(blocks)


def debug_command(prompts: PromptQueue, command: str, ranks: Iterable[int] | None, timeout: float) -> DebuggerReplies:
    """Send one debugger command to several stopped ranks; see ``Run.debug_command``."""
    check_seconds("timeout", timeout)
    stopped = prompts.debugged()
    wanted = stopped if ranks is None else list(ranks)
    if not wanted or any(rank not in stopped for rank in wanted):
        raise ValueError(f"ranks={wanted} are not all stopped at a breakpoint; the stopped ranks are {stopped}")
    asked = [prompt for rank in wanted if (prompt := prompts.claim(rank)) is not None]
    for prompt in asked:
        prompt.answer(command)
    answers = {prompt.rank: prompts.await_prompt(prompt.rank, timeout) for prompt in asked}
    return DebuggerReplies({rank: next_.request.shown if next_ else "(continues)" for rank, next_ in answers.items()})


# ---- prompts


def show_prompt(prompt: Prompt, prompts: PromptQueue, *, keep: bool) -> None:
    """Show a prompt that was taken from the queue. With ``keep``, an interrupt returns it to the queue."""
    try:
        ask_user(prompt, prompts)
    except KeyboardInterrupt:
        if keep:
            prompts.give_back(prompt)
        raise


def ask_user(prompt: Prompt, prompts: PromptQueue) -> None:
    """Show a rank's prompt in this cell and send the user's answer to the rank.

    At a debugger's prompt, the line ``rank 1`` is not sent, but switches to the debugger of rank 1.

    Args:
        prompt: The prompt to show, which was taken from ``prompts``.
        prompts: The queue of prompts.
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
        stdout.write(f"{label}no longer waits for this line\n")  # An interrupt has ended the rank's wait.
        return
    if prompt.of_debugger and text is not None and (named := _SWITCH.fullmatch(text)) is not None:
        _switch(prompt, prompts, int(named[1]), stdout)
        return
    if prompt.of_debugger:
        prompts.stay_with(prompt.rank)
    prompt.answer(text)


def _switch(prompt: Prompt, prompts: PromptQueue, rank: int, stdout: StandardStream) -> None:
    """Show the prompt of another rank's debugger next. If that rank is not in a debugger, show this prompt again."""
    stopped, prompt.seen = prompts.debugged(), True
    if rank in stopped:
        prompts.stay_with(rank)
    else:
        stdout.write(f"rank {rank} is not stopped in a debugger; stopped: {rank_names(stopped)}\n")
        prompts.stay_with(prompt.rank)
    prompts.give_back(prompt)
