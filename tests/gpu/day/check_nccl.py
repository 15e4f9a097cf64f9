"""NCCL's flight recorder and its limit on one device, and FSDP 2 of two ranks that share it over gloo."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, notebook_launcher
from notebook_accelerate.torch_internals import group_timeouts
from notebook_accelerate.utils import InitProcessGroupKwargs
from notebook_accelerate.worker import waits
from notebook_accelerate.worker.collective_timeouts import NCCL_FACTOR
from tests.support import gpu
from tests.support.gpu import Figure
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu
LIMIT = timedelta(minutes=7)


def _open_collective() -> tuple[list[str], dict[str, int], dict[str, float], float]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device, timeout=LIMIT)
    value = torch.ones(1024, device=device)
    dist.all_reduce(value)
    torch.cuda.synchronize()
    time.sleep(0.5)  # Give the agent time to notice the group.
    torch.cuda._sleep(int(1.7e9 * 4))
    work: Any = dist.all_reduce(value, async_op=True)
    time.sleep(0.5)
    waiting, last = waits.read_flight_recorder()
    begin = time.perf_counter()
    waits.read_flight_recorder()
    seconds = time.perf_counter() - begin
    limits = {name: limit.total_seconds() for name, limit in group_timeouts(dist.group.WORLD).items()}
    work.wait()
    dist.destroy_process_group()
    return [each.text() for each in waiting], last, limits, seconds


@gpu.only_cuda
def test_an_open_collective_of_nccl_is_detected_and_its_limit_is_long(figure: Figure) -> None:
    run: Any = notebook_launcher(_open_collective, num_processes=1, timeout=60, use_port=0)
    waiting, last, limits, seconds = run.results[0]
    figure("reading the flight recorders", f"{1000 * seconds:.1f} ms")
    assert [text.split(" ")[0] for text in waiting] == ["all_reduce"]
    assert last == {"default_pg/nccl": 2}
    assert limits["nccl"] == NCCL_FACTOR * LIMIT.total_seconds()


def _sharded(offload: bool, precision: str, folder: str) -> tuple[list[float], list[float]]:
    """Train, save in the background while training continues, and load the saved state."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, cpu_offload=offload,
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision=precision,
        cpu=gpu.DRY,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    raw = gpu.network()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.002))

    def train(first: int) -> list[float]:
        found = []
        for number in range(first, first + 4):
            loss = model(gpu.batch(number).to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
        return found

    train(0)
    accelerator.save_state(folder, blocking=False)
    after = train(4)
    accelerator.load_state(folder)
    return after, train(4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offloaded"])
def test_a_background_save_of_sharded_state_has_the_state_of_the_call(
    offload: bool, precision: str, tmp_path: Path
) -> None:
    environment = gpu.rank_environment(share=True)
    folder = str(tmp_path / "state")
    for after, again in run_ranks(_sharded, offload, precision, folder, world_size=2, env=environment):
        assert again == pytest.approx(after, rel=1e-4)
