"""Trackio."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.run_based import RunTracker


class TrackioTracker(RunTracker):
    """Records a run of Trackio, in a local database unless it is told otherwise.

    Args:
        run_name: Name of the project.
        kwargs: What `trackio.init` takes.
    """

    name: ClassVar[str] = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        import trackio

        return trackio.init(**{"project": self.run_name, **self.init_kwargs})
