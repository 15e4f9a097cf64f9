"""The tracker that is always active in a launched run: it sends numbers to the notebook."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate import telemetry
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.telemetry.events import MetricEvent
from notebook_accelerate.tracking.loggable_values import number_of, with_text_names
from notebook_accelerate.tracking.tracker import GeneralTracker


class LiveTracker(GeneralTracker):
    """Sends the numbers of every rank to the notebook that launched it; outside a launched run it does nothing."""

    name: ClassVar[str] = "live"
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False

    @property
    def tracker(self) -> Any:
        """The sink that events are sent to; None outside a launched run."""
        return telemetry.current_sink()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Send the numbers among the values; dictionaries of numbers as ``name/key``.

        Args:
            values: The values by name. Texts and media are for the other trackers.
            step: The step.
            kwargs: Not used.
        """
        if telemetry.current_sink() is None:
            return
        numbers: dict[str, float] = {}
        for name, value in with_text_names(values).items():
            if isinstance(value, dict):
                parts = {f"{name}/{key}": _float_of(item) for key, item in value.items()}
            else:
                parts = {name: _float_of(value)}
            if None in parts.values():
                warn_once(f"The live panel shows numbers: {name!r} ({type(value).__name__}) is left out there.")
            numbers.update({key: number for key, number in parts.items() if number is not None})
        if numbers:
            telemetry.emit(MetricEvent(numbers, step))


def _float_of(value: object) -> float | None:
    """Return a number; None for what is none, or is too large for the panel."""
    number = number_of(value)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return None
