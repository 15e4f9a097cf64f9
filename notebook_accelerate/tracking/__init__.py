"""Experiment trackers: one adapter per vendor, and the live tracker that sends numbers to the notebook.

The modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.tracking.active_trackers import (
        finish as finish,
        get_tracker as get_tracker,
        init_trackers as init_trackers,
        log as log,
    )
    from notebook_accelerate.tracking.vendors import (
        AimTracker as AimTracker,
    )
    from notebook_accelerate.tracking.vendors import (
        ClearMLTracker as ClearMLTracker,
    )
    from notebook_accelerate.tracking.vendors import (
        CometMLTracker as CometMLTracker,
    )
    from notebook_accelerate.tracking.vendors import (
        DVCLiveTracker as DVCLiveTracker,
    )
    from notebook_accelerate.tracking.active_trackers import (
        LiveTracker as LiveTracker,
    )
    from notebook_accelerate.tracking.tracker import (
        LogValueError as LogValueError,
    )
    from notebook_accelerate.tracking.vendors import (
        MLflowTracker as MLflowTracker,
    )
    from notebook_accelerate.tracking.profiler_traces import (
        profiled as profiled,
    )
    from notebook_accelerate.tracking.vendors import (
        SwanLabTracker as SwanLabTracker,
    )
    from notebook_accelerate.tracking.vendors import (
        TensorBoardTracker as TensorBoardTracker,
    )
    from notebook_accelerate.tracking.tracker import (
        GeneralTracker as GeneralTracker,
        on_main_process as on_main_process,
    )
    from notebook_accelerate.tracking.tracker_table import (
        LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
        TRACKERS as TRACKERS,
        filter_trackers as filter_trackers,
        get_available_trackers as get_available_trackers,
        register_tracker_class as register_tracker_class,
    )
    from notebook_accelerate.tracking.vendors import (
        TrackioTracker as TrackioTracker,
    )
    from notebook_accelerate.tracking.vendors import (
        WandBTracker as WandBTracker,
    )

reexport(__name__)
