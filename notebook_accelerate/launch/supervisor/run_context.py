"""State that the parts of a run's supervisor share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notebook_accelerate.launch.state.failures import ExceptionLoader
from notebook_accelerate.launch.state.run_events import NoteAdded

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.output.rank_lines import Publisher
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.run_state import RunState
    from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
    from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock


@dataclass(frozen=True)
class RunContext:
    """One run, for the parts of its supervisor.

    Attributes:
        id: The run's number in this kernel.
        config: Configuration of the launch.
        function_name: Name of the launched function.
        journal: Events of the run are appended here.
        commands: The user's commands, the prompts, and the requests to ranks.
        publisher: Shows output in the notebook.
        exceptions: Unpickles the exceptions of the ranks.
    """

    id: int
    config: LaunchConfig
    function_name: str
    journal: Journal
    commands: CommandQueue
    publisher: Publisher
    exceptions: ExceptionLoader = field(default_factory=ExceptionLoader)

    @property
    def clock(self) -> PausableClock:
        """The clock of the run's time limits."""
        return self.commands.clock

    @property
    def state(self) -> RunState:
        """The run after the last event."""
        return self.journal.state

    def show(self, text: str, stream: str = "stdout") -> None:
        """Show a line of the launch itself."""
        self.publisher.line(stream, text)
        self.publisher.flush(force=True)

    def note(self, text: str, *, shown_as: str | None = None) -> None:
        """Record a remark for panel and report, and show it (as ``shown_as``, if given)."""
        self.journal.append(NoteAdded(text))
        self.show(text if shown_as is None else shown_as, "stderr")
