"""Comet."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import kind_of
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class CometMLTracker(VendorTracker):
    """Records an experiment of Comet.

    Args:
        run_name: Name of the project.
        kwargs: What `comet_ml.start` takes; ``online=False`` writes an archive and sends nothing.
    """

    name: ClassVar[str] = "comet_ml"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        import comet_ml

        return comet_ml.start(**{"project_name": self.run_name, **self.init_kwargs})

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.tracker

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Anything by name.
        """
        self.tracker.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics, texts as other values, dictionaries of numbers as metrics of their own.

        Args:
            values: The values by name.
            step: The step.
            kwargs: What `log_metric`, `log_other` or `log_metrics` take.
        """
        plain = {name: kind_of(name, value) for name, value in values.items()}
        if step is not None:
            self.tracker.set_step(step)
        for name, (kind, value) in plain.items():
            if kind == "number":
                self.tracker.log_metric(name, value, step=step, **kwargs)
            elif kind == "text":
                self.tracker.log_other(name, value, **kwargs)
            else:
                self.tracker.log_metrics(value, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the experiment."""
        if self._run is not None:
            self._run.end()
