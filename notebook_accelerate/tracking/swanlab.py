"""SwanLab."""

from __future__ import annotations

from typing import ClassVar

from notebook_accelerate.tracking.run_tracker import ImageRunTracker


class SwanLabTracker(ImageRunTracker):
    """Records a run of SwanLab.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `swanlab.init`; ``mode="offline"`` sends nothing.
    """

    name: ClassVar[str] = "swanlab"
