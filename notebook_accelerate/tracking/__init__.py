"""Experiment trackers: one adapter per vendor, and the live one that feeds the notebook.

The room is loaded when something is logged or a tracker is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.tracking.active_trackers import finish, get_tracker, init_trackers, log
    from notebook_accelerate.tracking.aim import AimTracker
    from notebook_accelerate.tracking.clearml import ClearMLTracker
    from notebook_accelerate.tracking.comet import CometMLTracker
    from notebook_accelerate.tracking.dvclive import DVCLiveTracker
    from notebook_accelerate.tracking.live_tracker import LiveTracker
    from notebook_accelerate.tracking.loggable_values import LogValueError
    from notebook_accelerate.tracking.mlflow import MLflowTracker
    from notebook_accelerate.tracking.profiler_traces import profiled
    from notebook_accelerate.tracking.swanlab import SwanLabTracker
    from notebook_accelerate.tracking.tensorboard import TensorBoardTracker
    from notebook_accelerate.tracking.tracker import GeneralTracker, on_main_process
    from notebook_accelerate.tracking.tracker_table import (
        TRACKERS,
        filter_trackers,
        get_available_trackers,
        register_tracker_class,
    )
    from notebook_accelerate.tracking.trackio import TrackioTracker
    from notebook_accelerate.tracking.wandb import WandBTracker

__all__ = [
    "TRACKERS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "LiveTracker",
    "LogValueError",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "finish",
    "get_available_trackers",
    "get_tracker",
    "init_trackers",
    "log",
    "on_main_process",
    "profiled",
    "register_tracker_class",
]

_HOMES = {
    "tracking.aim": ("AimTracker",),
    "tracking.tracker": ("GeneralTracker", "on_main_process"),
    "tracking.clearml": ("ClearMLTracker",),
    "tracking.comet": ("CometMLTracker",),
    "tracking.dvclive": ("DVCLiveTracker",),
    "tracking.live_tracker": ("LiveTracker",),
    "tracking.mlflow": ("MLflowTracker",),
    "tracking.active_trackers": ("finish", "get_tracker", "init_trackers", "log"),
    "tracking.swanlab": ("SwanLabTracker",),
    "tracking.tracker_table": ("TRACKERS", "filter_trackers", "get_available_trackers", "register_tracker_class"),
    "tracking.tensorboard": ("TensorBoardTracker",),
    "tracking.profiler_traces": ("profiled",),
    "tracking.trackio": ("TrackioTracker",),
    "tracking.loggable_values": ("LogValueError",),
    "tracking.wandb": ("WandBTracker",),
}

__getattr__, __dir__, _ = attach(__name__, _HOMES)
