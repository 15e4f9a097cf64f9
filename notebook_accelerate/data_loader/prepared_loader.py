"""What every prepared loader is: a torch loader that knows where in its epoch it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.data_loader.iterable_shard import IterableDatasetShard
from notebook_accelerate.data_loader.pass_order import PassOrder, RememberedSource, draws_order
from notebook_accelerate.data_loader.persistent_workers import follow_epochs, seeding_apart, tell_epoch
from notebook_accelerate.data_loader.samplers import SeedableRandomSampler, get_sampler, index_source, innermost
from notebook_accelerate.data_loader.stream_skipping import advance
from notebook_accelerate.state import GradientState

NOTHING: Any = object()


class DataLoaderStateMixin:
    """Tells the gradient state which loader is read, and whether its last batch is out.

    Attributes:
        end_of_dataloader: Whether the last batch of this pass has been handed out.
        remainder: How many samples of the last round (one batch of every rank) are real; 0: all of them; -1: not known,
            or none of them is padding.
        gradient_state: The state that is told.
    """

    end_of_dataloader = False
    remainder = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget where the last pass ended."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start a pass: from now on this is the loader that is read."""
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
    """A torch DataLoader, or torchdata's StatefulDataLoader under the same class.

    Args:
        dataset: The dataset to load from.
        use_stateful_dataloader: Build on torchdata's StatefulDataLoader, whose position can be saved and restored.
        batch_sampler: The batch sampler, or None.
        **kwargs: What torch's DataLoader takes.

    Raises:
        ImportError: `use_stateful_dataloader` without torchdata.
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

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The torch loader: this object itself."""
        return self

    def batches(self) -> Iterator[Any]:
        """Iterate as torch does, without any of the additions.

        Returns:
            torch's own iterator.
        """
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Say where in its epoch this loader is.

        Returns:
            The state of torchdata's StatefulDataLoader, after the batches handed out.

        Raises:
            ValueError: The loader is not built on torchdata's StatefulDataLoader.
        """
        raise ValueError(_NOT_STATEFUL)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, in the next pass, from where a state was saved.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: The loader is not built on torchdata's StatefulDataLoader.
        """
        raise ValueError(_NOT_STATEFUL)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are taken for the batches handed out, never for those read ahead."""


_NOT_STATEFUL = (
    "This loader does not save its position. Prepare it with "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), which needs torchdata, or "
    "count the batches and use skip_first_batches(loader, count)."
)


class PreparedDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """What the loaders made by `prepare` share: epochs, samplers, skipping.

    Attributes:
        iteration: Number of the epoch that the next pass reads; a finished pass adds one.
        device: Where batches go; None leaves them where they are.
        between_batches: Called after each batch that went to the device was used; None: nothing.
        skip_batches: How many batches at the start of every pass are read and left out. `skip_first_batches` uses it
            only where the sampler cannot skip.
    """

    iteration: int
    skip_batches: int
    device: torch.device | None = None
    between_batches: Callable[[], Any] | None = None
    _non_blocking = False
    _order: PassOrder
    _original: PreparedDataLoader | None = None
    _workers_seeded = False
    _reads = True  # whether this rank reads the dataset itself
    _steps_back = True  # whether exactly one batch is read ahead

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self._order = PassOrder()
        super().__init__(dataset, use_stateful_dataloader, batch_sampler, **kwargs)
        follow_epochs(self)

    @property
    def _index_sampler(self) -> Any:
        """The source of indices (torch asks this property)."""
        source = index_source(self)
        return RememberedSource(source, self._order) if draws_order(self) else source

    def order_state(self) -> torch.Tensor | None:
        """Say what the order of the unfinished pass was drawn from, for a checkpoint within an epoch.

        Returns:
            The state of the random numbers, for `load_order_state`; None between passes, and where the order hangs on
            none, or on a seed and an epoch only.
        """
        return self._order.drawn_from

    def load_order_state(self, state: torch.Tensor | None) -> None:
        """Read the next pass, of this loader or of one made from it by `skip_first_batches`, in a saved order.

        Args:
            state: What `order_state` returned.
        """
        self._order.resumed = state

    @property
    def workers_seeded(self) -> bool:
        """Whether there are workers that persist, here or in the run that goes on here: no pass draws their seed again.

        A checkpoint keeps it.
        """
        return self.persistent_workers and (self._workers_seeded or self._iterator is not None)

    @workers_seeded.setter
    def workers_seeded(self, value: bool) -> None:
        self._workers_seeded = value

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads, for the sampler and the dataset.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.iteration = epoch
        for part in (innermost(index_source(self)), get_sampler(self), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        tell_epoch(self, epoch)

    def get_sampler(self) -> Any:
        """Find the sampler that orders the indices.

        Returns:
            The sampler; None where a custom batch sampler has none.
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
            vars(self)["sampler"] = sampler  # torch forbids the assignment; without batches nothing depends on it
        if isinstance(sampler, SeedableRandomSampler):
            self.iteration = sampler.epoch

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the whole dataset."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return int(dataset.total_length) if hasattr(dataset, "total_length") else len(dataset)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def _in_turn(self) -> Iterator[Any]:
        """Read a pass on this rank alone, knowing one batch ahead that it ends."""
        return self._moved() if _moves(self.device) else self._in_place()

    def _in_place(self) -> Iterator[Any]:
        """Hand out batches one behind what is read. The loop is all that a batch costs: 0.1 microseconds."""
        try:
            batches = self._open()
            reading = self.gradient_state.dataloader_references
            depth = len(reading)
            current = next(batches, NOTHING)
            for upcoming in batches:
                # Another loader that is still open, such as one of which a single batch was taken, must not answer for
                # this one (https://github.com/huggingface/accelerate/issues/1050). Comparing lengths takes half the
                # time of reading[-1].
                if len(reading) != depth:
                    self.gradient_state._add_dataloader(self)
                    depth = len(reading)
                yield current
                current = upcoming
            if current is not NOTHING:
                self._note_last()
                yield current
            self._finish_pass()
        finally:
            self.end()

    def _moved(self) -> Iterator[Any]:
        """Hand out batches on the device; a copy is started before the next batch is read."""
        try:
            batches = self._open()
            reading = self.gradient_state.dataloader_references
            depth = len(reading)
            upcoming = next(batches, NOTHING)
            while upcoming is not NOTHING:
                current = send_to_device(upcoming, self.device, non_blocking=self._non_blocking)
                upcoming = next(batches, NOTHING)
                if upcoming is NOTHING:
                    self._note_last()
                elif len(reading) != depth:
                    self.gradient_state._add_dataloader(self)
                    depth = len(reading)
                yield current
                if self.between_batches is not None:
                    self.between_batches()
            self._finish_pass()
        finally:
            self.end()

    def _open(self) -> Iterator[Any]:
        """Start a pass: tell the gradient state, and iterate as torch does."""
        self.begin()
        self.set_epoch(self.iteration)
        batches = self._watched(self._read())
        return advance(batches, self.skip_batches) if self.skip_batches else batches

    def _note_last(self) -> None:
        """Say that the batch handed out next is the last one."""
        self.gradient_state._add_dataloader(self)
        self.end_of_dataloader = True

    def _read(self) -> Iterator[Any]:
        """Iterate as torch does.

        A pass that leaves out what an earlier one has read draws no random numbers at its start: the earlier one has
        drawn them, and training goes on with the numbers it would have had. The same goes for the start of workers
        whose seed was drawn before the run was interrupted.
        """
        if self._original is not None:
            numbers = torch.get_rng_state()
            batches = self.batches()
            torch.set_rng_state(numbers)
            return batches
        with seeding_apart(self) if self._iterator is None and self.workers_seeded else nullcontext():
            return self.batches()

    def _watched(self, rounds: Iterator[Any]) -> Iterator[Any]:
        """Let a stateful loader see when the next round is read."""
        return rounds

    def _more_state(self) -> dict[str, Any]:
        """Return what resuming needs beside the position."""
        return {}

    def _load_more_state(self, state: dict[str, Any]) -> None:
        """Take back what `_more_state` returned."""

    def _finish_pass(self) -> None:
        """Go to the next epoch, together with the loader whose first batches this one skips."""
        self._order.drawn_from = None
        loader: PreparedDataLoader | None = self
        epoch = self.iteration + 1
        while loader is not None:
            loader.iteration = epoch
            loader = loader._original


def _moves(device: torch.device | None) -> bool:
    """Whether batches may have to be moved: not to the CPU where there is nothing else they could be on."""
    if device is None:
        return False
    return torch.device(device).type != "cpu" or torch.accelerator.is_available()
