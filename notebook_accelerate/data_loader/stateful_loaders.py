"""Prepared loaders based on torchdata's StatefulDataLoader, whose position within an epoch can be saved."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from notebook_accelerate.data_loader.pass_order import (
    check_order,
    draw_order,
    drawing_again,
    expected_item,
    is_own_order,
    read_numbers,
    unchanged_numbers,
    with_last_read,
)
from notebook_accelerate.data_loader.prepared_loader import (
    NOTHING,
    DataLoaderAdapter,
    PreparedDataLoader,
    separate_worker_seed,
)
from notebook_accelerate.data_loader.samplers import SeedableRandomSampler, get_sampler, index_source, iterate_from

_OWN = "_notebook_accelerate"
"""The key of the additional state, in pickles and in the checkpoints of earlier versions of this package."""


@functools.cache
def stateful_class(cls: type[DataLoaderAdapter]) -> type[DataLoaderAdapter]:
    """Return a loader class based on torchdata's StatefulDataLoader.

    Args:
        cls: A class of this package that is based on torch's DataLoader.

    Returns:
        A subclass of `cls` and of StatefulDataLoader that has the same name.

    Raises:
        ImportError: torchdata is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata 0.8 or later, which is not installed: pip install torchdata"
        ) from error
    return type(cls.__name__, (_Stateful, cls, StatefulDataLoader), {"__module__": cls.__module__})


class _Stateful(PreparedDataLoader):
    """The parts of a prepared loader that differ if it is based on StatefulDataLoader.

    torchdata counts the batches that it has read, but the loader reads one batch ahead of those that it yields. If a
    state consists only of a position, one batch is subtracted from it. Otherwise, the state is saved before reading
    ahead. A state that is saved after the last batch of a pass is a state between two passes, so a loader that loads
    it starts a complete pass.
    """

    iteration: int = 0
    skip_batches: int = 0
    _state_before: dict[str, Any] | None = None
    _read_ahead: int | None = None  # The number of batches read but not yielded, or None between passes.
    _first_numbers: torch.Tensor | None = None  # The random state before the loader drew numbers for its first pass.
    _is_inside = False  # Whether a pass has been started, and its last batch has not been yielded.
    _continues = False  # Whether the next pass is the rest of a saved pass.
    _counted_twice = 0  # The number of batches that torchdata's iterator has counted twice.

    @property
    def _index_sampler(self) -> Any:
        """The source of indices, whose position can be saved. torch reads this property."""
        source = index_source(self)
        if isinstance(self.dataset, IterableDataset) or hasattr(source, "state_dict"):
            return source
        return ResumableSampler(source, get_sampler(self))

    def _loader_created(self) -> None:
        """Draw the random numbers of the first pass now.

        Accelerate draws the numbers at the same time, because it starts the first pass to read that pass's state.
        """
        self._first_numbers = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if self.num_workers:  # Workers receive their first indices together with the seed.
            draw_order(self)

    def _get_iterator(self) -> Any:
        """Return a new iterator of torchdata, and record how many batches the iterator has counted twice."""
        loaded = _batches_of(self.next_iter_state or {})  # type: ignore[has-type]
        iterator = self._new_iterator()
        self._counted_twice = _batches_of(iterator.state_dict()) - loaded if loaded else 0
        return iterator

    def _new_iterator(self) -> Any:
        """Return a new iterator of torchdata. In the first pass, it uses the numbers that the constructor drew."""
        numbers, self._first_numbers = self._first_numbers, None
        if numbers is None:
            return super(DataLoaderAdapter, self)._get_iterator()
        if not self.num_workers or self.generator is not None:
            with separate_worker_seed(self, numbers):
                return super(DataLoaderAdapter, self)._get_iterator()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(numbers)
            return super(DataLoaderAdapter, self)._get_iterator()

    def begin(self) -> None:
        super().begin()
        self._is_inside = True

    def batches(self) -> Iterator[Any]:
        """Iterate as torchdata does, from the loaded state if there is one.

        Returns:
            torchdata's own iterator. Random numbers that the interrupted pass has drawn at its start are not drawn
            again.
        """
        state = self.next_iter_state  # type: ignore[has-type]
        self._state_before = None
        self._counted_twice = 0
        if state is None:
            return super().batches()
        drawn = self._first_numbers is not None
        with torch.random.fork_rng(devices=[]):
            batches = super().batches()
        if not drawn and (state.get(_FINISHED) or state.get(_COUNT) == 0) and self.generator is None:
            torch.empty((), dtype=torch.int64).random_()  # Each pass draws a seed for its workers.
        return batches

    def _track_position(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Track how many batches are read ahead, or save the state before each batch."""
        if self._is_over:
            return rounds
        simple = self.num_workers == 0 and not hasattr(self.dataset, "state_dict")
        if self._reads_one_ahead and simple and isinstance(self._index_sampler, ResumableSampler):
            self._read_ahead = 1
            return rounds
        return self._save_state_before_each(rounds)

    def _save_state_before_each(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Save the state before each round is read."""
        item: Any = None
        while item is not NOTHING:
            self._state_before = self._torchdata_state()
            item = next(rounds, NOTHING)
            if item is not NOTHING:
                yield item

    def _mark_last_batch(self, batch: Any) -> None:
        super()._mark_last_batch(batch)
        if self._read_ahead is not None:
            self._read_ahead = 0

    def _finish_pass(self) -> None:
        super()._finish_pass()
        self._state_before = self._read_ahead = None
        self._is_inside = False

    def _loaded_position(self) -> bool:
        """Return whether the pass that is starting is the rest of an earlier one. Later calls return False."""
        continues, self._continues = self._continues, False
        return continues

    def _has_drawn_seed(self) -> bool:
        """Return whether the random numbers for the pass that is starting were drawn. Later calls return False."""
        numbers, self._first_numbers = self._first_numbers, None
        return numbers is not None

    def resume_pass_of(self, original: PreparedDataLoader, skipped: int) -> None:
        """Make this copy read the rest of the original's pass. If nothing is left, the original keeps the state."""
        super().resume_pass_of(original, skipped)
        if self._is_over:
            vars(original)["next_iter_state"] = vars(self).pop("next_iter_state")
            vars(self)["next_iter_state"] = None
        elif self._resumes:  # The original must behave as if it had started this pass itself.
            vars(original)["_first_numbers"] = None

    def _torchdata_state(self) -> dict[str, Any]:
        """Return torchdata's own state.

        To return its state between passes, torchdata starts a pass, which draws the seed of the workers and, with
        workers, the order of the samples. If that pass were kept, saving would change the order of the next pass, and
        only on ranks that save. The pass is therefore dropped, and the numbers are drawn again when a pass really
        starts.
        """
        if self._iterator is not None:
            return self._counted_once(super(DataLoaderAdapter, self).state_dict())  # type: ignore[misc]
        sampler = get_sampler(self)
        generators = {g: g.get_state() for g in (self.generator, getattr(sampler, "generator", None)) if g is not None}
        first_numbers, loaded = self._first_numbers, self.next_iter_state  # type: ignore[has-type]
        with unchanged_numbers():
            state = self._counted_once(super(DataLoaderAdapter, self).state_dict())  # type: ignore[misc]
        for generator, numbers in generators.items():
            generator.set_state(numbers)
        if isinstance(sampler, SeedableRandomSampler):
            # Go back to this epoch, because the dropped pass may have sent all of its indices to workers.
            sampler.set_epoch(self.iteration)
        self._iterator, self._initial_iter_for_state_dict = None, False
        self._first_numbers, self.next_iter_state = first_numbers, loaded
        return state

    def _counted_once(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return torchdata's state with the correct number of batches.

        To resume a stream that has no `state_dict`, torchdata reads it from the start, and counts the skipped batches a
        second time. If they were not subtracted here, a state saved afterwards would skip batches that were never read.
        """
        if not self._counted_twice:
            return state
        if "_snapshot" in state:
            snapshot = state["_snapshot"]
            step = snapshot["_snapshot_step"] - self._counted_twice
            return {**state, "_snapshot": {**snapshot, "_snapshot_step": step}}
        return {**state, _COUNT: state[_COUNT] - self._counted_twice}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader in its epoch.

        Returns:
            The state of torchdata's StatefulDataLoader after the batches that have been yielded so far, as a
            `LoaderState`. It is empty on a rank that does not read the dataset.
        """
        own = {
            "iteration": self.iteration,
            "exhausted": self.exhausted,
            "inside": self._is_inside and not self.exhausted,
            "workers_seeded": self.workers_seeded,
            "first_numbers": self._first_numbers,
            **self._extra_state(),
        }
        if not self._reads_dataset:
            return LoaderState({}, own)
        saved = None if self.exhausted else self._state_before
        state = self._torchdata_state() if saved is None else saved
        if saved is None and self._read_ahead is not None and not self.exhausted:
            state = _rewound(state, self._read_ahead)
        if isinstance(self._index_sampler, ResumableSampler):
            state, own["position"] = _without_position(state)
        return LoaderState(state, own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue from a saved state.

        Args:
            state_dict: The result of `state_dict`, or a state from torchdata or Accelerate.
        """
        state = dict(state_dict)
        own = {**state.pop(_OWN, {}), **getattr(state_dict, "own", {})}
        self.iteration = own.get("iteration", self.iteration)
        if own.get("exhausted"):
            self.load_order_state(None, exhausted=True)
        self._is_inside = self._continues = own.get("inside", _batches_of(state) > 0)
        self._first_numbers = own.get("first_numbers")
        self.workers_seeded = own.get("workers_seeded", False)
        self._load_extra_state(own)
        self._state_before = self._read_ahead = None
        if state.get(_FINISHED) and self.num_workers:
            return  # There are no workers to resume, so the next pass is a new one.
        if self._reads_dataset:
            super(DataLoaderAdapter, self).load_state_dict(_with_position(state, own.get("position")))  # type: ignore[misc]


def resumed_batches(dataloader: Any) -> int:
    """Count the batches that the next pass of a loader skips, because a state was loaded.

    Args:
        dataloader: The loader to check, of any class.
    """
    return _batches_of(getattr(dataloader, "next_iter_state", None) or {})


def _batches_of(state: dict[str, Any]) -> int:
    """Return the number of batches of an unfinished pass that had been read when its state was saved."""
    if state.get(_FINISHED):
        return 0
    if "_snapshot" in state:
        return int(state["_snapshot"].get("_snapshot_step", 0)) + int(state.get("_steps_since_snapshot", 0))
    return int(state.get(_COUNT, 0))


_FINISHED = "_iterator_finished"
_SAMPLER = "_sampler_iter_state"
_SAMPLER_COUNT = "_sampler_iter_yielded"
_COUNT = "_num_yielded"


def _rewound(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """Subtract batches from the state of a loader without workers, which consists only of a position."""
    position = state[_SAMPLER]
    return {
        **state,
        _SAMPLER_COUNT: state[_SAMPLER_COUNT] - batches,
        _COUNT: state[_COUNT] - batches,
        _SAMPLER: {**position, "yielded": position["yielded"] - batches},
        _FINISHED: False,
    }


def _with_position(state: dict[str, Any], position: dict[str, Any] | None) -> dict[str, Any]:
    """Add the position in the sampler to a state that has no position.

    If `position` is None, the added position is after as many items as the state counts, in the same order.
    """
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        main = _with_position(snapshot["_main_snapshot"], position)
        return {**state, "_snapshot": {**snapshot, "_main_snapshot": main}}
    if state.get(_SAMPLER) is None and _SAMPLER_COUNT in state:
        return {**state, _SAMPLER: position or {"yielded": state[_SAMPLER_COUNT]}}
    return state


def _without_position(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split a state into the part that torchdata itself records, and the position in the sampler."""
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        main, position = _without_position(snapshot["_main_snapshot"])
        return {**state, "_snapshot": {**snapshot, "_main_snapshot": main}}, position
    return ({**state, _SAMPLER: None}, state[_SAMPLER]) if _SAMPLER in state else (state, None)


class LoaderState(dict[str, Any]):
    """The state of torchdata's StatefulDataLoader, with additional values that resuming needs.

    Args:
        state: torchdata's state.
        own: The additional values, such as the epoch and the random numbers that the order was drawn from. In a pickle,
            they are under an additional key, which torchdata and Accelerate ignore. `save_state` writes them to a
            separate file.
    """

    def __init__(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(state)
        self.own = own

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self, _OWN: self.own},)


class ResumableSampler:
    """A source of indices whose iterators can be saved and restored.

    Args:
        source: A batch sampler or sampler.
        sampler: The innermost sampler, whose random numbers determine the order, or None if there is no sampler.
    """

    draws_late = True  # An order is drawn when its first item is read.

    def __init__(self, source: Any, sampler: Any) -> None:
        self.source = source
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return ResumableIterator(self.source, self.sampler)


class ResumableIterator(Iterator[Any]):
    """An iterator over indices. Its state consists of the number of yielded items, and the random numbers at its start.

    Args:
        source: A batch sampler or sampler.
        sampler: The innermost sampler, or None if there is no sampler.
    """

    def __init__(self, source: Any, sampler: Any) -> None:
        self.source = source
        self.sampler = sampler
        self.yielded = 0
        self.numbers: Any = None
        self.items: Iterator[Any] | None = None
        self.is_own = is_own_order(source)
        self.last_read: tuple[int, Any] | None = None
        self.expected: int | None = None  # The number of the item that must match the interrupted pass.

    def __next__(self) -> Any:
        if self.items is None:
            self.numbers = self._read_numbers()
            self.items = iter(self.source)
        item = next(self.items)
        if self.is_own:
            self._watch(self.yielded, item)
        self.yielded += 1
        return item

    def _watch(self, number: int, item: Any) -> None:
        """Remember the last item that was read, and check the item that the interrupted pass read last."""
        self.last_read = number, item
        if number == self.expected:
            check_order(self.source, self.numbers, item)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of yielded items, and the state of the random numbers before the first item."""
        numbers = self._read_numbers() if self.items is None else self.numbers
        return {"yielded": self.yielded, "numbers": with_last_read(numbers, self.last_read)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the items that had been yielded when the state was saved, in the same order.

        Args:
            state_dict: The result of `state_dict`.
        """
        self.yielded, self.numbers = state_dict["yielded"], state_dict.get("numbers")
        if self.numbers is None:
            self.items = self._items_after_start() if self.yielded else None
            return
        self.expected = expected_item(self.numbers)
        with drawing_again(self.source, self.numbers):
            if self.yielded:
                self.items = self._items_after_start()

    def _items_after_start(self) -> Iterator[Any]:
        """Draw the order now, and return an iterator over the items that have not been yielded yet."""
        epoch = getattr(self.sampler, "epoch", 0)
        start = self.yielded if self.expected is None else min(self.yielded, self.expected)
        items = iterate_from(self.source, start)
        for number in range(start, self.yielded):
            self._watch(number, next(items, None))
        first = list(itertools.islice(items, 1))
        if isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.set_epoch(epoch)  # A sampler that has reached its end is in the next epoch.
        return itertools.chain(first, items)

    def _read_numbers(self) -> Any:
        """Return the random numbers that the order is drawn from, or None if the order depends only on the epoch."""
        is_fixed = self.sampler is None or isinstance(self.sampler, SequentialSampler | SeedableRandomSampler)
        return None if is_fixed and not self.is_own else read_numbers(self.source)
