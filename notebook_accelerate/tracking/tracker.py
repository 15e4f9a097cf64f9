"""The base classes of trackers, and the decorator that runs their methods on the main rank only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from notebook_accelerate.state import PartialState

_Function = TypeVar("_Function", bound=Callable[..., Any])


def on_main_process(function: _Function) -> _Function:
    """Run a tracker's method on the main rank only, if the tracker's `main_process_only` is set.

    Args:
        function: A method of a tracker.

    Returns:
        The method; on other ranks it does nothing and returns None.
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
    - `requires_logging_directory` (bool): whether it takes a `logging_dir`,
    - `tracker` (property): the vendor's own run object,
    - `main_process_only` (bool, default True): whether methods under `on_main_process` run on the main rank only.

    Its constructor takes the project's name and stores it; `start` opens the run, once the process group exists.

    Args:
        _blank: Check nothing: the tracker that does nothing, for ranks without trackers.

    Raises:
        NotImplementedError: The subclass lacks one of them.
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
        """Open the run; called by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run.

        Args:
            values: Numbers, texts and flags by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step.

        Args:
            values: Numbers (some trackers accept texts and more) by name.
            step: The step.
            kwargs: Arguments of the vendor's own call.
        """

    def finish(self) -> None:
        """Close the run; called by `Accelerator.end_training`."""


class BlankTracker(GeneralTracker):
    """A no-op tracker for ranks on which no tracker was started.

    Code that logs images with `accelerator.get_tracker("wandb", unwrap=True)` runs on every rank.

    Args:
        name: The name that was asked for.
    """

    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying ask for these
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Do nothing, and return this object."""
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
    """Base class of the adapters: opens the vendor's run in `start`, or on first use.

    Args:
        run_name: Name of the project.
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
        """Open the vendor's run if it is not open."""
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
