from __future__ import annotations

import pytest
import torch
from torch import nn

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.state import AcceleratorState
from notebook_accelerate.strategies import STRATEGIES, SingleStrategy, register_strategy
from notebook_accelerate.strategies.module_queries import extract_model_from_parallel, is_compiled_module
from notebook_accelerate.strategies.strategy import kind_of


def test_every_kind_of_world_has_a_row() -> None:
    assert set(STRATEGIES) >= {kind.value for kind in DistributedType}


def test_a_row_can_be_replaced() -> None:
    class Mine(SingleStrategy):
        name = "mine"

        def wrap_model(self, model: nn.Module) -> nn.Module:
            return nn.Sequential(model)

    before = STRATEGIES["NO"]
    register_strategy("NO", Mine)
    try:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        assert accelerator.strategy.name == "mine"
        assert accelerator.prepare(model)[0] is model
        assert accelerator._models == [model]
    finally:
        register_strategy("NO", before)


def test_an_unknown_kind_of_world_lists_the_known_ones() -> None:
    state = AcceleratorState(cpu=True)
    state.distributed_type = "RING"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"distributed_type='RING' has no strategy; allowed: NO, MULTI_CPU"):
        Accelerator()


def test_kinds_of_objects_are_recognised() -> None:
    class Schedule:
        def step(self) -> None: ...

        def get_last_lr(self) -> list[float]:
            return [0.1]

        def state_dict(self) -> dict[str, float]:
            return {}

    model = nn.Linear(1, 1)
    assert kind_of(model) == "model"
    assert kind_of(torch.optim.SGD(model.parameters(), lr=0.1)) == "optimizer"
    assert kind_of(Schedule()) == "scheduler"
    assert kind_of(torch.utils.data.DataLoader([1])) == "data_loader"  # type: ignore[arg-type]
    for other in (None, "text", model.parameters, [1]):
        assert kind_of(other) == "other"


def test_wrappers_are_removed() -> None:
    model = nn.Linear(1, 1)
    wrapped = nn.DataParallel(model)
    assert extract_model_from_parallel(wrapped) is model
    outer = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert isinstance(extract_model_from_parallel(outer)[0], nn.DataParallel)
    assert isinstance(extract_model_from_parallel(outer, recursive=True)[0], nn.Linear)
    compiled = torch.compile(wrapped, backend="eager")
    assert is_compiled_module(compiled)
    assert not is_compiled_module(model)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model  # type: ignore[arg-type]
    again = extract_model_from_parallel(compiled)  # type: ignore[arg-type]
    assert is_compiled_module(again)
    assert again._orig_mod is model
    # The backend is still "eager", which runs no compiler.
    assert torch.equal(again(torch.ones(1, 1)), model(torch.ones(1, 1)))
