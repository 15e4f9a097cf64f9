"""MLflow."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

from notebook_accelerate.config import environ
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.tracking.loggable_values import scalars
from notebook_accelerate.tracking.tracker import VendorTracker, on_main_process

# Limits of MLflow's own server, per value and per call.
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class MLflowTracker(VendorTracker):
    """Records a run of MLflow.

    Args:
        experiment_name: Name of the experiment; the variable MLFLOW_EXPERIMENT_NAME takes precedence.
        logging_dir: Tracking URI or folder; None keeps MLflow's own setting.
        run_id: A run to continue; the variable MLFLOW_RUN_ID takes precedence.
        tags: Tags of the run, as a dictionary or JSON; the variable MLFLOW_TAGS takes precedence.
        nested_run: Whether the run belongs to an open one; the variable MLFLOW_NESTED_RUN takes precedence.
        run_name: Name of the run.
        description: Description of the run.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name or "")
        self.experiment_name = environ.text("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = environ.text("MLFLOW_RUN_ID", run_id)
        given = environ.text("MLFLOW_TAGS") or tags
        self.tags: dict[str, Any] | None = json.loads(given) if isinstance(given, str) else given
        self.nested_run = environ.flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.description = description

    def _open(self) -> Any:
        import mlflow

        if self.logging_dir is not None:
            mlflow.set_tracking_uri(os.fspath(self.logging_dir))
        experiment = None if self.experiment_name is None else mlflow.set_experiment(self.experiment_name)
        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=None if experiment is None or self.run_id else experiment.experiment_id,
            run_name=self.run_name or None,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _close(self) -> None:
        import mlflow

        mlflow.end_run()

    active_run = property(lambda self: self.tracker)
    """The run."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings; a value whose text is longer than 500 characters is left out with a warning.

        Args:
            values: Any objects by name.
        """
        import mlflow

        long = [name for name, value in values.items() if len(str(value)) > _LONGEST_PARAMETER]
        if long:
            warn_once(f"MLflow takes settings of up to {_LONGEST_PARAMETER} characters: {', '.join(long)} left out.")
        fitting = [(name, value) for name, value in values.items() if name not in long]
        for start in range(0, len(fitting), _PARAMETERS_PER_CALL):
            mlflow.log_params(dict(fitting[start : start + _PARAMETERS_PER_CALL]), run_id=self.tracker.info.run_id)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers; texts are left out with one warning.

        Args:
            values: The values by name.
            step: The step.
            kwargs: Arguments of `mlflow.log_metrics`.
        """
        import mlflow

        metrics = scalars(values, "MLflow", texts=False)
        mlflow.log_metrics(metrics, **{"step": step, "run_id": self.tracker.info.run_id, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure.

        Args:
            figure: A figure of matplotlib or plotly.
            artifact_file: Path below the run's artifacts.
            save_kwargs: Arguments of the figure's own save method.
        """
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record the files of a folder.

        Args:
            local_dir: The folder.
            artifact_path: Path below the run's artifacts.
        """
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file.

        Args:
            local_path: The file.
            artifact_path: Path below the run's artifacts.
        """
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)
