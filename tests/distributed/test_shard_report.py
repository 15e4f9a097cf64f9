"""The shard report of a rank equals the bytes that the rank holds, for each of torch's strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accelerate.telemetry.sharding import KINDS, ShardReport
from tests.support.ranks import run_ranks


class Block(nn.Module):
    """Two layers that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the output of the layers."""
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks whose parts all divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


WHOLE = 4 * sum(p.numel() for p in Net().parameters())
_UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
_SHARDED = dict.fromkeys(KINDS, 0.5)
_FULL = dict.fromkeys(KINDS, 1.0)


def _bytes(tensor: Any) -> int:
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes)


def report_and_bytes(fsdp: dict[str, Any] | None, degrees: dict[str, int] | None) -> tuple[ShardReport, dict[str, int]]:
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp, **_UNITS)
    layout = None if degrees is None else ParallelismConfig(**degrees)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=layout)
    raw = Net()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters()))
    report = accelerator.strategy.sharding()
    real = {"parameters": sum(_bytes(p) for p in model.parameters())}
    accelerator.backward(model(torch.ones(2, 8)).sum())
    real["gradients"] = sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    states = optimizer.optimizer.state.values()
    real["optimizer state"] = sum(_bytes(v) for s in states for v in s.values() if torch.is_tensor(v) and v.dim())
    return report, real


_FIRST = {"fsdp_version": 1, "use_orig_params": True}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, int] | None, dict[str, float], dict[str, int]]] = {
    "ddp": (None, None, _FULL, {"dp": 2}),
    "fsdp2": ({"fsdp_version": 2}, None, _SHARDED, {"dp_shard": 2}),
    "fsdp2-kept": ({"fsdp_version": 2, "reshard_after_forward": False}, None, _SHARDED, {"dp_shard": 2}),
    "fsdp1": ({**_FIRST, "sharding_strategy": "FULL_SHARD"}, None, _SHARDED, {"dp_shard": 2}),
    "fsdp1-grad-op": ({**_FIRST, "sharding_strategy": "SHARD_GRAD_OP"}, None, _SHARDED, {"dp_shard": 2}),
    "fsdp1-flat": ({"fsdp_version": 1, "use_orig_params": False}, None, _SHARDED, {"dp_shard": 2}),
    "fsdp1-no-shard": ({**_FIRST, "sharding_strategy": "NO_SHARD"}, None, _FULL, {"dp_replicate": 2}),
    "tp": (None, {"tp_size": 2}, _SHARDED, {"tp": 2}),
}


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("name", CASES)
def test_reports_of_two_ranks_equal_their_bytes(name: str) -> None:
    fsdp, degrees, shares, axes = CASES[name]
    for rank, (report, real) in enumerate(run_ranks(report_and_bytes, fsdp, degrees)):
        assert report.axes == axes
        assert report.place == dict.fromkeys(axes, rank)
        for kind, times in zip(KINDS, (1, 1, 2), strict=True):
            held = report.held[kind]
            assert held.whole == times * WHOLE
            assert held.here == shares[kind] * times * WHOLE
            assert held.here == real[kind]
            assert held.sharded == (() if shares[kind] == 1 else tuple(axes))


@pytest.mark.parametrize("second", ["dp_replicate_size", "tp_size"])
def test_reports_of_four_ranks_in_a_mesh_equal_their_bytes(second: str) -> None:
    found = run_ranks(report_and_bytes, {"fsdp_version": 2}, {"dp_shard_size": 2, second: 2}, world_size=4)
    hybrid = second == "dp_replicate_size"
    axes = ["dp_replicate", "dp_shard"] if hybrid else ["dp_shard", "tp"]
    for rank, (report, real) in enumerate(found):
        assert list(report.axes.items()) == [(name, 2) for name in axes]
        assert report.place == dict(zip(axes, divmod(rank, 2), strict=True))
        assert report.held["parameters"].sharded == (("dp_shard",) if hybrid else ("dp_shard", "tp"))
        assert report.held["parameters"].here == WHOLE // (2 if hybrid else 4)
        assert report.variant == ("HYBRID_SHARD" if hybrid else "FULL_SHARD")
        assert report.units == 3
        assert {kind: report.held[kind].here for kind in KINDS} == real
