"""Ranks inherit the settings of the thread that launches them, whatever starts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accelerate import notebook_launcher

pytestmark = pytest.mark.usefixtures("zygote")


def _thread_settings() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.empty(0).device.type, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@pytest.mark.parametrize("method", ["inline", "fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_settings_of_the_cells_thread_reach_every_rank(method: str) -> None:
    count = 1 if method == "inline" else 2
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.float16):
        run = notebook_launcher(_thread_settings, (), count, use_port=0, start_method=method, panel=False)
    assert run.results == (("meta", False, True, True, torch.float16),) * count


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_without_settings_ranks_have_torchs_defaults(method: str) -> None:
    run = notebook_launcher(_thread_settings, (), 2, use_port=0, start_method=method, panel=False)
    assert run.results == (("cpu", True, False, False, torch.bfloat16),) * 2
