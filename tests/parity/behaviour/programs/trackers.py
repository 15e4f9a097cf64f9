"""Trackers: custom ones, and those of vendors' packages, without a network."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
)
from accelerate.utils import LoggerType, ProjectConfiguration

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import raised, warned

VENDORS = (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)


class Kept(GeneralTracker):
    """A tracker that records the calls it receives."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self, run_name: str = "own", **settings: Any) -> None:
        super().__init__()
        self.received: list[Any] = [("init", run_name, settings)]

    @property
    def tracker(self) -> Any:
        return self.received

    def start(self) -> None:
        self.received.append(("start",))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.received.append(("configuration", values))

    def log(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
        self.received.append(("log", dict(values), step, settings))

    def finish(self) -> None:
        self.received.append(("finish",))


class InFolder(Kept):
    """A tracker that requires a logging folder."""

    name = "in_folder"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **settings: Any) -> None:
        super().__init__(run_name, logging_dir=logging_dir, **settings)


class Everywhere(Kept):
    """A tracker that runs on all ranks."""

    name = "everywhere"
    main_process_only = False


class OnMain(Kept):
    """A tracker with a method that runs only on the main process."""

    name = "on_main"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
        super().log(values, step, **settings)


class WithoutTracker(GeneralTracker):
    name = "without"
    requires_logging_directory = False


class WithoutAnything(GeneralTracker):
    pass


CALLS = [
    "[[each.name, each.requires_logging_directory, each.main_process_only] for each in VENDORS]",
    "GeneralTracker()",
    "GeneralTracker(_blank=True).log({'a': 1}, step=1)",
    "GeneralTracker(_blank=True).start()",
    "GeneralTracker(_blank=True).store_init_configuration({})",
    "GeneralTracker(_blank=True).finish()",
    "raised(lambda: GeneralTracker(_blank=True).tracker)",
    "raised(lambda: GeneralTracker(_blank=True).name)",
    "WithoutTracker()",
    "WithoutAnything()",
    "Kept('run').tracker",
    "[str(each) for each in LoggerType]",
    "[type(key).__name__ for key in LOGGER_TYPE_TO_CLASS][:1]",
    "LOGGER_TYPE_TO_CLASS['wandb']",
    "LOGGER_TYPE_TO_CLASS[LoggerType.TENSORBOARD.value].name",
    "raised(lambda: LOGGER_TYPE_TO_CLASS['absent'])",
    "'tensorboard' in [str(each) for each in get_available_trackers()]",
    "filter_trackers(None)",
    "filter_trackers([])",
    "filter_trackers('tensorboard', '.')",
    "filter_trackers('tensorboard')",
    "filter_trackers(['tensorboard', 'tensorboard'], '.')",
    "filter_trackers([LoggerType.TENSORBOARD, Kept('x')], '.')[1].name",
    "filter_trackers('nonsense')",
    "filter_trackers(Kept('x'))[0].name",
    "filter_trackers(Kept)",
    "filter_trackers(5)",
    "filter_trackers(InFolder('x', 'y'))[0].name",
    "[str(each) for each in Accelerator(log_with='tensorboard', project_dir='.').log_with]",
    "Accelerator(log_with='tensorboard')",
    "Accelerator(log_with=['tensorboard', 'nonsense'], project_dir='.')",
    "'tensorboard' in [str(each) for each in Accelerator(log_with='all', project_dir='.').log_with]",
    "[each.name for each in Accelerator(log_with=[Kept('x'), Everywhere('y')]).log_with]",
    "Accelerator(log_with=Kept).log_with",
    "Accelerator(log_with='all', project_dir='.').trackers",
    "Accelerator().trackers, Accelerator().log_with",
    "Accelerator().log({'a': 1})",
    "Accelerator().log({})",
    "Accelerator().end_training()",
    "Accelerator().init_trackers('x')",
    "raised(lambda: Accelerator().get_tracker('tensorboard'))",
    "_life(Kept('x'))",
    "_life(Kept)",
    "_life(InFolder('x', 'y'))",
    "_life([Kept('x'), Kept('y')])",
    "_life([Kept('x'), OnMain('y')])",
    "_life(Kept('x'), init_kwargs={'kept': {'a': 1}})",
    "_life(Kept('x'), log_kwargs={'kept': {'a': 1}, 'other': {'b': 2}})",
    "_life(Kept('x'), config={'lr': 0.5, 'nested': {'a': [1]}, 'none': None})",
    "_life(Kept('x'), values={'text': 'a', 'tensor': torch.ones(1), 'array': np.ones(2), 'none': None, 'list': [1]})",
    "_life(Kept('x'), values=torch.ones(1))",
    "_started(Kept('x')).get_tracker('kept').name",
    "_started(Kept('x')).get_tracker('kept', unwrap=True)",
    "raised(lambda: _started(Kept('x')).get_tracker('absent'))",
    "_ended_twice()",
    "_again()",
    "_uninitialised()",
]
CALLS_ON_TWO_RANKS = [
    "_life(Kept('x'))",
    "_life(OnMain('x'))",
    "_life(Everywhere('x'))",
    "_life([Kept('x'), Everywhere('y')])",
    "type(_started(Kept('x')).get_tracker('kept')).__name__",
    "len(_started(Kept('x')).trackers)",
    "raised(lambda: type(_started(Kept('x')).get_tracker('absent')).__name__)",
    "raised(lambda: type(_started(Kept('x')).get_tracker('kept', unwrap=True)).__name__)",
    "_started(Everywhere('x')).get_tracker('everywhere').tracker",
    "_on_main_ranks()",
]


def _life(given: Any, *, values: Any = None, log_kwargs: Any = None, **settings: Any) -> Any:
    trackers = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, GeneralTracker)]
    accelerator = Accelerator(log_with=given)
    accelerator.init_trackers("project", **{"config": {"lr": 0.5}, **settings})
    accelerator.log({"loss": 1.5} if values is None else values, step=3, log_kwargs=log_kwargs or {})
    accelerator.log({"loss": 1})
    if accelerator.num_processes == 1:  # Accelerate would also end the process group, which later expressions need.
        accelerator.end_training()
    return [each.received for each in trackers if isinstance(each, Kept)]


def _started(given: Any) -> Accelerator:
    accelerator = Accelerator(log_with=given)
    accelerator.init_trackers("project")
    return accelerator


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _ended_twice() -> Any:
    tracker = Kept("x")
    accelerator = _started(tracker)
    accelerator.end_training()
    return raised(accelerator.end_training), tracker.received, len(accelerator.trackers)


def _again() -> Any:
    tracker = Kept("x")
    accelerator = _started(tracker)
    accelerator.init_trackers("second", config={"a": 1})
    accelerator.log({"loss": 1})
    return tracker.received, len(accelerator.trackers)


def _uninitialised() -> Any:
    tracker = Kept("x")
    accelerator = Accelerator(log_with=tracker)
    accelerator.log({"loss": 1})
    return tracker.received, accelerator.trackers


def _on_main_ranks() -> Any:
    tracker = OnMain("x")
    tracker.log({"a": 1})
    tracker.main_process_only = False
    tracker.log({"a": 2})
    return tracker.received


def objects_initialise_nothing() -> Any:
    tracker = TensorBoardTracker("run", "logs")
    before = is_initialized(), AcceleratorState._shared_state == {}, PartialState._shared_state == {}, _names(".")
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("project")
    return before, _names("logs"), accelerator.trackers[0] is tracker


@program(ranks=2)
def objects_before_the_process_group() -> Any:
    from datetime import timedelta

    tracker = Kept("run")
    tensorboard = TensorBoardTracker("run", "logs")
    before = is_initialized(), torch.distributed.is_initialized()
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77), backend="gloo")
    accelerator = Accelerator(log_with=[tracker, tensorboard], kwargs_handlers=[handler])
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1.0}, step=1)
    return before, torch.distributed.is_initialized(), tracker.received


@program(ranks=2)
def the_end_of_training_on_two_ranks() -> Any:
    accelerator = _started([Kept("x"), Everywhere("y")])
    kept = [each.received for each in accelerator.trackers]
    accelerator.end_training()
    return kept, torch.distributed.is_initialized()


def trackers_that_fail_to_log() -> Any:
    class Failing(Kept):
        name = "failing"

        def log(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
            raise OSError("no connection")

    accelerator = _started([Failing("x"), Kept("y")])
    return raised(lambda: accelerator.log({"loss": 1}))


def registered_classes() -> Any:
    from accelerate.tracking import register_tracker_class

    class Mine(Kept):
        name = "mine"

    register_tracker_class(Mine)
    accelerator = Accelerator(log_with="mine")
    accelerator.init_trackers("project", init_kwargs={"mine": {"a": 1}})
    return accelerator.trackers[0].tracker, raised(lambda: register_tracker_class(int))


def tensorboard_scalars_and_texts() -> Any:
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("project", config={"lr": 0.5, "name": "x", "flag": True})
    accelerator.log({"loss": 1.5, "text": "hello", "both": {"a": 1.0, "b": 2}}, step=3)
    accelerator.log({"loss": torch.tensor(2.5), "flag": True}, step=4)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"image": np.zeros((1, 4, 4, 3), dtype="uint8")}, step=3, dataformats="NHWC")
    accelerator.end_training()
    return _events("logs/project"), type(tracker.tracker)


def _events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder)
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [[each.step, each.value] for each in found.Scalars(tag)] for tag in sorted(tags["scalars"])}
    yml = [path.read_text() for path in Path(folder).glob("*/hparams.yml")]
    return (
        scalars,
        sorted(tags["images"]),
        sorted(tags["tensors"]),
        yml,
        sorted(path.name for path in Path(folder).glob("both*")),
    )


def tensorboard_configurations_that_it_does_not_take() -> Any:
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
    return raised(lambda: accelerator.init_trackers("project", config={"layers": [1, 2], "nested": {"a": 1}}))


def tensorboard_in_a_project() -> Any:
    settings = ProjectConfiguration(project_dir="here", logging_dir="here/logs")
    accelerator = Accelerator(log_with=LoggerType.TENSORBOARD, project_config=settings)
    accelerator.init_trackers("project", init_kwargs={"tensorboard": {"flush_secs": 60, "comment": "x"}})
    return accelerator.logging_dir, _names("here/logs"), accelerator.trackers[0].logging_dir


def tensorboard_with_unknown_settings() -> Any:
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
    return raised(lambda: accelerator.init_trackers("project", init_kwargs={"tensorboard": {"nonsense": 1}}))


@program(needs="wandb")
def wandb_offline() -> Any:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(Path.cwd()))
    accelerator = Accelerator(log_with="wandb")
    accelerator.init_trackers("project", config={"lr": 0.5, "nested": {"a": 1}}, init_kwargs={"wandb": {"name": "run"}})
    accelerator.log({"loss": 1.5, "text": "hello", "both": {"a": 1}}, step=3)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"image": [np.zeros((4, 4, 3), dtype="uint8")]}, step=4)
    tracker.log_table("table", columns=["a"], data=[[1]], step=5)
    run = accelerator.get_tracker("wandb", unwrap=True)
    found = dict(run.config), run.summary["loss"], run.summary["text"], run.name, run.project, run.step
    accelerator.end_training()
    return found, tracker.run is run


@program(needs="mlflow")
def mlflow_in_files() -> Any:
    os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI=f"file:{Path.cwd()}/runs")
    accelerator = Accelerator(log_with="mlflow")
    config = {"lr": 0.5, "name": "x", "long": "y" * 7000, **{f"p{i}": i for i in range(120)}}
    accelerator.init_trackers("project", config=config, init_kwargs={"mlflow": {"run_name": "run", "tags": {"a": "b"}}})
    accelerator.log({"loss": 1.5, "text": "hello", "tensor": torch.tensor(2.0)}, step=3)
    tracker = accelerator.get_tracker("mlflow")
    Path("file.txt").write_text("x")
    tracker.log_artifact("file.txt", "kept")
    Path("more").mkdir()
    Path("more/second.txt").write_text("y")
    tracker.log_artifacts("more")
    accelerator.end_training()
    metrics = {path.name: path.read_text().split()[1:] for path in Path("runs").glob("*/*/metrics/*")}
    found = sorted(path.name for path in Path("runs").glob("*/*/params/*"))
    artifacts = sorted(path.name for path in Path("runs").glob("*/*/artifacts/**/*.txt"))
    return metrics, found, artifacts, [path.read_text() for path in Path("runs").glob("*/*/tags/a")]


@program(needs="dvclive")
def dvclive_keeps_values() -> Any:
    import json

    accelerator = Accelerator(log_with="dvclive")
    settings = {"dvclive": {"dir": "live", "save_dvc_exp": False, "dvcyaml": None}}
    accelerator.init_trackers("project", config={"lr": 0.5, "name": "x"}, init_kwargs=settings)
    accelerator.log({"loss": 1.5, "text": "hello", "count": 2}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5), "flag": True, "none": None}, step=4)
    accelerator.end_training()
    return json.loads(Path("live/metrics.json").read_text()), Path("live/params.yaml").read_text()


@program(needs="trackio")
def trackio_in_files() -> Any:
    import json
    import sqlite3

    os.environ["TRACKIO_DIR"] = str(Path.cwd())
    accelerator = Accelerator(log_with="trackio")
    accelerator.init_trackers("project", config={"lr": 0.5}, init_kwargs={"trackio": {"name": "run"}})
    accelerator.log({"loss": 1.5, "text": "hello"}, step=3)
    accelerator.end_training()
    with sqlite3.connect(next(iter(Path().glob("project*.db")))) as rows:
        return [[step, json.loads(text)] for step, text in rows.execute("select step, metrics from metrics")]


@program(needs="comet_ml")
def comet_offline() -> Any:
    import zipfile

    os.environ["COMET_OFFLINE_DIRECTORY"] = str(Path.cwd())
    logging.getLogger("comet_ml").setLevel(logging.ERROR)
    accelerator = Accelerator(log_with="comet_ml")
    accelerator.init_trackers("project", config={"lr": 0.5}, init_kwargs={"comet_ml": {"online": False}})
    accelerator.log({"loss": 1.5, "text": "hello", "both": {"a": 1.0}}, step=3)
    accelerator.end_training()
    with zipfile.ZipFile(next(iter(Path().rglob("*.zip")))) as opened:
        text = opened.read("messages.json").decode()
    return [each in text for each in ('"metricName":"loss","metricValue":1.5,"step":3', "hello", '"lr"', '"a"')]


@program(needs="swanlab")
def swanlab_offline() -> Any:
    accelerator = Accelerator(log_with="swanlab")
    settings = {"swanlab": {"mode": "disabled", "logdir": "logs"}}
    accelerator.init_trackers("project", config={"lr": 0.5}, init_kwargs=settings)
    accelerator.log({"loss": 1.5, "text": "hello", "both": {"a": 1}}, step=3)
    tracker = accelerator.get_tracker("swanlab")
    found = type(tracker.tracker).__name__, dict(tracker.tracker.config)["lr"]
    accelerator.end_training()
    return found


@program(needs="aim")
def aim_in_files() -> Any:
    accelerator = Accelerator(log_with="aim", project_dir="logs")
    accelerator.init_trackers("project", config={"lr": 0.5}, init_kwargs={"aim": {"log_system_params": False}})
    accelerator.log({"loss": 1.5, "count": 2}, step=3)
    run = accelerator.get_tracker("aim", unwrap=True)
    found = run["hparams"], run.name, sorted(each.name for each in run.metrics())
    accelerator.end_training()
    return found, Path("logs/.aim").is_dir()


def warnings_of_trackers() -> Any:
    return warned(lambda: _life(Kept("x")))[0]
