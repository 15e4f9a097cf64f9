"""Splits inputs between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def share_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the bounds of a rank's contiguous share of `length` items.

    Args:
        length: Number of items.
        rank: The rank, from 0.
        size: Number of ranks.

    Returns:
        Begin and end; the first `length % size` ranks have one item more.
    """
    base, extra = divmod(length, size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def split_share(inputs: Any, rank: int, size: int, *, padding: bool, device: torch.device) -> Any:
    """Return one rank's share of `inputs`.

    Args:
        inputs: A list, a tuple, a tensor, a dict of these with equal lengths, or a datasets.Dataset.
        rank: The rank, from 0.
        size: Number of ranks.
        padding: Repeat the last item of `inputs` until all shares are equally long.
        device: Device of a padded tensor, so that it can be gathered.

    Returns:
        The share, of the same type as `inputs`; without padding it may be empty. Text and objects that are no sequences
        are returned whole, as in Accelerate.

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
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # datasets.Dataset, without importing it
        return inputs.select([*range(begin, end), *[len(inputs) - 1] * pad])
    share = inputs[begin:end]
    if not pad:
        return share
    padded = [*share, *[inputs[-1]] * pad]
    return tuple(padded) if isinstance(share, tuple) else padded
