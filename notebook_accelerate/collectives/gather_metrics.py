"""Gathers results so that every sample of the dataset counts once."""

from __future__ import annotations

from typing import Any

from notebook_accelerate.collectives.containers import Nested, recursively_apply, require_tensors
from notebook_accelerate.collectives.operations import gather, gather_object
from notebook_accelerate.state import GradientState, PartialState


def gather_for_metrics(input_data: Nested, gradient_state: GradientState, use_gather_object: bool = False) -> Nested:
    """Join results over ranks, without the samples that pad the last batches; every rank must call this.

    Args:
        input_data: Nested containers of tensors, or picklable objects in a list.
        gradient_state: Refers to the loader that is being read.
        use_gather_object: Treat the data as Python objects although it contains tensors.

    Returns:
        The results for each sample once, also in a world of one: libraries repeat a short batch's loss to the full
        batch size and rely on this cut.
    """
    kept = gradient_state.remainder if gradient_state.end_of_dataloader else -1
    if PartialState().num_processes == 1 and kept <= 0:
        return input_data
    as_objects = use_gather_object or not _only_tensors(input_data)
    data: Any = gather_object(input_data) if as_objects else gather(input_data)
    if kept > 0:
        data = data[:kept] if as_objects else recursively_apply(lambda tensor: tensor[:kept], data)
    results: Nested = data
    return results


def _only_tensors(data: Any) -> bool:
    try:
        require_tensors(data, "gather_for_metrics")
    except TypeError:
        return False
    return True
