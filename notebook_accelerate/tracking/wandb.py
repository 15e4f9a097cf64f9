"""Weights & Biases."""

from __future__ import annotations

from typing import Any, ClassVar

from notebook_accelerate.tracking.run_based import RunTracker
from notebook_accelerate.tracking.tracker import on_main_process


class WandBTracker(RunTracker):
    """Records a run of Weights & Biases.

    Args:
        run_name: Name of the project.
        kwargs: What `wandb.init` takes.
    """

    name: ClassVar[str] = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    def _open(self) -> Any:
        import wandb

        return wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Anything by name.
        """
        self.tracker.config.update(values, allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Lists of images (arrays, tensors, PIL images, paths) by name.
            step: The step.
            kwargs: What `wandb.Image` takes, for instance `caption`.
        """
        import wandb

        images = {name: [wandb.Image(image, **kwargs) for image in items] for name, items in values.items()}
        self.log(images, step=step)

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
            kwargs: What the run's `log` takes.
        """
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)
