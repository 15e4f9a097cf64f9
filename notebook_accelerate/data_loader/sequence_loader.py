"""Loaders for sequence parallel ranks: the ranks combine their batches and divide each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.state.warn_once import warn_once

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
