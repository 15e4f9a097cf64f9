"""ClearML."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import scalars
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process

_SPLITS = ("eval", "test", "train")


class ClearMLTracker(VendorTracker):
    """Records a task of ClearML; a task that is open already is used, and not closed.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `Task.init`.
    """

    name: ClassVar[str] = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._opened_elsewhere = False

    def _open(self) -> Any:
        from clearml import Task

        current = Task.current_task()
        if current is not None:
            self._opened_elsewhere = True
            return current
        name = self.run_name or None
        return Task.init(**{"project_name": name, "task_name": name, **self.init_kwargs})

    def _close(self) -> None:
        if not self._opened_elsewhere:
            self._run.close()

    task = property(lambda self: self.tracker)
    """The task."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars; texts are left out with one warning.

        Args:
            values: Numbers by name; ``eval_loss`` becomes the series ``eval`` of the plot ``loss``.
            step: The step; without one, a number is recorded as the task's single value of that name.
            kwargs: Arguments of `report_scalar` or `report_single_value`.
        """
        numbers = scalars(values, "ClearML", texts=False)
        logger = self.tracker.get_logger()
        for name, value in numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                logger.report_scalar(**_plot_and_series(name), value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Images (arrays, PIL images, paths) by name.
            step: The step.
            kwargs: Arguments of `report_image`.
        """
        logger = self.tracker.get_logger()
        for name, image in values.items():
            given = {"local_path" if isinstance(image, str) else "image": image}
            logger.report_image(**_plot_and_series(name), iteration=step, **given, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table; see `WandBTracker.log_table`.

        Raises:
            ValueError: Neither rows nor a data frame was passed.
        """
        if dataframe is None and data is None:
            raise ValueError(
                "log_table got neither rows nor a data frame; pass one of them: "
                "tracker.log_table(name, columns=[...], data=[[...], ...]) or tracker.log_table(name, dataframe=frame)"
            )
        table = dataframe if dataframe is not None else ([columns, *(data or [])] if columns else data)
        self.tracker.get_logger().report_table(
            **_plot_and_series(table_name), table_plot=table, iteration=step, **kwargs
        )


def _plot_and_series(name: str) -> dict[str, str]:
    """Return the title of the plot and the series for a name."""
    for split in _SPLITS:
        if name.startswith(f"{split}_"):
            return {"title": name.removeprefix(f"{split}_"), "series": split}
    return {"title": name, "series": "train"}
