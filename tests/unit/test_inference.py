"""The division of a model into the stages of a pipeline."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from notebook_accelerate import prepare_pippy
from notebook_accelerate.big_modeling.device_map import balanced_cuts
from notebook_accelerate.inference import find_pippy_batch_size, generate_device_map, pippy_forward


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_part_is_minimal(sizes: list[int], parts: int) -> None:
    parts = min(parts, len(sizes))
    cuts = balanced_cuts(sizes, parts)
    assert len(cuts) == parts - 1
    assert sorted(set(cuts)) == cuts
    assert all(0 < cut < len(sizes) for cut in cuts)

    def largest(points: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *points, len(sizes))))

    best = min(largest(points) for points in itertools.combinations(range(1, len(sizes)), parts - 1))
    assert largest(tuple(cuts)) == best


def test_the_batch_size_of_arguments_is_found() -> None:
    assert find_pippy_batch_size((torch.ones(3, 2),), {}) == 3
    assert find_pippy_batch_size((None, 1), {"mask": torch.ones(4)}) == 4
    assert find_pippy_batch_size((torch.tensor(1.0),), None) is None


def test_one_rank_keeps_the_whole_model() -> None:
    model = nn.Linear(2, 2)
    assert prepare_pippy(model, example_args=(torch.ones(1, 2),)) is model
    assert model.hf_split_points == []
    inputs = torch.ones(5, 2)
    assert torch.equal(pippy_forward(model, 2, None, inputs), model(inputs))


def test_modules_are_divided_evenly() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert generate_device_map(model, 2) == {"0": 0, "1.0": 0, "1.1": 1, "2": 1}
    assert generate_device_map(model, 3, ["Sequential"]) == {"0": 0, "1": 1, "2": 2}
    assert generate_device_map(model, 2, max_memory={0: 170, 1: 1000})["0"] == 0
    with pytest.raises(ValueError, match="has 3 modules that stay whole, but there are 4 ranks"):
        generate_device_map(model, 4, ["Sequential"])
