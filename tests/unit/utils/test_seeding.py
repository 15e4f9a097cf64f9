"""Seeding of random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accelerate.state import PartialState, reset_shared_state
from notebook_accelerate.utils import set_seed, wait_for_everyone


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    reset_shared_state()
    yield
    torch.use_deterministic_algorithms(False)
    reset_shared_state()


def _draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()  # noqa: NPY002


def test_the_same_seed_draws_the_same_numbers_in_every_library() -> None:
    set_seed(3)
    first = _draw()
    set_seed(3)
    assert _draw() == first
    set_seed(4)
    assert all(one != other for one, other in zip(_draw(), first, strict=True))


def test_seeding_alone_starts_no_state() -> None:
    set_seed(3)
    assert not PartialState._shared_state


def test_device_specific_seeds_differ_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PartialState(cpu=True)
    monkeypatch.setitem(state.__dict__, "process_index", 2)
    set_seed(5, device_specific=True)
    shifted = _draw()
    set_seed(7)
    assert _draw() == shifted


def test_algorithms_may_be_made_deterministic() -> None:
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", ["3", 3.0, True, None])
def test_a_seed_must_be_a_whole_number(seed: Any) -> None:
    with pytest.raises(ValueError, match="pass a whole number"):
        set_seed(seed)


def test_one_process_does_not_wait() -> None:
    PartialState(cpu=True)
    wait_for_everyone()
