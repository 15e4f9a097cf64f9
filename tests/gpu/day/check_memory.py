"""Out of memory: the search for a batch size, the table in the error, and a launch's allocator settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, WorkerError, notebook_launcher, shutdown
from notebook_accelerate.utils import find_executable_batch_size
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
WIDTH = gpu.size(4096, 16)
SETTINGS = "expandable_segments:True,max_split_size_mb:77"


def _search() -> tuple[int, int]:
    accelerator = Accelerator(cpu=gpu.DRY)
    if not gpu.DRY:
        torch.cuda.set_per_process_memory_fraction(0.03)
    tried = []

    @find_executable_batch_size(starting_batch_size=4096)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if gpu.DRY and batch_size > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        model = torch.nn.Linear(WIDTH, WIDTH, device=accelerator.device)
        inputs = torch.ones(batch_size * gpu.size(16, 1), WIDTH, device=accelerator.device)
        torch.stack([model(inputs).sum() for _ in range(4)]).sum().backward()
        return batch_size

    return train(), len(tried)


def test_a_batch_size_that_fits_is_found(figure: Figure) -> None:
    run: Any = notebook_launcher(_search, num_processes=1, timeout=60, use_port=0, block=True)
    fits, tries = run.results[0]
    figure("batch size that fits 3 % of the memory", f"{fits} after {tries} tries")
    assert tries > 1
    assert 0 < fits < 4096


def _exhaust() -> torch.Tensor:
    accelerator = Accelerator(cpu=gpu.DRY)
    model = torch.nn.Linear(1024, 1024)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(8, 1024, device=accelerator.device)).sum())
    optimizer.step()
    if gpu.DRY:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return torch.ones(1 << 40, dtype=torch.uint8, device=accelerator.device)


def test_a_rank_that_runs_out_of_memory_reports_its_largest_users() -> None:
    with pytest.raises(WorkerError) as caught:
        notebook_launcher(_exhaust, num_processes=1, timeout=60, use_port=0)
    assert "optimizer state" in "\n".join([str(caught.value), *caught.value._render_traceback_()])


def _settings() -> dict[str, Any]:
    torch.ones(1, device="cuda")
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])


@pytest.fixture
def no_server() -> Iterator[None]:
    """Stop the zygote after the test, if a launch has started one."""
    yield
    shutdown()


@gpu.only_cuda
@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_allocator_settings_of_a_launch_reach_the_rank(method: str) -> None:
    options: Any = {"start_method": method, "env": {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}}
    run: Any = notebook_launcher(_settings, num_processes=1, timeout=90, use_port=0, **options)
    assert run.results[0]["expandable_segments"] is True
