"""Replace, move and read single tensors of modules, including offloaded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.module_hooks import align_hooks
from notebook_accelerate.big_modeling.module_tree import (
    INTEGERS,
    dtype_of,
    named_module_tensors,
    prefixes,
    submodule,
    tied_parameters,
)

_LOG = accelerate_logger("utils.modeling")

TiedParams = dict[int, dict[torch.device, torch.Tensor]]


def set_module_tensor_to_device(
    module: torch.nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: Any = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,  # noqa: ARG001
) -> None:
    """Move a tensor of a module to a device, or replace it with a new value there.

    Args:
        module: The module that contains the tensor, directly or in a submodule.
        tensor_name: The dotted name of a parameter or buffer.
        device: The device to move the tensor to.
        value: New data of the same shape, which is required if the tensor is on the meta device.
        dtype: The dtype to convert the data to. If None, the tensor's dtype is kept. Integers always keep it.
        fp16_statistics: The scales of an 8-bit weight of bitsandbytes.
        tied_params_map: Existing copies to share, by the address of the original and by device.
        non_blocking: Whether to return without waiting for the copy.
        clear_cache: Accepted for compatibility, but not used, because there are no caches to empty.

    Raises:
        ValueError: The module does not have this tensor, `value` is required but None, or it has a different shape.
    """
    module, name = submodule(module, tensor_name)
    owner: Any = module._parameters if name in module._parameters else module._buffers
    if name not in owner:
        raise ValueError(f"{module} does not have a parameter or a buffer named {name}.")
    old: Any = owner[name]
    if value is None and old is None:
        return
    _check(name, old, value, device)
    if value is not None and old is not None:
        value = _converted(value, old.dtype if dtype is None else dtype_of(dtype))
    source = old if value is None else value
    moved = _moved(source.detach(), torch.device(device), tied_params_map, non_blocking)
    if owner is module._buffers or old is None:
        owner[name] = moved
        return
    if value is None and moved.device == old.device and moved.data_ptr() == old.data_ptr():
        return
    parameter = like(old, moved)
    if fp16_statistics is not None:
        parameter.SCB = fp16_statistics.to(device)
    if tied_params_map is not None and source.data_ptr() in tied_params_map:
        parameter = tied_params_map[source.data_ptr()].setdefault(parameter.device, parameter)
    owner[name] = parameter


def _check(name: str, old: torch.Tensor | None, value: torch.Tensor | None, device: Any) -> None:
    if old is None:
        return
    if value is None and old.device.type == "meta" and torch.device(device).type != "meta":
        raise ValueError(f"{name} is on the meta device, we need a `value` to put in on {device}.")
    packed = type(old).__name__ in ("Params4bit", "Int8Params")
    if value is not None and value.shape != old.shape and not packed:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this looks '
            "incorrect."
        )


def _converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype in INTEGERS and dtype not in INTEGERS else value.to(dtype)


def _moved(source: torch.Tensor, device: torch.device, tied: TiedParams | None, non_blocking: bool) -> torch.Tensor:
    copies = (tied or {}).get(source.data_ptr()) if source.device.type != "meta" else None
    if copies and device in copies:
        return copies[device].detach()
    if device.type == "xpu" and not torch.xpu.is_available():
        raise ValueError(f'{device} is not available, you should use device="cpu" instead')
    return source.to(device, non_blocking=non_blocking)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are the same. A device without an index counts as index 0.

    Args:
        first_device: The first device to compare.
        second_device: The device to compare the first one with.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.type in ("cpu", "meta"):
        return True
    return (first_device.index or 0) == (second_device.index or 0)


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """Return whether any hook of a module loads the module's own weights for each forward pass.

    Args:
        module: The module whose hooks are checked.
    """
    return any(hook.offload for hook in align_hooks(module))


@contextlib.contextmanager
def align_module_device(module: torch.nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """Move a module's own parameters to a device inside the block, and load the offloaded ones.

    Args:
        module: The module. Its submodules are not moved.
        execution_device: The device to move to. If None, the hook's device is used or, without a hook, the parameters
            stay on their device.
    """
    if has_offloaded_params(module):
        with _loaded(module, execution_device):
            yield
    elif execution_device is not None:
        devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


@contextlib.contextmanager
def _loaded(module: torch.nn.Module, device: torch.device | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for hook in align_hooks(module):
            if hook.offload:
                stack.enter_context(hook.loading_for(device))
                stack.callback(hook.post_forward, module, None)
                with torch.inference_mode(mode=False):  # The weights may still be used outside of inference mode.
                    hook.pre_forward(module)
        yield


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Any = "cpu",
) -> dict[str, Any]:
    """Fill a state dict with a module's own offloaded tensors.

    Args:
        module: The module that has the tensors.
        module_name: The dotted name of one of the module's tensors, which starts with the module's prefix.
        state_dict: The state dict, keyed by dotted name. It is changed in place.
        device_to_put_offload: The device to load the tensors to.

    Returns:
        The same dict, `state_dict`.
    """
    root = module_name.rpartition(".")[0]
    with align_module_device(module, torch.device(device_to_put_offload)):
        for key, tensor in module.state_dict().items():
            name = f"{root}.{key}" if root else key
            if name in state_dict:
                state_dict[name] = tensor.detach()
    return state_dict


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a dispatched model on the CPU, including offloaded tensors.

    Args:
        model: The dispatched model.

    Raises:
        ValueError: Some tensors are on the meta device, but no hook loads them.
    """
    found: dict[str, torch.Tensor] = {}
    on_meta: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        with align_module_device(module, torch.device("cpu") if has_offloaded_params(module) else None):
            for key, tensor in _loaded_tensors(module).items():
                if tensor.device.type == "meta":
                    on_meta.append(prefix + key)
                elif prefix + key not in found:
                    with torch.inference_mode(mode=False):
                        found[prefix + key] = tensor.detach().cpu()
    missing = [name for name in on_meta if name not in found]
    if missing:
        raise ValueError(
            f"These weights are on the meta device and no hook loads them: {', '.join(missing[:5])}; load a checkpoint "
            "first: load_checkpoint_and_dispatch(model, checkpoint, device_map=...)"
        )
    return {name: found[name] for name in model.state_dict() if name in found}


def _loaded_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own persistent tensors, and its submodules' tensors if its hook loads them, too."""
    if any(hook.offload and hook.place_submodules for hook in align_hooks(module)):
        return {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return dict(named_module_tensors(module, remove_non_persistent=True))


def name_of_scales(name: str) -> str:
    """Return the name of the scales of the 8-bit weight ``name``, or ``name`` itself for other tensors."""
    return f"{name.removesuffix('weight')}SCB" if name.endswith("weight") else name


# ---- tied parameters: one parameter that has several names


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:  # noqa: ARG001
    """List the names of a model's tied parameters.

    Args:
        model: The model before it is dispatched, because hooks untie the parameters that they offload.
        kwargs: Ignored, as in Accelerate.

    Returns:
        One sorted list of names for each tied parameter, in the order of the first names.
    """
    return sorted(sorted(group) for group in tied_parameters(model))


def retie_parameters(model: torch.nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again, for example after they have been loaded.

    Args:
        model: The model whose parameters are tied.
        tied_params: The result of an earlier call of `find_tied_parameters`. All names in a group get the group's first
            tensor that is not on the meta device, or its first tensor if all are on the meta device.
    """
    for group in tied_params:
        owners = [submodule(model, name) for name in group]
        tensors = [getattr(module, name) for module, name in owners]
        shared = next((tensor for tensor in tensors if tensor.device.type != "meta"), tensors[0] if tensors else None)
        for module, name in owners:
            setattr(module, name, shared)


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Return whether a model's configuration requests tied weights (transformers' `tie_word_embeddings` and others).

    Args:
        model: The model whose configuration is read.
    """
    config = getattr(model, "config", None)
    if config is None:
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(text, "tie_word_embeddings", False) and _has_output_embeddings(model)
    encoders = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool(embeddings or encoders or modules)


def warn_if_untied(model: torch.nn.Module, tied_params: Collection[Sequence[str]]) -> None:
    """Warn if a model's configuration requests tied weights, but no parameters are tied.

    Args:
        model: The model whose configuration is read.
        tied_params: The result of `find_tied_parameters`.
    """
    if not tied_params and check_tied_parameters_in_config(model):
        _LOG.warning(
            "The model weights are not tied. Please use the `tie_weights` method before using the "
            "`infer_auto_device` function."
        )


def _has_output_embeddings(model: Any) -> bool:
    return bool(hasattr(model, "get_output_embeddings") and model.get_output_embeddings())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn if a device map puts a tied parameter on several devices.

    Args:
        tied_params: The result of `find_tied_parameters`.
        device_map: The device of each module by name.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            _LOG.warning(
                "Tied parameters are on different devices: %s. Please modify your custom device map or set "
                "`device_map='auto'`.",
                devices,
            )


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that a map lists for a name or its innermost enclosing module, or None if it lists neither."""
    return next((device_map[outer] for outer in reversed(prefixes(name)) if outer in device_map), None)


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: Any,
    module_sizes: Mapping[str, Any],
    modules_to_treat: Iterable[tuple[str, torch.nn.Module]],
) -> tuple[Any, list[str], list[torch.nn.Module]]:
    """Add up the sizes of modules that must be on the same device because they share parameters.

    Args:
        tied_params: The names of the shared parameters in other modules.
        module_size: The size in bytes of the module itself.
        module_sizes: The size in bytes of each module and tensor, by name.
        modules_to_treat: The modules to choose from, with their names.

    Returns:
        The total size in bytes, with shared parameters counted once, and the names and objects of the added modules.
    """
    treated = dict(modules_to_treat)
    total, names = module_size, []
    for tied in tied_params:
        name = next((outer for outer in prefixes(tied) if outer in treated), None)
        if name is not None:
            total += (0 if name in names else module_sizes.get(name, 0)) - module_sizes.get(tied, 0)
            names += [] if name in names else [name]
    return total, names, [treated[name] for name in names]
