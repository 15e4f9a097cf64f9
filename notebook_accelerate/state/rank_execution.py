"""Decorators and context managers that choose which ranks run a function, and in what order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from notebook_accelerate.state.warn_once import warn_once

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RankDecorator(Protocol):
    """Makes a function run on some ranks only; on the others it does nothing and returns None."""

    def __call__(self, function: Callable[_P, _R], /) -> Callable[_P, _R | None]:
        """Return the guarded function."""


class RankExecution:
    """Mixin of `PartialState`, `AcceleratorState` and `Accelerator`: which ranks run a function, and in which order.

    Subclasses have num_processes, process_index, local_process_index and wait_for_everyone.
    """

    num_processes: int
    process_index: int
    local_process_index: int

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this; every rank must."""
        raise NotImplementedError

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 run the block before the others; every rank must enter it.

        Returns:
            A context manager. The others start when rank 0 has left the block, also by an exception.
        """
        return self._runs_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first rank of each machine run the block before the others; every rank must enter it.

        Returns:
            A context manager.
        """
        return self._runs_first(self.is_local_main_process)

    @contextmanager
    def _runs_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    @overload
    def on_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]: ...

    @overload
    def on_main_process(self, function: None = None) -> RankDecorator: ...

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make `function` run only on rank 0.

        Args:
            function: The function; None returns the decorator.

        Returns:
            The function; on other ranks it does nothing and returns None.
        """
        return _only_if(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]: ...

    @overload
    def on_local_main_process(self, function: None = None) -> RankDecorator: ...

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make `function` run only on the first rank of each machine.

        Args:
            function: The function; None returns the decorator.

        Returns:
            The function; on other ranks it does nothing and returns None.
        """
        return _only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Make `function` run only on the last rank.

        Args:
            function: The function.

        Returns:
            The function; on other ranks it does nothing and returns None.
        """
        return _only_if(lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[_P, _R], process_index: int | None = None) -> Callable[_P, _R | None]: ...

    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> RankDecorator: ...

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make `function` run only on one rank.

        Args:
            function: The function; None returns the decorator.
            process_index: The rank; None means every rank. In a world of one, the function runs whatever it is.

        Returns:
            The function; on other ranks it does nothing and returns None.
        """
        return _only_if(lambda: process_index in {None, self.process_index} or self.num_processes == 1, function)

    @overload
    def on_local_process(
        self,
        function: Callable[_P, _R],
        local_process_index: int | None = None,
        local_process_idx: int | None = None,
    ) -> Callable[_P, _R | None]: ...

    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None, local_process_idx: int | None = None
    ) -> RankDecorator: ...

    def on_local_process(
        self,
        function: Callable[..., Any] | None = None,
        local_process_index: int | None = None,
        local_process_idx: int | None = None,
    ) -> Callable[..., Any]:
        """Make `function` run only on one rank of each machine.

        Args:
            function: The function; None returns the decorator.
            local_process_index: The rank's index on its machine; None means every rank. In a world of one, the function
                runs whatever it is.
            local_process_idx: Deprecated name of local_process_index.

        Returns:
            The function; on other ranks it does nothing and returns None.
        """
        if local_process_idx is not None:
            warn_once("on_local_process(local_process_idx=...) is deprecated: pass local_process_index=...")
            local_process_index = local_process_idx
        wanted = local_process_index
        return _only_if(lambda: wanted in {None, self.local_process_index} or self.num_processes == 1, function)


def _only_if(condition: Callable[[], bool], function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return `function` guarded by `condition`, evaluated at each call: a decorated function may be forked."""
    if function is None:
        return functools.partial(_only_if, condition)
    if not callable(function):
        raise ValueError(f"{function!r} is not a function; decorate a function, as in @state.on_main_process")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return guarded
