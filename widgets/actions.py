"""Rows of text with buttons in a run's panel, which ask for the user's attention, and stop or resume the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_accelerate import launch
from notebook_accelerate.launch.output.running_cell import published_under
from notebook_accelerate.launch.report import rank_rows
from notebook_accelerate.launch.report.document import Action
from notebook_accelerate.launch.resumption import newest_complete_checkpoint
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.panel_elements import asset, script

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.compared_run import ComparedRun
    from notebook_accelerate.widgets.front_end import KernelState


@dataclass(frozen=True, kw_only=True)
class ActionRow:
    """A row with text and buttons.

    Attributes:
        key: Identifies the row in later updates.
        text: The text to the left of the buttons.
        actions: The buttons after the text.
        tone: "bad", "warn", "busy" (with a spinner) or "".
    """

    key: str
    text: str = ""
    actions: tuple[Action, ...] = ()
    tone: str = ""


class ActionRows(anywidget.AnyWidget):
    """Rows of text with buttons.

    Args:
        on_action: Called with the id of the action that was clicked.
        label: Name of the rows for screen readers.
    """

    _esm = script("feed.js", "actions.js")
    rows: Any = traitlets.List().tag(sync=True)
    note: Any = traitlets.Dict().tag(sync=True)
    label: Any = traitlets.Unicode("").tag(sync=True)
    kernel: Any = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_action: Callable[[str], None], label: str = "") -> None:
        super().__init__(label=label)
        self._on_action = on_action
        self.on_msg(self._on_message)

    def show(self, rows: Sequence[ActionRow], kernel: str = "", note: str = "", unreachable: str = "") -> None:
        """Show rows in place of the previous ones.

        Args:
            rows: The rows, in order from the top.
            kernel: The kernel's ID on the notebook's server, or "" if it is unknown.
            note: Text to show below the rows.
            unreachable: Text to show instead of ``note`` if the browser cannot interrupt the kernel. If "",
                ``note`` is shown.
        """
        shown = [asdict(row) for row in rows]
        for row in shown:
            row["actions"] = list(row["actions"])
        self.kernel, self.note, self.rows = kernel, {"text": note, "unreachable": unreachable}, shown

    @property
    def text(self) -> str:
        """The rows and the note as plain text, with one line for each."""
        lines = [" ".join([row["text"], *(f"[{each['label']}]" for each in row["actions"])]) for row in self.rows]
        return "\n".join(filter(None, [*map(str.strip, lines), self.note.get("text", "")]))

    def click(self, action: str) -> None:
        """Do the same as a click on an action's button."""
        self._on_action(action)

    def _on_message(self, _: object, content: object, __: object) -> None:
        if isinstance(content, dict) and content.get("kind") == "click":
            self.click(str(content.get("action")))


class CopyButton(anywidget.AnyWidget):
    """A button that copies ``text`` to the browser's clipboard, or inserts it as a cell below.

    Args:
        text: The text to copy.
        label: The label of the button for screen readers, such as "Copy this cell".
        insertable: Whether the text is the code of a cell, which can be inserted in JupyterLab and Notebook.
    """

    _esm = f"{asset('copy.js')}\nexport default {{ render: showCopyButtons }};"
    text: Any = traitlets.Unicode("").tag(sync=True)
    label: Any = traitlets.Unicode("Copy this text").tag(sync=True)
    insertable: Any = traitlets.Bool(default_value=False).tag(sync=True)


# ---- how a run can be stopped

ASK_SECONDS = 60.0
"""If the run is older than this, Stop first asks for confirmation, because more than a minute of work would be lost."""


@dataclass(frozen=True)
class Stopping:
    """The button that stops a run now, with the sentences about it.

    Attributes:
        action: The button that stops the run.
        note: A sentence about the button, or "" after the end of the run.
        unreachable: The sentence for browsers that cannot interrupt the kernel, if the button does so. If "", ``note``
            is shown.
    """

    action: Action
    note: str = ""
    unreachable: str = ""


def stopping(run: Run, kernel: KernelState | None) -> Stopping:
    """Return how a run can be stopped now.

    Args:
        run: The run to stop.
        kernel: The state of the kernel, or None outside a kernel.
    """
    kills = run.status == "stopping"
    interrupts = kernel is not None and _interrupts(run, kernel)
    if kills:
        action = Action(id="stop", label="Kill", hint="End every rank immediately", tone="kill", interrupts=interrupts)
        note = "Stopping: ranks may finish saving. Click Kill to end them immediately"
        without = "Stopping: ranks may finish saving. Press ■ again to end them immediately"
        return Stopping(action, note, without if interrupts else "")
    if run.ended is None and (refusal := internals(run).commands.refusal):
        return Stopping(Action(id="stop", label="Stop", hint=refusal, tone="stop", enabled=False), refusal)
    action = replace(stop_action(run, "Ask every rank to stop"), interrupts=interrupts)
    if run.ended is not None or kernel is None:
        return Stopping(action)
    if not kernel.busy:
        return Stopping(action, "Click Stop to end this run (■ does not affect background runs)")
    if interrupts or kernel.handles_clicks:
        note = "Click Stop, or ■ in the toolbar, to end this run"
        return Stopping(action, note, "Press ■ in the toolbar to end this run" if interrupts else "")
    return Stopping(action, "Another cell is running: clicks take effect when it ends")


def stop_action(run: ComparedRun, hint: str) -> Action:
    """Return the button that stops a run. If the run is older than ``ASK_SECONDS``, the first click asks the user."""
    question = "Stop run?" if run.ended is None and run.elapsed > ASK_SECONDS else ""
    return Action(id="stop", label="Stop", hint=hint, tone="stop", question=question)


def _interrupts(run: Run, kernel: KernelState) -> bool:
    """Return whether the run must be stopped by interrupting the running cell.

    This is the case if a click would be handled only after that cell ends.
    """
    if is_inline(run):
        return kernel.busy
    return kernel.busy and not kernel.handles_clicks and (run.config.block or not kernel.blocked)


def is_inline(run: Run) -> bool:
    """Return whether the only rank of a run is the kernel itself."""
    return run.plan is not None and run.plan.start_method == "inline"


# ---- what the user of a run should know or do

DEBUG = Action(id="debug", label="Debug", hint="Show where every rank is, and how to open its debugger")

UNPAUSE = Action(id="unpause", label="Unpause", hint="Continue the paused ranks", tone="first")

PAUSE = Action(id="pause", label="Pause", hint="Hold all ranks before their next step")

ERRORS = Action(id="errors", label="Show error", hint="Open the Errors tab")

RELEASE = Action(id="stop", label="Release ranks", hint="End the ranks that are kept for the debugger")


def needs(run: Run, now: float, stop: Action) -> list[ActionRow]:
    """Return the rows with everything that the user should know or do, with the most urgent first.

    Args:
        run: The run that the rows are about.
        now: The time in seconds since the epoch.
        stop: The button that stops the run.
    """
    if run.ended is not None:
        return [*_failed(run), *_not_finite(run), *_warnings(run)]
    return [*_stuck(run, now, stop), *_prompts(run), *_paused(run), *_not_finite(run), *_warnings(run)]


def _failed(run: Run) -> Iterator[ActionRow]:
    if not run.failures:
        return
    kept = (RELEASE,) if run.held else ()
    text = f"{failures.headline(run.failures).replace(':', ' failed:', 1)}"
    if run.held:
        text += " · the ranks are kept at this line"
    yield ActionRow(key="failed", text=text, actions=(ERRORS, DEBUG, *kept), tone="bad")


def _stuck(run: Run, now: float, stop: Action) -> Iterator[ActionRow]:
    if text := rank_rows.stuck(run, now):
        yield ActionRow(key="stuck", text=text, actions=(DEBUG, stop), tone="bad")


def _prompts(run: Run) -> Iterator[ActionRow]:
    stopped = internals(run).commands.prompts.debugged()
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
    last = internals(run).store.last_step
    steps = sorted({step for rank in paused if (step := last.get(rank)) is not None and step >= 0})
    at = ""
    if steps:
        at = f" at step {steps[0]:,}" if len(steps) == 1 else f" at steps {steps[0]:,} to {steps[-1]:,}"
    running = [info.rank for info in run.ranks if info.state == "running"]
    who = "Paused" if set(paused) >= set(running) else f"{rank_names(paused)} paused"
    yield ActionRow(key="paused", text=f"{who}{at}", actions=(UNPAUSE, DEBUG), tone="warn")


def _not_finite(run: Run) -> Iterator[ActionRow]:
    if text := rank_rows.not_finite(run):
        yield ActionRow(key="finite", text=text, actions=() if run.ended is not None else (DEBUG,), tone="bad")


def _warnings(run: Run) -> Iterator[ActionRow]:
    for index, text in enumerate(rank_rows.latest_warnings(run)):
        yield ActionRow(key=f"warning {index}", text=text, tone="warn")


# ---- resume the training of an ended run

CONTINUE = Action(
    id="continue",
    label="Resume training",
    hint="Launch the same function again, from this checkpoint, as one history",
    tone="first",
)


class ResumeOffer:
    """Offers to resume the training of an ended run from a checkpoint, and launches the new run.

    Attributes:
        parent: The execute request of the cell that shows the panel, or None if no cell shows it.
        launched: The run that resumes the training, or None if it has not been launched.
    """

    def __init__(self) -> None:
        self.parent: Any = None
        self.launched: Run | None = None
        self._checkpoint: str | None = None

    def rows(self, run: Run) -> list[ActionRow]:
        """Return the offer if the run ended before its training was complete, and has a complete checkpoint."""
        if self.launched is not None:
            return [ActionRow(key="continue", text=f"run {self.launched.id} continues this training")]
        if run.ended is None or run.held or run.status == "succeeded" or not (checkpoint := self._newest(run)):
            return []
        if internals(run).call is not None:
            return [ActionRow(key="continue", text=f"Can continue from {checkpoint}", actions=(CONTINUE,))]
        text = (
            f"Can continue from {checkpoint}: execute the cells that define {run.function_name}, then "
            f"notebook_launcher({run.function_name}, args, config=run.config, resume=run)"
        )
        return [ActionRow(key="continue", text=text)]

    def _newest(self, run: Run) -> str:
        if self._checkpoint is None:
            found = newest_complete_checkpoint(run)
            self._checkpoint = PurePath(found.path).name if found is not None else ""
        return self._checkpoint

    def launch(self, run: Run) -> None:
        """Launch the run that resumes the training, in the background. Its panel is shown under the same cell.

        Raises:
            LaunchError: The function or an argument no longer exists, or the run could not be started.
        """
        if self.launched is not None or (call := internals(run).call) is None:
            return
        function, arguments = call.restore(run.function_name)
        with published_under(self.parent):
            self.launched = launch.start(run.config.changed(block=False), function, arguments, run)
