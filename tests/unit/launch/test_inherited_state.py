"""With every start method, ranks inherit the settings of the thread that launches them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from notebook_accelerate import notebook_launcher
from tests.support.runs import METHODS

pytestmark = pytest.mark.usefixtures("zygote")


def _thread_settings() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.empty(0).device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@pytest.mark.parametrize("method", ["inline", "fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_settings_of_the_calling_thread_reach_every_rank(method: str) -> None:
    count = 1 if method == "inline" else 2
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.float16):
        run = notebook_launcher(_thread_settings, (), count, use_port=0, start_method=method, panel=False)
    assert run.results == (("meta", False, True, True, torch.float16),) * count


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_without_settings_ranks_have_torchs_defaults(method: str) -> None:
    run = notebook_launcher(_thread_settings, (), 2, use_port=0, start_method=method, panel=False)
    assert run.results == (("cpu", True, False, False, torch.bfloat16),) * 2


@pytest.fixture
def _set_up() -> Iterator[None]:
    before = sys.getrecursionlimit(), os.umask(0o027), torch.multiprocessing.get_sharing_strategy()
    sys.setrecursionlimit(4321)
    socket.setdefaulttimeout(77.0)
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    sys.setrecursionlimit(before[0])
    os.umask(before[1])
    socket.setdefaulttimeout(None)
    torch.multiprocessing.set_sharing_strategy(before[2])


def _process_settings() -> tuple[Any, ...]:
    mask = os.umask(0)
    os.umask(mask)
    strategy = torch.multiprocessing.get_sharing_strategy()
    return sys.getrecursionlimit(), mask, socket.getdefaulttimeout(), strategy


@pytest.mark.usefixtures("_set_up")
@METHODS
def test_the_settings_of_the_process_reach_every_rank(method: str) -> None:
    run = notebook_launcher(_process_settings, (), 2, use_port=0, start_method=method, panel=False)
    assert run.results == ((4321, 0o027, 77.0, "file_system"),) * 2


def _queued_seed() -> tuple[int, bool]:
    # CUDA's generators use the queued seed once the device is initialized.
    return torch.initial_seed(), bool(torch.cuda._lazy_seed_tracker.call_order)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_devices_are_not_seeded_if_the_kernel_has_no_seed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda._lazy_seed_tracker, "call_order", [])  # type: ignore[attr-defined]
    run = notebook_launcher(_queued_seed, (), 1, use_port=0, start_method=method)
    assert not run.results[0][1]


@METHODS
def test_the_kernels_seed_reaches_the_devices_of_every_rank(method: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        run = notebook_launcher(lambda: (*_queued_seed(), torch.rand(3)), (), 1, use_port=0, start_method=method)
    seed, queued, numbers = run.results[0]
    assert (seed, queued) == (5, True)
    assert torch.equal(numbers, expected)
