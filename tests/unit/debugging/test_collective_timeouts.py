"""The kernel's time limits in the place of torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from notebook_accelerate.worker.collective_timeouts import GroupTimeouts


def begin(seconds: int) -> None:
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def own_limit() -> timedelta:
    limit: timedelta = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return limit


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_in_the_place_of_another_has_its_own_limit() -> None:
    timeouts = GroupTimeouts()
    assert timeouts.poll() is None
    begin(7)
    assert timeouts.poll() == 7
    assert timeouts.poll() is None
    assert own_limit() > timedelta(days=1)
    dist.destroy_process_group()
    begin(9)  # before anybody has looked
    assert timeouts.poll() == 9
    assert timeouts.poll() is None
    assert own_limit() > timedelta(days=1)
