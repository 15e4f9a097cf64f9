"""TensorBoard."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import by_kind
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class TensorBoardTracker(VendorTracker):
    """Writes TensorBoard's event files.

    Args:
        run_name: Name of the project: a folder inside `logging_dir`.
        logging_dir: Parent of that folder.
        kwargs: Arguments of torch's `SummaryWriter`.
    """

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)

    def _open(self) -> Any:
        try:
            module = import_module("torch.utils.tensorboard")
        except ModuleNotFoundError:  # tensorboardX writes the same files
            module = import_module("tensorboardX")
        return module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    writer = property(lambda self: self.tracker)
    """The `SummaryWriter`."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings, in TensorBoard's table of hyperparameters and as ``hparams.yml``.

        Args:
            values: Numbers, texts and flags by name; others are recorded as text.
        """
        plain = {
            str(name): value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in values.items()
        }
        self.tracker.add_hparams(plain, metric_dict={})
        self.tracker.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True)
        import yaml  # takes a tenth of a second, which only users of this tracker should pay

        (folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, texts as text, dictionaries of numbers as one group of curves.

        Args:
            values: The values by name.
            step: The step.
            kwargs: Arguments of `add_scalar`, `add_text` or `add_scalars`.
        """
        writers = {
            "number": self.tracker.add_scalar,
            "text": self.tracker.add_text,
            "numbers": self.tracker.add_scalars,
        }
        for name, (kind, value) in by_kind(values, "TensorBoard").items():
            writers[kind](name, value, global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Arrays or tensors of N images by name.
            step: The step.
            kwargs: Arguments of `add_images`, for instance ``dataformats="NHWC"``.
        """
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)
