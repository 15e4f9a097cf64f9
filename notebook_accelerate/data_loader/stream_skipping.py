"""Skips the first items of an index stream, at a cost that does not grow with their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any, TypeVar

from torch.utils.data import BatchSampler

Item = TypeVar("Item")

_END: Any = object()
_JUMPING: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def iterate_from(batches: Any, skipped: int) -> Iterator[Any]:
    """Iterate over a batch sampler, or any iterable, without its first batches.

    A batch sampler with a method `iterate_from` skips by itself. For torch's own BatchSampler, the sampler's indices
    are skipped instead of the batches.

    Args:
        batches: A batch sampler, a sampler, or any other iterable.
        skipped: Number of batches to skip, 0 or more.

    Returns:
        An iterator over the remaining batches.
    """
    if hasattr(batches, "iterate_from"):
        own: Iterator[Any] = batches.iterate_from(skipped)
        return own
    if skipped and type(batches) is BatchSampler:
        moved = advance(iter(batches.sampler), skipped * batches.batch_size)
        return iter(BatchSampler(moved, batches.batch_size, batches.drop_last))
    return advance(iter(batches), skipped)


def open_from(batches: Iterable[Any], skipped: int, kept: int) -> tuple[list[Any], Iterator[Any]]:
    """Read the first batches of an epoch, then iterate from a later batch of the same epoch.

    The sampler is iterated only once: a second iteration would draw another permutation.

    Args:
        batches: A batch sampler, or any iterable of batches.
        skipped: Number of batches to skip in the iterator, 0 or more.
        kept: Number of the epoch's first batches to return in the list, if there are as many.

    Returns:
        The epoch's first `kept` batches, and an iterator over the batches after the first `skipped`.
    """
    if not kept:
        return [], iterate_from(batches, skipped)
    if type(batches) is BatchSampler:
        size, drop_last = batches.batch_size, batches.drop_last
        indices = iter(batches.sampler)
        opening = list(BatchSampler(itertools.islice(indices, kept * size), size, drop_last))
        rest = iter(BatchSampler(advance(indices, max(skipped - kept, 0) * size), size, drop_last))
    else:
        rest = iter(batches)
        opening = list(itertools.islice(rest, kept))
        rest = advance(rest, max(skipped - kept, 0))
    return opening, itertools.chain(opening[skipped:], rest)


def advance(iterator: Iterator[Item], count: int) -> Iterator[Item]:
    """Move an iterator forward by a number of items.

    Iterators over lists, tuples and ranges jump. A generator that delegates to such an iterator (``yield from
    torch.randperm(n).tolist()``, as torch's RandomSampler does) jumps inside it. All other iterators are read.

    Args:
        iterator: The iterator; it may have been started.
        count: Number of items to skip, 0 or more.

    Returns:
        The same iterator, moved by `count` items or to its end.
    """
    count -= _jump(iterator, count)
    if count and isinstance(iterator, GeneratorType) and next(iterator, _END) is not _END:
        inner = iterator.gi_yieldfrom
        while isinstance(inner, GeneratorType):
            inner = inner.gi_yieldfrom
        count -= 1 + _jump(inner, count - 1)
    next(itertools.islice(iterator, count, count), None)
    return iterator


def _jump(iterator: Any, count: int) -> int:
    """Move an iterator over a stored sequence by up to `count` items; return by how many."""
    if type(iterator) not in _JUMPING:
        return 0
    stride: int = min(count, iterator.__length_hint__())
    if stride > 0:
        # Before Python 3.12 a position is counted from the start of the sequence, and for ranges since then from here.
        _, _, *position = iterator.__reduce__()
        iterator.__setstate__((position[0] if position and position[0] is not None else 0) + stride)
    return stride
