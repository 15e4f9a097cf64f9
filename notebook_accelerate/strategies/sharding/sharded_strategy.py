"""Parameters of which each rank has a part: what the versions of FSDP and tensor parallelism have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from notebook_accelerate.collectives.collective_watchdog import start_watchdog
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.fsdp import fsdp_checkpoint
from notebook_accelerate.strategies.fsdp.fsdp_units import upcast
from notebook_accelerate.strategies.parameter_names import Pointers, names_of, parameters_of
from notebook_accelerate.strategies.sharding.local_shards import StatePart
from notebook_accelerate.strategies.sharding.write_plans import forget_plans
from notebook_accelerate.strategies.strategy import NOTHING, Strategy, joint_norm, parameters_in
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel, is_compiled_module


class ShardedStrategy(Strategy):
    """Every rank has a part of parameters, gradients and optimizer states.

    Attributes:
        models: The prepared models, sharded.
    """

    checkpoint_layout: ClassVar[str] = "fsdp"
    shards_parameters: ClassVar[bool] = False
    """Whether parameters are sharded one by one, so that a precision may decide how each is gathered."""
    order: ClassVar[Mapping[str, int]] = {"model": -1, "scheduler": 1}  # optimizers take the sharded parameters over

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._pointers = Pointers()
        start_watchdog()  # otherwise save_state on some ranks only hangs: every rank writes a part

    @property
    def state_dict_kind(self) -> str:
        """How checkpoints hold the parts: SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT."""
        return "SHARDED_STATE_DICT"

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; every rank must call this.

        Args:
            model: The model.
            device_placement: Not used: a unit goes to the device when it is sharded.
            evaluation_mode: Prepare it for inference only: it stays whole.

        Returns:
            The sharded model; one that is sharded already is left as it is.
        """
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        wrapped: nn.Module = _bare(model)
        before = names_of(wrapped)  # the precision may replace parameters too
        self.setup.precision.wrap_model(inner, self.shards_parameters)
        if not self.is_sharded(wrapped):
            if self.setup.precision.compute_dtype is not None and upcast(wrapped):
                warn_once(f"{type(inner).__name__} has parameters of low precision: they are trained in float32")
            wrapped = self.wrap_model(wrapped)
            self._pointers.note(before, self.sharded_names(wrapped))
            for optimizer in self.optimizers:
                self._pointers.apply(optimizer.optimizer)
        if not any(wrapped is kept for kept in self.models):
            self.models.append(wrapped)
        prepared = self.compile(model if is_compiled_module(model) else wrapped)
        prepared._is_accelerate_prepared = True  # type: ignore[assignment]
        return prepared

    def is_sharded(self, model: nn.Module) -> bool:
        """Tell whether a model is sharded by this version of FSDP.

        Args:
            model: The model.
        """
        raise NotImplementedError

    def sharded_names(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what an optimizer trains, by the plain names of the model's parameters.

        Args:
            model: The sharded model.
        """
        return names_of(model)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer; parameters it has from before the sharding are replaced.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared optimizer.

        Raises:
            ValueError: Its parameters belong to no prepared model.
        """
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        self._pointers.apply(inner)
        if self.models and not any(True for _ in self._owners(inner)):
            raise ValueError(
                f"{type(inner).__name__} has no parameter of a prepared model: it was created before the model was "
                "sharded, or for another one. Prepare them together: model, optimizer = accelerator.prepare(model, "
                "optimizer), or create it from model.parameters() of the prepared model"
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def _owners(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """List the prepared models that an optimizer trains."""
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        return [model for model in self.models if any(id(parameter) in trained for parameter in model.parameters())]

    # -- training -----------------------------------------------------------------------------------------------------

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward keeps gradients whole and does not exchange them.

        Args:
            models: Prepared models.

        Returns:
            A context manager.
        """
        sharded = [bare for model in models if self.is_sharded(bare := _bare(model))]
        return self.unsynchronised(sharded) if sharded else NOTHING

    def unsynchronised(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward of sharded models does not exchange gradients.

        Args:
            models: Sharded models.
        """
        return NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients of one model.

        Args:
            model: A prepared model, or any object with a method `no_sync`.

        Returns:
            A context manager.
        """
        return self.accumulating([model]) if self.is_sharded(_bare(model)) else super().no_sync(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Warn that sharded models cannot be joined: a rank without a batch would miss the others' exchanges.

        Args:
            joinables: Not used.
            even_batches: Not used.

        Returns:
            A context manager that does nothing.
        """
        warn_once(
            "join_uneven_inputs has no effect on models of which each rank has a part: every rank must run every "
            "forward; keep even_batches=True"
        )
        return NOTHING

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`; every rank must call this.

        Args:
            parameters: The parameters.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping, over all shards.
        """
        self.unscale_gradients()
        groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters_in(parameters):
            if parameter.grad is not None:
                groups[getattr(parameter.grad, "device_mesh", None)].append(parameter)
        total = joint_norm([_norm_of(group, norm_type) for group in groups.values()], norm_type)
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value].

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value allowed.
        """
        self.unscale_gradients()
        for parameter in parameters_in(parameters):
            if parameter.grad is not None:
                grad = parameter.grad
                (grad.to_local() if hasattr(grad, "to_local") else grad).clamp_(-clip_value, clip_value)

    # -- states -------------------------------------------------------------------------------------------------------

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state; every rank must call this.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict in main memory on rank 0, nothing on other ranks.
        """
        bare = _bare(model)
        return (
            fsdp_checkpoint.whole_model_state(bare)
            if self.is_sharded(bare)
            else super().model_state_dict(model, unwrap)
        )

    def state_parts(self, safe_serialization: bool = True, **options: Any) -> list[StatePart]:
        """Return what this rank writes of models and optimizers; every rank must call this.

        Args:
            safe_serialization: Not used: the formats are torch's.
            options: None is known.

        Returns:
            The parts, in the same order on every rank; they refer to the memory that is trained.

        Raises:
            ValueError: An option is not known.
        """
        _refuse("save_state", options)
        kind = self.state_dict_kind
        parts = [
            part for index, model in enumerate(self.models) for part in fsdp_checkpoint.model_parts(model, index, kind)
        ]
        for index, optimizer in enumerate(self.optimizers):
            parts += fsdp_checkpoint.optimizer_parts(optimizer.optimizer, self._model_of(optimizer), index, kind)
        return parts

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read models and optimizers from a folder; every rank must call this.

        Args:
            folder: The checkpoint.
            models: The prepared models that no hook has loaded.
            options: `strict`: whether the names must be those of the models.

        Raises:
            ValueError: An option is not known.
        """
        strict = options.pop("strict", True)
        _refuse("load_state", options)
        for index, model in enumerate(self.models):
            if any(model is wanted for wanted in models):
                fsdp_checkpoint.load_model(model, folder, index, strict)
        for index, optimizer in enumerate(self.optimizers):
            fsdp_checkpoint.load_optimizer(optimizer.optimizer, self._model_of(optimizer), folder, index)

    def _model_of(self, optimizer: AcceleratedOptimizer) -> nn.Module:
        owners = self._owners(optimizer.optimizer)
        if len(owners) != 1:
            raise ValueError(
                f"{type(optimizer.optimizer).__name__} trains {len(owners)} of the {len(self.models)} prepared models; "
                "a checkpoint of sharded states needs one optimizer for each model"
            )
        return owners[0]

    def clear(self) -> None:
        """Forget all prepared objects."""
        super().clear()
        self._pointers.forget()
        forget_plans()


def _bare(model: Any) -> Any:
    return model._orig_mod if is_compiled_module(model) else model


def _refuse(call: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"{call} of sharded models knows no {', '.join(options)}; leave it out")


def _norm_of(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def broadcast_start(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's weights and buffers, as DistributedDataParallel does; every rank must call this.

    Args:
        model: The model before it is sharded.
        device: The device that the ranks exchange tensors on.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, src=0)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)
