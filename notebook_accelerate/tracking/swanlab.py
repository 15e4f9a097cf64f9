"""SwanLab."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.run_based import RunTracker
from notebook_accelerate.tracking.tracker import on_main_process


class SwanLabTracker(RunTracker):
    """Records a run of SwanLab.

    Args:
        run_name: Name of the project.
        kwargs: What `swanlab.init` takes; ``mode="offline"`` sends nothing.
    """

    name: ClassVar[str] = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        import swanlab

        return swanlab.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Lists of images (arrays, tensors, PIL images, paths) by name.
            step: The step.
            kwargs: What `swanlab.Image` takes, for instance `caption`.
        """
        import swanlab

        images = {name: [swanlab.Image(image, **kwargs) for image in items] for name, items in values.items()}
        self.log(images, step=step)
