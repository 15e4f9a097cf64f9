"""What a run needs its user for: a stall, a prompt, a pause, a failure, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import findings
from notebook_accelerate.launch.state import error_messages
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.actions import Action, ActionRow
from notebook_accelerate.widgets.run_summary import duration

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run

DEBUG = Action(id="debug", label="Debug", hint="Show where every rank is, and how to open its debugger")
RESUME = Action(id="resume", label="Resume", hint="Continue the paused ranks", tone="first")
PAUSE = Action(id="pause", label="Pause", hint="Hold all ranks before their next step")
ERRORS = Action(id="errors", label="Show error", hint="Open the Errors tab")
RELEASE = Action(id="stop", label="Release ranks", hint="End the ranks that are kept for the debugger")


def needs(run: Run, now: float, stop: Action) -> list[ActionRow]:
    """Return what the user should know or do, the most urgent first.

    Args:
        run: The run.
        now: Seconds since the epoch.
        stop: The button that stops the run.
    """
    if run.ended is not None:
        return [*_failed(run), *_not_finite(run), *_warnings(run)]
    return [*_stuck(run, now, stop), *_prompts(run), *_paused(run), *_not_finite(run), *_warnings(run)]


def _failed(run: Run) -> Iterator[ActionRow]:
    if not run.failures:
        return
    kept = (RELEASE,) if run.held else ()
    text = f"{error_messages.headline(run.failures).replace(':', ' failed:', 1)}"
    if run.held:
        text += " · the ranks are kept at this line"
    yield ActionRow(key="failed", text=text, actions=(ERRORS, DEBUG, *kept), tone="bad")


def _stuck(run: Run, now: float, stop: Action) -> Iterator[ActionRow]:
    if (stall := run.stall) is not None:
        text = f"Stuck for {duration(max(0.0, now - stall.since))}: {stall.cause or 'no rank makes progress'}"
        yield ActionRow(key="stuck", text=text, actions=(DEBUG, stop), tone="bad")


def _prompts(run: Run) -> Iterator[ActionRow]:
    stopped = run.commands.prompts.debugged()
    waiting = [rank for rank in run.prompts if rank not in stopped]
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        answer = Action(id="answer", label="Answer", hint="Show how to answer", tone="first")
        yield ActionRow(key="input", text=f"{rank_names(waiting)} {verb} for input", actions=(answer,), tone="warn")
    if stopped:
        yield ActionRow(key="breakpoint", text=f"{rank_names(stopped)} at breakpoint", actions=(DEBUG,), tone="warn")


def _paused(run: Run) -> Iterator[ActionRow]:
    if not (paused := run.paused):
        return
    steps = sorted({step for rank in paused if (step := run.store.last_step.get(rank)) is not None and step >= 0})
    at = ""
    if steps:
        at = f" at step {steps[0]:,}" if len(steps) == 1 else f" at steps {steps[0]:,} to {steps[-1]:,}"
    running = [info.rank for info in run.ranks if info.state == "running"]
    who = "Paused" if set(paused) >= set(running) else f"{rank_names(paused)} paused"
    yield ActionRow(key="paused", text=f"{who}{at}", actions=(RESUME, DEBUG), tone="warn")


def _not_finite(run: Run) -> Iterator[ActionRow]:
    if text := findings.not_finite(run):
        yield ActionRow(key="finite", text=text, actions=() if run.ended is not None else (DEBUG,), tone="bad")


def _warnings(run: Run) -> Iterator[ActionRow]:
    for index, text in enumerate(findings.latest_warnings(run)):
        yield ActionRow(key=f"warning {index}", text=text, tone="warn")
