"""The commands that a run passes to its supervisor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from notebook_accelerate.debugging.session import RankRequests
from notebook_accelerate.launch.state.prompts import PromptQueue

DEFAULT_GRACE = 5.0
"""The default number of seconds between the KeyboardInterrupt and SIGKILL."""


class RunCommands(Protocol):
    """Commands to a run's supervisor. They can be called from any thread, and have no effect once the run is over.

    Attributes:
        prompts: The prompts of ranks that wait for a line of input.
        requests: Sends requests to the ranks, and matches their replies.
        refusal: Why the run cannot be stopped from here, or "" if it can.
    """

    refusal: str
    prompts: PromptQueue
    requests: RankRequests

    @property
    def connected(self) -> bool:
        """Whether a detached run's process is connected. If a disk is full, it stays connected after the run's end."""

    def stop(self, grace: float) -> None:
        """Stop the ranks within ``grace`` seconds. A second call kills them immediately."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send a KeyboardInterrupt to ranks, without ending the run."""

    def show_under(self, cell: object) -> None:
        """Show later output under another cell, which is given by its execute request."""

    def hold_clock(self, rank: int) -> None:
        """Suspend the run's time limits while the user holds a rank."""

    def release_clock(self, rank: int) -> None:
        """End the suspension of the time limits by ``hold_clock``."""


class NoCommands:
    """The commands of a run without a supervisor: an inline run, or one rebuilt from its journal."""

    refusal, connected = "", False

    def __init__(self) -> None:
        self.prompts, self.requests = PromptQueue(), RankRequests()

    def stop(self, grace: float) -> None:
        """Do nothing."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Do nothing."""

    def show_under(self, cell: object) -> None:
        """Do nothing."""

    def hold_clock(self, rank: int) -> None:
        """Do nothing."""

    def release_clock(self, rank: int) -> None:
        """Do nothing."""
