"""The real package of each vendor, offline. Logged values are read back from its files."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.tracking import tracker_table

# Vendors' packages start threads and services that remain until the process exits, so each has its own process.
_SCRIPT = """
import json, sys
import numpy as np, torch
from notebook_accelerate import Accelerator

name, options = sys.argv[1], json.loads(sys.argv[2])
accelerator = Accelerator(cpu=True, log_with=name, project_dir=".")
assert accelerator.log_with == [name]
accelerator.init_trackers("project", config={"lr": 0.25, "name": "x"}, init_kwargs={name: options})
accelerator.log({"loss": torch.tensor(1.5), "eval_acc": np.float32(0.5)}, step=1)
accelerator.log({"loss": 0.75}, step=2)
tracker = accelerator.get_tracker(name)
assert tracker.tracker is not None
"""
_END = "\naccelerator.end_training()\nprint('ended')\n"


def track(name: str, folder: Path, options: dict[str, Any], more: str = "", **env: str) -> str:
    """Log two steps with one vendor's tracker in a separate process. Return the output."""
    if not tracker_table.TRACKERS[name].is_available():
        pytest.skip(f"{name} is not installed: pip install {tracker_table.TRACKERS[name].package}")
    script = _SCRIPT + textwrap.dedent(more) + _END
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script, name, json.dumps(options)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout
    assert "failed in" not in done.stderr, done.stderr
    return done.stdout


def test_tensorboard_records_the_values(tmp_path: Path) -> None:
    more = """
    accelerator.log({"note": "hello", "both": {"a": 1.0, "b": 2.0}}, step=3)
    tracker.log_images({"image": np.zeros((2, 8, 8, 3), dtype="uint8")}, step=3, dataformats="NHWC")
    tracker.writer.add_scalar("by hand", 4.0, 1)
    """
    track("tensorboard", tmp_path, {}, more)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.5), (2, 0.75)]
    assert [event.value for event in events.Scalars("by hand")] == [4.0]
    assert events.Tags()["images"] == ["image"]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert {path.name for path in (tmp_path / "project").iterdir()} >= {"both_a", "both_b"}
    settings = next((tmp_path / "project").glob("*/hparams.yml")).read_text()
    assert settings == "lr: 0.25\nname: x\n"


def test_wandb_records_the_values(tmp_path: Path) -> None:
    more = """
    tracker.log_images({"images": [np.zeros((8, 8, 3), dtype="uint8")]}, step=3, caption="c")
    tracker.log_table("table", columns=["a"], data=[[1]], step=4)
    assert dict(tracker.run.config) == {"lr": 0.25, "name": "x"}
    assert tracker.run.summary["loss"] == 0.75 and tracker.run.project == "project"
    """
    track("wandb", tmp_path, {"settings": {"silent": True}}, more, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"eval_acc" in written.read_bytes()


def test_mlflow_records_the_values(tmp_path: Path) -> None:
    more = """
    (open("file.txt", "w")).write("x")
    tracker.log_artifact("file.txt", "kept")
    accelerator.get_tracker("mlflow").store_init_configuration({f"p{i}": i for i in range(150)})
    """
    track("mlflow", tmp_path, {"logging_dir": f"file:{tmp_path}/runs", "tags": '{"a": "b"}'}, more,
          MLFLOW_ALLOW_FILE_STORE="true")  # fmt: skip
    (run,) = [path.parent for path in tmp_path.glob("runs/*/*/metrics")]
    assert [line.split()[1:] for line in (run / "metrics" / "loss").read_text().splitlines()] == [
        ["1.5", "1"],
        ["0.75", "2"],
    ]
    assert (run / "params" / "lr").read_text() == "0.25"
    assert (run / "params" / "p149").read_text() == "149"
    assert (run / "tags" / "a").read_text() == "b"
    assert list(tmp_path.rglob("kept/file.txt"))


def test_dvclive_records_the_values(tmp_path: Path) -> None:
    track("dvclive", tmp_path, {"dir": "live", "save_dvc_exp": False, "dvcyaml": None})
    assert json.loads((tmp_path / "live" / "metrics.json").read_text()) == {"loss": 0.75, "eval_acc": 0.5, "step": 2}
    assert (tmp_path / "live" / "params.yaml").read_text().split() == ["lr:", "0.25", "name:", "x"]
    rows = (tmp_path / "live" / "plots" / "metrics" / "loss.tsv").read_text().split()
    assert rows == ["step", "loss", "1", "1.5", "2", "0.75"]


def test_trackio_records_the_values(tmp_path: Path) -> None:
    track("trackio", tmp_path, {"name": "first"}, TRACKIO_DIR=str(tmp_path))
    (database,) = tmp_path.glob("project*.db")
    connection = sqlite3.connect(database)
    rows = [(step, json.loads(metrics)) for step, metrics in connection.execute("select step, metrics from metrics")]
    connection.close()
    assert rows == [(1, {"loss": 1.5, "eval_acc": 0.5}), (2, {"loss": 0.75})]


def test_comet_records_the_values(tmp_path: Path) -> None:
    more = 'accelerator.log({"note": "hello", "both": {"a": 1.0}}, step=3)\nassert tracker.writer.curr_step == 3'
    track("comet_ml", tmp_path, {"online": False}, more, COMET_OFFLINE_DIRECTORY=str(tmp_path))
    (archive,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        text = opened.read("messages.json").decode()
    assert '"metricName":"loss","metricValue":1.5,"step":1' in text
    assert "hello" in text
    assert '"lr"' in text


def test_clearml_records_the_values(tmp_path: Path) -> None:
    more = (
        'tracker.log_table("table", columns=["a"], data=[[1]], step=4)\nprint(tracker.task.get_offline_mode_folder())'
    )
    track("clearml", tmp_path, {"auto_connect_frameworks": False, "auto_resource_monitoring": False}, more,
          CLEARML_OFFLINE_MODE="1")  # fmt: skip
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    text = metrics.read_text()
    assert '"metric": "loss", "variant": "train"' in text
    assert '"metric": "acc", "variant": "eval"' in text


def test_swanlab_records_the_values(tmp_path: Path) -> None:
    more = 'tracker.log_images({"image": [np.zeros((8, 8, 3), dtype="uint8")]}, step=3)'
    track("swanlab", tmp_path, {"mode": "offline", "logdir": str(tmp_path / "swan")}, more)
    (run,) = (tmp_path / "swan").glob("run-*")
    assert "lr" in (run / "files" / "config.yaml").read_text()
    assert b"eval_acc" in next(run.glob("*.swanlab")).read_bytes()
    assert list((run / "media").rglob("*.png"))


def test_aim_records_the_values(tmp_path: Path) -> None:
    more = """
    tracker.log_images({"image": (np.zeros((8, 8, 3), dtype="uint8"), "a caption")}, step=3)
    name = tracker.writer.hash
    accelerator.end_training()
    import aim
    run = aim.Run(name, repo=".", log_system_params=False, capture_terminal_logs=False)
    assert run["hparams"]["lr"] == 0.25 and run.name == "project"
    found = {metric.name: list(metric.values.values_list()) for metric in run.metrics()}
    assert found["loss"] == [1.5, 0.75] and found["eval_acc"] == [0.5]
    """
    track("aim", tmp_path, {"log_system_params": False, "capture_terminal_logs": False}, more)


_VENDORS: dict[str, Callable[[Path], None]] = {
    "aim": test_aim_records_the_values,
    "clearml": test_clearml_records_the_values,
    "comet_ml": test_comet_records_the_values,
    "dvclive": test_dvclive_records_the_values,
    "mlflow": test_mlflow_records_the_values,
    "swanlab": test_swanlab_records_the_values,
    "tensorboard": test_tensorboard_records_the_values,
    "trackio": test_trackio_records_the_values,
    "wandb": test_wandb_records_the_values,
}


def test_every_vendor_has_a_test() -> None:
    assert set(_VENDORS) == set(tracker_table.TRACKERS)
