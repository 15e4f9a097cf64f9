"""Choose which ranks run a function, choose their order, and split inputs between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from notebook_accelerate.state.warn_once import warn_once

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RankDecorator(Protocol):
    """A decorator that makes a function run only on some ranks.

    On other ranks, the function does nothing and returns None.
    """

    def __call__(self, function: Callable[_P, _R], /) -> Callable[_P, _R | None]:
        """Return the guarded function."""


class RankExecution:
    """A mixin of `PartialState`, `AcceleratorState` and `Accelerator` that selects the ranks that run a function.

    Subclasses define num_processes, process_index, local_process_index and wait_for_everyone.
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
        """Whether this is the first rank on its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this; every rank must call this."""
        raise NotImplementedError

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 run the block before the others; every rank must enter it.

        Returns:
            A context manager. The other ranks start once rank 0 has left the block, even if it did so with an
            exception.
        """
        return self._runs_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first rank on each machine run the block before the others; every rank must enter it.

        Returns:
            A context manager. The other ranks on the machine start once the first one has left the block.
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
            function: The function to decorate. If None, a decorator is returned.

        Returns:
            The decorated function. On other ranks, it does nothing and returns None.
        """
        return _only_if(self, lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]: ...

    @overload
    def on_local_main_process(self, function: None = None) -> RankDecorator: ...

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make `function` run only on the first rank of each machine.

        Args:
            function: The function to decorate. If None, a decorator is returned.

        Returns:
            The decorated function. On other ranks, it does nothing and returns None.
        """
        return _only_if(self, lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Make `function` run only on the last rank.

        Args:
            function: The function to decorate.

        Returns:
            The decorated function. On other ranks, it does nothing and returns None.
        """
        return _only_if(self, lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[_P, _R], process_index: int | None = None) -> Callable[_P, _R | None]: ...

    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> RankDecorator: ...

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make `function` run only on one rank.

        Args:
            function: The function to decorate. If None, a decorator is returned.
            process_index: The rank that runs the function. None means every rank. If there is only one rank, it always
                runs the function.

        Returns:
            The decorated function. On other ranks, it does nothing and returns None.
        """
        return _only_if(self, lambda: process_index in {None, self.process_index} or self.num_processes == 1, function)

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
            function: The function to decorate. If None, a decorator is returned.
            local_process_index: The index of that rank on its machine. None means every rank. If there is only one
                rank, it always runs the function.
            local_process_idx: The deprecated name of local_process_index.

        Returns:
            The decorated function. On other ranks, it does nothing and returns None.
        """
        if local_process_idx is not None:
            warn_once("on_local_process(local_process_idx=...) is deprecated: pass local_process_index=...")
            local_process_index = local_process_idx
        wanted = local_process_index
        return _only_if(self, lambda: wanted in {None, self.local_process_index} or self.num_processes == 1, function)


def _only_if(owner: object, condition: Callable[[], bool], function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function that calls `function` only if `condition` is true.

    The condition is evaluated in each call, because the process may be forked after the function was decorated.
    """
    if not isinstance(owner, RankExecution):
        raise ValueError(
            f"{owner!r} is decorated with a method of a class instead of an instance: write "
            "accelerator = Accelerator(), and then @accelerator.on_main_process"
        )
    if function is None:
        return functools.partial(_only_if, owner, condition)
    if not callable(function):
        raise ValueError(f"{function!r} is not a function; decorate a function, as in @state.on_main_process")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return guarded


# ---- inputs


def share_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the bounds of a rank's contiguous share of `length` items.

    Args:
        length: The number of items.
        rank: The rank, counted from 0.
        size: The number of ranks.

    Returns:
        The start and the end of the share. The first `length % size` ranks have one item more than the others.
    """
    base, extra = divmod(length, size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def split_share(inputs: Any, rank: int, size: int, *, padding: bool, device: torch.device) -> Any:
    """Return one rank's share of `inputs`.

    Args:
        inputs: A list, a tuple, a tensor, a dict of these with equal lengths, or a datasets.Dataset.
        rank: The rank, counted from 0.
        size: The number of ranks.
        padding: Whether to repeat the last item of `inputs` until all shares have the same length.
        device: The device that a tensor is moved to if `padding` is True, so that results can be gathered.

    Returns:
        The share, which has the same type as `inputs` and may be empty without padding. As in Accelerate, strings and
        objects that are not sequences are returned whole.

    Raises:
        ValueError: The values of a dict differ in length, or `inputs` cannot be split.
    """
    if isinstance(inputs, (str, bytes)) or not (hasattr(inputs, "__getitem__") or hasattr(inputs, "select")):
        return inputs
    length = _length(inputs)
    begin, end = share_bounds(length, rank, size)
    pad = -(-length // size) - (end - begin) if padding else 0
    return _slice_and_pad(inputs, begin, end, pad, device if padding else None)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values of the dict have the lengths {lengths}; pass values of the same length")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 0:
        raise ValueError("a tensor without dimensions cannot be split; pass tensor[None]")
    try:
        return len(inputs)
    except TypeError:
        raise ValueError(
            f"{type(inputs).__name__} cannot be split between processes; "
            "pass a list, a tuple, a tensor, a dict of those, or a datasets.Dataset"
        ) from None


def _slice_and_pad(inputs: Any, begin: int, end: int, pad: int, device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        taken = {key: _slice_and_pad(value, begin, end, pad, device) for key, value in inputs.items()}
        return taken if type(inputs) is dict else type(inputs)(taken)  # type: ignore[call-arg]
    if isinstance(inputs, torch.Tensor):
        share = inputs[begin:end]
        if pad:
            share = torch.cat([share, inputs[-1:].expand(pad, *inputs.shape[1:])])
        return share if device is None else share.to(device)
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # Recognise a datasets.Dataset without importing.
        return inputs.select([*range(begin, end), *[len(inputs) - 1] * pad])
    share = inputs[begin:end]
    if not pad:
        return share
    padded = [*share, *[inputs[-1]] * pad]
    return tuple(padded) if isinstance(share, tuple) else padded
