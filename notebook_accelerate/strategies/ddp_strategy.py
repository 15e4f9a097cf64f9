"""Data parallelism: every rank has the whole model, and the backward pass averages the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from notebook_accelerate.collectives import leaves_of
from notebook_accelerate.config import environ
from notebook_accelerate.state.process_group import keep_group_for
from notebook_accelerate.state.warn_once import warn_once, warn_user
from notebook_accelerate.strategies.module_queries import ddp_inside, is_on_several_devices, model_has_dtensor
from notebook_accelerate.strategies.strategy import NOTHING, Strategy, even_batches_set
from notebook_accelerate.torch_internals import recorded_static_graph


class DDPStrategy(Strategy):
    """Trains with torch's `DistributedDataParallel`, on gloo, NCCL or any other backend."""

    name: ClassVar[str] = "ddp"
    _wraps: bool = False
    """Whether this strategy has wrapped a model."""

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model that has trainable parameters.

        Args:
            model: The model, on its device and in its precision.

        Returns:
            The DDP module, or the model itself if no parameter requires a gradient.

        Raises:
            ValueError: The model is spread across several devices by a device map, or has parameters that are DTensors.
        """
        bypassed = environ.text("ACCELERATE_BYPASS_DEVICE_MAP") == "true"
        if is_on_several_devices(model) and not bypassed:
            raise ValueError(
                "a model that a device map spreads across several devices cannot be trained by several processes; "
                "start one process, load the model without device_map, or set ACCELERATE_BYPASS_DEVICE_MAP=true if "
                "each process has devices of its own"
            )
        if ddp_inside(model) is not None or not any(p.requires_grad for p in model.parameters()):
            return model
        if model_has_dtensor(model):
            raise ValueError(
                "a model whose parameters are DTensors cannot be replicated by DDP, because each rank has a part of "
                "it; pass the layout that split it: Accelerator(parallelism_config=ParallelismConfig(tp_size=...)), "
                "or load the model without device_map='auto' and tp_plan"
            )
        handler = self.setup.ddp_handler
        device = self.setup.device
        # DDP rejects devices without an index: the CPU, and device types with one device per process.
        placed: dict[str, Any] = {"device_ids": [device], "output_device": device}
        if device.index is None or bypassed:
            placed = {}
        wrapped = DistributedDataParallel(model, **placed, **(handler.to_kwargs() if handler is not None else {}))
        keep_group_for(wrapped.process_group, wrapped.reducer, wrapped.logger)
        self._wraps = True
        if wrapped.find_unused_parameters and not wrapped.static_graph:
            wrapped.register_forward_hook(_remember_outputs)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        return wrapped

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        wrapped = [found for model in models if (found := ddp_inside(model)) is not None]
        if wrapped:
            return Unsynchronised(wrapped)
        if self._wraps:
            warn_once(
                "accumulate() was given no prepared model, so gradients are exchanged in every batch; pass the "
                "model that prepare() returned: with accelerator.accumulate(model)"
            )
        return NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        wrapped = ddp_inside(model)
        return super().no_sync(model) if wrapped is None else Unsynchronised([wrapped])

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks that have run out of batches join the collectives of others; see `Accelerator.join_uneven_inputs`.

        Raises:
            ValueError: An object is not a model and does not support joining.
        """
        if isinstance(joinables, torch.nn.Module):
            raise ValueError("join_uneven_inputs takes a list: accelerator.join_uneven_inputs([model])")
        joined = [found for item in joinables if (found := _joinable(item)) is not None]
        with even_batches_set(self.dataloaders, even_batches) as others:
            if even_batches is not None and others:
                warn_user("join_uneven_inputs(even_batches=...) does not apply to loaders of iterable datasets")
            with Join(joined, enable=True, throw_on_early_termination=False) if joined else NOTHING:
                yield


def _joinable(item: Any) -> Joinable | None:
    """Return the object to join, or None for a plain model, which exchanges nothing between ranks."""
    for candidate in (item, ddp_inside(item), getattr(item, "optimizer", None)):
        if isinstance(candidate, Joinable):
            return candidate
    if isinstance(item, torch.nn.Module):  # This may be a moving average of the weights, evaluated like the model.
        warn_once(f"join_uneven_inputs() has no effect on {type(item).__name__}: it is not a model from prepare()")
        return None
    raise ValueError(
        f"{type(item).__name__} cannot be joined; pass prepared models: accelerator.join_uneven_inputs([model])"
    )


class Unsynchronised:
    """A context that keeps the backward pass of DDP models from exchanging gradients.

    It has the same effect as `DistributedDataParallel.no_sync` of each model, at a tenth of the cost. Models with a
    static graph still exchange gradients in one pass: torch records the graph in a backward pass that exchanges
    gradients, and would otherwise fail an assertion. The gradients at the end of the accumulation window are the same
    either way.

    Args:
        models: The DDP modules to keep from exchanging gradients.
    """

    __slots__ = ("_before", "_models")

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before = [model.require_backward_grad_sync for model in self._models]
        for model in self._models:
            model.require_backward_grad_sync = model.static_graph and not recorded_static_graph(model)

    def __exit__(self, *_: object) -> None:
        for model, before in zip(self._models, self._before, strict=True):
            model.require_backward_grad_sync = before


_outputs: WeakKeyDictionary[DistributedDataParallel, list[torch.Tensor]] = WeakKeyDictionary()


def _remember_outputs(model: DistributedDataParallel, _: Any, output: Any) -> None:
    """Keep references to the graph of a forward pass whose backward pass will not exchange gradients.

    The references are empty slices of the outputs, so the memory of the outputs can still be freed.
    """
    kept: list[torch.Tensor] = []
    if torch.is_grad_enabled() and not model.require_backward_grad_sync:
        dense = [tensor for tensor in leaves_of(output) if tensor.requires_grad and tensor.layout == torch.strided]
        kept = [tensor.reshape(-1)[:0].clone() for tensor in dense]
    _outputs[model] = kept


@contextmanager
def synchronised_backward(model: Any) -> Iterator[None]:
    """Make the next backward pass exchange gradients, even though the forward pass ran under `no_sync`.

    Args:
        model: A prepared model. A model that DDP does not wrap is left as it is.

    Yields:
        Nothing.

    Raises:
        ValueError: DDP searches for unused parameters, but the model's last forward pass did not run under `no_sync`.
    """
    wrapped = ddp_inside(model)
    if wrapped is None:
        yield
        return
    before = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
    wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
    # DDP's forward pass only prepares the reducer if it knows that gradients will be exchanged.
    wrapped.reducer.prepare_for_backward(_outputs_to_search(wrapped))
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync = before


def _outputs_to_search(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the outputs that DDP searches for unused parameters, or an empty list if it does not search."""
    if not model.find_unused_parameters or model.static_graph:
        return []
    outputs = _outputs.get(model)
    if not outputs:
        raise ValueError(
            "trigger_sync_in_backward with find_unused_parameters=True needs a forward of the prepared model under "
            "accelerator.no_sync(model) before it, and the backward pass of its loss"
        )
    return outputs
