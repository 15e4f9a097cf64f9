"""ClearML."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.loggable_values import numbers_only
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process

_SPLITS = ("eval", "test", "train")


class ClearMLTracker(VendorTracker):
    """Records a task of ClearML; one that is open already is used and left open.

    Args:
        run_name: Name of the project.
        kwargs: What `Task.init` takes.
    """

    name: ClassVar[str] = "clearml"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._found_open = False

    def _open(self) -> Any:
        from clearml import Task

        current = Task.current_task()
        if current is not None:
            self._found_open = True
            return current
        return Task.init(
            **{"project_name": self.run_name or None, "task_name": self.run_name or None, **self.init_kwargs}
        )

    @property
    def task(self) -> Any:
        """The task."""
        return self.tracker

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Anything by name.
        """
        self.tracker.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars; texts are left out with one warning.

        Args:
            values: Numbers by name; ``eval_loss`` becomes the series ``eval`` of the plot ``loss``.
            step: The step; without one a number is recorded as the run's only value.
            kwargs: What `report_scalar` or `report_single_value` take.
        """
        numbers = numbers_only(values, "ClearML")
        logger = self.tracker.get_logger()
        for name, value in numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _plot_of(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Images (arrays, PIL images, paths) by name.
            step: The step.
            kwargs: What `report_image` takes.
        """
        logger = self.tracker.get_logger()
        for name, image in values.items():
            title, series = _plot_of(name)
            logger.report_image(title=title, series=series, iteration=step, **{_image_argument(image): image}, **kwargs)

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
        """Record a table.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A pandas DataFrame, in place of columns and rows.
            step: The step.
            kwargs: What `report_table` takes.

        Raises:
            ValueError: There are neither rows nor a data frame.
        """
        if dataframe is None and data is None:
            raise ValueError("log_table takes rows or a DataFrame: log_table(name, columns=[...], data=[[...], ...])")
        table = dataframe if dataframe is not None else ([columns, *(data or [])] if columns else data)
        title, series = _plot_of(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task, unless it was open before."""
        if self._run is not None and not self._found_open:
            self._run.close()


def _plot_of(name: str) -> tuple[str, str]:
    """Return the plot and the series that a name stands for."""
    for split in _SPLITS:
        if name.startswith(f"{split}_"):
            return name.removeprefix(f"{split}_"), split
    return name, "train"


def _image_argument(image: Any) -> str:
    return "local_path" if isinstance(image, str) else "image"
