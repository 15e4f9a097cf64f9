"""The base class of strategies, which prepare objects, run the backward pass, and synchronise and clip gradients."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.module_queries import (
    check_quantized_places,
    check_values,
    compile_regions,
    compiled_around,
    is_compiled_module,
    is_on_several_devices,
    without_wrappers,
)
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.telemetry.sharding import ShardReport

_Prepared = TypeVar("_Prepared", bound=Any)
NOTHING: AbstractContextManager[None] = nullcontext()
"""A context manager that does nothing and can be entered any number of times."""


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, (LRScheduler, AcceleratedScheduler)) or all(
        hasattr(item, name) for name in ("step", "get_last_lr", "state_dict")
    )


# The order matters: the kind of an object is the first one whose test returns True.
_KINDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("data_loader", lambda item: isinstance(item, DataLoader)),
    ("model", lambda item: isinstance(item, torch.nn.Module)),
    ("optimizer", lambda item: isinstance(item, torch.optim.Optimizer)),
    ("scheduler", _is_scheduler),
)


def kind_of(item: Any) -> str:
    """Return the kind of a training object.

    Args:
        item: An argument of `prepare`.

    Returns:
        "model", "optimizer", "data_loader", "scheduler" or "other". `prepare` returns other objects as they are.
    """
    return next((kind for kind, test in _KINDS if test(item)), "other")


def indices_by_kind(objects: Sequence[Any], kind: Callable[[Any], str] = kind_of) -> Mapping[str, list[int]]:
    """Group the arguments of `prepare` by kind.

    Args:
        objects: The arguments of `prepare`.
        kind: A function that returns the kind of an object.

    Returns:
        The indices of the objects of each kind. For a kind without objects, the list is empty.
    """
    indices: defaultdict[str, list[int]] = defaultdict(list)
    for at, item in enumerate(objects):
        indices[kind(item)].append(at)
    return indices


class Strategy:
    """The base class of strategies. Used directly, it trains with a single process.

    Args:
        setup: The settings of the `Accelerator`.

    Attributes:
        models: The models prepared for training, without wrappers.
        optimizers: All optimizers that were prepared.
        schedulers: All schedulers that were prepared.
        dataloaders: The prepared loaders.
    """

    name: ClassVar[str] = "single"
    checkpoint_layout: ClassVar[str] = "whole"
    """How checkpoints store models: "whole", or another name if the strategy itself writes and reads them."""
    all_ranks_save: ClassVar[bool] = False
    """Whether every rank writes a part when a model is saved."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.models: list[torch.nn.Module] = []
        self.compiled_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """The models that were already compiled when they were prepared."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[DataLoader[Any]] = []
        self._reported: ShardReport | None = None

    # ---- preparing

    def __getstate__(self) -> dict[str, Any]:
        # pickle cannot write a WeakSet.
        return {**self.__dict__, "compiled_models": list(self.compiled_models)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.compiled_models = weakref.WeakSet(state["compiled_models"])

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Prepare objects; every rank must call this with the same kinds of objects.

        Models are prepared first, because this may replace their parameters. Optimizers are then switched to the new
        parameters. Schedulers are prepared last, because each of them looks up its prepared optimizer.

        Args:
            objects: Models, optimizers, loaders and schedulers in any order. Other objects are returned as they are.
            placements: For each object, whether to move it to the device. If None, the Accelerator's setting is used.

        Returns:
            The prepared objects in the same order.
        """
        indices = indices_by_kind(objects)
        results = list(objects)
        self._join_precision(results, indices["model"], indices["optimizer"])
        for at in indices["model"]:
            results[at] = self.prepare_model(results[at], placements[at])
        for at in indices["optimizer"]:
            results[at] = self.prepare_optimizer(results[at], placements[at])
        for at in indices["data_loader"]:
            results[at] = self.prepare_data_loader(results[at], placements[at])
        for at in indices["scheduler"]:
            results[at] = self.prepare_scheduler(results[at])
        return results

    def _join_precision(self, objects: list[Any], models: Sequence[int], optimizers: Sequence[int]) -> None:
        """Let the precision replace models and optimizers together. The list ``objects`` is changed in place."""
        joined = self.setup.precision.join([objects[at] for at in models], [objects[at] for at in optimizers])
        for positions, items in zip((models, optimizers), joined, strict=True):
            for position, item in zip(positions, items, strict=True):
                objects[position] = item

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """See `Accelerator.prepare_model`. A model that is already prepared is not wrapped a second time."""
        check_quantized_places(model)
        if device_placement is None:
            device_placement = self.setup.device_placement
        if device_placement and not is_on_several_devices(model):
            check_values(model, "load its weights before prepare(), or prepare with device_placement=[False, ...]")
            model = model.to(self.setup.device)
        inner = without_wrappers(model)
        self.setup.precision.wrap_model(inner)
        if not evaluation_mode:
            if compiled_around(model) is not None and not any(inner is known for known in self.models):
                self.compiled_models.add(inner)
            add_once(self.models, inner)
        return self.compile_and_mark(model if evaluation_mode else self.wrap_model(model))

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model so that it trains together with the other ranks.

        Args:
            model: The model, on its device and in its precision.

        Returns:
            The wrapped model.
        """
        return model

    def compile_and_mark(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile a model if the Accelerator has a dynamo plugin, and mark the model as prepared.

        Args:
            model: The model to compile, with its wrappers.

        Returns:
            The compiled model, or the model itself if it is not compiled.
        """
        prepared = self.compile(model)
        prepared._is_accelerate_prepared = True  # type: ignore[assignment]
        return prepared

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile a model if the Accelerator has a dynamo plugin.

        Args:
            model: The model to compile, with its wrappers.

        Returns:
            The compiled model, or the model itself if it is not compiled.
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
        """See `Accelerator.prepare_optimizer`. An optimizer that is already prepared is returned as it is."""
        if any(optimizer is kept for kept in self.optimizers):
            return optimizer  # type: ignore[return-value]
        if device_placement is None:
            device_placement = self.setup.device_placement
        return self.keep(
            AcceleratedOptimizer(inner_optimizer(optimizer), device_placement, self.setup.scaler), self.optimizers
        )

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """See `Accelerator.prepare_scheduler`. A scheduler that is already prepared is returned as it is."""
        if any(scheduler is kept for kept in self.schedulers):
            return scheduler  # type: ignore[no-any-return]
        scheduler = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
        wanted = inner_optimizer(getattr(scheduler, "optimizer", None))
        own = [optimizer for optimizer in self.optimizers if wanted is optimizer.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self.optimizers,
            step_with_optimizer=self.setup.step_scheduler_with_optimizer,
            split_batches=self.setup.dataloader_config.split_batches,
        )
        return self.keep(prepared, self.schedulers)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """See `Accelerator.prepare_data_loader`. A loader that is already prepared for this rank is returned as is."""
        from notebook_accelerate.data_loader import prepare_data_loader

        rank = (self.setup.state.num_processes, self.setup.state.process_index)
        if getattr(data_loader, "_prepared_for", None) == rank:
            data_loader.gradient_state = self.setup.gradient_state
            add_once(self.dataloaders, data_loader)
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
        prepared._prepared_for = rank
        return self.keep(prepared, self.dataloaders)

    def keep(self, prepared: _Prepared, kept: list[Any]) -> _Prepared:
        """Mark an optimizer, scheduler or loader as prepared, pass it the gradient state, and add it to a list.

        Args:
            prepared: The optimizer, scheduler or loader to mark.
            kept: The list of prepared objects of the same kind.

        Returns:
            The prepared object itself.
        """
        prepared.gradient_state = self.setup.gradient_state
        prepared._is_accelerate_prepared = True
        kept.append(prepared)
        return prepared

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

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaling the loss first if the precision requires it.

        Args:
            loss: The loss, already divided by the number of batches in an accumulation window.
            kwargs: The arguments of `torch.Tensor.backward`.
        """
        if self.setup.scaler is None:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        else:
            self.setup.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context that keeps the backward pass from exchanging the gradients of some models.

        Args:
            models: The prepared models whose gradients stay local.
        """
        return NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context that keeps the backward pass from exchanging the gradients of one model.

        Args:
            model: A prepared model, or any object with a method `no_sync`.
        """
        return model.no_sync() if hasattr(model, "no_sync") else NOTHING

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """See `Accelerator.join_uneven_inputs`. A single process has nothing to join."""
        return NOTHING

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], kept_split: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context that splits sequences across ranks, if the strategy supports this.

        Args:
            buffers: The tensors to split in place.
            dims: The sequence dimension of each buffer.
            kept_split: The buffers that stay split afterwards.
        """
        return NOTHING

    def sequence_loader(self, loader: Any) -> Any:
        """Make a loader yield pieces of sequences, if ranks share the sequences of a batch with this strategy.

        Args:
            loader: The prepared loader to convert.

        Returns:
            A loader of pieces, or the loader itself if ranks do not share sequences.
        """
        return loader

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """See `Accelerator.unscale_gradients`."""
        if self.setup.scaler is None:
            return
        given = self.optimizers if optimizer is None else optimizer
        for item in given if isinstance(given, (list, tuple)) else [given]:
            while isinstance(item, AcceleratedOptimizer):
                item = item.optimizer  # noqa: PLW2901 - unwrap down to the optimizer that the scaler knows
            self.setup.scaler.unscale_(item)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Accelerator.clip_grad_norm_`."""
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters_in(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """See `Accelerator.clip_grad_value_`."""
        self.unscale_gradients()
        with_gradient = [parameter for parameter in parameters_in(parameters) if parameter.grad is not None]
        if with_gradient:  # torch raises an error for an empty list.
            torch.nn.utils.clip_grad_value_(with_gradient, clip_value)

    # ---- states

    def model_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `Accelerator.get_state_dict`."""
        return (without_wrappers(model) if unwrap else model).state_dict()

    def sharding(self) -> ShardReport:
        """Return the sizes of this rank's parameters, gradients and optimizer state, without a collective."""
        return shard_report.count_shards(self)

    def report_sharding(self) -> None:
        """Send the result of `sharding` to this rank's kernel, if the result has changed since the last call."""
        self._reported = shard_report.emit_changes(self, self._reported)

    def clear(self) -> None:
        """Forget all prepared objects."""
        for kept in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kept.clear()


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a prepared optimizer, or the object itself if it is not prepared.

    Args:
        optimizer: An optimizer, prepared or not.
    """
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def parameters_in(given: Any) -> list[torch.Tensor]:
    """List the parameters whose gradients are clipped.

    Args:
        given: A tensor, or an iterable of tensors.

    Returns:
        The parameters as a list.

    Raises:
        ValueError: `given` is a model.
    """
    if isinstance(given, torch.nn.Module):
        raise ValueError(
            f"clipping takes parameters, not a {type(given).__name__}; write "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm)"
        )
    return [given] if isinstance(given, torch.Tensor) else list(given)


def joint_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the joint norm of several sets of gradients.

    Args:
        norms: The norm of each set.
        norm_type: The type of the norm, such as 2.0 for the 2-norm.

    Returns:
        The norm, or 0 if there are no sets.
    """
    if len(norms) == 1:
        return norms[0]
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms) or [torch.zeros(())]), norm_type)
    return joint


@contextmanager
def even_batches_set(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[list[Any]]:
    """Change the setting `even_batches` of loaders inside a `with` block.

    Args:
        loaders: Prepared loaders.
        even_batches: The new value. If None, the current value is kept.

    Yields:
        The loaders without this setting, which read iterable datasets.
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


def add_once(items: list[Any], item: Any) -> None:
    """Append an object to a list unless the list contains it already.

    Args:
        items: The list to append to.
        item: The object, which is compared by identity.
    """
    if not any(kept is item for kept in items):
        items.append(item)


class SingleStrategy(Strategy):
    """Trains with one process. Models, optimizers and loaders behave as in plain torch."""


class PipelineStrategy(Strategy):
    """Runs inference in a pipeline. This strategy exchanges nothing, because `prepare_pippy` distributes the layers.

    Ranks along the dimension "pp" read the same data, and each of them has some of the layers.
    """

    name: ClassVar[str] = "pp"

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Raise an error, because no rank has all layers of the model.

        Raises:
            ValueError: Always.
        """
        size = self.setup.state.parallelism_config.pp_size
        raise ValueError(
            f"pp_size={size} distributes layers for inference only (prepare_pippy), so {type(optimizer).__name__} "
            f"cannot be prepared; train a pipeline with "
            f"Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree={size})), or set pp_size=1"
        )
