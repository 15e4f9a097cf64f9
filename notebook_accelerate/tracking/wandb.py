"""Weights & Biases."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.run_tracker import ImageRunTracker
from notebook_accelerate.tracking.tracker import on_main_process


class WandBTracker(ImageRunTracker):
    """Records a run of Weights & Biases.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `wandb.init`.
    """

    name: ClassVar[str] = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings; those of an earlier call may change.

        Args:
            values: Any objects by name.
        """
        self.tracker.config.update(values, allow_val_change=True)

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
            kwargs: Arguments of the run's `log`.
        """
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)
