"""Adapters for vendors' trackers, one class for each vendor."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from notebook_accelerate.config import environ
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.tracking.tracker import (
    ImageRunTracker,
    RunTracker,
    VendorTracker,
    by_kind,
    on_main_process,
    plain_number,
    plain_numbers,
    scalars,
)

# ---- Aim


class AimTracker(VendorTracker):
    """Records an Aim run in a local repository.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        kwargs: Arguments of `aim.Run`.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open(self) -> Any:
        from aim import Run

        repo = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        run = Run(**{"repo": repo, **self.init_kwargs})
        run.name = self.run_name
        return run

    writer = property(lambda self: self.tracker)
    """The vendor's run object."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings under ``hparams``.

        Args:
            values: Any objects by name.
        """
        self.tracker["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record the values of one step.

        Args:
            values: Numbers and Aim's own objects by name.
            step: The number of the training step.
            kwargs: Arguments of `Run.track`, for instance `context`.
        """
        for name, value in plain_numbers(values).items():
            self.tracker.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images.

        Args:
            values: Images (arrays, tensors, PIL images) by name. A tuple contains an image and its caption.
            step: The number of the training step.
            kwargs: The arguments of `aim.Image` under ``aim_image``, and those of `Run.track` under ``track``.
        """
        import aim

        for_image, for_track = ((kwargs or {}).get(part, {}) for part in ("aim_image", "track"))
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            self.tracker.track(aim.Image(image, caption=caption, **for_image), name=name, step=step, **for_track)


# ---- ClearML


_SPLITS = ("eval", "test", "train")


class ClearMLTracker(VendorTracker):
    """Records a ClearML task. A task that is already open is used and not closed.

    Args:
        run_name: Name of the project and of the task, unless CLEARML_PROJECT or CLEARML_TASK is set.
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
        project, task = (environ.text(name) or self.run_name or None for name in ("CLEARML_PROJECT", "CLEARML_TASK"))
        return Task.init(**{"project_name": project, "task_name": task, **self.init_kwargs})

    def _close(self) -> None:
        if not self._opened_elsewhere:
            self._run.close()

    task = property(lambda self: self.tracker)
    """The ClearML task."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars. Leave out text, with one warning.

        Args:
            values: Numbers by name; ``eval_loss`` becomes the series ``eval`` of the plot ``loss``.
            step: The number of the training step. If None, a number is recorded as the task's single value of that
                name.
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
            step: The number of the training step.
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
                "log_table() got neither rows nor a data frame; pass one of them: "
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


# ---- Comet


class CometMLTracker(VendorTracker):
    """Records a Comet experiment.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `comet_ml.start`. With ``online=False``, it writes an archive and sends nothing.
    """

    name: ClassVar[str] = "comet_ml"

    def _open(self) -> Any:
        import comet_ml

        return comet_ml.start(**{"project_name": self.run_name, **self.init_kwargs})

    def _close(self) -> None:
        self._run.end()

    writer = property(lambda self: self.tracker)
    """The Comet experiment."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics, text as other values, and dictionaries of numbers as several metrics.

        Args:
            values: The values to record, by name.
            step: The number of the training step.
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


# ---- DVCLive


class DVCLiveTracker(VendorTracker):
    """Records a run with DVCLive.

    Args:
        run_name: Name of the project, which DVCLive does not use.
        live: The `dvclive.Live` to use. If None, one is created.
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
        """Record the settings, and write them to ``params.yaml``.

        Args:
            values: Numbers, strings, flags, and lists and dictionaries of them, by name.
        """
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and text, and advance to the next step. Leave out other values, with one warning.

        Args:
            values: The values to record, by name.
            step: The number of the training step. If None, it is the step after the last one.
            kwargs: Arguments of `log_metric`.
        """
        recorded = scalars(values, "DVCLive", texts=True)
        if step is not None:
            self.tracker.step = step
        for name, value in recorded.items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()


# ---- MLflow


# MLflow's server limits the length of a value and the number of values in a call.
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class MLflowTracker(VendorTracker):
    """Records an MLflow run.

    Args:
        experiment_name: The name of the experiment. The environment variable MLFLOW_EXPERIMENT_NAME takes precedence.
        logging_dir: The tracking URI or folder. If None, MLflow's own setting is kept.
        run_id: The run to continue. The environment variable MLFLOW_RUN_ID takes precedence.
        tags: The tags of the run, as a dictionary or JSON. The environment variable MLFLOW_TAGS takes precedence.
        nested_run: Whether the run is nested in an open run. The environment variable MLFLOW_NESTED_RUN takes
            precedence.
        run_name: The name of the run.
        description: The description of the run.
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
    """The vendor's run object."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings. A value whose text is longer than 500 characters is left out, with a warning.

        Args:
            values: Any objects by name.
        """
        import mlflow

        long = [name for name, value in values.items() if len(str(value)) > _LONGEST_PARAMETER]
        if long:
            warn_once(f"MLflow limits settings to {_LONGEST_PARAMETER} characters; left out: {', '.join(long)}.")
        fitting = [(name, value) for name, value in values.items() if name not in long]
        for start in range(0, len(fitting), _PARAMETERS_PER_CALL):
            mlflow.log_params(dict(fitting[start : start + _PARAMETERS_PER_CALL]), run_id=self.tracker.info.run_id)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers. Leave out text, with one warning.

        Args:
            values: The values to record, by name.
            step: The number of the training step.
            kwargs: Arguments of `mlflow.log_metrics`.
        """
        import mlflow

        metrics = scalars(values, "MLflow", texts=False)
        mlflow.log_metrics(metrics, **{"step": step, "run_id": self.tracker.info.run_id, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure.

        Args:
            figure: A matplotlib or plotly figure.
            artifact_file: Path below the run's artifacts.
            save_kwargs: Arguments of the figure's own save method.
        """
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record the files of a folder.

        Args:
            local_dir: The folder whose files are recorded.
            artifact_path: Path below the run's artifacts.
        """
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file.

        Args:
            local_path: The path of the file to record.
            artifact_path: Path below the run's artifacts.
        """
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)


# ---- SwanLab


class SwanLabTracker(ImageRunTracker):
    """Records a SwanLab run.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `swanlab.init`; ``mode="offline"`` sends nothing.
    """

    name: ClassVar[str] = "swanlab"


# ---- TensorBoard


def _plain_setting(value: object) -> bool | int | float | str:
    """Return a setting in one of the types that TensorBoard and YAML accept. Enumerations become their values."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)) and plain_number(value) is not None:
        return int(value) if isinstance(value, int) else float(value)
    return str(value)


class TensorBoardTracker(VendorTracker):
    """Writes TensorBoard's event files.

    Args:
        run_name: Name of the project, and of a folder inside `logging_dir`.
        logging_dir: Parent of that folder.
        kwargs: Arguments of torch's `SummaryWriter`.
    """

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)

    def _open(self) -> Any:
        try:
            module = import_module("torch.utils.tensorboard")
        except ModuleNotFoundError:  # Use tensorboardX instead, which writes the same files.
            module = import_module("tensorboardX")
        return module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    writer = property(lambda self: self.tracker)
    """The `SummaryWriter`."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings in TensorBoard's table of hyperparameters, and write them to ``hparams.yml``.

        Args:
            values: Numbers, strings and flags by name. Other values are recorded as text.
        """
        plain = {str(name): _plain_setting(value) for name, value in values.items()}
        self.tracker.add_hparams(plain, metric_dict={})
        self.tracker.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True)
        import yaml  # Import it only if it is used, because that takes a tenth of a second.

        (folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, strings as text, and dictionaries of numbers as one group of curves.

        Args:
            values: The values to record, by name.
            step: The number of the training step.
            kwargs: Arguments of `add_scalar`, `add_text` or `add_scalars`.
        """
        writers = {
            "number": self.tracker.add_scalar,
            "text": self.tracker.add_text,
            "numbers": self.tracker.add_scalars,
        }
        for name, (kind, value) in by_kind(values, "TensorBoard").items():
            writers[kind](name, value, global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Arrays or tensors of N images by name.
            step: The number of the training step.
            kwargs: Arguments of `add_images`, for instance ``dataformats="NHWC"``.
        """
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)


# ---- Trackio


class TrackioTracker(RunTracker):
    """Records a Trackio run, by default in a local database.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `trackio.init`.
    """

    name: ClassVar[str] = "trackio"


# ---- Weights & Biases


class WandBTracker(ImageRunTracker):
    """Records a Weights & Biases run.

    Args:
        run_name: Name of the project.
        kwargs: Arguments of `wandb.init`.
    """

    name: ClassVar[str] = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings, which may replace settings from an earlier call.

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
            table_name: The name of the table.
            columns: Names of the columns.
            data: The rows.
            dataframe: A pandas DataFrame, in place of columns and rows.
            step: The number of the training step.
            kwargs: Arguments of the run's `log`.
        """
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)
