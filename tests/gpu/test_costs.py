"""The cost of training and offloading on a GPU, compared with plain torch on the same device. Figures are printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, cpu_offload
from notebook_accelerate.big_modeling import estimate_memory
from tests.support import gpu
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu
WIDTH, DEPTH, ROWS = gpu.size(1024, 32), gpu.size(12, 3), gpu.size(4096, 16)
STEPS = gpu.size(20, 3)
TURNS = 5
SLOW = 3.0
"""The limit for ratios, which only catches gross mistakes such as a wait after each layer; see `make bench`."""


def step_of(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None], device: Any) -> Callable[[], None]:
    inputs = gpu.batch(0, ROWS, WIDTH).to(device)

    def step() -> None:
        backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None]) -> float:
    step()
    gpu.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    gpu.synchronize()
    return (time.perf_counter() - begin) / STEPS


def both(strategy: str) -> tuple[float, float]:
    """Return how many seconds a step takes in a prepared and in a plain training run, measured alternately."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000)
    accelerator = Accelerator(fsdp_plugin=plugin if strategy == "fsdp" else None)
    device = accelerator.device
    raw = gpu.network(WIDTH, DEPTH)
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters()))
    own = step_of(model, optimizer, accelerator.backward, device)
    peer: Any = gpu.network(WIDTH, DEPTH).to(device)
    if strategy == "fsdp":
        for part in peer:
            fully_shard(part)
        fully_shard(peer)
    elif accelerator.num_processes > 1:
        peer = DistributedDataParallel(peer, device_ids=None if gpu.DRY else [device.index])
    plain = step_of(peer, torch.optim.AdamW(peer.parameters()), torch.Tensor.backward, device)
    pairs = [(seconds(own), seconds(plain)) for _ in range(TURNS)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


@pytest.mark.parametrize("strategy", ["replicas", "fsdp"])
@pytest.mark.parametrize("world", gpu.WORLDS)
def test_a_step_costs_as_much_as_in_plain_torch(world: int, strategy: str, figure: gpu.Figure) -> None:
    own, plain = run_ranks(both, strategy, world_size=world, env=gpu.rank_environment(), timeout=480)[0]
    figure(
        f"a step, {strategy}, {world} ranks, relative to plain torch", f"{own / plain:.3f} × of {1000 * plain:.2f} ms"
    )
    assert own < SLOW * plain


def offloaded() -> tuple[float, float, float]:
    """Return how many seconds a forward pass with offloaded weights, copying alone, and computing alone take."""
    device = Accelerator().device
    inputs = gpu.batch(0, ROWS, WIDTH).to(device)
    model = gpu.network(WIDTH, DEPTH).eval()
    with torch.no_grad():
        computing = seconds(lambda: model.to(device)(inputs))
        pinned = [
            parameter.detach().cpu() if gpu.DRY else parameter.detach().cpu().pin_memory()
            for parameter in model.parameters()
        ]

        def copy() -> None:
            for each in pinned:
                each.to(device, non_blocking=True)

        copying = seconds(copy)
        model.to("cpu")
        cpu_offload(model, device)
        return seconds(lambda: model(inputs)), copying, computing


def test_an_offloaded_model_is_copied_while_it_computes(figure: gpu.Figure) -> None:
    ((forward, copying, computing),) = run_ranks(offloaded, world_size=1, env=gpu.rank_environment(), timeout=480)
    limit = max(copying, computing)
    figure(
        "a forward pass offloaded to main memory, relative to the slower of copying and computing",
        f"{forward / limit:.2f} ×",
    )
    if not gpu.DRY:
        assert forward < SLOW * limit


def peak() -> tuple[int, int]:
    """Return a training run's peak memory on the device, and the estimate for it."""
    accelerator = Accelerator()
    raw = gpu.network(WIDTH, DEPTH)
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters()))
    step = step_of(model, optimizer, accelerator.backward, accelerator.device)
    for _ in range(3):
        step()
    gpu.synchronize()
    measured = 0 if gpu.DRY else torch.cuda.max_memory_allocated()
    inputs = torch.empty(ROWS, WIDTH, device="meta")
    return measured, estimate_memory(lambda: gpu.network(WIDTH, DEPTH), inputs=inputs).training_total


def test_the_peak_of_memory_is_near_its_estimate(figure: gpu.Figure) -> None:
    ((measured, estimated),) = run_ranks(peak, world_size=1, env=gpu.rank_environment())
    figure(
        "peak of a training's memory, relative to its estimate",
        f"{measured / estimated:.2f} × of {estimated / 2**20:.0f} MiB",
    )
    assert estimated > 0
    if not gpu.DRY:
        assert 0.7 * estimated < measured < 1.5 * estimated
