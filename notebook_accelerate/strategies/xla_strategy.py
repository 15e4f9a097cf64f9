"""XLA devices (TPUs): steps are traced into graphs, which run when the step is over or a value is asked for.

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
from notebook_accelerate.strategies.parameter_names import ParameterReplacements, parameters_by_name
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.strategy import Strategy
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.telemetry.sharding_events import ShardReport


class XLAOptimizer(AcceleratedOptimizer):
    """An optimizer that averages gradients over ranks before it steps, and runs the step's graph afterwards."""

    _average_gradients: Callable[[], None]

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        self._average_gradients()
        result = super()._take_step(closure)
        self.gradient_state.is_xla_gradients_synced = False
        torch_xla.sync()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, where this batch completes a window; do nothing elsewhere.

        Args:
            set_to_none: Set gradients to None rather than zero; None means the optimizer's default.
        """
        super().zero_grad(set_to_none)
        self.gradient_state.is_xla_gradients_synced = False


class XLAStrategy(Strategy):
    """One rank per device; every rank has the whole model, and gradients are averaged when a window is complete."""

    name: ClassVar[str] = "xla"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._replacements = ParameterReplacements()

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model; on its way to an XLA device, its parameters become other objects.

        Args:
            model: The model.
            device_placement: Whether it goes to the device; None means the Accelerator's setting.
            evaluation_mode: Prepare it for inference only: nothing is exchanged between ranks.

        Returns:
            The prepared model.
        """
        before = parameters_by_name(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._replacements.record(before, parameters_by_name(prepared))
        for optimizer in self.optimizers:
            self._replacements.apply(optimizer.optimizer)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared optimizer; one that this Accelerator prepared before is returned as it is.
        """
        self._replacements.apply(optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer)
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = XLAOptimizer
        prepared._average_gradients = self.average_gradients
        return prepared  # type: ignore[no-any-return]

    def average_gradients(self) -> None:
        """Average all optimizers' gradients over ranks, where a window is complete and it was not done yet.

        Every rank must call this. What is averaged twice stays as it is, so several optimizers do no harm.
        """
        state = self.setup.gradient_state
        if state.sync_gradients and not state.is_xla_gradients_synced:
            for optimizer in self.optimizers:
                xm.reduce_gradients(optimizer.optimizer)  # does nothing in a world of one
            state.is_xla_gradients_synced = True

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give every rank rank 0's weights, as DistributedDataParallel does; every rank must call this.

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
        """Prepare a loader; the graph that is being traced runs between two batches, also where nothing steps.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: How a batch that rank 0 reads is cut for the ranks; None: by the first dimension.

        Returns:
            The prepared loader.
        """
        prepared: Any = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared.between_batches = torch_xla.sync
        return prepared  # type: ignore[no-any-return]

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        devices = runtime.global_runtime_device_count() if runtime.is_spmd() else 1
        return shard_report.count_shards(
            self, variant=f"SPMD, batches split over {devices} devices" if devices > 1 else ""
        )

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`; every rank must call this.

        Args:
            parameters: The parameters.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping, of the gradients averaged over ranks.
        """
        self.average_gradients()
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]; every rank must call this.

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value allowed.
        """
        self.average_gradients()
        super().clip_grad_value(parameters, clip_value)

    def model_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state in main memory: tensors of XLA have no memory that could be written.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict; parameters that are one stay one.
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
    """Share the rows of a model's inputs out over the devices of this process; the compiler does the rest."""
    devices = runtime.global_runtime_device_count()
    mesh = spmd.Mesh(list(range(devices)), (devices,), ("data",))

    def split(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] % devices == 0:
            spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.dim() - 1)))
        return tensor

    return recursively_apply(split, args), recursively_apply(split, kwargs)


__all__ = ["XLAOptimizer", "XLAStrategy"]
