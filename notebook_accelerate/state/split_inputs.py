"""One rank's share of an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def share_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's contiguous share of `length` items begins and ends.

    Args:
        length: Number of items.
        rank: The rank, from 0.
        size: Number of ranks.

    Returns:
        begin and end; the first `length % size` ranks have one item more.
    """
    base, extra = divmod(length, size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def split_share(inputs: Any, rank: int, size: int, *, padding: bool, device: torch.device) -> Any:
    """Return one rank's share of `inputs`.

    Args:
        inputs: A list, tuple or tensor, a dict of such (equally long), or a datasets.Dataset.
        rank: The rank, from 0.
        size: Number of ranks.
        padding: Repeat the last item of `inputs` until all shares are equally long.
        device: Where a padded tensor goes, so that it can be gathered.

    Returns:
        The share: same kind as `inputs`; empty where there are fewer items than ranks and no padding.

    Raises:
        ValueError: The values of a dict differ in length, or `inputs` cannot be split.
    """
    length = _length(inputs)
    begin, end = share_bounds(length, rank, size)
    pad = -(-length // size) - (end - begin) if padding else 0
    return _take(inputs, begin, end, pad, device if padding else None)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"all values of the dict must have the same length; got {lengths}")
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


def _take(inputs: Any, begin: int, end: int, pad: int, device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        taken = {key: _take(value, begin, end, pad, device) for key, value in inputs.items()}
        return taken if type(inputs) is dict else type(inputs)(taken)  # type: ignore[call-arg]
    if isinstance(inputs, torch.Tensor):
        share = inputs[begin:end]
        if pad:
            share = torch.cat([share, inputs[-1:].expand(pad, *inputs.shape[1:])])
        return share if device is None else share.to(device)
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # datasets.Dataset, without importing it
        return inputs.select([*range(begin, end), *[len(inputs) - 1] * pad])
    share = inputs[begin:end]
    if not pad:
        return share
    padded = [*share, *[inputs[-1]] * pad]
    return tuple(padded) if isinstance(share, tuple) else padded
