"""Continue the training of an ended run from its newest complete checkpoint, and keep the history of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from notebook_accelerate.config.constants import MANIFEST_NAME
from notebook_accelerate.launch.kept import journal_file, journal_format
from notebook_accelerate.launch.kept.journal_file import last_lines, points_frames
from notebook_accelerate.launch.kept.journal_reader import JournalContents
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.call_arguments import Plain
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import NoteAdded, RunContinued
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import CheckpointEvent
from notebook_accelerate.telemetry.store import Record


@dataclass(frozen=True)
class Resumption:
    """The checkpoint and the history that let a new run continue an earlier one.

    Attributes:
        run: The earlier run, which has ended.
        checkpoint: The checkpoint to continue from, or None if the run has no complete one.
        frames: The history up to that checkpoint, as frames of a journal.
    """

    run: Run
    checkpoint: CheckpointEvent | None
    frames: tuple[bytes, ...]

    def add_history(self, journal: Journal) -> None:
        """Add the earlier run's history to the new run's journal, followed by the point where the new run continues."""
        earlier = self.run
        if self.checkpoint is None:
            text = f"run {earlier.name} has no complete checkpoint to continue from: the training starts again"
            journal.append(NoteAdded(text))
            return
        history = JournalContents(journal=Journal(journal.store), header={"kind": "header"})
        for frame in self.frames:
            history.feed(frame)
            history.end = 0
        step = max(journal.store.last_step.values(), default=None)
        for known in earlier.resume_points:
            journal.append(
                RunContinued(known.name, known.status, known.checkpoint, known.time, known.step, dict(known.changed))
            )
        path = self.checkpoint.path
        changed = changed_arguments(earlier, journal.state.arguments)
        journal.append(RunContinued(earlier.name, earlier.status, path, self.checkpoint.time, step, changed))
        at = f" (step {step})" if step is not None and step >= 0 else ""
        journal.append(NoteAdded(f"continues run {earlier.name}, which {_ended(earlier)}, from {path}{at}"))


def changed_arguments(earlier: Run, arguments: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the arguments of a run, by name, in which another call differs.

    Args:
        earlier: The run.
        arguments: The arguments of the other call, by name.
    """
    return {name: value for name, value in earlier.arguments.items() if arguments.get(name, ...) != value}


def _ended(run: Run) -> str:
    return f"was {run.status}" if run.status in ("stopped", "lost") else run.status


def resumption_of(run: Run) -> Resumption:
    """Return the checkpoint and the history that let a launch continue a run.

    Args:
        run: The run to continue, which must have ended.

    Raises:
        ValueError: ``run`` is not a `Run`, is still running, has held ranks, or has succeeded without a checkpoint.
    """
    if not isinstance(run, Run):
        raise ValueError(
            f"resume={run!r} is not a run; pass the run itself, or one from notebook_accelerate.open_run('runs/NAME')"
        )
    if run.ended is None or run.held:
        raise ValueError(f"run {run.name} is {run.status if run.ended is None else 'held'}; end it first: run.stop()")
    checkpoint = newest_complete_checkpoint(run)
    if checkpoint is None:
        if run.status == "succeeded":
            raise ValueError(
                f"run {run.name} has succeeded and has no complete checkpoint, so there is nothing to continue; leave "
                "out resume to train again"
            )
        return Resumption(run, None, ())
    # Keep even the lines after the checkpoint, because it is not known exactly when a rank wrote a line.
    lines = last_lines(internals(run).journal, journal_file.KEPT_LOG_BYTES)
    frames = [*points_frames(internals(run).journal, checkpoint.time), *journal_format.encode_records(lines)]
    frames += journal_format.encode_records(checkpoint_records(run, checkpoint.time))
    return Resumption(run, checkpoint, tuple(frames))


def checkpoint_records(run: Run, until: float) -> list[Record]:
    """Return the records of the checkpoints that a run saved until a time, in seconds since the epoch."""
    found = [event for event in list(internals(run).store.checkpoints) if event.time <= until]
    return [Record(0, event.time, event) for event in found]


def newest_complete_checkpoint(run: Run) -> CheckpointEvent | None:
    """Return a run's newest complete checkpoint that still exists, or None if there is none.

    A URL is accepted without a check, because only the ranks have the packages to access it.
    """
    for event in reversed(list(internals(run).store.checkpoints)):
        with suppress(OSError, ValueError):  # The path may not be allowed on this system, or its disk may not respond.
            if "://" in event.path or (Path(event.path) / MANIFEST_NAME).is_file():
                return event
    return None
