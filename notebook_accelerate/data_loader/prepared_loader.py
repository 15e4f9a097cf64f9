"""The base classes of prepared loaders, which are torch loaders that track their position in an epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from notebook_accelerate import telemetry
from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.data_loader.pass_order import PassOrder, RecordedSource, draws_order
from notebook_accelerate.data_loader.samplers import (
    IterableDatasetShard,
    SeedableRandomSampler,
    advance,
    get_sampler,
    index_source,
    innermost,
)
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state import GradientState
from notebook_accelerate.telemetry import EpochEvent

NOTHING: Any = object()


class DataLoaderStateMixin:
    """A mixin that reports to the gradient state which loader is being read, and whether it has yielded its last batch.

    Attributes:
        end_of_dataloader: Whether the last batch of this pass has been yielded.
        remainder: The number of samples in the last round (one batch of each rank) that are not padding. 0 means that
            all samples count. -1 means that the number is unknown, or that there is no padding.
        gradient_state: The gradient state that the loader reports to.
    """

    end_of_dataloader = False
    remainder = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Reset the attributes for a new pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start a pass by making this loader the active one."""
        self.reset()
        if not getattr(self, "_drop_last", False):
            # Datasets and samplers may have no length, and a batch sampler may have no batch size.
            with suppress(TypeError, AttributeError, NotImplementedError):
                self.remainder = self._samples_per_pass() % self.total_batch_size  # type: ignore[attr-defined]
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End a pass, whether or not it has read all batches."""
        self.gradient_state._remove_dataloader(self)

    def _samples_per_pass(self) -> int:
        """Return the number of samples in one pass, for all ranks together and without padding."""
        sampler = get_sampler(self)  # type: ignore[arg-type]
        length = getattr(sampler, "__len__", None)
        if length is None or isinstance(self.dataset, IterableDatasetShard):  # type: ignore[attr-defined]
            return self.total_dataset_length  # type: ignore[attr-defined,no-any-return]
        return int(length())


class DataLoaderAdapter(DataLoader[Any]):
    """A loader that is based on torch's DataLoader or on torchdata's StatefulDataLoader.

    Args:
        dataset: The dataset to load from.
        use_stateful_dataloader: Whether to use torchdata's StatefulDataLoader, whose position can be saved and
            restored.
        batch_sampler: The batch sampler, or None.
        **kwargs: Arguments for torch's DataLoader.

    Raises:
        ImportError: `use_stateful_dataloader` is True, but torchdata is not installed.
    """

    use_stateful_dataloader: bool

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        if use_stateful_dataloader:
            from notebook_accelerate.data_loader.stateful_loaders import stateful_class

            kind: Any = type(self)
            self.__class__ = stateful_class(kind)
        self.use_stateful_dataloader = use_stateful_dataloader
        with warnings.catch_warnings() if use_stateful_dataloader else nullcontext():
            if use_stateful_dataloader:  # torchdata 0.11 calls a function that torch 2.13 deprecates.
                warnings.filterwarnings("ignore", ".*set_vital.*")
            super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        self._loader_created()

    def _loader_created(self) -> None:
        """Run at the end of torch's constructor. Stateful loaders draw random numbers here."""

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The torch loader, which is this object itself. If a loader is assigned, this object reads that loader's data.

        Raises:
            ValueError: The class of the assigned loader is user-defined, and the way it iterates would be lost.
        """
        return self

    @base_dataloader.setter
    def base_dataloader(self, value: DataLoader[Any]) -> None:
        if value is self:
            return
        of_torch = type(value).__module__.partition(".")[0] in {"torch", "torchdata"}
        if not (of_torch or isinstance(value, PreparedDataLoader)):
            raise ValueError(
                f"base_dataloader={type(value).__name__}(...) is not allowed; assign a torch DataLoader, or pass yours "
                "to Accelerator.prepare"
            )
        taken = {name: vars(value)[name] for name in vars(DataLoader(value.dataset)) if name in vars(value)}
        vars(self).update(taken, _iterator=None)  # torch forbids assigning most of these attributes.

    def batches(self) -> Iterator[Any]:
        """Return torch's own iterator without this package's additions."""
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader in its epoch.

        Returns:
            The state of torchdata's StatefulDataLoader after the batches that have been yielded so far.

        Raises:
            AttributeError: The loader is not based on torchdata's StatefulDataLoader.
        """
        raise AttributeError(_NOT_STATEFUL)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue from a saved state.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            AttributeError: The loader is not based on torchdata's StatefulDataLoader.
        """
        raise AttributeError(_NOT_STATEFUL)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing, because states never include batches that were read ahead but not yielded."""


_NOT_STATEFUL = (
    "This loader does not save its position. Prepare it with "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), which needs torchdata, or "
    "count the batches and use skip_first_batches(loader, count)."
)


class PreparedDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """The base class of the loaders that `prepare` creates. It handles epochs, samplers and skipping.

    Attributes:
        iteration: The epoch of the next pass. It increases by one when a pass is complete.
        device: The device of the batches. If None, batches are not moved.
        between_batches: A function that is called after each batch on the device has been used, or None.
        skip_batches: The number of batches to read and drop at the start of each pass. `skip_first_batches` sets it
            only if the sampler cannot skip.
        is_only_rank: Whether no other rank reads a share of the data.
    """

    iteration: int
    skip_batches: int
    device: torch.device | None = None
    between_batches: Callable[[], Any] | None = None
    is_only_rank = False
    _non_blocking = False
    _order: PassOrder
    _original: PreparedDataLoader | None = None
    _resumes = False  # Whether this copy of `_original` reads the rest of a pass, instead of a separate pass.
    _is_over = False  # Whether `_original` had yielded the last batch of that pass, so nothing is left.
    _workers_seeded = False
    _reads_dataset = True  # Whether this rank reads the dataset itself.
    _reads_one_ahead = True  # Whether exactly one batch is read ahead.

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self._order = PassOrder()
        super().__init__(dataset, use_stateful_dataloader, batch_sampler, **kwargs)
        follow_epochs(self)

    @property
    def _index_sampler(self) -> Any:
        """The source of indices. torch reads this property."""
        source = index_source(self)
        return RecordedSource(source, self._order) if draws_order(self) else source

    def order_state(self) -> Any:
        """Return the random numbers behind the order of an unfinished pass, for a checkpoint within an epoch.

        Returns:
            Plain data for `load_order_state`. It is None between passes, and if the order does not depend on random
            numbers other than a seed and an epoch.
        """
        return self._order.state()

    @property
    def exhausted(self) -> bool:
        """Whether the current pass has yielded its last batch, but has not ended yet."""
        return self._order.exhausted

    @exhausted.setter
    def exhausted(self, value: bool) -> None:
        self._order.exhausted = value

    def load_order_state(self, state: Any, exhausted: bool = False) -> None:
        """Make the next pass of this loader, or of a copy from `skip_first_batches`, read in a saved order.

        If the saved pass had yielded its last batch, there is nothing to resume, so the next pass belongs to the next
        epoch. Only a copy that skips all batches repeats the epoch.

        Args:
            state: The result of `order_state`.
            exhausted: Whether the saved pass had yielded its last batch.
        """
        self._order.resumed, self._order.completed_epoch = state, None
        if exhausted:
            self._order.completed_epoch = self.iteration
            self.set_epoch(self.iteration + 1)

    def begin(self) -> None:
        """Start a pass, with a new order unless it is the rest of a resumed pass."""
        super().begin()
        self.exhausted = False
        if self._order.completed_epoch is not None:
            self._order.resumed = None
        self._order.completed_epoch = None
        if telemetry.current_sink() is not None and len(self.gradient_state.dataloader_references) == 2:
            # Report only the outermost loader: a pass inside its loop, such as an evaluation, is not an epoch.
            self._report_pass()

    def _report_pass(self) -> None:
        """Report the epoch, and the number of optimizer steps in the pass."""
        steps = math.ceil(_length(self) / self.gradient_state.num_steps)
        telemetry.emit(EpochEvent(self.iteration, steps or None))

    def resume_pass_of(self, original: PreparedDataLoader, skipped: int) -> None:
        """Make this copy read the rest of the original's pass, if the original is in a pass.

        Args:
            original: The loader that was copied.
            skipped: The number of batches that the copy skips.
        """
        self._original = original
        completed = self._order.completed_epoch
        if completed is None:
            self._resumes = skipped > 0 or self._order.resumed is not None
        else:  # The pass is complete, so a copy that skips all batches has nothing to read.
            self._resumes = self._is_over = skipped >= max(_length(original), 1)
            self.iteration = completed if self._resumes else original.iteration

    @property
    def workers_seeded(self) -> bool:
        """Whether persistent workers have been seeded, in this run or in the run that it resumes.

        If so, no pass draws the workers' seed again. Checkpoints contain this value.
        """
        return self.persistent_workers and (self._workers_seeded or self._iterator is not None)

    @workers_seeded.setter
    def workers_seeded(self, value: bool) -> None:
        self._workers_seeded = value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass for the sampler, the dataset and the workers.

        Args:
            epoch: The number of the epoch, counted from 0.
        """
        self.iteration = epoch
        for part in (innermost(index_source(self)), get_sampler(self), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        send_epoch(self, epoch)

    def get_sampler(self) -> Any:
        """Return the sampler that orders the indices.

        Returns:
            The sampler, or None for a custom batch sampler that does not have one.
        """
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that orders the indices, for example with one from a checkpoint.

        If the sampler is a SeedableRandomSampler, the next pass reads the epoch that the sampler is in.

        Args:
            sampler: The sampler to use from the next pass on.
        """
        source = innermost(index_source(self))
        if hasattr(source, "sampler") or self.batch_sampler is not None:
            source.sampler = sampler
        else:
            vars(self)["sampler"] = sampler  # torch forbids this, but it is harmless here.
        if isinstance(sampler, SeedableRandomSampler):
            self.iteration = sampler.epoch

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the complete dataset."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def _local_batches(self) -> Iterator[Any]:
        """Yield the batches that this rank reads, reading one ahead to know which one is the last."""
        return self._device_batches() if _must_be_moved(self.device) else self._host_batches()

    def _host_batches(self) -> Iterator[Any]:
        """Yield batches without moving them, reading one ahead. The loop adds 0.1 microseconds per batch."""
        try:
            batches = self._start_pass()
            reading = self.gradient_state.dataloader_references
            depth = len(reading)
            current = next(batches, NOTHING)
            for upcoming in batches:
                # A loader that was not read to its end, for example after next(iter(loader)), must not remain the
                # active one (https://github.com/huggingface/accelerate/issues/1050). Comparing lengths takes half as
                # long as reading[-1].
                if len(reading) != depth:
                    self.gradient_state._add_dataloader(self)
                    depth = len(reading)
                yield current
                current = upcoming
            if current is not NOTHING:
                self._mark_last_batch(current)
                yield current
            self._finish_pass()
        finally:
            self.end()

    def _device_batches(self) -> Iterator[Any]:
        """Yield batches on the device. Each copy to the device starts before the next batch is read."""
        try:
            batches = self._start_pass()
            reading = self.gradient_state.dataloader_references
            depth = len(reading)
            upcoming = next(batches, NOTHING)
            while upcoming is not NOTHING:
                current = send_to_device(upcoming, self.device, non_blocking=self._non_blocking)
                upcoming = next(batches, NOTHING)
                if upcoming is NOTHING:
                    self._mark_last_batch(current)
                elif len(reading) != depth:
                    self.gradient_state._add_dataloader(self)
                    depth = len(reading)
                yield current
                if self.between_batches is not None:
                    self.between_batches()
            self._finish_pass()
        finally:
            self.end()

    def _start_pass(self) -> Iterator[Any]:
        """Start a pass, register it with the gradient state, and return its iterator."""
        self.begin()
        self.set_epoch(self.iteration)
        batches = self._track_position(self._read_batches())
        return advance(batches, self.skip_batches) if self.skip_batches else batches

    def _mark_last_batch(self, batch: Any) -> None:
        """Record that the next batch, or the round that it belongs to, is the last one."""
        self.gradient_state._add_dataloader(self)
        self.end_of_dataloader = self.exhausted = True

    def _read_batches(self) -> Iterator[Any]:
        """Return torch's iterator.

        A pass that resumes an earlier one draws no random numbers at its start, because the earlier pass has already
        drawn them. Training therefore continues with the same numbers as an uninterrupted run. For the same reason,
        starting workers draws no seed if it was drawn before the run was interrupted.
        """
        if self._is_over:
            return iter(())
        if self._resumes:
            with torch.random.fork_rng(devices=[]):
                return self.batches()
        with separate_worker_seed(self) if self._iterator is None and self.workers_seeded else nullcontext():
            return self.batches()

    def _track_position(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Return the rounds. Stateful loaders track their position here."""
        return rounds

    def _loaded_position(self) -> bool:
        """Return whether the pass that is starting is the rest of an earlier one, because a state was loaded."""
        return False

    def _has_drawn_seed(self) -> bool:
        """Return whether the random numbers of the pass that is starting were drawn when the loader was created."""
        return False

    def _extra_state(self) -> dict[str, Any]:
        """Return the state that resuming needs in addition to the position."""
        return {}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `_extra_state`."""

    def _finish_pass(self) -> None:
        """Move this loader, and the loader that it was copied from, to the next epoch."""
        self._order.numbers, self._order.last_read, self.exhausted = None, None, False
        loader: PreparedDataLoader | None = self
        epoch = self.iteration + 1
        while loader is not None:
            loader.iteration = epoch
            loader = loader._original


def _length(loader: DataLoader[Any]) -> int:
    """Return the number of batches in a pass, or 0 if the number is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # An iterable dataset or a sampler may have no length.
        return 0


def _must_be_moved(device: torch.device | None) -> bool:
    """Return whether batches may have to be moved. Without an accelerator, batches are already on the CPU."""
    if device is None:
        return False
    return torch.device(device).type != "cpu" or device_table.accelerator_in_use()


# ---- persistent workers, which follow the loader's epoch, and can be restarted without drawing random numbers

_READING = ("__iter__", "__getitem__", "__getitems__")


class EpochFollower:
    """A `worker_init_fn` that keeps a worker's copy of the dataset in the same epoch as the loader.

    A persistent worker copies the dataset only once, so a later `set_epoch` in the loader's process does not affect the
    copy. The epoch is therefore stored in shared memory, where the worker looks it up before it reads samples.

    Args:
        function: The user's `worker_init_fn`, which is called first.

    Attributes:
        epoch: The epoch, in shared memory.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function: Callable[[int], None] | None = function
        if isinstance(function, EpochFollower):
            self.function = function.function
        self.epoch: torch.Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker: int) -> None:
        """Make the worker's dataset follow the epoch.

        Args:
            worker: The worker's number.
        """
        if self.function is not None:
            self.function(worker)
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        try:
            dataset.__class__ = _following(type(dataset), self.epoch)
        except TypeError as error:
            warnings.warn(
                f"A {type(dataset).__name__} in persistent workers stays in the epoch that they started in: {error}. "
                "Pass DataLoader(..., persistent_workers=False).",
                stacklevel=1,
            )


def _following(cls: type, epoch: torch.Tensor) -> type:
    """Return a subclass of a dataset's class. Its objects switch to the shared epoch before they are read."""

    def reading(name: str) -> Any:
        read = getattr(cls, name)

        def read_in_epoch(self: Any, *args: Any) -> Any:
            if (now := int(epoch)) != vars(self).get("_epoch_followed"):
                vars(self)["_epoch_followed"] = now
                self.set_epoch(now)
            return read(self, *args)

        return read_in_epoch

    return type(cls.__name__, (cls,), {name: reading(name) for name in _READING if hasattr(cls, name)})


def follow_epochs(dataloader: DataLoader[Any]) -> None:
    """Make a loader's persistent workers follow its epoch, if its dataset has `set_epoch`.

    Args:
        dataloader: A loader that has not started its workers yet.
    """
    if dataloader.persistent_workers and hasattr(dataloader.dataset, "set_epoch"):
        vars(dataloader)["worker_init_fn"] = EpochFollower(dataloader.worker_init_fn)


def send_epoch(dataloader: DataLoader[Any], epoch: int) -> None:
    """Send the epoch of the next pass to a loader's workers, which read nothing between passes.

    Args:
        dataloader: The loader whose workers follow its epoch.
        epoch: The number of the epoch.
    """
    if isinstance(dataloader.worker_init_fn, EpochFollower):
        dataloader.worker_init_fn.epoch.fill_(epoch)


@contextmanager
def separate_worker_seed(dataloader: DataLoader[Any], numbers: torch.Tensor | None = None) -> Iterator[None]:
    """Draw the seed of the workers from a separate generator.

    torch itself would draw the seed from the loader's generator or from the global one, which would change the random
    numbers of training and samplers.

    Args:
        dataloader: The loader that starts its workers inside the context.
        numbers: The state of the separate generator. If None, it is the state of the generator that torch would use.
    """
    own = dataloader.generator
    separate = torch.Generator()
    if numbers is None:
        numbers = torch.get_rng_state() if own is None else own.get_state()
    separate.set_state(numbers)
    vars(dataloader)["generator"] = separate
    try:
        yield
    finally:
        vars(dataloader)["generator"] = own
