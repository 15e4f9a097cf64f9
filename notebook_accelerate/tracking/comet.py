"""Comet."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import by_kind
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class CometMLTracker(VendorTracker):
    """Records an experiment of Comet.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `comet_ml.start`; ``online=False`` writes an archive and sends nothing.
    """

    name: ClassVar[str] = "comet_ml"

    def _open(self) -> Any:
        import comet_ml

        return comet_ml.start(**{"project_name": self.run_name, **self.init_kwargs})

    def _close(self) -> None:
        self._run.end()

    writer = property(lambda self: self.tracker)
    """The experiment."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics, texts as other values, dictionaries of numbers as several metrics.

        Args:
            values: The values by name.
            step: The step.
            kwargs: Arguments of `log_metric`, `log_other` or `log_metrics`.
        """
        if step is not None:
            self.tracker.set_step(step)
        for name, (kind, value) in by_kind(values, "Comet").items():
            if kind == "number":
                self.tracker.log_metric(name, value, step=step, **kwargs)
            elif kind == "text":
                self.tracker.log_other(name, value, **kwargs)
            else:
                self.tracker.log_metrics(value, step=step, **kwargs)
