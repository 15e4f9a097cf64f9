"""Profiles of a live rank contain its kernels, and the rules find its problems."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, notebook_launcher
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
SECONDS = gpu.size(40, 25)
EXPECTED = {
    "large kernels": None,
    "many small kernels": "small_operations",
    "item in each step": None,  # The device computes all the time, so reading the loss costs nothing.
    "float32 in spite of bf16": "full_precision",
}


def _network(small: bool) -> torch.nn.Sequential:
    width, depth = (64, 60) if small else (gpu.size(4096, 64), 4)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))


def _train(kind: str) -> int:
    in_full, small = kind == "float32 in spite of bf16", kind == "many small kernels"
    accelerator = Accelerator(cpu=gpu.DRY, mixed_precision="bf16" if in_full else "no")
    model: Any = _network(small).to(accelerator.device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not small)
    if in_full:
        # Only the optimizer is prepared, so that the model trains in float32.
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    batch = gpu.batch(0, 16 if small else gpu.size(4096, 16), model[0].in_features).to(accelerator.device)
    end, steps, losses = time.monotonic() + SECONDS, 0, []
    while time.monotonic() < end:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if kind == "item in each step":
            losses.append(loss.item())
        elif steps % 20 == 0:
            gpu.synchronize()
    return steps


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_profile_reports_the_problems(kind: str, figure: Figure) -> None:
    run: Any = notebook_launcher(_train, (kind,), num_processes=1, timeout=60, block=False, use_port=0)
    try:
        time.sleep(4)
        begin = time.perf_counter()
        profile = run.profile(steps=4)
        figure(f"profile of 4 steps, {kind}", f"{time.perf_counter() - begin:.1f} s")
        figure(f"findings, {kind}", " ".join(str(each) for each in profile.findings) or "none")
        assert gpu.DRY or any(row.device for row in profile.ops()), "no kernel is in the trace"
        if not gpu.DRY:
            assert {each.rule for each in profile.findings} == {EXPECTED[kind]} - {None}
        if kind == "large kernels":
            assert "optimizer state" in repr(run.memory())
    finally:
        run.stop(grace=1.5)
        run.wait(15)
