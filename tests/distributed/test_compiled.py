"""After a training run with compiled models is killed and resumed, its results equal those of an uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from notebook_accelerate.utils import TorchDynamoPlugin
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.timeout(900)  # This guards against hangs, and allows for compiling.
STEPS, HALF = 8, 4
SECONDS = 300.0


class Net(nn.Module):
    """A model of equal blocks, which regional compilation compiles once."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the blocks for x."""
        hidden: torch.Tensor = self.start(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def train(sharded: bool, regions: bool, folder: str | None, goes_on: bool, dies: bool = False) -> dict[str, Any]:
    """Train, saving halfway if a folder is given, or resume from it. With `dies`, kill the process a step later."""
    torch._dynamo.reset()
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
        dynamo_plugin=TorchDynamoPlugin(backend="AOT_EAGER", use_regional_compilation=regions),
    )
    torch.manual_seed(accelerator.process_index)
    model = Net()
    data = TensorDataset(torch.randn(STEPS * 4, 4, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05), loader)
    if goes_on:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, HALF)
    losses = []
    for index, (x,) in enumerate(loader):
        if folder is not None and not goes_on and index == HALF:
            accelerator.save_state(folder)
        if dies and index == HALF + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(x) - x.sum()).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "weights": accelerator.get_state_dict(model)}


def names_in(folder: Path, sharded: bool) -> set[str]:
    """Return the names of the weights in a checkpoint."""
    if not sharded:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return set(file.keys())
    known = FileSystemReader(folder / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in known}


@pytest.mark.parametrize(
    ("sharded", "regions"),
    [
        pytest.param(False, True, id="ddp-regions"),
        pytest.param(True, False, id="fsdp2-whole"),
        pytest.param(False, False, id="ddp-whole", marks=pytest.mark.nightly),
        pytest.param(True, True, id="fsdp2-regions", marks=pytest.mark.nightly),
    ],
)
def test_resuming_equals_an_uninterrupted_training(sharded: bool, regions: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    expected = run_ranks(train, sharded, regions, None, False, timeout=SECONDS)[0]
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, sharded, regions, str(folder), False, True, timeout=SECONDS)
    assert names_in(folder, sharded) == set(Net().state_dict())
    resumed = run_ranks(train, sharded, regions, str(folder), True, timeout=SECONDS)[0]
    assert resumed["losses"] == expected["losses"][HALF:]
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]
    assert resumed["weights"].keys() == Net().state_dict().keys()
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name


def test_checkpoints_load_with_and_without_compiling(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = run_ranks(train, False, False, folder, False, timeout=SECONDS)[0]
    resumed = run_ranks(train, False, True, folder, True, timeout=SECONDS)[0]
    assert resumed["losses"] == pytest.approx(expected["losses"][HALF:], rel=1e-6)
