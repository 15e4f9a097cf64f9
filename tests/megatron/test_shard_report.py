"""Shard reports of Megatron-LM's ranks equal the sizes of their tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from notebook_accelerate.telemetry.sharding import KINDS, ShardReport
from tests.megatron.trainings import Case, place, prepared, steps
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)


def told_and_real(case: Case) -> tuple[ShardReport, dict[str, int]]:
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        told = accelerator.strategy.sharding()
        steps(case, accelerator, model, optimizer, loader)
        inner: Any = [one.optimizer for one in getattr(model.optimizer, "chained_optimizers", [model.optimizer])]
        weights = {p.data_ptr() for p in model.parameters()}
        kept = [v for one in inner for s in one.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
        masters = [p for one in inner for group in one.param_groups for p in group["params"]]
        copies = [p for p in masters if p.data_ptr() not in weights] if case.precision != "no" else []
        real = {
            "parameters": sum(p.nbytes for p in model.parameters()),
            "gradients": sum(buffer.grad_data.nbytes for chunk in model.module for buffer in chunk.buffers),
            "optimizer state": sum(tensor.nbytes for tensor in (*kept, *copies)),
        }
        accelerator.end_training()
    return told, real


@pytest.mark.parametrize(
    ("case", "ranks", "axes"),
    [
        (Case(), 1, {}),
        (Case(tp=2), 2, {"tp": 2}),
        (Case(precision="bf16"), 2, {"dp": 2}),
        (Case(tp=2, pp=2), 4, {"pp": 2, "tp": 2}),
    ],
    ids=["one", "tensors", "bf16", "both"],
)
def test_bytes_are_reported_by_kind(case: Case, ranks: int, axes: dict[str, int]) -> None:
    found = run_ranks(told_and_real, case, world_size=ranks)
    for told, real in found:
        assert told.axes == axes
        assert {kind: told.held[kind].here for kind in KINDS} == real
        assert told.stages == ("pp" if case.pp > 1 else "")
        assert told.units == 2 // case.pp
        assert told.held["parameters"].sharded == (("tp",) if case.tp > 1 else ())
    if case.tp == 2:
        here, whole = found[0][0].held["parameters"].here, found[0][0].held["parameters"].whole
        assert here is not None
        assert whole is not None
        assert 0.5 * whole <= here < 0.6 * whole


@pytest.mark.parametrize("case", [Case(tp=2), Case(pp=2)], ids=["tensors", "layers"])
def test_each_rank_holds_its_share(case: Case) -> None:
    ((_, whole),) = run_ranks(told_and_real, Case(), world_size=1)
    for rank, (_, real) in enumerate(run_ranks(told_and_real, case)):
        shares = {kind: size / whole[kind] for kind, size in real.items()}
        print(f"tp={case.tp}, pp={case.pp}, rank {rank}: {shares}")
        # All ranks hold norms and some biases. The first and last stages both hold the words, as embedding and as head.
        assert shares == pytest.approx(dict.fromkeys(KINDS, 0.55), abs=0.07)


def test_a_distributed_optimizer_is_reported() -> None:
    case = Case(batch_size=2, more={"use_distributed_optimizer": True})
    for told, real in run_ranks(told_and_real, case, world_size=2):
        assert told.variant == "distributed optimizer"
        assert told.held["optimizer state"].sharded == ("dp",)
        assert told.held["parameters"].sharded == ()
        state = told.held["optimizer state"].here
        assert state is not None
        assert state == pytest.approx(real["optimizer state"], rel=0.6)
