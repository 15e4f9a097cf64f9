"""The strategy for XLA devices (TPUs), which trace steps as graphs and run a graph when a step ends or a value is read.

Source: https://docs.pytorch.org/xla/master/learn/pytorch-on-xla-devices.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader
from torch_xla import runtime
from torch_xla.distributed import spmd

from notebook_accelerate.collectives import recursively_apply
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.module_queries import ParameterReplacements, parameters_by_name
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.strategy import Strategy, inner_optimizer
from notebook_accelerate.telemetry.sharding import ShardReport


class XLAOptimizer(AcceleratedOptimizer):
    """An optimizer that averages gradients over ranks before its step, and then runs the traced graph."""

    _average_gradients: Callable[[], None]

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        self._average_gradients()
        result = super()._take_step(closure)
        self.gradient_state.is_xla_gradients_synced = False
        torch_xla.sync()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        self.gradient_state.is_xla_gradients_synced = False


class XLAStrategy(Strategy):
    """Trains one rank per device, each with the whole model, and averages gradients at the end of a window."""

    name: ClassVar[str] = "xla"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._replacements = ParameterReplacements()

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """See `Strategy.prepare_model`. Optimizers are updated, because a move to XLA replaces a model's parameters."""
        before = parameters_by_name(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._replacements.record(before, parameters_by_name(prepared))
        for optimizer in self.optimizers:
            self._replacements.apply(optimizer.optimizer)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """See `Strategy.prepare_optimizer`. The optimizer averages gradients before each step."""
        self._replacements.apply(inner_optimizer(optimizer))
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = XLAOptimizer
        prepared._average_gradients = self.average_gradients
        return prepared  # type: ignore[no-any-return]

    def average_gradients(self) -> None:
        """Average the gradients of all optimizers over ranks, once per window; every rank must call this.

        Optimizers may share gradients, because averaging a gradient a second time does not change it.
        """
        state = self.setup.gradient_state
        if state.sync_gradients and not state.is_xla_gradients_synced:
            for optimizer in self.optimizers:
                xm.reduce_gradients(optimizer.optimizer)  # If there is only one rank, this does nothing.
            state.is_xla_gradients_synced = True

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Broadcast rank 0's weights, as DistributedDataParallel does; every rank must call this.

        Args:
            model: The model, on its device.

        Returns:
            The model itself.
        """
        if self.setup.state.num_processes > 1:
            xm.broadcast_master_param(model)
        if runtime.is_spmd():
            model.register_forward_pre_hook(_split_batch, with_kwargs=True)
        return model

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """See `Strategy.prepare_data_loader`. The traced graph runs between batches even without optimizer steps."""
        prepared: Any = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared.between_batches = torch_xla.sync
        return prepared  # type: ignore[no-any-return]

    def sharding(self) -> ShardReport:
        devices = runtime.global_runtime_device_count() if runtime.is_spmd() else 1
        return shard_report.count_shards(
            self, variant=f"SPMD, batches split over {devices} devices" if devices > 1 else ""
        )

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Strategy.clip_grad_norm`. Gradients are first averaged over ranks, so every rank must call this."""
        self.average_gradients()
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """See `Strategy.clip_grad_value`. Gradients are first averaged over ranks, so every rank must call this."""
        self.average_gradients()
        super().clip_grad_value(parameters, clip_value)

    def model_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `Strategy.model_state_dict`. Tensors are copied to the CPU, because XLA tensors have no storage to write.

        Returns:
            The state dict. Shared parameters stay shared.
        """
        moved: dict[int, Any] = {}
        state = super().model_state_dict(model, unwrap)
        for value in state.values():
            if isinstance(value, torch.Tensor) and id(value) not in moved:
                moved[id(value)] = value.cpu()
        return {name: moved.get(id(value), value) for name, value in state.items()}


def _split_batch(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split the rows of a model's inputs across this process's devices.

    The XLA compiler distributes the computation.
    """
    devices = runtime.global_runtime_device_count()
    mesh = spmd.Mesh(list(range(devices)), (devices,), ("data",))

    def split(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] % devices == 0:
            spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.dim() - 1)))
        return tensor

    return recursively_apply(split, args), recursively_apply(split, kwargs)
