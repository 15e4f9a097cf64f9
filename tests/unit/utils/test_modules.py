"""Helper functions that inspect a model's modules."""

from __future__ import annotations

import torch
from torch import nn

from notebook_accelerate.utils import (
    get_model_tp_size,
    get_module_children_bottom_up,
    has_compiled_regions,
    model_has_dtensor,
)
from notebook_accelerate.utils.other import has_repeated_blocks, is_repeated_blocks


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())))


def test_children_come_before_their_parents() -> None:
    model = _model()
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert sorted(names) == sorted(name for name, _ in model.named_modules())
    for name in names:
        parent = name.rpartition(".")[0]
        assert name == "" or names.index(name) < names.index(parent)
    assert get_module_children_bottom_up(model)[-1] is model


def test_repeated_blocks_of_one_class_are_found() -> None:
    blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert is_repeated_blocks(blocks)
    assert not is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert has_repeated_blocks(nn.ModuleDict({"layers": blocks}))
    assert not has_repeated_blocks(_model())


def test_compiled_regions_are_in_the_model_or_below() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert not has_compiled_regions(model)
    assert has_compiled_regions(torch.compile(nn.Linear(1, 1), backend="eager"))
    model[0] = torch.compile(model[0], backend="eager")
    assert has_compiled_regions(model)


def test_plain_models_are_not_distributed() -> None:
    model = _model()
    assert not model_has_dtensor(model)
    assert get_model_tp_size(model) is None
    model.tp_size = 4  # type: ignore[assignment]
    assert get_model_tp_size(model) == 4
