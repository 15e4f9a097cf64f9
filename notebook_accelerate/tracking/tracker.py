"""Base classes of trackers, and the decorator that runs their methods on the main rank only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar, cast

from notebook_accelerate.state import PartialState
from notebook_accelerate.state.warn_once import warn_once

_Function = TypeVar("_Function", bound=Callable[..., Any])


def on_main_process(function: _Function) -> _Function:
    """Run a tracker's method on the main rank only, if the tracker's `main_process_only` is set.

    Args:
        function: A method of a tracker.

    Returns:
        The wrapped method. On other ranks, it does nothing and returns None.
    """

    @wraps(function)
    def on_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast("_Function", on_main)


class GeneralTracker:
    """Base class of trackers.

    A subclass defines

    - `name` (str): its name in `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker`,
    - `requires_logging_directory` (bool): whether its constructor takes a `logging_dir`,
    - `tracker` (property): the vendor's own run object,
    - `main_process_only` (bool, default True): whether methods decorated with `on_main_process` run on the main rank
      only.

    Its constructor stores the project's name. `start` opens the run once the process group has been created.

    Args:
        _blank: Whether to skip the checks, for the tracker that does nothing on ranks without trackers.

    Raises:
        NotImplementedError: The subclass lacks a required attribute.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        required = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in required if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(
                "The implementation for this tracker class is missing the following required attributes. "
                f"Please define them in the class definition: {', '.join(f'`{name}`' for name in missing)}"
            )

    def start(self) -> None:
        """Open the run. `Accelerator.init_trackers` calls this."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run.

        Args:
            values: Numbers, strings and flags by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: Numbers by name. Some trackers also accept text and other values.
            step: The number of the training step.
            kwargs: Arguments of the vendor's own function.
        """

    def finish(self) -> None:
        """Close the run. `Accelerator.end_training` calls this."""


class BlankTracker(GeneralTracker):
    """A tracker that does nothing, for ranks that have started no tracker.

    It lets code that logs images with `accelerator.get_tracker("wandb", unwrap=True)` run on every rank.

    Args:
        name: The requested name.
    """

    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Protocols such as copying check whether these attributes exist.
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Do nothing and return this object."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class VendorTracker(GeneralTracker):
    """Base class of the vendors' adapters. It opens the vendor's run in `start`, or on first use.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of the vendor's own start function.
    """

    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The vendor's own run object."""
        if self._run is None:
            self.start()
        return self._run

    @on_main_process
    def start(self) -> None:
        """Open the vendor's run, unless it is already open."""
        if self._run is None:
            self._run = self._open()

    @on_main_process
    def finish(self) -> None:
        """Close the run, if it was opened."""
        if self._run is not None:
            self._close()

    def _open(self) -> Any:
        """Open the vendor's run and return it."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the vendor's run."""
        self._run.close()


class RunTracker(VendorTracker):
    """Base class for W&B, SwanLab and Trackio, whose runs have `config`, `log` and `finish`.

    The tracker's name is also the name of the vendor's module, which has a function `init`.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of the vendor's `init`.
    """

    main_process_only: ClassVar[bool] = False

    def _open(self) -> Any:
        return import_module(self.name).init(**{"project": self.run_name, **self.init_kwargs})

    def _close(self) -> None:
        self._run.finish()

    run = property(lambda self: self.tracker)
    """The vendor's run."""

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings.

        Args:
            values: Any objects by name.
        """
        self.tracker.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: Numbers, strings, and the vendor's own media by name.
            step: The number of the training step.
            kwargs: Arguments of the vendor's `log`.
        """
        self.tracker.log(plain_numbers(values), step=step, **kwargs)


class ImageRunTracker(RunTracker):
    """Base class of adapters for vendors that also have an `Image` class.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of the vendor's `init`.
    """

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images.

        Args:
            values: Lists of images (arrays, tensors, PIL images, paths) by name.
            step: The number of the training step.
            kwargs: Arguments of the vendor's `Image`, for instance `caption`.
        """
        make_image = import_module(self.name).Image
        self.log({name: [make_image(image, **kwargs) for image in items] for name, items in values.items()}, step=step)


# ---- convert logged values

Kind = Literal["number", "text", "numbers"]


class LogValueError(ValueError):
    """Raised when the argument of `log` is not a dictionary or another mapping.

    Values that a tracker cannot record do not raise this error, but are left out.
    """


def with_text_names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values with all names converted to strings. Warn once if a name was not a string.

    Args:
        values: The logged values by name.
    """
    if all(isinstance(name, str) for name in values):
        return dict(values)
    for name in values:
        if not isinstance(name, str):
            warn_once(
                f"log() got the name {name!r} ({type(name).__name__}), which is recorded as {_as_text(name)!r}; names "
                f'must be strings: accelerator.log({{"{_as_text(name)}": ...}})'
            )
    return {name if isinstance(name, str) else _as_text(name): value for name, value in values.items()}


def _as_text(name: object) -> str:
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


_LARGEST = int(sys.float_info.max)


def plain_number(value: Any) -> float | int | None:
    """Convert a value to a plain number.

    Args:
        value: An int, float, bool, numpy number, or a tensor or array with one element.

    Returns:
        The number, or None if the value is not a number or is too large for a float.
    """
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else None
    if isinstance(value, float):
        return value
    if isinstance(value, (str, bytes, type, Mapping)) or not hasattr(value, "item"):
        return None
    if hasattr(value, "is_meta"):  # If reading a tensor fails, a kernel on its device has failed, so raise the error.
        readable = not (value.is_meta or value.is_nested) and value.numel() == 1
        found = value.item() if readable else None
    else:
        try:
            found = value.item() if getattr(value, "size", 1) == 1 else None
        except Exception:  # noqa: BLE001 - the value is an object of another library, which must not end the training.
            return None
    return found if isinstance(found, (int, float)) else None


def by_kind(
    values: Mapping[str, Any], tracker: str, kinds: Sequence[Kind] = ("number", "text", "numbers")
) -> dict[str, tuple[Kind, Any]]:
    """Return the values that a tracker can record, with their kinds. Other values are left out, with one warning each.

    Args:
        values: The values passed to `log`, by name.
        tracker: The name of the vendor, for the warning.
        kinds: The kinds of values that the tracker can record.

    Returns:
        The kind and the value as a plain Python object, by name.
    """
    found: dict[str, tuple[Kind, Any]] = {}
    for name, value in values.items():
        recorded = _classified(value)
        if recorded is not None and recorded[0] in kinds:
            found[name] = recorded
            continue
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
        warn_once(
            f"{tracker} records numbers{' and text' if 'text' in kinds else ''}; {name!r} ({what}) is left out. Write "
            f'accelerator.log({{"{name}": {name.rpartition("/")[2]}.mean().item()}}) to record the mean of a tensor'
        )
    return found


def _classified(value: Any) -> tuple[Kind, Any] | None:
    """Return the kind of a value and the value as a plain Python object, or None if no kind fits it."""
    if (number := plain_number(value)) is not None:
        return "number", number
    if isinstance(value, str):
        return "text", value
    if isinstance(value, Mapping):
        numbers = {str(key): plain_number(item) for key, item in value.items()}
        if None not in numbers.values():
            return "numbers", numbers
    return None


def scalars(values: Mapping[str, Any], tracker: str, texts: bool) -> dict[str, Any]:
    """Return the numbers among the values, and text if ``texts`` is set. Leave out other values, with a warning.

    The entries of dictionaries are named ``name/key``.

    Args:
        values: The values passed to `log`, by name.
        tracker: The name of the vendor, for the warning.
        texts: Whether the tracker also records text.
    """
    found: dict[str, Any] = {}
    kinds: Sequence[Kind] = ("number", "text", "numbers") if texts else ("number", "numbers")
    for name, (kind, plain) in by_kind(values, tracker, kinds).items():
        found.update({f"{name}/{key}": item for key, item in plain.items()} if kind == "numbers" else {name: plain})
    return found


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert numpy numbers and tensors with one element to plain numbers, and keep all other values.

    Args:
        values: The values passed to `log`, by name.
    """
    return {name: value if (number := plain_number(value)) is None else number for name, value in values.items()}
