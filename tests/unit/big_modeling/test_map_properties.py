"""Every device map is complete, stays within the limits, and puts tied parameters on one device."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from notebook_accelerate import infer_auto_device_map
from notebook_accelerate.big_modeling.module_tensors import device_of
from notebook_accelerate.utils.modeling import check_device_map, compute_module_sizes
from tests.unit.big_modeling.models import Block, ThreeLayers

pytestmark = pytest.mark.filterwarnings("ignore:Current model requires")


def _grow(random_: random.Random, depth: int = 0) -> nn.Module:
    """Create a tree of small layers that may have parameters and buffers at every level."""
    node = nn.Module()
    for index in range(random_.randint(1, 4)):
        kinds: list[Any] = [
            lambda: nn.Linear(random_.randint(1, 9), random_.randint(1, 9), bias=random_.random() < 0.5),
            lambda: Block(random_.randint(2, 6)),
            ThreeLayers,
            nn.ReLU,
        ]
        if depth < 3:
            kinds += [lambda: _grow(random_, depth + 1)] * 2
        node.add_module(f"m{index}", random_.choice(kinds)())
    if random_.random() < 0.3:
        node.own = nn.Parameter(torch.zeros(random_.randint(1, 30)))
    if random_.random() < 0.2:
        node.register_buffer("offset", torch.zeros(random_.randint(1, 9)))
    return node


def _tie(random_: random.Random, model: nn.Module) -> None:
    """Give some parameters two or three names each, in one module or in several."""
    places = [
        (owner, key) for owner in model.modules() for key in owner._parameters if owner._parameters[key] is not None
    ]
    for _ in range(random_.randint(1, 3)):
        (first, name), *others = random_.sample(places, min(len(places), random_.choice([2, 2, 3])))
        for owner, key in others:
            owner._parameters[key] = first._parameters[name]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tied=st.booleans(),
    shares=st.lists(st.floats(0, 1), min_size=0, max_size=3),
    cpu=st.none() | st.floats(0, 1.5),
    whole=st.sampled_from([None, ["Block"], ["Linear", "Block"]]),
    clean=st.booleans(),
    fallback=st.booleans(),
)
def test_maps_are_complete_and_within_the_limits(
    seed: int, tied: bool, shares: Any, cpu: Any, whole: Any, clean: bool, fallback: bool
) -> None:
    random_ = random.Random(seed)
    model = _grow(random_)
    if not any(True for _ in model.parameters()):
        return
    if tied:
        _tie(random_, model)
    total = compute_module_sizes(model)[""]
    limits: dict[Any, int] = {number: int(share * total) for number, share in enumerate(shares)}
    if cpu is not None or not limits:
        limits["cpu"] = int((cpu or 0) * total)
    device_map = infer_auto_device_map(
        model, limits, no_split_module_classes=whole, clean_result=clean, fallback_allocation=fallback
    )
    _check(model, device_map, limits, whole or [])


def _check(model: nn.Module, device_map: dict[str, Any], limits: dict[Any, int], whole: list[str]) -> None:
    check_device_map(model, device_map)
    assert set(device_map.values()) <= {*limits, "disk"}
    for name in device_map:
        assert not any(other and name.startswith(f"{other}.") for other in device_map), f"{name} is in the map twice"
    where: dict[int, set[Any]] = defaultdict(set)
    used: Counter[Any] = Counter()
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        device = device_of(name, device_map)
        if device not in where[id(tensor)]:
            where[id(tensor)].add(device)
            used[device] += tensor.nbytes
    assert all(len(devices) == 1 for devices in where.values()), "a parameter with several names must be on one device"
    assert all(used[device] <= limit for device, limit in limits.items())
    for name, module in model.named_modules():
        if type(module).__name__ in whole:
            inside = {device_of(f"{name}.{key}", device_map) for key, _ in module.named_parameters()}
            assert len(inside) <= 1, f"{name} is split"


def test_a_model_that_fits_one_device_is_not_split() -> None:
    for seed in range(50):
        random_ = random.Random(seed)
        model = _grow(random_)
        _tie(random_, model) if seed % 2 and any(True for _ in model.parameters()) else None
        total = compute_module_sizes(model)[""]
        if total:
            assert set(infer_auto_device_map(model, {0: 2 * total, "cpu": 10 * total}).values()) == {0}
