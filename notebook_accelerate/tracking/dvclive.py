"""DVCLive."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import scalars
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process


class DVCLiveTracker(VendorTracker):
    """Records with DVCLive.

    Args:
        run_name: Name of the project; not used by DVCLive.
        live: A `dvclive.Live` to use; None creates one.
        kwargs: Arguments of `dvclive.Live`.
    """

    name: ClassVar[str] = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._given = live

    def _open(self) -> Any:
        if self._given is not None:
            return self._given
        from dvclive import Live

        return Live(**self.init_kwargs)

    def _close(self) -> None:
        self._run.end()

    live = property(lambda self: self.tracker)
    """The `dvclive.Live`."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings, also as ``params.yaml``.

        Args:
            values: Numbers, texts, flags, lists and dictionaries of them, by name.
        """
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and texts, and advance to the next step; other values are left out with one warning.

        Args:
            values: The values by name.
            step: The step; None means the one after the last.
            kwargs: Arguments of `log_metric`.
        """
        recorded = scalars(values, "DVCLive", texts=True)
        if step is not None:
            self.tracker.step = step
        for name, value in recorded.items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()
