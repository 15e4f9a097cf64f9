"""Persistent workers: they follow the loader's epoch, and restart after a resume without drawing random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.state.warn_once import warn_once

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


# Loaders for sequence parallel ranks: the ranks combine their batches and divide each sequence.

_NEEDED = ("input_ids", "position_ids", "labels")
Splitter = Callable[[Iterable[Any]], Iterable[Any]]


class SequenceLoader(DataLoader[Any]):
    """Yields this rank's piece of every sequence that the sequence parallel ranks read.

    Each rank reads its own batches. When all have one, this rank gets its piece of the first rank's batch, then of the
    second rank's, and so on. A pass therefore has `ranks` times as many batches. All other attributes are those of the
    inner loader.

    Args:
        loader: The prepared loader of this rank's batches.
        split: Called with an iterable of this rank's batches; returns an iterable of pieces.
        ranks: Number of ranks that share sequences.
        rows: Number of sequences in each batch; None: any.
        device: Device of the pieces; None leaves them where they are.
        skipped: Number of pieces to skip at the start of a pass.

    Attributes:
        loader: The inner loader.
    """

    def __init__(
        self,
        loader: Any,
        split: Splitter,
        ranks: int,
        rows: int | None = None,
        device: torch.device | None = None,
        skipped: int = 0,
    ) -> None:
        # Without DataLoader.__init__: this is a view of another loader, without a dataset or workers of its own.
        self.loader, self.ranks, self.rows, self.device = loader, ranks, rows, device
        self._split, self._skipped = split, skipped
        loader.hands_out_pieces = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(len(self.loader) * self.ranks - self._skipped, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ended = False
        for number, piece in enumerate(self._split(self._checked())):
            ended = ended or self.loader.end_of_dataloader
            # The pass ends with the last rank's batch; a piece does not show which of its samples are padding.
            self.loader.end_of_dataloader = self.loader.exhausted = ended and number % self.ranks == self.ranks - 1
            self.loader.remainder = -1
            if number >= self._skipped:
                yield send_to_device(_contiguous(piece), self.device) if self.device is not None else _contiguous(piece)

    def _checked(self) -> Iterator[Any]:
        for batch in self.loader:
            _check(batch, self.rows)
            yield batch

    def skipping(self, skip: Callable[[Any, int], Any], count: int) -> SequenceLoader:
        """Return a copy of this loader that skips more pieces at the start of every pass.

        Args:
            skip: Returns a copy of the inner loader that skips batches.
            count: Number of pieces to skip.
        """
        batches, pieces = divmod(self._skipped + count, self.ranks)
        return SequenceLoader(skip(self.loader, batches), self._split, self.ranks, self.rows, self.device, pieces)


def _check(batch: Any, rows: int | None) -> None:
    missing = [name for name in _NEEDED if not isinstance(batch, Mapping) or name not in batch]
    if missing:
        had = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"a batch has {had}, and no {', '.join(missing)}; sequences are split by input_ids, position_ids and "
            "labels of shape [batch, sequence]. Add the missing ones in collate_fn, for instance "
            "batch['position_ids'] = torch.arange(length).expand(rows, -1)"
        )
    count = len(batch["input_ids"])
    if rows is not None and count != rows:
        raise ValueError(
            f"a batch has {count} sequences, and DeepSpeed's attention was created for {rows} in every batch; pass "
            "DataLoader(..., drop_last=True), or keep even_batches=True"
        )
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        warn_once(
            "attention_mask masks the beginning of sequences, and attention that is split over ranks ignores masks: "
            "pad sequences at their end, with labels of -100"
        )


def _contiguous(piece: Any) -> Any:
    """Return a piece with contiguous tensors: models reshape them, and a view would keep the full sequence alive."""
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in piece.items()}
