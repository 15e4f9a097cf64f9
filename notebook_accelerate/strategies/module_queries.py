"""Find out which of a model's modules and parameters are compiled, sharded, wrapped, repeated, tied or replaced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from notebook_accelerate.precision import restore_forward
from notebook_accelerate.torch_internals import (
    compiled_module,
    flat_parameter,
    is_compiled,
    names_in_flat_parameter,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether a module is a list of blocks of one class, so that one compilation serves all of them.

    Args:
        module: The module to check.
    """
    if not isinstance(module, torch.nn.ModuleList) or not len(module):
        return False
    return all(type(block) is type(module[0]) for block in module)


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether a model contains, at any depth, a list of blocks of the same class.

    Args:
        module: The model to search.
    """
    return any(is_repeated_blocks(child) for child in module.modules())


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a model has parameters that are distributed across a device mesh.

    Args:
        model: The model to check.
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor.

    Args:
        tensor: The tensor to check.
    """
    # Importing torch.distributed.tensor takes a second. Until it has been imported, no DTensor can exist.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return the number of ranks that transformers has split a model across, or None if the model is not split.

    Args:
        model: The model to inspect.
    """
    size = getattr(model, "tp_size", None)
    return size if isinstance(size, int) else None


_KINDS_BY_SETTING = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


def layer_kinds(model: nn.Module) -> list[str]:
    """Return the kinds of layers listed in the configuration of a transformers model.

    Args:
        model: The model, which need not be a transformers model.

    Returns:
        The kinds in alphabetical order: full_attention, linear_attention, sliding_attention, and so on. The list is
        empty if the model has no such configuration.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Some configurations, such as Mistral's, have a single setting for all layers.
        kinds = [kind for name, kind in _KINDS_BY_SETTING.items() if getattr(config, name, None)]
    return sorted(set(kinds))


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model one by one, so that a single compilation serves all of them.

    Each of the other parts of the model is compiled as a whole.

    Args:
        module: The model, which is compiled in place. A model without repeated blocks is compiled as a whole.
        compile_kwargs: The arguments of `torch.compile`.

    Returns:
        The model. Its type and the names of its parameters do not change.
    """
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return module
    for child in module.children():
        if is_repeated_blocks(module):
            child.compile(**compile_kwargs)
        else:
            compile_regions(child, **compile_kwargs)
    return module


# ---- checks before a model is moved to a device. A device map may spread it, or its parameters may have no values.


def is_on_several_devices(model: torch.nn.Module) -> bool:
    """Return whether a device map spreads a model across several devices.

    Args:
        model: The model to check.

    Returns:
        True if the first `hf_device_map` found, on the model or on a submodule, has more than one device.
    """
    maps = (getattr(module, "hf_device_map", None) for module in model.modules())
    found: dict[str, Any] = next((found for found in maps if found is not None), {})
    return len(set(found.values())) > 1


def check_quantized_places(model: torch.nn.Module) -> None:
    """Check that no part of a quantized model is offloaded to a disk. Such a model cannot be trained.

    Args:
        model: The model to check.

    Raises:
        ValueError: A part is on a disk.
    """
    quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if quantized and "disk" in places:
        raise ValueError(
            "a model in 8 or 4 bits whose weights are partly on a disk cannot be prepared: load it with a device_map "
            "without 'disk'"
        )


def check_values(model: torch.nn.Module, remedy: str) -> None:
    """Check that the parameters of a model have values.

    Args:
        model: The model to check.
        remedy: The end of the error message, which explains how to load the values.

    Raises:
        ValueError: Some parameters are on the meta device.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"{type(model).__name__} has parameters without values ({', '.join(empty[:3])}, ...): {remedy}"
        )


# ---- the wrappers of a prepared model

_WRAPPERS: tuple[type[torch.nn.Module], ...] = (DistributedDataParallel, DataParallel)
_LAZY_WRAPPERS = {
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}


def _is_wrapper(model: torch.nn.Module) -> bool:
    # Importing FSDP or DeepSpeed takes a second. A library that has wrapped the model has already been imported.
    return isinstance(model, _WRAPPERS) or any(
        (module := sys.modules.get(name)) is not None and isinstance(model, getattr(module, kind, ()))
        for name, kind in _LAZY_WRAPPERS.items()
    )


def is_compiled_module(module: Any) -> bool:
    """Return whether a module was compiled with `torch.compile`.

    Args:
        module: The module to check.
    """
    return isinstance(module, torch.nn.Module) and is_compiled(module)


def without_compile(model: Any) -> Any:
    """Return the module inside a compiled module, or the module itself if it is not compiled.

    Args:
        model: A model, compiled or not.
    """
    while is_compiled_module(model):
        model = compiled_module(model)
    return model


def ddp_inside(model: Any) -> DistributedDataParallel | None:
    """Return the DDP module in a prepared model.

    Args:
        model: A prepared model, compiled or not.

    Returns:
        The DDP module, or None if DDP does not wrap the model.
    """
    inner = without_compile(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """Remove the wrappers that `prepare` added to a model.

    Args:
        model: The prepared model to unwrap.
        keep_fp32_wrapper: Whether to keep the forward method that computes in mixed precision. If False, the original
            forward method is restored in place.
        keep_torch_compile: Whether a compiled model stays compiled.
        recursive: Whether to also remove the wrappers of submodules.

    Returns:
        The model without wrappers.
    """
    compiled, inner = compiled_around(model), without_wrappers(model)
    if recursive:
        for module in list(inner.modules()):
            for name, child in list(module.named_children()):
                setattr(module, name, without_wrappers(child))
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if compiled is not None and keep_torch_compile:
        if compiled_module(compiled) is inner:
            return compiled  # type: ignore[no-any-return]
        # Create a second compiled module with the same settings around the inner model, and leave the prepared one
        # unchanged.
        again: Any = type(compiled)(inner, compiled.dynamo_ctx)
        return again  # type: ignore[no-any-return]
    return inner


def without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers that `prepare` and `torch.compile` put around it.

    Args:
        model: The model to unwrap.
    """
    *_, inner = _layers(model)
    return inner


def compiled_around(model: torch.nn.Module) -> Any:
    """Return the innermost compiled module around a model. There may be other wrappers inside and outside it.

    Args:
        model: The model, including its wrappers.

    Returns:
        The compiled module, or None if the model is not compiled.
    """
    return next((layer for layer in reversed([*_layers(model)]) if is_compiled_module(layer)), None)


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model, then the model inside each wrapper, from the outermost to the innermost."""
    yield model
    while _is_wrapper(model) or is_compiled_module(model):
        model = compiled_module(model) if is_compiled_module(model) else model.module  # type: ignore[assignment]
        yield model


# ---- tied parameters, which must stay tied while a model is prepared


def tied_names(model: nn.Module) -> list[list[str]]:
    """List the plain names of each parameter that has more than one name.

    Args:
        model: The model to search.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[list[str]]) -> None:
    """Tie parameters again that were tied before the model was prepared.

    Args:
        model: The model whose parameters are tied.
        groups: The result of `tied_names` for the model before its parameters were untied.
    """
    owners = {plain_name(name): module for name, module in model.named_modules()}
    for first, *others in groups:
        parameter = getattr(owners[first.rpartition(".")[0]], first.rpartition(".")[2])
        for name in others:
            setattr(owners[name.rpartition(".")[0]], name.rpartition(".")[2], parameter)


def keep_ties(make: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[nn.Module], Any]:
    """Wrap a function that allocates the parameters of modules, so that it keeps tied parameters tied.

    Args:
        make: The function to wrap, which is called with each module.
        model: The model, with its parameters tied.

    Returns:
        The function to use instead of `make`.
    """
    owners: dict[tuple[int, str], int] = {
        (id(module), name): id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    made: dict[int, nn.Parameter] = {}

    def made_once(module: nn.Module) -> Any:
        result = make(module)
        for name, parameter in list(module._parameters.items()):
            key = owners.get((id(module), name))
            if key is not None and parameter is not None:
                setattr(module, name, made.setdefault(key, parameter))
        return result

    return made_once


# ---- parameters by plain name, and which parameters were replaced while a model was prepared

_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    Args:
        name: The full name in a wrapped model.
    """
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by plain name. Tied parameters appear under each of their names.

    Args:
        model: The model, wrapped or not.
    """
    return {plain_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def flat_parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the flat parameters of an FSDP 1 model by the plain names of the parameters they contain.

    Args:
        model: The wrapped model, with use_orig_params=False.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        flat = flat_parameter(module)
        for inner in names_in_flat_parameter(flat) if flat is not None else ():
            prefix = plain_name(f"{name}.").lstrip(".")
            found[plain_name(f"{prefix}{inner}")] = flat
    return found


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """Return an optimizer's parameters, group by group.

    Args:
        optimizer: The optimizer, prepared or not.
    """
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class ParameterReplacements:
    """Records which parameters were replaced, because optimizers still refer to the old ones."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def record(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Record the parameters that were replaced.

        Args:
            before: The parameters before the model was prepared, by name.
            after: The current parameters, by name.
        """
        for name, old in before.items():
            new = after.get(name)
            if new is not None and new is not old:
                self._new[id(old)] = (weakref.ref(old), new)

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the replacement of a parameter, or the parameter itself if it was not replaced.

        Args:
            parameter: A parameter of an optimizer.
        """
        old, new = self._new.get(id(parameter), (None, parameter))
        # Compare the objects, too, because Python reuses the IDs of deleted objects.
        return new if old is not None and old() is parameter else parameter

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch an optimizer to the current parameters, and shard its state as the parameters were sharded.

        Args:
            optimizer: The optimizer to change.

        Raises:
            ValueError: Parameters of different groups were merged into one, or the optimizer's state cannot be sharded.
        """
        mapping = {parameter: self.current(parameter) for parameter in optimizer_parameters(optimizer)}
        if any(old is not new for old, new in mapping.items()):
            switch_parameters(optimizer, mapping)

    def clear(self) -> None:
        """Forget all recorded parameters."""
        self._new.clear()


def switch_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer in place.

    Args:
        optimizer: The optimizer to change.
        mapping: The new parameters, by old parameter or by the old parameter's `data_ptr()`.

    Raises:
        ValueError: A parameter has no replacement, or parameters of different groups were merged into one.
    """
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        switched: list[nn.Parameter] = []
        for old in group["params"]:
            new = mapping[old] if old in mapping else mapping.get(old.data_ptr())
            if new is None:
                raise ValueError(
                    f"a parameter of shape {tuple(old.shape)} of {type(optimizer).__name__} belongs to no sharded "
                    "model; create the optimizer from model.parameters() of the model that is prepared with it"
                )
            if group_of.setdefault(id(new), index) != index:
                raise ValueError(
                    "parameters of different groups of the optimizer share one flat parameter of FSDP 1; write "
                    "FullyShardedDataParallelPlugin(use_orig_params=True), or fsdp_version=2"
                )
            if not any(new is kept for kept in switched):
                switched.append(new)
            _switch_state(optimizer, old, new)
        group["params"] = switched


def _switch_state(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    if old is new or old not in optimizer.state:
        return
    if not is_dtensor(new) and new.shape != old.shape:
        raise ValueError(
            f"{type(optimizer).__name__} took steps before its model was sharded, and FSDP 1 cannot shard its state; "
            "prepare before training, or use FullyShardedDataParallelPlugin(fsdp_version=2)"
        )

    def switched(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != old.shape:
            return value
        if is_dtensor(new):
            from torch.distributed.tensor import distribute_tensor

            return distribute_tensor(value, new.device_mesh, new.placements)
        return value.to(new.device)

    optimizer.state[new] = {name: switched(value) for name, value in optimizer.state.pop(old).items()}
