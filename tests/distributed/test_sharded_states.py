"""The state dicts of sharded models and optimizers equal the results of torch's `get_state_dict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from notebook_accelerate.strategies.sharding import sharded_checkpoint
from tests.support.ranks import run_ranks


class Part(nn.Module):
    """A module with a parameter, a saved and an unsaved buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"note": "extra"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"note": "extra"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(inputs))
        return result


def plain(parts: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*parts)


def tied(parts: list[nn.Module]) -> nn.Module:
    parts[1].linear.weight = parts[0].linear.weight  # type: ignore[union-attr]
    return nn.Sequential(*parts)


def frozen(parts: list[nn.Module]) -> nn.Module:
    parts[0].requires_grad_(False)
    return nn.Sequential(*parts)


def recomputed(parts: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(part) for part in parts))


def compiled(parts: list[nn.Module]) -> nn.Module:
    return nn.Sequential(torch.compile(parts[0], backend="eager"), parts[1])  # type: ignore[arg-type]


MODELS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    function.__name__: function for function in (plain, tied, frozen, recomputed, compiled)
}


def local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, list):
        return [local(item) for item in value]
    if isinstance(value, DTensor):
        return "DTensor", value.placements, value.to_local().detach().tolist()
    return value.detach().tolist() if isinstance(value, torch.Tensor) else value


def states_of(kind: str) -> list[bool]:
    torch.manual_seed(0)
    parts: list[nn.Module] = [Part(), Part()]
    model, mesh = MODELS[kind](parts), init_device_mesh("cpu", (2,))
    for part in () if kind == "tied" else model:  # type: ignore[union-attr,attr-defined]
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:], "lr": 0.5}])
    found = []
    for _ in range(2):  # The optimizer has no state before the first step.
        ours: Any = sharded_checkpoint.sharded_optimizer_state(model, optimizer)
        theirs: Any = get_optimizer_state_dict(model, optimizer)
        found += [local(ours) == local(theirs), list(ours["state"]) == list(theirs["state"])]
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    theirs = get_model_state_dict(model)
    for keep_vars in (False, True):
        ours = sharded_checkpoint.sharded_model_state(model, keep_vars)
        found += [local(ours) == local(theirs), list(ours) == list(theirs), ours._metadata == theirs._metadata]
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_states_equal_get_state_dict_of_torch(kind: str) -> None:
    for found in run_ranks(states_of, kind, process_group=True):
        assert all(found), found


def gathered_under_both_names() -> list[bool]:
    parts: list[nn.Module] = [Part(), Part()]
    model = tied(parts)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = sharded_checkpoint.full_model_state(model)
    return [state[f"{first}.linear.weight"] is state["1.linear.weight"] for first in "01" if state]


def test_a_gathered_tied_weight_is_a_single_tensor() -> None:
    assert run_ranks(gathered_under_both_names, process_group=True) == [[True, True], []]


def test_an_optimizer_of_another_model_is_refused_by_torch() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(KeyError):
        sharded_checkpoint.sharded_optimizer_state(model, optimizer)
