"""Aim."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import plain_numbers
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class AimTracker(VendorTracker):
    """Records a run of Aim in a local repository.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        kwargs: Arguments of `aim.Run`.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open(self) -> Any:
        from aim import Run

        repo = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        run = Run(**{"repo": repo, **self.init_kwargs})
        run.name = self.run_name
        return run

    writer = property(lambda self: self.tracker)
    """The run."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings under ``hparams``.

        Args:
            values: Any objects by name.
        """
        self.tracker["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            values: Numbers and Aim's own objects by name.
            step: The step.
            kwargs: Arguments of `Run.track`, for instance `context`.
        """
        for name, value in plain_numbers(values).items():
            self.tracker.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images.

        Args:
            values: Images (arrays, tensors, PIL images) by name; a tuple is an image and its caption.
            step: The step.
            kwargs: Arguments of `aim.Image` under ``aim_image`` and of `Run.track` under ``track``.
        """
        import aim

        for_image, for_track = ((kwargs or {}).get(part, {}) for part in ("aim_image", "track"))
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            self.tracker.track(aim.Image(image, caption=caption, **for_image), name=name, step=step, **for_track)
