"""Gathers results so that every sample of the dataset counts once."""

from __future__ import annotations

import logging
from typing import Any

from notebook_accelerate.collectives.layouts import Nested, recursively_apply, require_tensors
from notebook_accelerate.collectives.operations import gather, gather_object
from notebook_accelerate.state import GradientState

_log = logging.getLogger(__name__)


def gather_for_metrics(input_data: Nested, gradient_state: GradientState, use_gather_object: bool = False) -> Nested:
    """Join results over ranks, without the samples that pad the last batches; every rank must call this.

    Args:
        input_data: Nested containers of tensors, or picklable objects in a list, one for each sample.
        gradient_state: Refers to the loader that is being read.
        use_gather_object: Treat the data as Python objects although it contains tensors.

    Returns:
        The results for each sample once, also in a world of one: libraries repeat a short batch's loss to the full
        batch size and rely on this cut. All results, uncut, if a part of them has no rows that can be cut: in a world
        of one, a loss without dimensions or a number.
    """
    as_objects = use_gather_object or not _only_tensors(input_data)
    data: Any = gather_object(input_data) if as_objects else gather(input_data)
    kept = gradient_state.remainder if gradient_state.end_of_dataloader else 0
    if kept < 0:
        _log.info("Nothing is cut from the results of the last batch: its loader has no length.")
    results: Nested = _first(kept, data, as_objects) if kept > 0 else data
    return results


def _first(kept: int, data: Any, as_objects: bool) -> Any:
    try:
        return data[:kept] if as_objects else recursively_apply(lambda tensor: tensor[:kept], data)
    except Exception:  # noqa: BLE001 - an object may raise anything where it is sliced, as on Accelerate
        return data


def _only_tensors(data: Any) -> bool:
    try:
        require_tensors(data, "gather_for_metrics")
    except TypeError:
        return False
    return True
