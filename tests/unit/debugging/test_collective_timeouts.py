"""Time limits of collectives, which the kernel enforces instead of torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from notebook_accelerate.worker import collective_timeouts
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


def test_a_new_group_in_place_of_another_has_its_own_limit() -> None:
    timeouts = GroupTimeouts()
    assert timeouts.poll() is None
    begin(7)
    assert timeouts.poll() == 7
    assert timeouts.poll() is None
    assert own_limit() > timedelta(days=1)
    dist.destroy_process_group()
    begin(9)  # The new group begins before poll is called again.
    assert timeouts.poll() == 9
    assert timeouts.poll() is None
    assert own_limit() > timedelta(days=1)


class _Group:
    """A process group with a backend that this machine lacks."""


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"gloo": timedelta(minutes=30)}, timedelta(days=7)),
        ({"nccl": timedelta(minutes=10)}, timedelta(minutes=30)),
        ({"gloo": timedelta(minutes=30), "nccl": timedelta(minutes=10)}, timedelta(minutes=30)),
    ],
)
def test_nccl_keeps_a_limit_that_ends_unwatched_ranks(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, timedelta], expected: timedelta
) -> None:
    found: list[timedelta] = []
    monkeypatch.setattr(collective_timeouts, "group_timeouts", lambda _group: limits)
    monkeypatch.setattr(collective_timeouts, "set_group_timeout", lambda limit, _group: found.append(limit))
    group = _Group()
    assert collective_timeouts.lengthen(group) == min(limits.values()).total_seconds()
    assert found == [expected]
    assert collective_timeouts.lengthen(group) is None, "the limit must be replaced only once"
    assert found == [expected]


@pytest.mark.parametrize("backends", [["xccl"], ["hccl"], ["gloo", "xccl"]])
def test_other_back_ends_keep_torchs_limit(monkeypatch: pytest.MonkeyPatch, backends: list[str]) -> None:
    found: list[timedelta] = []
    monkeypatch.setattr(collective_timeouts, "group_timeouts", lambda _: dict.fromkeys(backends, timedelta(minutes=10)))
    monkeypatch.setattr(collective_timeouts, "set_group_timeout", lambda limit, _group: found.append(limit))
    assert collective_timeouts.lengthen(_Group()) is None
    assert found == []


def test_two_threads_that_find_a_group_replace_its_limit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"nccl": timedelta(minutes=10)}

    def set_slowly(limit: timedelta, _group: object) -> None:
        time.sleep(0.1)
        limits["nccl"] = limit

    monkeypatch.setattr(collective_timeouts, "group_timeouts", lambda _group: dict(limits))
    monkeypatch.setattr(collective_timeouts, "set_group_timeout", set_slowly)
    group = _Group()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(collective_timeouts.lengthen, (group, group)))
    assert sorted(found, key=str) == [600.0, None]
    assert limits == {"nccl": timedelta(minutes=30)}
