"""Parameters of models and of their optimizers: plain names, and what took the place of each in a prepared model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from notebook_accelerate.strategies.fsdp.fsdp_units import plain_name


def names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by plain name, tied ones under each.

    Args:
        model: The model, wrapped or not.
    """
    return {plain_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def flat_names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the flat parameters of an FSDP 1 model by the plain names of what they hold.

    Args:
        model: The wrapped model, with use_orig_params=False.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        flat: Any = module._parameters.get("_flat_param")
        for inner in flat._fqns if flat is not None else ():
            prefix = plain_name(f"{name}.").lstrip(".")
            found[plain_name(f"{prefix}{inner}")] = flat
    return found


class Pointers:
    """What became of parameters, for the optimizers that still have the old ones."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def note(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Note which parameter replaced which.

        Args:
            before: The parameters by name before the model was sharded.
            after: The parameters by name now.
        """
        for name, old in before.items():
            new = after.get(name)
            if new is not None and new is not old:
                self._new[id(old)] = (weakref.ref(old), new)

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what a parameter became; the parameter itself where it was not replaced.

        Args:
            parameter: A parameter of an optimizer.
        """
        old, new = self._new.get(id(parameter), (None, parameter))
        # An id is used again once its object is gone.
        return new if old is not None and old() is parameter else parameter

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the parameters of now, and its states their shards.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: Parameters of different groups became one, or the optimizer's state cannot be sharded.
        """
        mapping = {
            parameter: self.current(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        if any(old is not new for old, new in mapping.items()):
            switch_parameters(optimizer, mapping)

    def forget(self) -> None:
        """Forget all parameters."""
        self._new.clear()


def switch_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer, in place.

    Args:
        optimizer: The optimizer.
        mapping: The new parameter by old one, or by the old one's `data_ptr()`.

    Raises:
        ValueError: A parameter has no new one, or parameters of different groups became one.
    """
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        new: list[nn.Parameter] = []
        for old in group["params"]:
            found = mapping[old] if old in mapping else mapping.get(old.data_ptr())
            if found is None:
                raise ValueError(
                    f"a parameter of shape {tuple(old.shape)} of {type(optimizer).__name__} belongs to no sharded "
                    "model; create the optimizer from model.parameters() of the model that is prepared with it"
                )
            if group_of.setdefault(id(found), index) != index:
                raise ValueError(
                    "parameters of different groups of the optimizer share one flat parameter of FSDP 1; write "
                    "FullyShardedDataParallelPlugin(use_orig_params=True), or fsdp_version=2"
                )
            if not any(found is kept for kept in new):
                new.append(found)
            _switch_state(optimizer, old, found)
        group["params"] = new


def _switch_state(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    if old is new or old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    if not isinstance(new, DTensor) and new.shape == old.shape:  # the same parameter on another device
        state = {name: value.to(new.device) if _is_shaped(value, old) else value for name, value in state.items()}
        optimizer.state[new] = state
        return
    if not isinstance(new, DTensor):
        raise ValueError(
            f"{type(optimizer).__name__} has made steps before its model was sharded by FSDP 1, which cannot take them "
            "over; prepare before training, or use FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    optimizer.state[new] = {
        name: distribute_tensor(value, new.device_mesh, new.placements) if _is_shaped(value, old) else value
        for name, value in state.items()
    }


def _is_shaped(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """Return an optimizer's parameters, group by group.

    Args:
        optimizer: The optimizer.
    """
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
