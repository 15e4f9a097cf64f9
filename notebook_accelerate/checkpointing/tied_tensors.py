"""Tensors that share memory: saved once, and tied again on loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


def tied_names(state: Mapping[str, Any]) -> list[list[str]]:
    """List groups of names whose tensors are the same view of the same memory, names in the order of the state.

    Args:
        state: Named tensors; other values are ignored.
    """
    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and _has_address(tensor) and tensor.numel():
            names[tensor.data_ptr()].append(name)
    views: dict[Any, list[str]] = defaultdict(list)
    for name in (name for group in _groups(names) for name in group):  # few: a view takes longer to describe
        tensor = state[name]
        views[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype].append(name)
    return _groups(views)


def _groups(names: Mapping[Any, list[str]]) -> list[list[str]]:
    return [group for group in names.values() if len(group) > 1]


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type not in {"meta", "xla"}


def memory_key(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return a key that is equal for tensors that share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr() if _has_address(tensor) else id(tensor)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make named tensors fit for safetensors: contiguous, and none sharing memory.

    Of several names for one tensor the first is kept: a model registers its embedding before the head that shares its
    weight, and the class without the head must find the embedding in the file. Other views of one memory are copied.

    Args:
        state_dict: Named tensors.

    Returns:
        A new dictionary; tensors that need no change are the same objects.

    Raises:
        ValueError: A value is not a tensor.
    """
    dropped = {name for group in tied_names(state_dict) for name in group[1:]}
    seen: set[tuple[Any, int]] = set()
    clean = {}
    for name, tensor in state_dict.items():
        if name in dropped:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}: safetensors "
                "files contain tensors only; pass safe_serialization=False"
            )
        memory = memory_key(tensor)
        clean[name] = tensor.clone().contiguous() if memory in seen and tensor.numel() else tensor.contiguous()
        seen.add(memory)
    return clean


def add_tied_names(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Add the names that saving left out because their tensors share memory with a saved one.

    Args:
        state: Named tensors of a file.
        model: The model to load them into; its own ties are used.

    Returns:
        `state` with the names added.
    """
    wanted = model.state_dict(keep_vars=True)
    if wanted.keys() <= state.keys():  # nothing was left out
        return state
    for group in (*tied_names(wanted), *_names_of_same_object(model)):
        source = next((name for name in group if name in state), None)
        if source is not None:
            state.update({name: state[source] for name in group if name not in state})
    return state


def _names_of_same_object(model: torch.nn.Module) -> list[list[str]]:
    """List the names of parameters that are one object: ties where memory has no addresses (XLA, meta)."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return _groups(names)
