"""The table of trackers by name: built-in trackers, registered trackers, and trackers from entry points."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

from notebook_accelerate.config.enums import LoggerType
from notebook_accelerate.hardware.versions import is_package
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.tracking.tracker import GeneralTracker
from notebook_accelerate.tracking.vendors import (
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

ENTRY_POINTS = "notebook_accelerate.trackers"
"""The entry point group with which other packages register their tracker classes."""


@dataclass(frozen=True)
class TrackerRow:
    """A tracker that can be selected by name."""

    tracker_class: type[GeneralTracker]
    is_available: Callable[[], bool] = lambda: True
    """Returns whether the tracker's package is installed."""
    package: str = ""
    """The package to install with pip."""


TRACKERS: dict[str, TrackerRow] = {
    "tensorboard": TrackerRow(
        TensorBoardTracker, lambda: is_package("tensorboard") or is_package("tensorboardX"), "tensorboard"
    ),
    "wandb": TrackerRow(WandBTracker, partial(is_package, "wandb"), "wandb"),
    "comet_ml": TrackerRow(CometMLTracker, partial(is_package, "comet_ml"), "comet-ml"),
    "aim": TrackerRow(AimTracker, partial(is_package, "aim"), "aim"),
    "mlflow": TrackerRow(MLflowTracker, partial(is_package, "mlflow"), "mlflow"),
    "clearml": TrackerRow(ClearMLTracker, partial(is_package, "clearml"), "clearml"),
    "dvclive": TrackerRow(DVCLiveTracker, partial(is_package, "dvclive"), "dvclive"),
    "swanlab": TrackerRow(SwanLabTracker, partial(is_package, "swanlab"), "swanlab"),
    "trackio": TrackerRow(TrackioTracker, partial(is_package, "trackio"), "trackio"),
}
"""The built-in and registered trackers, by name."""


class _TrackerClasses(MutableMapping[str, type[GeneralTracker]]):
    """A view of the classes in `TRACKERS` by name. Assigning to a name registers a tracker."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        return TRACKERS[str(name)].tracker_class

    def __setitem__(self, name: str, tracker_class: type[GeneralTracker]) -> None:
        TRACKERS[str(name)] = TrackerRow(tracker_class)

    def __delitem__(self, name: str) -> None:
        del TRACKERS[str(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(TRACKERS)

    def __len__(self) -> int:
        return len(TRACKERS)

    def __repr__(self) -> str:
        return repr(dict(self))


LOGGER_TYPE_TO_CLASS = _TrackerClasses()
"""The tracker classes by name. Accelerate has a dictionary with this name."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker available by its name: ``Accelerator(log_with="name")``.

    Args:
        tracker_class: A subclass of `GeneralTracker` with a `name`. A tracker with the same name is replaced, with a
            warning.

    Raises:
        ValueError: The class is not a subclass of `GeneralTracker`, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(
            f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}. Pass the class: "
            "register_tracker_class(MyTracker)"
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or name == LoggerType.ALL.value:
        raise ValueError(
            f"{tracker_class.__name__} has name={name!r}; a tracker needs a unique name. Add a class attribute: "
            'name = "my_tracker"'
        )
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} must define the class attribute `requires_logging_directory`: True if its "
            "constructor takes a logging_dir, otherwise False"
        )
    if name in TRACKERS and TRACKERS[name].tracker_class is not tracker_class:
        warnings.warn(f"Tracker {name!r} is replaced by {tracker_class.__name__}.", stacklevel=2)
    TRACKERS[name] = TrackerRow(tracker_class)


def find_row(name: str) -> TrackerRow | None:
    """Return the row of a tracker, or None if it is unknown. If the table lacks it, search the entry points.

    Args:
        name: The tracker's name.
    """
    if name not in TRACKERS:
        for point in metadata.entry_points(group=ENTRY_POINTS, name=name):
            TRACKERS[name] = TrackerRow(point.load())
    return TRACKERS.get(name)


def known_trackers() -> list[str]:
    """Return the names that can be selected."""
    return sorted({*TRACKERS, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))})


def get_available_trackers() -> list[LoggerType | str]:
    """Return the trackers whose packages are installed.

    Returns:
        Members of `LoggerType`, and the names of registered trackers.
    """
    return [_public_name(name) for name in TRACKERS if TRACKERS[name].is_available()]


def _public_name(name: str) -> LoggerType | str:
    return LoggerType(name) if name in LoggerType.list() else name


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[LoggerType | str | GeneralTracker]:
    """Return the requested trackers that are available.

    Args:
        log_with: Names, members of `LoggerType`, instances of trackers, or "all" for every installed tracker.
        logging_dir: The folder for trackers that need one.

    Returns:
        The trackers, without duplicates. Trackers whose package is not installed are left out, with a warning.

    Raises:
        ValueError: A name is unknown, or a tracker needs a `logging_dir`.
    """
    requested = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    found: list[LoggerType | str | GeneralTracker] = []
    for item in requested:
        if item is None:
            continue
        if isinstance(item, GeneralTracker):
            found.append(item)
        elif item == LoggerType.ALL.value:
            found += [
                name
                for name in get_available_trackers()
                if logging_dir is not None or not TRACKERS[str(name)].tracker_class.requires_logging_directory
            ]
        elif _check_name(item, logging_dir):
            found.append(_public_name(str(item)))
    return [item for position, item in enumerate(found) if item not in found[:position]]


def _check_name(name: Any, logging_dir: Any) -> bool:
    """Return whether the tracker's package is installed, and warn if it is not.

    Raises:
        ValueError: The name is unknown, or the tracker needs a `logging_dir`.
    """
    row = find_row(str(name)) if isinstance(name, str) else None
    if row is None:
        raise ValueError(
            f"Unsupported logging capability: {name}. Choose between {', '.join(['all', *known_trackers()])}, pass an "
            "instance of your own GeneralTracker, or register its class with register_tracker_class."
        )
    if not row.is_available():
        warn_once(f"log_with={str(name)!r} is ignored: its package is not installed. Run: pip install {row.package}")
        return False
    if row.tracker_class.requires_logging_directory and logging_dir is None:
        raise ValueError(
            f"Logging with `{name}` requires a `logging_dir` to be passed in: "
            f'Accelerator(log_with="{name}", project_dir="runs")'
        )
    return True
