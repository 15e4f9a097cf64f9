"""The offer of an ended run's panel to go on with its training."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_accelerate import launch
from notebook_accelerate.launch.output.rank_lines import published_under
from notebook_accelerate.launch.resumption import newest_checkpoint
from notebook_accelerate.widgets.actions import Action, ActionRow

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run

CONTINUE = Action(
    id="continue",
    label="Resume training",
    hint="Launch the same function again, from this checkpoint, as one history",
    tone="first",
)


class ResumeOffer:
    """Says from where an ended run can go on, and launches it.

    Attributes:
        parent: The execute request of the cell that shows the panel; None: none does.
        launched: The run that goes on; None: there is none yet.
    """

    def __init__(self) -> None:
        self.parent: Any = None
        self.launched: Run | None = None
        self._checkpoint: str | None = None

    def rows(self, run: Run) -> list[ActionRow]:
        """Return the offer, if the run ended before its training did and has a complete checkpoint."""
        if self.launched is not None:
            return [ActionRow(key="continue", text=f"run {self.launched.id} goes on with this training")]
        if run.ended is None or run.held or run.status == "succeeded" or not (checkpoint := self._newest(run)):
            return []
        if run.call is not None:
            return [ActionRow(key="continue", text=f"Can go on from {checkpoint}", actions=(CONTINUE,))]
        text = (
            f"Can go on from {checkpoint}: execute the cells that define {run.function_name}, then "
            f"notebook_launcher({run.function_name}, args, config=run.config, resume=run)"
        )
        return [ActionRow(key="continue", text=text)]

    def _newest(self, run: Run) -> str:
        if self._checkpoint is None:
            found = newest_checkpoint(run)
            self._checkpoint = PurePath(found.path).name if found is not None else ""
        return self._checkpoint

    def launch(self, run: Run) -> None:
        """Launch the run that goes on, in the background; its panel is shown under the same cell.

        Raises:
            LaunchError: The function or an argument exists no more, or the run could not be started.
        """
        if self.launched is not None or run.call is None:
            return
        function, arguments = run.call.restore(run.function_name)
        with published_under(self.parent):
            self.launched = launch.start(run.config.changed(block=False), function, arguments, run)


__all__ = ["CONTINUE", "ResumeOffer"]
