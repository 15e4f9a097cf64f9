"""What W&B, SwanLab and Trackio have in common: a module with `init`, a run with `config`, `log` and `finish`."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import plain_numbers
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class RunTracker(VendorTracker):
    """Base class of adapters whose vendor takes any value and has one run object for everything.

    Args:
        run_name: Name of the project.
        kwargs: What the vendor's `init` takes.
    """

    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False

    @property
    def run(self) -> Any:
        """The vendor's run."""
        return self.tracker

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Anything by name.
        """
        self.tracker.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: Numbers, texts, and the vendor's own media by name.
            step: The step.
            kwargs: What the vendor's `log` takes.
        """
        self.tracker.log(plain_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
