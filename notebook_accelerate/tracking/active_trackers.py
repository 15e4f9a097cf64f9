"""The trackers of one Accelerator: started, fed and closed so that none of them can stop a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.tracking.live_tracker import LiveTracker
from notebook_accelerate.tracking.loggable_values import LogValueError, kind_of
from notebook_accelerate.tracking.tracker import GeneralTracker
from notebook_accelerate.tracking.tracker_table import known_trackers, row_of

_live = LiveTracker()
_warned: set[tuple[str, str]] = set()


def init_trackers(
    accelerator: Any,
    project_name: str,
    config: Mapping[str, Any] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Start the trackers of `accelerator.log_with`, on the main rank.

    Args:
        accelerator: The Accelerator; its `trackers` become the started ones.
        project_name: Name of the project.
        config: Settings of the run, to be recorded.
        init_kwargs: More arguments of trackers, by name.

    Raises:
        ValueError: `init_kwargs` names a tracker that does not exist.
    """
    extra = dict(init_kwargs or {})
    instances = {item.name for item in accelerator.log_with if isinstance(item, GeneralTracker)}
    if unknown := [name for name in extra if name not in instances and row_of(name) is None]:
        raise ValueError(f"init_kwargs names unknown trackers {unknown}; there are {', '.join(known_trackers())}")
    accelerator.trackers = []
    _warned.clear()
    if not accelerator.is_main_process:
        return
    for wanted in accelerator.log_with:
        name = str(getattr(wanted, "name", wanted))
        tracker = _guarded(name, "start", _started, accelerator, wanted, project_name, extra)
        if tracker is None:
            continue
        accelerator.trackers.append(tracker)
        if config is not None:
            _guarded(name, "store_init_configuration", tracker.store_init_configuration, dict(config))


def _started(
    accelerator: Any, wanted: Any, project_name: str, extra: Mapping[str, Mapping[str, Any]]
) -> GeneralTracker:
    tracker: GeneralTracker = wanted
    if not isinstance(wanted, GeneralTracker):
        row = row_of(str(wanted))
        assert row is not None
        more = (accelerator.logging_dir,) if row.tracker_class.requires_logging_directory else ()
        make: Callable[..., GeneralTracker] = row.tracker_class
        tracker = make(project_name, *more, **extra.get(str(wanted), {}))
    tracker.start()
    return tracker


def log(
    accelerator: Any,
    values: Mapping[str, Any],
    step: int | None = None,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Record values of one step, in the notebook that launched this rank and in the started trackers.

    Args:
        accelerator: The Accelerator.
        values: Numbers (some trackers take texts and more) by name.
        step: The step.
        log_kwargs: More arguments of trackers, by name.

    Raises:
        ValueError: A value is nothing that a tracker records.
    """
    if not isinstance(values, Mapping):
        raise LogValueError(
            f'log() takes a dictionary, accelerator.log({{"loss": 0.5}}); it got {type(values).__name__}'
        )
    plain = dict(values)
    if not accelerator.log_with:  # no vendor's tracker, which may know what to do with it
        for name, value in plain.items():
            if value is None or hasattr(value, "shape"):  # other objects may be a vendor's pictures and tables
                kind_of(name, value)
    _live.log(plain, step=step)
    for tracker in accelerator.trackers:
        more = (log_kwargs or {}).get(tracker.name, {})
        _guarded(tracker.name, "log", tracker.log, plain, step=step, **more)


def finish(accelerator: Any) -> None:
    """Close the started trackers.

    Args:
        accelerator: The Accelerator; its `trackers` are empty afterwards.
    """
    while accelerator.trackers:
        tracker = accelerator.trackers.pop(0)
        _guarded(tracker.name, "finish", tracker.finish)


def get_tracker(accelerator: Any, name: str, unwrap: bool = False) -> Any:
    """Return a started tracker.

    Args:
        accelerator: The Accelerator.
        name: The tracker's name; "live" is always there.
        unwrap: Return the vendor's own run object.

    Returns:
        The tracker. One that does nothing on ranks without trackers, and in place of one that could not be started.

    Raises:
        ValueError: No tracker of that name was asked for.
    """
    for tracker in (*accelerator.trackers, _live):
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    wanted = [str(getattr(item, "name", item)) for item in accelerator.log_with]
    if not accelerator.trackers or name in wanted:
        return GeneralTracker(_blank=True)
    raise ValueError(
        f"{name} is not an available tracker stored inside the `Accelerator`. It has {', '.join(wanted)}: "
        f'Accelerator(log_with=["{name}", ...]).'
    )


def _guarded(name: str, what: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a tracker; what it raises becomes one warning, a wrong value stays an error of the caller."""
    try:
        return action(*args, **kwargs)
    except LogValueError:
        raise
    except Exception as error:  # noqa: BLE001 - a tracker's failure, whatever it is, must not stop the training
        if (name, what) not in _warned:
            _warned.add((name, what))
            reason = str(error).strip().splitlines()
            warn_once(
                f"Tracker {name!r} failed in {what} ({type(error).__name__}: {reason[0] if reason else 'no message'}). "
                "Training goes on without what it should have recorded."
            )
        return None
