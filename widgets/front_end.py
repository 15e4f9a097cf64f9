"""Whether the front end of this kernel shows live widgets, as far as the kernel can know.

Some front ends have no widgets (marimo), a notebook that nbclient executes has no front end, and VS Code may have its
renderer switched off. Panels show an HTML display there, which is updated while the run lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.launch.output.replaceable_outputs import MarimoOutput

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.replaceable_outputs import Output

ANSWER_SECONDS = 10.0
"""A front end that has drawn a view reports it. One that has not done so in this time, in which the kernel could have
handled the report, shows no live widgets; VS Code may first load a renderer."""


class FrontEnd:
    """What is known about the front end.

    Attributes:
        drawn: Whether it has drawn a live view.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._waited = 0.0
        self._last = float("inf")
        self._noted = False

    @property
    def silent(self) -> bool:
        """Whether it has had the time to draw a live view, and has not."""
        return not self.drawn and self._waited >= ANSWER_SECONDS

    def observe(self, now: float, *, handles_messages: bool) -> None:
        """Count the time in which a live view is shown and the kernel handles messages.

        Args:
            now: Seconds on any clock.
            handles_messages: Whether a message from the browser is handled now, not after the running cell.
        """
        if handles_messages and not self.drawn:
            self._waited += min(max(0.0, now - self._last), 1.0)
        self._last = now

    def note(self, reason: str) -> str:
        """Return why panels are HTML displays, for the first of them; "" for later ones."""
        if self._noted:
            return ""
        self._noted = True
        return f"{reason}: panels are HTML displays here, which are updated while the run lasts."


def no_widgets(output: Output | None) -> str:
    """Return why a front end shows no live widgets; "" if it does or may.

    Args:
        output: An output of the running cell; None outside a notebook.
    """
    if isinstance(output, MarimoOutput):
        return "marimo shows no ipywidgets"
    if output is not None and not output.interactive:
        return "No front end shows this notebook (its client takes no input, as nbclient)"
    return ""


front_end = FrontEnd()
"""The front end of this kernel."""
