"""What a strategy is: it prepares objects, and owns backward, synchronisation, clipping and the states it sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.strategies.model_placement import is_on_several_devices, place_model
from notebook_accelerate.strategies.module_queries import compile_regions
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel, is_compiled_module
from notebook_accelerate.telemetry.sharding_events import ShardReport

Parameters = torch.Tensor | Sequence[torch.Tensor]
NOTHING: AbstractContextManager[None] = nullcontext()
"""A context that does nothing and is entered as often as one likes."""


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, (LRScheduler, AcceleratedScheduler)) or all(
        hasattr(item, name) for name in ("step", "get_last_lr", "state_dict")
    )


# The first test that holds says what an object is.
_KINDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("data_loader", lambda item: isinstance(item, DataLoader)),
    ("model", lambda item: isinstance(item, torch.nn.Module)),
    ("optimizer", lambda item: isinstance(item, torch.optim.Optimizer)),
    ("scheduler", _is_scheduler),
    ("nothing", lambda item: item is None),
)


def kind_of(item: Any) -> str:
    """Say which kind of training object something is.

    Args:
        item: What `prepare` was given.

    Returns:
        model, optimizer, data_loader, scheduler, or nothing for None.

    Raises:
        ValueError: It is none of them.
    """
    for kind, test in _KINDS:
        if test(item):
            return kind
    raise ValueError(
        f"prepare() was given {type(item).__name__} ({_short(item)}); it takes torch modules, optimizers, DataLoaders "
        "and learning rate schedulers, as in: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    )


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Strategy:
    """One process, and the base class of the others.

    Args:
        setup: The settings of the `Accelerator`.

    Attributes:
        models: The models prepared for training, as they were given.
        optimizers: The prepared optimizers.
        schedulers: The prepared schedulers.
        dataloaders: The prepared loaders.
    """

    name: ClassVar[str] = "single"
    checkpoint_layout: ClassVar[str] = "whole"
    """How checkpoints hold the models: whole, or a name of its own where the strategy writes and reads them itself."""
    should_save_model: ClassVar[bool] = True
    """Whether the model's weights are whole on a rank that saves."""
    order: ClassVar[Mapping[str, int]] = {"scheduler": 1}
    """Which kinds of objects are prepared after (above 0) or before the others.

    Schedulers come last: they look for the prepared optimizer they belong to.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[DataLoader[Any]] = []
        self._told: ShardReport | None = None

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Prepare objects in any order; every rank must call this with the same kinds.

        Args:
            objects: Models, optimizers, loaders, schedulers.
            placements: For each, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects, in the order given.
        """
        kinds = [kind_of(item) for item in objects]
        results = list(objects)
        self._join(results, kinds)
        for position in sorted(range(len(kinds)), key=lambda index: self.order.get(kinds[index], 0)):
            results[position] = self._prepare_one(kinds[position], results[position], placements[position])
        return results

    def _join(self, objects: list[Any], kinds: Sequence[str]) -> None:
        """Let the precision change models and optimizers together, in place."""
        places = [[at for at, kind in enumerate(kinds) if kind == wanted] for wanted in ("model", "optimizer")]
        given = [[objects[at] for at in those] for those in places]
        for those, new in zip(places, self.setup.precision.join(*given), strict=True):
            for at, item in zip(those, new, strict=True):
                objects[at] = item

    def _prepare_one(self, kind: str, item: Any, placement: bool | None) -> Any:
        if kind == "scheduler":
            return self.prepare_scheduler(item)
        if kind == "model":
            return self.prepare_model(item, placement)
        if kind == "optimizer":
            return self.prepare_optimizer(item, placement)
        return item if kind == "nothing" else self.prepare_data_loader(item, placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model.

        Args:
            model: The model.
            device_placement: Whether it goes to the device; None means the Accelerator's setting.
            evaluation_mode: Prepare it for inference only: nothing is exchanged between ranks.

        Returns:
            The prepared model; what was done to a model prepared before (by another Accelerator, or in the kernel
            before a launch) is not done twice.
        """
        if device_placement is None:
            device_placement = self.setup.device_placement
        if device_placement and not is_on_several_devices(model):
            model = place_model(model, self.setup.device)
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        self.setup.precision.wrap_model(inner)
        if not evaluation_mode:
            _add(self.models, inner)
        prepared = self.compile(model if evaluation_mode else self.wrap_model(model))
        prepared._is_accelerate_prepared = True  # type: ignore[assignment]
        return prepared

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model that trains alone into one that trains with the other ranks.

        Args:
            model: The model, on its device and in its precision.

        Returns:
            The wrapped model.
        """
        return model

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile a model where the Accelerator was told to.

        Args:
            model: The wrapped model.

        Returns:
            The compiled model, or the model itself.
        """
        plugin = self.setup.dynamo_plugin
        if plugin is None or plugin.backend in {None, "NO", "no"} or is_compiled_module(model):
            return model
        if plugin.use_regional_compilation:
            return compile_regions(model, **plugin.to_kwargs())
        compiled: Any = torch.compile(model, **plugin.to_kwargs())
        return compiled  # type: ignore[no-any-return]

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
        if any(optimizer is kept for kept in self.optimizers):
            return optimizer  # type: ignore[return-value]
        optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if device_placement is None:
            device_placement = self.setup.device_placement
        prepared = AcceleratedOptimizer(optimizer, device_placement, self.setup.scaler)
        prepared.gradient_state = self.setup.gradient_state
        prepared._reports_progress = not self.optimizers
        prepared._is_accelerate_prepared = True
        self.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler.

        Args:
            scheduler: The scheduler.

        Returns:
            The prepared scheduler; one that this Accelerator prepared before is returned as it is.
        """
        if any(scheduler is kept for kept in self.schedulers):
            return scheduler  # type: ignore[no-any-return]
        scheduler = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
        wanted = getattr(scheduler, "optimizer", None)
        wanted = wanted.optimizer if isinstance(wanted, AcceleratedOptimizer) else wanted
        own = [optimizer for optimizer in self.optimizers if wanted is optimizer.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self.optimizers,
            step_with_optimizer=self.setup.step_scheduler_with_optimizer,
            split_batches=self.setup.dataloader_config.split_batches,
        )
        prepared.gradient_state = self.setup.gradient_state
        prepared._is_accelerate_prepared = True
        self.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Prepare a loader.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: How a batch that rank 0 reads is cut for the ranks; None: by the first dimension.

        Returns:
            The prepared loader; one that was prepared before for this rank of this world is returned as it is.
        """
        from notebook_accelerate.data_loader import prepare_data_loader

        place = (self.setup.state.num_processes, self.setup.state.process_index)
        if getattr(data_loader, "_prepared_for", None) == place:
            data_loader.gradient_state = self.setup.gradient_state
            _add(self.dataloaders, data_loader)
            return data_loader
        if device_placement is None:
            device_placement = self.setup.device_placement
        prepared: Any = prepare_data_loader(
            data_loader,
            self.setup.device,
            put_on_device=device_placement,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            **self._loader_settings(),
        )
        prepared.gradient_state = self.setup.gradient_state
        prepared._is_accelerate_prepared = True
        prepared._prepared_for = place
        self.dataloaders.append(prepared)
        return prepared  # type: ignore[no-any-return]

    def _loader_settings(self) -> dict[str, Any]:
        config, state = self.setup.dataloader_config, self.setup.state
        return {
            "num_processes": state.num_processes,
            "process_index": state.process_index,
            "split_batches": config.split_batches,
            "rng_types": None if self.setup.rng_types is None else list(self.setup.rng_types),
            "dispatch_batches": config.dispatch_batches,
            "even_batches": config.even_batches,
            "use_seedable_sampler": config.use_seedable_sampler,
            "data_seed": config.data_seed,
            "non_blocking": config.non_blocking,
            "use_stateful_dataloader": config.use_stateful_dataloader,
            "torch_device_mesh": self.setup.state.device_mesh,
        }

    # -- training -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of a loss, scaled where the precision asks for it.

        Args:
            loss: The loss, divided by the batches of a window already.
            kwargs: As for `torch.Tensor.backward`.
        """
        if self.setup.scaler is None:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        else:
            self.setup.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients of some models.

        Args:
            models: Prepared models.

        Returns:
            A context manager.
        """
        return NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients of one model.

        Args:
            model: A prepared model, or any object with a method `no_sync`.

        Returns:
            A context manager.
        """
        return model.no_sync() if hasattr(model, "no_sync") else NOTHING

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may have different numbers of batches.

        Args:
            joinables: Prepared models (and optimizers that exchange something).
            even_batches: Setting of the prepared loaders inside the context; None keeps it.

        Returns:
            A context manager; alone there is nothing to join.
        """
        return NOTHING

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], kept_split: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context in which sequences are split over ranks, where the strategy does that.

        Args:
            buffers: Tensors that are split in place.
            dims: Their sequence dimensions.
            kept_split: Those that are not made whole again afterwards.

        Returns:
            A context manager.
        """
        return NOTHING

    def sequence_loader(self, loader: Any) -> Any:
        """Make a loader hand out pieces of sequences, where ranks share sequences that each has read.

        Args:
            loader: A prepared loader.

        Returns:
            The loader of pieces; here ranks share none, and it is the loader itself.
        """
        return loader

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the scale of the loss, once per step, in precisions that scale it.

        Args:
            optimizer: A prepared optimizer or several; None means all.
        """
        if self.setup.scaler is None:
            return
        given = self.optimizers if optimizer is None else optimizer
        for item in given if isinstance(given, (list, tuple)) else [given]:
            while isinstance(item, AcceleratedOptimizer):
                item = item.optimizer  # noqa: PLW2901 - down to the optimizer that the scaler knows
            self.setup.scaler.unscale_(item)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`.

        Args:
            parameters: The parameters.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping.
        """
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters_in(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value].

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value allowed.
        """
        self.unscale_gradients()
        with_gradient = [parameter for parameter in parameters_in(parameters) if parameter.grad is not None]
        if with_gradient:  # torch fails where there is none
            torch.nn.utils.clip_grad_value_(with_gradient, clip_value)

    # -- states -------------------------------------------------------------------------------------------------------

    def model_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state; every rank must call this.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict.
        """
        return (extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model).state_dict()

    # -- what is where ------------------------------------------------------------------------------------------------

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        return shard_report.of(self)

    def tell_sharding(self) -> None:
        """Tell the kernel that launched this rank what it holds, where that has changed."""
        self._told = shard_report.tell(self, self._told)

    def clear(self) -> None:
        """Forget all prepared objects."""
        for kept in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kept.clear()


def parameters_in(given: Any) -> list[torch.Tensor]:
    """List parameters whose gradients are to be clipped.

    Args:
        given: A tensor or tensors.

    Returns:
        The tensors.

    Raises:
        ValueError: It is a model.
    """
    if isinstance(given, torch.nn.Module):
        raise ValueError(
            f"gradients are clipped of parameters; got {type(given).__name__}: write "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm)"
        )
    return [given] if isinstance(given, torch.Tensor) else list(given)


def joint_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over several sets of gradients.

    Args:
        norms: That of each set.
        norm_type: Which norm.

    Returns:
        Theirs together; 0 where there is none.
    """
    if len(norms) == 1:
        return norms[0]
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms) or [torch.zeros(())]), norm_type)
    return joint


@contextmanager
def even_batches_set(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[list[Any]]:
    """Give loaders another `even_batches` inside a block.

    Args:
        loaders: Prepared loaders.
        even_batches: The setting; None keeps it.

    Yields:
        The loaders that have no such setting (iterable datasets).
    """
    holders = [loader.batch_sampler for loader in loaders if hasattr(loader.batch_sampler, "even_batches")]
    before = [holder.even_batches for holder in holders]
    for holder in holders if even_batches is not None else ():
        holder.even_batches = even_batches
    try:
        yield [loader for loader in loaders if not hasattr(loader.batch_sampler, "even_batches")]
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.even_batches = value


def _add(items: list[Any], item: Any) -> None:
    if not any(kept is item for kept in items):
        items.append(item)
