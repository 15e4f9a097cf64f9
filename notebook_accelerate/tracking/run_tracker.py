"""Base class for W&B, SwanLab and Trackio: a module with `init`, a run with `config`, `log` and `finish`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process, plain_numbers


class RunTracker(VendorTracker):
    """Base class of adapters whose vendor accepts any value and has one run object for everything.

    The tracker's name is also the vendor's module.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of the vendor's `init`.
    """

    main_process_only: ClassVar[bool] = False

    def _open(self) -> Any:
        return import_module(self.name).init(**{"project": self.run_name, **self.init_kwargs})

    def _close(self) -> None:
        self._run.finish()

    run = property(lambda self: self.tracker)
    """The vendor's run."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: Numbers, texts, and the vendor's own media by name.
            step: The step.
            kwargs: Arguments of the vendor's `log`.
        """
        self.tracker.log(plain_numbers(values), step=step, **kwargs)


class ImageRunTracker(RunTracker):
    """Base class of adapters whose vendor also has an `Image` class.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of the vendor's `init`.
    """

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Lists of images (arrays, tensors, PIL images, paths) by name.
            step: The step.
            kwargs: Arguments of the vendor's `Image`, for instance `caption`.
        """
        make_image = import_module(self.name).Image
        self.log({name: [make_image(image, **kwargs) for image in items] for name, items in values.items()}, step=step)
