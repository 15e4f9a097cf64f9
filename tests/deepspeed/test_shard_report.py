"""Shard reports of DeepSpeed's ranks, in all stages of ZeRO."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, DeepSpeedPlugin
from notebook_accelerate.telemetry.sharding import KINDS, ShardReport
from tests.parity.strategies.deepspeed_scripts import Wide
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)
PARAMETERS = 4 * sum(p.numel() for p in Wide().parameters())


def told(stages: list[int], precision: str) -> list[tuple[ShardReport, int]]:
    """Return each stage's report, and the size in bytes of the optimizer's moments after a step."""
    found = []
    for stage in stages:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        plugin = DeepSpeedPlugin({"zero_optimization": zero})
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
        loader = DataLoader(TensorDataset(torch.randn(8, 64)), batch_size=4)
        model = Wide()
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        said = accelerator.strategy.sharding()
        for (x,) in loader:
            accelerator.backward(model(x).float().pow(2).mean())
            optimizer.step()
        inner = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)
        states = [value for state in inner.state.values() for value in state.values()]
        found.append((said, sum(value.nbytes for value in states if torch.is_tensor(value) and value.dim())))
        accelerator.free_memory()
        accelerator.state._reset_state(reset_partial_state=False)
    return found


def told_of_offloaded() -> list[ShardReport]:
    """Return the reports with the optimizer state in CPU memory, first without and then with the parameters."""
    found = []
    for parameters in ("none", "cpu"):
        plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", offload_param_device=parameters)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        loader = DataLoader(TensorDataset(torch.randn(8, 64)), batch_size=4)
        model = Wide()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader)
        found.append(accelerator.strategy.sharding())
        accelerator.free_memory()
        accelerator.state._reset_state(reset_partial_state=False)
    return found


def test_offloaded_sizes_name_the_device() -> None:
    for found in run_ranks(told_of_offloaded):
        where = [[one.held[kind].offloaded for kind in KINDS] for one in found]
        assert where == [["", "cpu", "cpu"], ["cpu", "cpu", "cpu"]]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bytes_are_reported_by_stage(precision: str) -> None:
    computing = PARAMETERS // (1 if precision == "no" else 2)
    for rank, found in enumerate(run_ranks(told, [0, 1, 2, 3], precision)):
        for stage, (said, moments) in enumerate(found):
            assert (said.strategy, said.variant, said.axes) == ("deepspeed", f"ZeRO-{stage}", {"dp": 2})
            assert said.place == {"dp": rank}
            parameters, gradients, state = (said.held[kind] for kind in KINDS)
            assert (parameters.whole, gradients.whole) == (computing, computing)
            assert parameters.here == computing // (2 if stage == 3 else 1)
            assert gradients.here == computing // (2 if stage >= 2 else 1)
            assert state.sharded == (("dp",) if stage else ())
            assert state.here is not None
            assert state.whole is not None
            assert state.here == state.whole // (2 if stage else 1)
            masters = 0 if (precision, stage) == ("no", 0) else PARAMETERS // (2 if stage else 1)
            assert state.here in {moments, moments + masters}
            assert state.note == ("with master weights" if state.here > moments else "")
