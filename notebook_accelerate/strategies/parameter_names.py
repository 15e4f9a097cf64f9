"""Names of parameters without wrappers' prefixes, and the parameters that replaced others in a prepared model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from notebook_accelerate.torch_internals import flat_parameter, names_in_flat_parameter

_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Return a parameter's name without wrappers' prefixes.

    Args:
        name: The full name in a wrapped model.
    """
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by plain name, tied ones under each of their names.

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
        optimizer: The optimizer.
    """
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class ParameterReplacements:
    """Which parameter replaced which, for optimizers that still refer to the old ones."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def record(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Record the parameters that were replaced.

        Args:
            before: The parameters by name before the model was prepared.
            after: The parameters by name now.
        """
        for name, old in before.items():
            new = after.get(name)
            if new is not None and new is not old:
                self._new[id(old)] = (weakref.ref(old), new)

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that replaced another; the parameter itself if it was not replaced.

        Args:
            parameter: A parameter of an optimizer.
        """
        old, new = self._new.get(id(parameter), (None, parameter))
        # Python reuses the id of an object that was deleted.
        return new if old is not None and old() is parameter else parameter

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch an optimizer to the current parameters, and shard its states like them.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: Parameters of different groups became one, or the optimizer's state cannot be sharded.
        """
        mapping = {parameter: self.current(parameter) for parameter in optimizer_parameters(optimizer)}
        if any(old is not new for old, new in mapping.items()):
            switch_parameters(optimizer, mapping)

    def clear(self) -> None:
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
    if not isinstance(new, DTensor) and new.shape != old.shape:
        raise ValueError(
            f"{type(optimizer).__name__} made steps before its model was sharded, and FSDP 1 cannot shard its state; "
            "prepare before training, or use FullyShardedDataParallelPlugin(fsdp_version=2)"
        )

    def switched(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != old.shape:
            return value
        if isinstance(new, DTensor):
            return distribute_tensor(value, new.device_mesh, new.placements)
        return value.to(new.device)

    optimizer.state[new] = {name: switched(value) for name, value in optimizer.state.pop(old).items()}
