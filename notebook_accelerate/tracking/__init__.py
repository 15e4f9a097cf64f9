"""Experiment trackers: one adapter per vendor, and the live tracker that sends numbers to the notebook.

The modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.tracking.active_trackers import (
        LiveTracker as LiveTracker,
        finish as finish,
        get_tracker as get_tracker,
        init_trackers as init_trackers,
        log as log,
    )
    from notebook_accelerate.tracking.vendors import (
        AimTracker as AimTracker,
        ClearMLTracker as ClearMLTracker,
        CometMLTracker as CometMLTracker,
        DVCLiveTracker as DVCLiveTracker,
        MLflowTracker as MLflowTracker,
        SwanLabTracker as SwanLabTracker,
        TensorBoardTracker as TensorBoardTracker,
        TrackioTracker as TrackioTracker,
        WandBTracker as WandBTracker,
    )
    from notebook_accelerate.tracking.tracker import (
        GeneralTracker as GeneralTracker,
        LogValueError as LogValueError,
        on_main_process as on_main_process,
    )
    from notebook_accelerate.tracking.profiler_traces import (
        profiled as profiled,
    )
    from notebook_accelerate.tracking.tracker_table import (
        LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
        TRACKERS as TRACKERS,
        filter_trackers as filter_trackers,
        get_available_trackers as get_available_trackers,
        register_tracker_class as register_tracker_class,
    )

reexport(__name__)
