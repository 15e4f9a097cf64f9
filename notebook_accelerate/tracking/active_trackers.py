"""Start, use and close the trackers of an Accelerator. Training continues even if a tracker fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accelerate import telemetry
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.telemetry import automatic_metrics
from notebook_accelerate.telemetry.events import MetricEvent
from notebook_accelerate.tracking.tracker import (
    BlankTracker,
    GeneralTracker,
    LogValueError,
    plain_number,
    with_text_names,
)
from notebook_accelerate.tracking.tracker_table import find_row, known_trackers

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties


# ---- the notebook's tracker


class LiveTracker(GeneralTracker):
    """Sends the numbers of every rank to the notebook that launched it. Outside a launched run it does nothing."""

    name: ClassVar[str] = "live"
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False

    @property
    def tracker(self) -> Any:
        """The sink that the events are sent to, or None outside a launched run."""
        return telemetry.current_sink()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Send the numbers among the values. A dictionary of numbers is sent as several metrics named ``name/key``.

        Args:
            values: The values by name. Text and media are left to the other trackers.
            step: The number of the training step.
            kwargs: Not used.
        """
        if telemetry.current_sink() is None:
            return
        numbers: dict[str, float] = {}
        for name, value in with_text_names(values).items():
            if isinstance(value, dict):
                parts = {f"{name}/{key}": _float_of(item) for key, item in value.items()}
            else:
                parts = {name: _float_of(value)}
            if None in parts.values():
                warn_once(f"The live panel shows only numbers and leaves out {name!r} ({type(value).__name__}).")
            numbers.update({key: number for key, number in parts.items() if number is not None})
        if numbers:
            telemetry.emit(MetricEvent(numbers, step))


def _float_of(value: object) -> float | None:
    """Return a value as a float, or None if it is not a number or is too large."""
    number = plain_number(value)
    return None if number is None else float(number)


_live = LiveTracker()
_FLOATS, _TEXTS = frozenset([float]), frozenset([str])
_warned: set[tuple[str, str]] = set()


def init_trackers(
    accelerator: AcceleratorProperties,
    project_name: str,
    config: Mapping[str, Any] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Start the trackers of `accelerator.log_with`, on the main rank.

    Args:
        accelerator: The Accelerator. Its `trackers` are set to the trackers that were started.
        project_name: The name of the project.
        config: The settings of the run, which are recorded.
        init_kwargs: The arguments for each tracker, by its name.

    Raises:
        ValueError: `init_kwargs` names an unknown tracker.
        TypeError: A tracker does not accept one of its `init_kwargs`, or a required argument is missing.
    """
    extra = dict(init_kwargs or {})
    instances = {item.name for item in accelerator.log_with if isinstance(item, GeneralTracker)}
    if unknown := [name for name in extra if name not in instances and find_row(name) is None]:
        raise ValueError(
            f"init_kwargs names unknown trackers {unknown}; choose between {', '.join(known_trackers())}: "
            'init_kwargs={"wandb": {"entity": "my-team"}}'
        )
    accelerator.trackers = []
    _warned.clear()
    if not accelerator.is_main_process:
        return
    for requested in accelerator.log_with:
        name = str(getattr(requested, "name", requested))
        tracker = _call_tracker(name, "start", _start, accelerator, requested, project_name, extra)
        if tracker is None:
            continue
        accelerator.trackers.append(tracker)
        if config is not None:
            _call_tracker(name, "store_init_configuration", tracker.store_init_configuration, dict(config))


def _start(
    accelerator: AcceleratorProperties, requested: Any, project_name: str, extra: Mapping[str, Mapping[str, Any]]
) -> GeneralTracker:
    tracker: GeneralTracker = requested
    if not isinstance(requested, GeneralTracker):
        row = find_row(str(requested))
        assert row is not None
        folder = (accelerator.logging_dir,) if row.tracker_class.requires_logging_directory else ()
        make: Callable[..., GeneralTracker] = row.tracker_class
        tracker = make(project_name, *folder, **extra.get(str(requested), {}))
    tracker.start()
    return tracker


def log(
    accelerator: AcceleratorProperties,
    values: Mapping[str, Any],
    step: int | None = None,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Record values of one step, in the notebook that launched this rank and in the started trackers.

    Args:
        accelerator: The Accelerator whose trackers are used.
        values: Numbers by name. Some trackers also accept text and other values.
        step: The number of the training step.
        log_kwargs: The arguments for each tracker's `log`, by its name.

    Raises:
        LogValueError: `values` is not a dictionary or another mapping.
    """
    if (
        type(values) is dict
        and values
        and not accelerator.trackers
        and _FLOATS.issuperset(map(type, values.values()))
        and _TEXTS.issuperset(map(type, values))
    ):
        # This is a shortcut for the common case. After a training step, the CPU's caches no longer contain this code.
        # The shortcut then takes 36 us, and the general case 55 us. In a loop that only logs, both take 3 us.
        telemetry.emit(MetricEvent(values.copy(), step))
        return
    if not isinstance(values, Mapping):
        raise LogValueError(
            f"log() takes a mapping, but got {type(values).__name__}; pass a dictionary: "
            'accelerator.log({"loss": 0.5})'
        )
    plain = with_text_names(values)
    _live.log(plain, step=step)
    with automatic_metrics.reported():
        for tracker in accelerator.trackers:
            extra = (log_kwargs or {}).get(tracker.name, {})
            _call_tracker(tracker.name, "log", tracker.log, plain, step=step, **extra)


def finish(accelerator: AcceleratorProperties) -> None:
    """Close the started trackers.

    Args:
        accelerator: The Accelerator. Its list `trackers` is empty afterwards.
    """
    while accelerator.trackers:
        tracker = accelerator.trackers.pop(0)
        _call_tracker(tracker.name, "finish", tracker.finish)


def get_tracker(accelerator: AcceleratorProperties, name: str, unwrap: bool = False) -> Any:
    """Return a started tracker.

    Args:
        accelerator: The Accelerator that started the tracker.
        name: The tracker's name. The tracker "live" always exists.
        unwrap: Whether to return the vendor's own run object.

    Returns:
        The tracker. On ranks without trackers, and if the tracker could not be started, a tracker that does nothing.

    Raises:
        ValueError: No tracker with that name was requested.
    """
    for tracker in (*accelerator.trackers, _live):
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    requested = [str(getattr(item, "name", item)) for item in accelerator.log_with]
    if not accelerator.trackers or name in requested:
        return BlankTracker(name)
    raise ValueError(
        f"{name} is not an available tracker stored inside the `Accelerator`. It has {', '.join(requested)}; add it: "
        f'Accelerator(log_with=["{name}", ...]).'
    )


def _call_tracker(name: str, method: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a tracker, and turn its errors into one warning per method.

    Only a TypeError from `start` is raised, because it means that the arguments are wrong, and no training is lost yet.
    """
    try:
        return call(*args, **kwargs)
    except Exception as error:  # Training must continue even if a tracker fails.
        if method == "start" and isinstance(error, TypeError):
            raise
        if (name, method) not in _warned:
            _warned.add((name, method))
            reason = next(iter(str(error).strip().splitlines()), "no message")
            warn_once(
                f"Tracker {name!r} failed in {method} ({type(error).__name__}: {reason}). "
                "Training continues without its records."
            )
        return None
