"""Trackio."""

from __future__ import annotations

from typing import ClassVar

from notebook_accelerate.tracking.run_tracker import RunTracker


class TrackioTracker(RunTracker):
    """Records a run of Trackio, in a local database by default.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `trackio.init`.
    """

    name: ClassVar[str] = "trackio"
