"""The base of prepared loaders: torch loaders that track their position in an epoch."""

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
    """Reports to the gradient state which loader is read, and whether it has yielded its last batch.

    Attributes:
        end_of_dataloader: Whether the last batch of this pass was yielded.
        remainder: Samples of the last round (one batch of every rank) without padding; 0: all of them; -1: unknown, or
            there is no padding.
        gradient_state: The gradient state.
    """

    end_of_dataloader = False
    remainder = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Reset the attributes for a new pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start a pass: make this the active loader."""
        self.reset()
        if not getattr(self, "_drop_last", False):
            # Datasets and samplers may have no length; a batch sampler may have no batch size.
            with suppress(TypeError, AttributeError, NotImplementedError):
                self.remainder = self._samples_per_pass() % self.total_batch_size  # type: ignore[attr-defined]
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End a pass, finished or not."""
        self.gradient_state._remove_dataloader(self)

    def _samples_per_pass(self) -> int:
        """Count the samples of one pass over all ranks, without padding."""
        sampler = get_sampler(self)  # type: ignore[arg-type]
        length = getattr(sampler, "__len__", None)
        if length is None or isinstance(self.dataset, IterableDatasetShard):  # type: ignore[attr-defined]
            return self.total_dataset_length  # type: ignore[attr-defined,no-any-return]
        return int(length())


class DataLoaderAdapter(DataLoader[Any]):
    """A torch DataLoader, or torchdata's StatefulDataLoader, under one class.

    Args:
        dataset: The dataset to load from.
        use_stateful_dataloader: Use torchdata's StatefulDataLoader, whose position can be saved and restored.
        batch_sampler: The batch sampler, or None.
        **kwargs: Arguments of torch's DataLoader.

    Raises:
        ImportError: `use_stateful_dataloader` is used without torchdata.
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
            if use_stateful_dataloader:  # torchdata 0.11 calls what torch 2.13 deprecates
                warnings.filterwarnings("ignore", ".*set_vital.*")
            super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        self._loader_created()

    def _loader_created(self) -> None:
        """Called when torch's part has been created; stateful loaders draw random numbers here."""

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The torch loader, which is this object itself. Once set, this object reads the other loader's data.

        Raises:
            ValueError: The assigned loader's class is user-defined, and its own way of iterating would be lost.
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
        vars(self).update(taken, _iterator=None)  # torch refuses to set most of these

    def batches(self) -> Iterator[Any]:
        """Return torch's own iterator, without this package's additions."""
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader in its epoch.

        Returns:
            The state of torchdata's StatefulDataLoader, after the yielded batches.

        Raises:
            AttributeError: The loader is not based on torchdata's StatefulDataLoader.
        """
        raise AttributeError(_NOT_STATEFUL)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in the next pass, from a saved state.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            AttributeError: The loader is not based on torchdata's StatefulDataLoader.
        """
        raise AttributeError(_NOT_STATEFUL)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are those after the yielded batches, never after batches read ahead."""


_NOT_STATEFUL = (
    "This loader does not save its position. Prepare it with "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), which needs torchdata, or "
    "count the batches and use skip_first_batches(loader, count)."
)


class PreparedDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """The common parts of loaders created by `prepare`: epochs, samplers, skipping.

    Attributes:
        iteration: Number of the next pass's epoch; a finished pass adds one.
        device: Device of the batches; None leaves them where they are.
        between_batches: Called after each batch on the device was used, if not None.
        skip_batches: Number of batches to read and drop at the start of every pass. `skip_first_batches` uses it only
            if the sampler cannot skip.
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
    _resumes = False  # whether this copy of `_original` reads the rest of a pass, rather than a pass of its own
    _is_over = False  # whether `_original` had yielded the last batch of that pass, so that nothing is left
    _workers_seeded = False
    _reads_dataset = True  # whether this rank reads the dataset itself
    _reads_one_ahead = True  # whether exactly one batch is read ahead

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self._order = PassOrder()
        super().__init__(dataset, use_stateful_dataloader, batch_sampler, **kwargs)
        follow_epochs(self)

    @property
    def _index_sampler(self) -> Any:
        """The source of indices; torch reads this property."""
        source = index_source(self)
        return RecordedSource(source, self._order) if draws_order(self) else source

    def order_state(self) -> Any:
        """Return the random numbers behind the order of an unfinished pass, for a checkpoint within an epoch.

        Returns:
            Plain data for `load_order_state`; None between passes, and if the order depends on no random numbers, or
            only on a seed and an epoch.
        """
        return self._order.state()

    @property
    def exhausted(self) -> bool:
        """Whether the current pass has yielded its last batch and has not ended."""
        return self._order.exhausted

    @exhausted.setter
    def exhausted(self, value: bool) -> None:
        self._order.exhausted = value

    def load_order_state(self, state: Any, exhausted: bool = False) -> None:
        """Read the next pass of this loader, or of its copy by `skip_first_batches`, in a saved order.

        After the last batch of a pass there is nothing to resume: the next pass is that of the next epoch, unless a
        copy skips all batches.

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
            self._report_pass()  # the outermost one: a pass inside it, as of an evaluation, is no epoch

    def _report_pass(self) -> None:
        """Report the epoch, and the optimizer steps that its pass takes."""
        steps = math.ceil(_length(self) / self.gradient_state.num_steps)
        telemetry.emit(EpochEvent(self.iteration, steps or None))

    def resume_pass_of(self, original: PreparedDataLoader, skipped: int) -> None:
        """Make this copy read the rest of the pass that the original was in, if there is one.

        Args:
            original: The loader that this is a copy of.
            skipped: Number of batches that the copy skips.
        """
        self._original = original
        completed = self._order.completed_epoch
        if completed is None:
            self._resumes = skipped > 0 or self._order.resumed is not None
        else:  # that pass is complete: a copy that skips all of it reads nothing
            self._resumes = self._is_over = skipped >= max(_length(original), 1)
            self.iteration = completed if self._resumes else original.iteration

    @property
    def workers_seeded(self) -> bool:
        """Whether persistent workers were seeded, here or in the resumed run: no pass draws their seed again.

        Saved in checkpoints.
        """
        return self.persistent_workers and (self._workers_seeded or self._iterator is not None)

    @workers_seeded.setter
    def workers_seeded(self, value: bool) -> None:
        self._workers_seeded = value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for the sampler, the dataset and the workers.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.iteration = epoch
        for part in (innermost(index_source(self)), get_sampler(self), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        send_epoch(self, epoch)

    def get_sampler(self) -> Any:
        """Return the sampler that orders the indices.

        Returns:
            The sampler; None for custom batch samplers without one.
        """
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that orders the indices, for instance by one restored from a checkpoint.

        The next pass reads the epoch that a SeedableRandomSampler is in.

        Args:
            sampler: The sampler to use from the next pass on.
        """
        source = innermost(index_source(self))
        if hasattr(source, "sampler") or self.batch_sampler is not None:
            source.sampler = sampler
        else:
            vars(self)["sampler"] = sampler  # torch forbids the assignment, but nothing depends on it here
        if isinstance(sampler, SeedableRandomSampler):
            self.iteration = sampler.epoch

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the complete dataset."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def _local_batches(self) -> Iterator[Any]:
        """Yield the batches that this rank reads, one behind reading, so that the last one is known."""
        return self._device_batches() if _must_be_moved(self.device) else self._host_batches()

    def _host_batches(self) -> Iterator[Any]:
        """Yield batches one behind reading. Only the loop adds to the cost of a batch: 0.1 microseconds."""
        try:
            batches = self._start_pass()
            reading = self.gradient_state.dataloader_references
            depth = len(reading)
            current = next(batches, NOTHING)
            for upcoming in batches:
                # Another loader that is still open, such as one after a single batch, must not stay the active one
                # (https://github.com/huggingface/accelerate/issues/1050). Comparing lengths takes half the time of
                # reading[-1].
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
        """Yield batches on the device; each copy starts before the next batch is read."""
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
        """Record that the next batch, or this rank's round of batches, is the last one."""
        self.gradient_state._add_dataloader(self)
        self.end_of_dataloader = self.exhausted = True

    def _read_batches(self) -> Iterator[Any]:
        """Return torch's iterator.

        A pass that skips what an earlier pass has read draws no random numbers at its start: the earlier pass drew
        them, and training continues with the numbers of an uninterrupted run. The same holds for the start of workers
        whose seed was drawn before the run was interrupted.
        """
        if self._is_over:
            return iter(())
        if self._resumes:
            with torch.random.fork_rng(devices=[]):
                return self.batches()
        with separate_worker_seed(self) if self._iterator is None and self.workers_seeded else nullcontext():
            return self.batches()

    def _track_position(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Return the rounds; stateful loaders track their position here."""
        return rounds

    def _loaded_position(self) -> bool:
        """Return whether the pass that begins is the rest of one, because a state was loaded."""
        return False

    def _has_drawn_seed(self) -> bool:
        """Return whether the numbers of the pass that begins were drawn when the loader was created."""
        return False

    def _extra_state(self) -> dict[str, Any]:
        """Return the state that resuming needs in addition to the position."""
        return {}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `_extra_state`."""

    def _finish_pass(self) -> None:
        """Move to the next epoch, together with the loader whose first batches this one skips."""
        self._order.numbers, self._order.last_read, self.exhausted = None, None, False
        loader: PreparedDataLoader | None = self
        epoch = self.iteration + 1
        while loader is not None:
            loader.iteration = epoch
            loader = loader._original


def _length(loader: DataLoader[Any]) -> int:
    """Return the number of batches of a pass; 0 if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of an iterable dataset, or of a sampler
        return 0


def _must_be_moved(device: torch.device | None) -> bool:
    """Return whether batches may have to be moved; in a process without an accelerator they are on the CPU already."""
    if device is None:
        return False
    return torch.device(device).type != "cpu" or device_table.accelerator_in_use()


# ---- persistent workers follow the loader's epoch, and restart after a resume without drawing random numbers

_READING = ("__iter__", "__getitem__", "__getitems__")


class EpochFollower:
    """A `worker_init_fn` that keeps a worker's copy of the dataset in the loader's epoch.

    A persistent worker copies the dataset once, so a later `set_epoch` in the loader's process does not change the
    copy. The epoch is in shared memory, and the worker reads it before it reads samples.

    Args:
        function: The user's `worker_init_fn`, called first.

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
            worker: Number of the worker.
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
                f"A {type(dataset).__name__} in persistent workers stays in the epoch in which they started: {error}. "
                "Pass DataLoader(..., persistent_workers=False).",
                stacklevel=1,
            )


def _following(cls: type, epoch: torch.Tensor) -> type:
    """Return a subclass whose objects set the shared epoch before they are read."""

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
    """Let a loader's persistent workers follow its epoch, if its dataset has `set_epoch`.

    Args:
        dataloader: A loader whose workers have not been started.
    """
    if dataloader.persistent_workers and hasattr(dataloader.dataset, "set_epoch"):
        vars(dataloader)["worker_init_fn"] = EpochFollower(dataloader.worker_init_fn)


def send_epoch(dataloader: DataLoader[Any], epoch: int) -> None:
    """Send the epoch of the next pass to a loader's workers; no worker reads between two passes.

    Args:
        dataloader: The loader.
        epoch: Number of the epoch.
    """
    if isinstance(dataloader.worker_init_fn, EpochFollower):
        dataloader.worker_init_fn.epoch.fill_(epoch)


@contextmanager
def separate_worker_seed(dataloader: DataLoader[Any], numbers: torch.Tensor | None = None) -> Iterator[None]:
    """Draw the seed of the workers from a separate generator.

    torch draws it from the loader's generator, or from the global one, which would change the random numbers of
    training and samplers.

    Args:
        dataloader: The loader that starts its workers inside the context.
        numbers: State of the separate generator; None: the generator that torch would use has it.
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
