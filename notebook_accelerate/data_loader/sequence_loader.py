"""Loaders whose ranks put their batches together and share out each sequence among themselves."""

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
    """Hands out a piece of every sequence that some ranks have read.

    Each of the ranks reads batches of its own. When all have one, they go through them together: this rank gets its
    piece of the first rank's batch, then of the second rank's, and so on. A pass has therefore as many more batches as
    there are such ranks. Everything else that a loader has is the read loader's.

    Args:
        loader: The prepared loader of this rank's batches.
        split: Makes the pieces: called with an iterable of this rank's batches, it returns an iterable of pieces.
        ranks: How many ranks share sequences.
        rows: How many sequences each batch must have; None: any number.
        device: Where pieces go; None leaves them where they are.
        skipped: How many pieces are left out at the start of a pass.

    Attributes:
        loader: The loader that is read.
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
        # No DataLoader's __init__: this is a view of another loader, and has neither dataset nor workers of its own.
        self.loader, self.ranks, self.rows, self.device = loader, ranks, rows, device
        self._split, self._skipped = split, skipped
        loader.hands_out_pieces = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, as while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(len(self.loader) * self.ranks - self._skipped, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ended = False
        for number, piece in enumerate(self._split(self._checked())):
            ended = ended or self.loader.end_of_dataloader
            # The pass ends with the last rank's batch; which of its samples are padding, a piece does not tell.
            self.loader.end_of_dataloader = ended and number % self.ranks == self.ranks - 1
            self.loader.remainder = -1
            if number >= self._skipped:
                yield send_to_device(_solid(piece), self.device) if self.device is not None else _solid(piece)

    def _checked(self) -> Iterator[Any]:
        for batch in self.loader:
            _check(batch, self.rows)
            yield batch

    def skipping(self, skip: Callable[[Any, int], Any], count: int) -> SequenceLoader:
        """Return a loader like this one that leaves out more pieces at the start of every pass.

        Args:
            skip: Returns a loader that leaves out batches of the one that is read.
            count: How many pieces.
        """
        whole, rest = divmod(self._skipped + count, self.ranks)
        return SequenceLoader(skip(self.loader, whole), self._split, self.ranks, self.rows, self.device, rest)


def _check(batch: Any, rows: int | None) -> None:
    missing = [name for name in _NEEDED if not isinstance(batch, Mapping) or name not in batch]
    if missing:
        had = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"sequences are split by their batches' input_ids, position_ids and labels, each [batch, sequence]; a "
            f"batch has {had}, and no {', '.join(missing)}: have the collate function add it (position_ids are "
            "torch.arange(length) for each sequence)"
        )
    count = len(batch["input_ids"])
    if rows is not None and count != rows:
        raise ValueError(
            f"a batch has {count} sequences, and DeepSpeed's attention was made for {rows} in every batch; write "
            "DataLoader(..., drop_last=True), or keep even_batches=True"
        )
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        warn_once(
            "attention_mask hides the beginning of sequences, and attention that is split over ranks knows no mask: "
            "pad sequences at their end, with labels of -100"
        )


def _solid(piece: Any) -> Any:
    """Return a piece whose tensors are no views: models reshape them, and a view would keep the whole sequence."""
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in piece.items()}


__all__ = ["SequenceLoader"]
